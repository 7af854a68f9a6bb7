"""The daemon's scheduler and cache on a virtual clock: another executor, and no second scheduler.

virtual_clock       time that moves when somebody moves it
model               what an iteration and a copy cost: shapes and hardware, by name
modelled_executor   carries iterations out on that clock
trace               who says what when: recorded, or drawn
simulator           plays a trace to an engine
report              what came of it
"""
