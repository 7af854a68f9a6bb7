"""Published figures computed again by simulation, for scripts/reproduce_figures.

scenario         a system under a load of random conversations
equal_latency    the load at which a system's P90 latency reaches a limit
study            models, memory, seeds and simulations that all figures share
pensieve_paper   figures 3.12 to 3.16 and 3.18 of the Pensieve paper
sarathi_paper    table 4 of the Sarathi-Serve paper
sarathi_capacity figures 9 to 11 of the Sarathi-Serve paper
baton_paper      tables 1 and 2 of the Baton paper
pipeline         a model in pipeline stages
tables           figures as Markdown and as JSON
"""
