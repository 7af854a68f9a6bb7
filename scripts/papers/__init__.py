"""Tables and figures of the papers computed again, for scripts/paper.

rows           a row, the paper's claim and the verdict
conversations  a system under a load of random conversations
equal_latency  the load at which a system's P90 latency reaches a limit
pipeline       a model in pipeline stages
cell_simulation  a policy of `pensieve.cells` on simulated workers
pensieve, sarathi, baton, fluidinfer, batchmaker
               the papers: each module has `FIGURES`, functions that yield rows
"""
