"""Move full garbage collections to times when no client waits.

Reference counts free nearly all objects here. A full collection finds little garbage, but visits every live
object and stops the process meanwhile. By default, Python does this about once a second. A collection takes
25 to 130 ms in a service with a few hundred streams, and longer in an engine with 100,000 conversations. No
stream gets a token in this time.

So a process calls `freeze` after its start. Later collections never visit the objects that are alive then.
Young objects are still collected, in larger portions. A full collection starts by itself only after about
four million more objects were allocated than freed (the product of the three constants below). To prevent
this, a process calls `collect` when it is idle.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG_OBJECTS = 2_000  # collecting these takes one or two milliseconds
PASSES_PER_MIDDLE, PASSES_PER_FULL = 10, 200


def freeze() -> None:
    """Exempt all live objects from later collections, and make full collections rare."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, PASSES_PER_MIDDLE, PASSES_PER_FULL)


@contextmanager
def paused() -> Iterator[None]:
    """Pause garbage collection in the block, and exempt the objects that it leaves alive. For imports."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def collect() -> None:
    """Run a full collection. Call this when the process is idle."""
    gc.collect()
