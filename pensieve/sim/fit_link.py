"""The rate of the link between the tiers, fitted to observed iterations with copies.

It is found where copies took longer than the computation beside them, or where an iteration waited for a copy
and for nothing else.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from pensieve.sim.cost import CostModel
from pensieve.sim.observed import Observation, expected_seconds

LINK_ROWS_MIN = 10


def fit_link(
    cost: CostModel, rows: Sequence[Observation], rates: Sequence[float]
) -> tuple[CostModel, str]:
    """The costs with the link's rate, and a note if it was not found."""
    rows = [row for row in rows if row.slots_in]

    def error(rate: float) -> float:
        model = replace(cost, link_bytes_per_second=rate)
        return statistics.median(
            abs(expected_seconds(model, row) / row.seconds - 1) for row in rows
        )

    at_least = 0.0
    if len(rows) >= LINK_ROWS_MIN:
        hidden = error(math.inf)
        grid = [10 ** (5 + i / 8) for i in range(65)]
        best = min(grid, key=error)
        if error(best) < 0.9 * hidden:
            closer = [best * 10 ** (i / 64) for i in range(-8, 9)]
            return replace(cost, link_bytes_per_second=min(closer, key=error)), ""
        at_least = next((rate for rate in grid if error(rate) <= 1.05 * hidden), 0.0)
    if len(rates) >= LINK_ROWS_MIN:
        rate = statistics.median(rates) * cost.kv_bytes_per_token
        return replace(cost, link_bytes_per_second=max(rate, at_least)), ""
    taken = max(cost.link_bytes_per_second, at_least)
    why = "no copy was waited for"
    if at_least:
        why = f"copies hid behind the computation, so it is at least {at_least:.3g}"
    return (
        replace(cost, link_bytes_per_second=taken),
        f"link_bytes_per_second: {why}; {taken:.3g} is that of {cost.source}"
        if taken > at_least
        else f"link_bytes_per_second: {why}; that is taken",
    )
