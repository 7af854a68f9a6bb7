"""The daemon's scheduler and cache on a virtual clock: another executor, and no second scheduler.

clock               virtual time: it moves when it is moved
cost, cost_file     what an iteration and a copy cost: from shapes and data sheets, or from a file
executor            an executor that computes nothing and takes that long
trace               which message comes when: recorded, or drawn
clairvoyant         a retention policy that knows the trace
simulator           runs a trace through the engine
series              figures over time, and quantiles, in a fixed amount of memory
report              the figures of a run, as a row and as a table
observed            what a replayed journal shows of each iteration
fit, least_squares  what iterations cost on a machine, from that
plan/               how many conversations a replica carries, and how many replicas are needed
"""
