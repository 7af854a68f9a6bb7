"""Tables and figures of the papers computed again, for scripts/paper.

claims         what a paper says about a value, and the verdict
rows           a row: a claim, our values and a reason
equal_latency  the throughput of a system at the highest load whose P90 latency is within a limit
pipeline       a model in pipeline stages
cell_simulation  a policy of `pensieve.cells` on simulated workers
pensieve, sarathi, baton, fluidinfer, batchllm, batchmaker
               the papers: each module has `FIGURES`, functions that yield rows
"""
