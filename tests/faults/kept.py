"""Seeds that found bugs, with a description of each bug.

After a change to the code that draws worlds, a seed gives a different world. So each bug also has its own
test, and is planted again in test_planted_faults.py.
"""

KEPT = {
    59: "a turn whose end could not be stored was said to run, for ever",
    1573: "KV of a turn that is in no log was taken for that of one cancelled in the queue",
    1944: "of the checker: a begin whose client had hung up was held to be refused with the next call",
    300848: "of the checker: who attaches to a turn that was cut is told what stays of it, and that is all",
}
