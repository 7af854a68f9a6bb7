"""Distributions of values in bounded memory: of all values (`Histogram`), or of recent ones (`RecentTimes`).

A `Histogram` is like a histogram of Prometheus: counts of values by bounds, and the sum of the values.

    bounds    0.1   0.5   2.0
    counts     3     0     4     1      values up to this bound and above the previous bound; last: above 2.0

`add` costs a bisection and two additions. One thread adds values. Another thread may read at the same time;
it may see a sum that already includes one value more than the counts.

`RecentTimes` gives quantiles of durations over the latest five minutes. It counts durations in BUCKETS
buckets, each RATIO times as wide as the previous bucket. So the error of a quantile is at most 2 %. Each
minute has separate counts, and the oldest minute is dropped as a whole. This takes a few kilobytes. If there
is an objective, the durations that met it are counted exactly. A `RecentShare` is a fraction over the latest
five minutes. `RecentTimes` and `RecentShare` get the time as an argument, so they work with any clock.
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
FLOOR_SECONDS = 1e-4  # shorter durations count as zero
RATIO = 1.04
BUCKETS = 412  # the last bucket begins at 16 minutes
_LOG_RATIO = math.log(RATIO)


class Histogram:
    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        assert all(a < b for a, b in pairwise(bounds)), bounds
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """Add a value `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    # -- as a flat dict, which the engine can send to the service --

    def figures(self, name: str) -> dict[str, float]:
        keys = [f"{name}.{bound:g}" for bound in (*self.bounds, math.inf)]
        return {**dict(zip(keys, self.counts, strict=True)), f"{name}.{SUM}": self.sum}

    @classmethod
    def of_figures(cls, name: str, figures: Mapping[str, float]) -> Histogram:
        """Make the histogram whose `figures(name)` are among these."""
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
    """Quantiles in seconds; zeros if there are no values."""

    count: int = 0
    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0


@dataclass(slots=True)
class _Interval:
    ends_at: float
    counts: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    num_within: int = 0  # durations that met the objective


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
        """Return (duration, count) of each bucket, in rising order: the source of `spread`."""
        return [(_middle(i), num) for i, num in enumerate(self._counts(now)) if num]

    def attained(self, now: float) -> float:
        """Return the fraction of durations that met the objective; 1 if there are no durations."""
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
        self._minutes: deque[list[float]] = deque()  # [end, part, whole] of each minute

    def add(self, part: float, whole: float, now: float) -> None:
        if not self._minutes or now >= self._minutes[-1][0]:
            self._forget(now)
            self._minutes.append([now + INTERVAL_SECONDS, 0.0, 0.0])
        latest = self._minutes[-1]
        latest[1] += part
        latest[2] += whole

    def share(self, now: float) -> float:
        """Return the part over the whole; 0 if the whole is 0."""
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
