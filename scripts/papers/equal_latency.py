"""Find the highest load at which a system's P90 latency is within a limit.

The papers compare throughputs at equal latency. So each system needs the rate of conversations at which the
P90 of its normalized latency (a turn's seconds over its output tokens) reaches the limit. As the rate rises,
the P90 may cross the limit several times. The result of a usual search then depends on where it starts. This
search does not:

1. Rates lie on one grid, the powers of `GRID_RATIO`, the same for all systems and seeds.
2. The grid is scanned from `confirming` consecutive rates within the limit to as many beyond it.
3. The interval of the first upward crossing is halved a few times. The result is its lower end: a simulated
   rate whose P90 is within the limit. Nothing is interpolated, because the P90 rises steeply at the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

GRID_RATIO = 1.25
BEGIN = 0.7  # the first scanned rate, divided by the guess
SCANNED_MAX = 40  # rates of the grid

Row = dict[str, Any]


class Crossing(NamedTuple):
    """The highest rate below the first crossing of the limit."""

    rate: float  # conversations per second
    tokens_per_second: float
    row: Row  # the figures at this rate
    reached: bool  # False: the limit is beyond the scanned rates, and this is the nearest of them


def first_crossing(
    simulate: Callable[[float], Row],
    limit_ms: float,
    guess: float,
    halvings: int = 2,
    confirming: int = 3,
    scanned_max: int = SCANNED_MAX,
) -> Crossing:
    """Return the first crossing. `guess` sets where the scan begins and hardly affects the result."""
    rows: dict[float, Row] = {}

    def p90(rate: float) -> float:
        if rate not in rows:
            rows[rate] = simulate(rate)
        found = rows[rate]["normalized_p90"]
        return math.inf if found is None else float(found)

    grid = _scan(lambda rate: p90(rate) <= limit_ms, guess, confirming, scanned_max)
    upward = [(low, high) for low, high in pairwise(grid) if p90(low) <= limit_ms < p90(high)]
    if not upward:
        nearest = grid[-1] if p90(grid[-1]) <= limit_ms else grid[0]
        row = rows[nearest]
        return Crossing(nearest, row["tokens_per_second"] or 0.0, row, False)
    low, high = upward[0]
    for _ in range(halvings):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if p90(middle) <= limit_ms else (low, middle)
    return Crossing(low, rows[low]["tokens_per_second"] or 0.0, rows[low], True)


def _scan(
    within: Callable[[float], bool], guess: float, confirming: int, scanned_max: int
) -> list[float]:
    """Return the grid rates that were tried, in order."""
    least = most = math.floor(math.log(BEGIN * guess) / math.log(GRID_RATIO))
    below: list[bool] = [within(GRID_RATIO**least)]
    while len(below) < scanned_max:
        if not all(below[:confirming]) or (all(below) and len(below) < confirming):
            least -= 1
            below.insert(0, within(GRID_RATIO**least))
        elif any(below[-confirming:]):
            most += 1
            below.append(within(GRID_RATIO**most))
        else:
            break
    return [GRID_RATIO**power for power in range(least, most + 1)]
