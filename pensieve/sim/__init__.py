"""The daemon's scheduler and cache on a virtual clock: another executor, and no second scheduler.

cost, cost_file     what an iteration and a copy cost: from shapes and data sheets, or from a file
executor            a virtual clock, and an executor that computes nothing and takes that long
trace, workload     the arrivals of turns: recorded, or drawn
simulator           runs a trace through the engine
series              figures over time, and quantiles, in a fixed amount of memory
report              the figures of a run, as a row and as a table
clairvoyant         a retention policy that knows the trace
sweep               one load with every combination of policies, rates and sizes of the tiers; its journal
observed            what a replayed journal shows of each iteration
fit                 what iterations cost on a machine, from that
fit_points          the same from a profile's iterations, as points that were measured
"""
