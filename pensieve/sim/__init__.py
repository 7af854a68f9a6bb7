"""The daemon's scheduler and cache on a virtual clock: another executor, and no second scheduler.

virtual_clock       time that moves when somebody moves it
model               what an iteration and a copy cost: shapes and hardware, by name
cost_file           the same in a file
modelled_executor   carries iterations out on that clock
trace               who says what when: recorded, or drawn
simulator           plays a trace to an engine
series              figures over time, and quantiles, in a fixed room
report              what came of it
scenario            a system under a load, and the load at which it is as slow as another
study, figures      published figures played again
long_prompts        requests with long prompts, batched in several ways
clairvoyant         a policy that knows the trace
load                conversations per second, as a rate that can be turned
fleet               who among several replicas hears which turn
replica             one engine under a load: is it served as it should be?
planning            what a replica carries, what host memory brings, how many are needed
observed            what a replayed journal saw of each iteration
fitting             what iterations cost on a machine, from that
least_squares       with no negative number
"""
