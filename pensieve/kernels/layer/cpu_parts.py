"""What each part of the compiled layers takes; csrc/cpu/laps.h measures it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from pensieve.kernels.layer.cpu_weights import library

# As the stages of csrc/cpu/laps.h.  Experts, with their router, are "MLP out".
PARTS = (
    *("norm before", "heads in", "rotation", "KV written", "attention", "heads out"),
    *("sum and norm", "MLP in", "MLP out", "sum", "output matrix"),
)


@contextmanager
def measured_parts() -> Iterator[dict[str, float]]:
    """Fills the dictionary at the end: the seconds of all calls in between, by part.

    For one thread that computes; the threads that help it are not counted.
    """
    sums = (ctypes.c_int64 * len(PARTS))()
    found: dict[str, float] = {}
    count = library().pensieve_measure_parts(ctypes.byref(sums))
    assert count == len(PARTS), (count, PARTS)
    try:
        yield found
    finally:
        library().pensieve_measure_parts(None)
        found.update({name: each / 1e9 for name, each in zip(PARTS, sums, strict=True)})
