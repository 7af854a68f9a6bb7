"""Published figures computed again by simulation: what scripts/reproduce_figures runs.

scenario         a system under a load of drawn conversations
equal_latency    the load at which a system's P90 latency reaches a limit
study            what all figures share: models, memory, seeds, and every simulation that was run
pensieve_paper   figures 3.12 to 3.16 and 3.18 of the Pensieve paper
sarathi_paper    table 4 of the Sarathi-Serve paper
sarathi_capacity figures 9 to 11 of it; pipeline: a model in stages
tables           figures as Markdown and as JSON
"""
