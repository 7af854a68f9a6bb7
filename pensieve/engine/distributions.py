"""How values are distributed, in bounded memory: over all time (`Histogram`), or of late (`RecentTimes`).

A `Histogram` is one as Prometheus has them: how many values there were up to each bound, and their sum.

    bounds    0.1   0.5   2.0
    counts     3     0     4     1      values up to the bound and beyond the one before; the last: beyond all

`add` is a bisection and two additions.  One thread adds.  Another may look meanwhile: it finds every count as
it was a moment ago, and a sum that may be a value ahead of them.

`RecentTimes` tells how long something takes, as quantiles of the latest five minutes.  It counts times in
BUCKETS buckets, each RATIO as wide as the one before, so a quantile is right to within 2 % and no single time
is kept.  It has such counts for each of the latest five minutes.  The oldest minute is dropped as a whole,
and all of it is a few kilobytes however many times come.  If there is an objective, it also counts exactly
how many times met it.  A `RecentShare` is a part of a whole over the same minutes.  Both are told the time,
so any clock may drive them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

SUM = "sum"
INTERVAL_SECONDS = 60.0
INTERVALS = 5
FLOOR_SECONDS = 1e-4  # what is shorter counts as nothing
RATIO = 1.04
BUCKETS = 412  # the last one begins at 16 minutes
_LOG_RATIO = math.log(RATIO)


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


@dataclass(frozen=True)
class Spread:
    """In seconds; of none, zeros."""

    count: int = 0
    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0


@dataclass(slots=True)
class _Interval:
    ends_at: float
    counts: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    num_within: int = 0  # the objective


class RecentTimes:
    def __init__(self, objective: float = math.inf) -> None:
        self.intervals: deque[_Interval] = deque()
        self._objective = objective

    def add(self, seconds: float, now: float, count: int = 1) -> None:
        if not self.intervals or now >= self.intervals[-1].ends_at:
            self._forget(now)
            self.intervals.append(_Interval(now + INTERVAL_SECONDS))
        latest = self.intervals[-1]
        latest.counts[_bucket(seconds)] += count
        if seconds <= self._objective:
            latest.num_within += count

    def spread(self, now: float) -> Spread:
        counts = self._counts(now)
        total = sum(counts)
        if not total:
            return Spread()
        up_to = list(accumulate(counts))
        ranks = (max(math.ceil(share * total), 1) for share in (0.5, 0.95, 0.99))
        return Spread(
            total,
            *(_middle(next(i for i, num in enumerate(up_to) if num >= rank)) for rank in ranks),
        )

    def histogram(self, now: float) -> list[tuple[float, int]]:
        """What `spread` takes its quantiles from: what times count as, in rising order, and how many do."""
        return [(_middle(i), num) for i, num in enumerate(self._counts(now)) if num]

    def attained(self, now: float) -> float:
        """The share of times that met the objective; 1 of none."""
        total = sum(self._counts(now))
        return sum(each.num_within for each in self.intervals) / total if total else 1.0

    def _counts(self, now: float) -> list[int]:
        self._forget(now)
        if not self.intervals:
            return []
        return [
            sum(column) for column in zip(*(each.counts for each in self.intervals), strict=True)
        ]

    def _forget(self, now: float) -> None:
        while (
            self.intervals and self.intervals[0].ends_at <= now - (INTERVALS - 1) * INTERVAL_SECONDS
        ):
            self.intervals.popleft()


class RecentShare:
    def __init__(self) -> None:
        self._minutes: deque[list[float]] = deque()  # when each ends, the part, the whole

    def add(self, part: float, whole: float, now: float) -> None:
        if not self._minutes or now >= self._minutes[-1][0]:
            self._forget(now)
            self._minutes.append([now + INTERVAL_SECONDS, 0.0, 0.0])
        latest = self._minutes[-1]
        latest[1] += part
        latest[2] += whole

    def share(self, now: float) -> float:
        """0 of nothing."""
        self._forget(now)
        whole = sum(each[2] for each in self._minutes)
        return sum(each[1] for each in self._minutes) / whole if whole else 0.0

    def _forget(self, now: float) -> None:
        while self._minutes and self._minutes[0][0] <= now - (INTERVALS - 1) * INTERVAL_SECONDS:
            self._minutes.popleft()


def _bucket(seconds: float) -> int:
    if seconds < FLOOR_SECONDS:
        return 0
    return min(int(math.log(seconds / FLOOR_SECONDS) / _LOG_RATIO) + 1, BUCKETS - 1)


def _middle(bucket: int) -> float:
    return FLOOR_SECONDS * RATIO ** (bucket - 0.5) if bucket else 0.0
