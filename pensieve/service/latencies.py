"""How long clients wait for tokens, as quantiles of the latest five minutes.

A `RecentTimes` counts times in BUCKETS buckets, each RATIO as wide as the one before, so a quantile is right
to within 5 % and no single time is kept.  It has such counts for each of the latest SLICES minutes: the
oldest one is dropped as a whole, and all of it is a few kilobytes however much comes.

All of it belongs to the loop.  Times are those of its clock, when the service has tokens in hand: what the
engine, the pipe and a busy loop take is in them, the network to the client is not.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from pensieve.service.live_turn import LiveTurn

SLICE_SECONDS = 60.0
SLICES = 5
FLOOR_SECONDS = 1e-4  # what is shorter counts as nothing
RATIO = 1.1
BUCKETS = 170  # the last one begins at 16 minutes
_LOG_RATIO = math.log(RATIO)


@dataclass(frozen=True)
class Spread:
    """In seconds; of none, zeros."""

    count: int = 0
    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0


class Slice(NamedTuple):
    ends_at: float
    counts: list[int]


class RecentTimes:
    def __init__(self) -> None:
        self.slices: deque[Slice] = deque()

    def add(self, seconds: float, now: float, count: int = 1) -> None:
        if not self.slices or now >= self.slices[-1].ends_at:
            self._forget(now)
            self.slices.append(Slice(now + SLICE_SECONDS, [0] * BUCKETS))
        self.slices[-1].counts[_bucket(seconds)] += count

    def spread(self, now: float) -> Spread:
        self._forget(now)
        counts = [sum(each.counts[bucket] for each in self.slices) for bucket in range(BUCKETS)]
        total = sum(counts)
        if not total:
            return Spread()
        up_to = list(accumulate(counts))
        ranks = (max(math.ceil(share * total), 1) for share in (0.5, 0.95, 0.99))
        return Spread(
            total,
            *(_middle(next(i for i, num in enumerate(up_to) if num >= rank)) for rank in ranks),
        )

    def _forget(self, now: float) -> None:
        while self.slices and self.slices[0].ends_at <= now - (SLICES - 1) * SLICE_SECONDS:
            self.slices.popleft()


def _bucket(seconds: float) -> int:
    if seconds < FLOOR_SECONDS:
        return 0
    return min(int(math.log(seconds / FLOOR_SECONDS) / _LOG_RATIO) + 1, BUCKETS - 1)


def _middle(bucket: int) -> float:
    return FLOOR_SECONDS * RATIO ** (bucket - 0.5) if bucket else 0.0


class Latencies:
    """Of the turns of all clients."""

    def __init__(self) -> None:
        self.first_token = RecentTimes()  # since a request was admitted
        self.token_gap = RecentTimes()

    def came(self, live: LiveTurn, now: float) -> None:
        """Tokens of a turn, or its end."""
        num_new = live.num_tokens - live.num_timed
        if num_new <= 0:
            return
        if live.num_timed:
            self.token_gap.add(now - live.token_at, now)
        else:
            self.first_token.add(now - live.arrived_at, now)
        if num_new > 1:  # they came together
            self.token_gap.add(0.0, now, num_new - 1)
        live.num_timed, live.token_at = live.num_tokens, now
