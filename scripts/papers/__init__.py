"""Tables and figures of the papers computed again, for scripts/paper.

rows           a row, the paper's claim and the verdict
conversations  a system under a load of random conversations
equal_latency  the highest load at which a system's P90 latency is within a limit
pipeline       a model in pipeline stages
cell_simulation  a policy of `pensieve.cells` on simulated workers
pensieve, sarathi, baton, fluidinfer, batchllm, batchmaker
               the papers: each module has `FIGURES`, functions that yield rows
"""
