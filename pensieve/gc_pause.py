"""Moves Python's full passes of garbage collection to times when no client waits.

Reference counts free nearly everything here.  The cycle collector has little left to find (a task, its
exception and their frames), but a full pass of it visits every object that is alive and stops the
process meanwhile: 25 to 130 ms in a service with a few hundred streams, hundreds in an engine that
knows 100,000 conversations, about once a second by Python's own thresholds.  No stream gets a token
during a pass, so it is the longest gap of every stream.

So a process calls `freeze` once it has started: the objects that are alive then are never visited again.
Young objects are still collected, in larger portions, and a full pass starts by itself only when some ten
million objects more were allocated than freed.  A process that finds itself idle calls `collect`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG_OBJECTS = 2_000  # a pass over these takes a millisecond or two
PASSES_PER_MIDDLE, PASSES_PER_FULL = 10, 200


def freeze() -> None:
    """Exempt all objects that are alive now from later passes, and make full passes rare."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, PASSES_PER_MIDDLE, PASSES_PER_FULL)


@contextmanager
def paused() -> Iterator[None]:
    """Collect nothing while modules are imported; later passes do not visit their objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def collect() -> None:
    """Run a full pass; to be called when the process is idle."""
    gc.collect()
