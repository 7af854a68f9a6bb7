"""When Python looks for dead cycles: when nobody waits.

Reference counts free nearly everything here.  What is left to the cycle collector is rare (a task, its
exception and their frames), but a full pass of it visits every object that is alive and stops the
process meanwhile: 25 to 130 ms in a service with a few hundred streams, hundreds in an engine that
knows 100,000 conversations, about once a second by Python's own thresholds.  That is every stream's
longest gap.

So a process says `settle` when it has started: what is alive then stays alive, is frozen and never
visited again; young objects are looked through as ever, in larger portions, and a full pass comes by
itself only after some ten million objects more than were freed.  Whoever finds that nothing is to be
done says `rest`, which is the time for one.
"""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 2_000  # a pass over these takes a millisecond or two
PASSES_PER_MIDDLE, PASSES_PER_FULL = 10, 200


def settle() -> None:
    """What is alive now will be alive to the end."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, PASSES_PER_MIDDLE, PASSES_PER_FULL)


def rest() -> None:
    """A full pass, while nothing else is to be done."""
    gc.collect()
