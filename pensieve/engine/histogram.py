"""A histogram as Prometheus has them: how many values there were up to each bound, and their sum.

    bounds    0.1   0.5   2.0
    counts     3     0     4     1      values up to the bound and beyond the one before; the last: beyond all

`add` is a bisection and two additions.  One thread adds.  Another may look meanwhile: it finds every count as
it was a moment ago, and a sum that may be a value ahead of them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise

SUM = "sum"


class Histogram:
    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        assert all(a < b for a, b in pairwise(bounds)), bounds
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """So many values of this size."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    # -- as figures by name, which cross the pipe --

    def figures(self, name: str) -> dict[str, float]:
        keys = [f"{name}.{bound:g}" for bound in (*self.bounds, math.inf)]
        return {**dict(zip(keys, self.counts, strict=True)), f"{name}.{SUM}": self.sum}

    @classmethod
    def of_figures(cls, name: str, figures: Mapping[str, float]) -> Histogram:
        """The one whose figures of this name these are."""
        found = {
            key.removeprefix(f"{name}."): value
            for key, value in figures.items()
            if key.startswith(f"{name}.")
        }
        histogram = cls([])
        histogram.sum = found.pop(SUM, 0.0)
        counts = sorted((float(bound), int(count)) for bound, count in found.items())
        histogram.bounds = tuple(bound for bound, _ in counts if bound != math.inf)
        histogram.counts = [count for _, count in counts] or [0]
        return histogram
