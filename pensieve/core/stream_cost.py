"""What iterations take with streamed turns and without, learned from those that have run.

What is predicted (iteration_cost.py) is often off: costs may be estimates, rows become dearer when a batch is
large, and how well copies hide behind computing depends on the machine.  So the seconds of an iteration in
which turns generate are taken to be

    a · predicted + b · rows + c · groups + d · copies

each term in seconds as configured (a pass, its dense part per token, `group_seconds`, `copy_seconds`), and
a, b, c, d are fitted to the last iterations, by least squares of the relative error, as old ones fade.  They
are pulled towards 1, 0, 1, 1, which are also the answer before anything is measured, and none is negative.
An iteration that was late for another reason has a relative error below 1, and one alone, even the first
with streamed turns, weighs less than what was configured: so it changes little.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pensieve.core.scheduler_config import SchedulerConfig

FADING = 0.97  # of an observation's weight, with each that follows
PULL = 1.5  # of what was configured, in observations of a term
NEVER_SEEN = 1e-12  # of a term that nothing was observed of
CONFIGURED = (1.0, 0.0, 1.0, 1.0)


class Load(NamedTuple):
    """What an iteration holds in which some turns generate."""

    num_turns: int
    num_positions: int
    num_pages: int  # of streamed turns

    def with_turn(self, num_tokens: int, num_pages: int = 0) -> Load:
        return Load(self.num_turns + 1, self.num_positions + num_tokens, self.num_pages + num_pages)


class StreamCost:
    def __init__(self, config: SchedulerConfig, pages_max: int) -> None:
        """A group has so many pages at most."""
        self._config, self._pages_max = config, max(pages_max, 1)
        size = len(CONFIGURED)
        self._products = [
            [0.0] * size for _ in range(size)
        ]  # of the terms, over the seconds squared
        self._sums = [0.0] * size
        self._counts = [0.0] * size  # observations of each term
        self._factors: Sequence[float] | None = CONFIGURED  # None: to be fitted

    def seconds(self, load: Load) -> float:
        if self._factors is None:
            self._factors = self._fitted()
        terms = self._terms(load)
        return sum(factor * term for factor, term in zip(self._factors, terms, strict=True))

    def took(self, load: Load, seconds: float) -> None:
        """An iteration with this load."""
        if seconds <= 0.0 or not load.num_turns:
            return
        shares = [term / seconds for term in self._terms(load)]
        for row, own in zip(self._products, shares, strict=True):
            for column, other in enumerate(shares):
                row[column] = FADING * row[column] + own * other
        self._sums = [FADING * known + own for known, own in zip(self._sums, shares, strict=True)]
        self._counts = [
            FADING * known + (own > 0.0) for known, own in zip(self._counts, shares, strict=True)
        ]
        self._factors = None

    def _terms(self, load: Load) -> tuple[float, float, float, float]:
        config, (count, positions, pages) = self._config, load
        cost = config.cost
        return (
            cost.pass_seconds(count, positions, positions, count),
            cost.dense_seconds_per_token * count,
            config.group_seconds * -(-pages // self._pages_max),
            config.copy_seconds * pages,
        )

    def _fitted(self) -> list[float]:
        """Terms whose factor would be negative are left out, the lowest first."""
        products, used = self._products, list(range(len(CONFIGURED)))
        pulls = [PULL * products[i][i] / max(self._counts[i], 1.0) + NEVER_SEEN for i in used]
        factors = [0.0] * len(CONFIGURED)
        while used:
            found = solved(
                [[products[i][j] + (pulls[i] if i == j else 0.0) for j in used] for i in used],
                [self._sums[i] + pulls[i] * CONFIGURED[i] for i in used],
            )
            lowest = min(range(len(used)), key=found.__getitem__)
            if found[lowest] >= 0.0:
                for i, factor in zip(used, found, strict=True):
                    factors[i] = factor
                break
            del used[lowest]
        return factors


def solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Of a symmetric matrix that is positive definite, by elimination."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(size):
        for below in rows[i + 1 :]:
            factor = below[i] / rows[i][i]
            for j in range(i, size + 1):
                below[j] -= factor * rows[i][j]
    found = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(rows[i][j] * found[j] for j in range(i + 1, size))
        found[i] = (rows[i][size] - rest) / rows[i][i]
    return found
