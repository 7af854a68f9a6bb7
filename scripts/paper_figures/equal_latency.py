"""The load at which a system's P90 latency reaches a limit, and how well it is known.

The papers compare throughputs at equal latency, so each system needs the rate of conversations at which the
P90 of its normalized latency (a turn's seconds over its output tokens) reaches the limit.  The P90 does not
only rise with the rate: near the limit it may exceed it, fall below it again and exceed it once more.  Then
"the load at the limit" depends on where a search starts.  This search does not:

1. Rates lie on one grid, the powers of `GRID_RATIO`, the same for all systems and seeds.
2. The grid is scanned from `CONFIRMING` rates in a row within the limit up to `CONFIRMING` rates in a row
   beyond it.
3. What is reported is the first upward crossing: halved a few times, and interpolated in what is left of it.
4. `num_upward` counts the upward crossings among the scanned rates, and `last_bracket` is the highest, so
   that a report can say where the limit is crossed more than once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

GRID_RATIO = 1.25
CONFIRMING = 3
BEGIN = 0.7  # of the guess: where the scan begins
SCANNED_MAX = 40  # rates of the grid

Row = dict[str, Any]


class Crossing(NamedTuple):
    """Where a system's P90 reaches the limit for the first time, seen from below."""

    rate: float  # conversations per second
    tokens_per_second: float
    row: Row  # the figures at the highest rate before it
    bracket: tuple[float, float]  # the rates on the grid between which it lies
    last_bracket: tuple[float, float]  # the same of the highest upward crossing
    num_upward: int  # upward crossings among the scanned rates
    reached: bool  # False: the limit is beyond the scanned rates, and this is the nearest of them


def first_crossing(
    simulate: Callable[[float], Row],
    limit_ms: float,
    guess: float,
    halvings: int = 2,
    scanned_max: int = SCANNED_MAX,
) -> Crossing:
    """`guess` says where the scan begins, and hardly what it finds."""
    rows: dict[float, Row] = {}

    def p90(rate: float) -> float:
        if rate not in rows:
            rows[rate] = simulate(rate)
        found = rows[rate]["normalized_p90"]
        return math.inf if found is None else float(found)

    grid = _scan(lambda rate: p90(rate) <= limit_ms, guess, scanned_max)
    upward = [(low, high) for low, high in pairwise(grid) if p90(low) <= limit_ms < p90(high)]
    if not upward:
        nearest = grid[-1] if p90(grid[-1]) <= limit_ms else grid[0]
        row = rows[nearest]
        tokens = row["tokens_per_second"] or 0.0
        return Crossing(nearest, tokens, row, (nearest,) * 2, (nearest,) * 2, 0, False)
    low, high = upward[0]
    for _ in range(halvings):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if p90(middle) <= limit_ms else (low, middle)
    share = 0.0  # between a rate that is served and one at which no turn ends there is nothing
    if math.isfinite(p90(high)) and p90(low) > 0:
        share = math.log(limit_ms / p90(low)) / math.log(p90(high) / p90(low))

    def between(key: str) -> float:
        first, last = rows[low][key] or 0.0, rows[high][key] or 0.0
        return float(first + share * (last - first))

    return Crossing(
        between("rate"),
        between("tokens_per_second"),
        rows[low],
        upward[0],
        upward[-1],
        len(upward),
        True,
    )


def _scan(within: Callable[[float], bool], guess: float, scanned_max: int) -> list[float]:
    """The rates of the grid that were looked at, in order."""
    least = most = math.floor(math.log(BEGIN * guess) / math.log(GRID_RATIO))
    below: list[bool] = [within(GRID_RATIO**least)]
    while len(below) < scanned_max:
        if not all(below[:CONFIRMING]) or (all(below) and len(below) < CONFIRMING):
            least -= 1
            below.insert(0, within(GRID_RATIO**least))
        elif any(below[-CONFIRMING:]):
            most += 1
            below.append(within(GRID_RATIO**most))
        else:
            break
    return [GRID_RATIO**power for power in range(least, most + 1)]
