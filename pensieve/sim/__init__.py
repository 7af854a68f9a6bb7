"""Simulate the daemon's own scheduler and cache on a virtual clock; only the executor is replaced.

cost, cost_file     cost of iterations and copies: from shapes and data sheets, or from a file
executor            a virtual clock, and an executor that computes nothing and takes the predicted time
trace, workload     the arrivals of turns: recorded, or random
simulator           runs a trace through the engine
series              figures over time, and quantiles, in a fixed amount of memory
report              the figures of a run, as a row and as a table
clairvoyant         an eviction policy that knows the trace
sweep               one load with all combinations of policies, rates and tier sizes; records journals
observed            a sample of a replayed journal's iterations
fit                 costs fitted to a journal
fit_points          costs as points, fitted to the iterations of a profile
"""
