"""Seeds that found bugs, with a description of each bug.

After a change to the code that draws worlds, a seed gives a different world. So each bug also has its own
test, and is planted again in test_planted_faults.py.
"""

KEPT = {
    59: "a turn whose end could not be stored was reported as running for ever",
    1573: "KV of a turn that is in no log was taken for KV of a turn that was cancelled in the queue",
    1944: "checker: a turn whose client had disconnected was assumed refused when the next call was refused",
    300848: "checker: a client that attaches to a shortened turn receives only the part that was kept",
}
