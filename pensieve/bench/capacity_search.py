"""Find the highest rate of conversations at which the latency objectives are met."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Stop when the lowest rate that failed is at most this many times the highest rate that passed.
RESOLUTION = 1.04
RATE_LEAST, RATE_MOST = 1e-4, 1e5
QUEUE_P50_SECONDS = 2.0

Row = dict[str, Any]


@dataclass(frozen=True)
class Slo:
    """Limits on the figures of a load. A rate passes if its figures exceed no limit."""

    tbt_p99_seconds: float
    ttft_p50_seconds: float
    queue_p50_seconds: float = QUEUE_P50_SECONDS

    def violations(self, row: Row) -> list[str]:
        """Return the limits that these figures exceed; a missing figure exceeds no limit."""
        limits = (
            ("tbt_p99", self.tbt_p99_seconds, "P99 time between tokens"),
            ("ttft_p50", self.ttft_p50_seconds, "median time to first token"),
            ("queue_p50", self.queue_p50_seconds, "median time in the queue"),
        )
        return [
            f"{name} {row[key]:.3g} s"
            for key, limit, name in limits
            if row[key] is not None and row[key] > limit
        ]


class Impossible(ValueError):
    """Even the lowest rate exceeds the limits."""


def capacity(
    trial: Callable[[float], Row],
    slo: Slo,
    rate: float,
    step: float = 2.0,
    *,
    resolution: float = RESOLUTION,
    rate_least: float = RATE_LEAST,
) -> tuple[float, Row]:
    """Return the highest rate that passes, to within `resolution`, and its figures.

    The search begins at `rate`. It multiplies or divides the rate by `step` until one rate has passed and
    another has failed. Then it halves the interval between these rates.
    """
    low, row, high = 0.0, Row(), math.inf
    while not low or high / low > resolution:
        if math.isinf(high):
            tried = step * low or min(rate, RATE_MOST)
        else:
            tried = math.sqrt(low * high) if low else high / step
        if tried > RATE_MOST:
            break
        found = trial(tried)
        violations = slo.violations(found)
        if not violations:
            low, row = tried, found
        elif tried < rate_least:
            raise Impossible(
                f"even {tried:.2g} conversations/s exceeds a limit: {', '.join(violations)}"
            )
        else:
            high = tried
    return low, row
