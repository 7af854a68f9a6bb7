"""Rows of the papers' tables and figures: the paper's number beside ours, and a verdict from both.

A verdict needs a claim of the paper. It compares the paper's number with the median of ours over the seeds.
The *effect* of a ratio is its distance from 1. An absolute value (a time, a rate) has no effect.

    reproduced      within TOLERANCE of the paper's number or range, and at least half of the paper's effect
    same shape      the effect has the paper's direction in every seed, and its size is within the factor
                    SHAPE; an absolute value is within the factor TIME
    not reproduced  otherwise

If the paper's text has a direction but no number, the best verdict is "same shape", and the effect must be at
least EFFECT_MIN of the neutral value. Without a claim of the paper there is no verdict.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

TOLERANCE = 0.15
SHAPE = 4.0
TIME = 2.0
EFFECT_MIN = 0.005
REPRODUCED, SAME_SHAPE, NOT_REPRODUCED = "reproduced", "same shape", "not reproduced"
NO_CLAIM = "-"


@dataclass(frozen=True)
class Spread:
    """The values of one row by seed."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def shown(self, form: str) -> str:
        least, most = form.format(min(self.values)), form.format(max(self.values))
        if least == most:
            return least
        return f"{form.format(self.median)} ({least} to {most})"


def ratio(ours: Iterable[float], theirs: Iterable[float]) -> Spread:
    return Spread(tuple(a / (b or math.nan) for a, b in zip(ours, theirs, strict=True)))


@dataclass(frozen=True)
class Claim:
    """What a paper says. `neutral`: the value without any effect; None: an absolute value.

    In a range, `least` has the smaller effect. If the number is `neutral`, the claim is that there is no
    effect: it is reproduced or not.
    """

    least: float
    most: float
    neutral: float | None = 1.0
    has_number: bool = True

    def __post_init__(self) -> None:
        neutral = self.neutral or 0.0
        assert not self.has_number or abs(self.least - neutral) <= abs(self.most - neutral), self

    def verdict(self, ours: Spread) -> str:
        median = ours.median
        if not all(map(math.isfinite, ours.values)):
            return NOT_REPRODUCED
        low, high = sorted((self.least * (1 - TOLERANCE), self.least * (1 + TOLERANCE)))
        high = max(high, self.most * (1 + TOLERANCE))
        if self.has_number and low <= median <= high and self._has_half(median):
            return REPRODUCED
        if self.neutral is None:
            is_near = self.least / TIME <= median <= self.most * TIME
            return SAME_SHAPE if is_near else NOT_REPRODUCED
        effect = self.least - self.neutral
        same_side = all((value - self.neutral) * effect > 0 for value in ours.values)
        size = abs(median - self.neutral)
        least, most = abs(effect) / SHAPE, abs(self.most - self.neutral) * SHAPE
        if not self.has_number:
            least, most = EFFECT_MIN * abs(self.neutral), math.inf
        return SAME_SHAPE if same_side and least <= size <= most else NOT_REPRODUCED

    def _has_half(self, value: float) -> bool:
        """Return whether a value has half of the effect: one without any may be within TOLERANCE."""
        if self.neutral is None or self.least == self.neutral:
            return True
        return (value - self.neutral) / (self.least - self.neutral) >= 0.5

    def shown(self, form: str) -> str:
        if not self.has_number:
            return (
                f"{'more' if self.least > (self.neutral or 0.0) else 'less'} than "
                + form.format(self.neutral)
            )
        if self.least == self.most:
            return form.format(self.least)
        return f"{form.format(self.least)} to {form.format(self.most)}"


def about(value: float, most: float | None = None, neutral: float | None = 1.0) -> Claim:
    """The paper has this number, or a range. For an absolute value, `neutral` is None."""
    return Claim(value, value if most is None else most, neutral)


def more(neutral: float = 1.0) -> Claim:
    """The paper has only the direction: more than `neutral`."""
    return Claim(neutral + 1.0, math.inf, neutral, has_number=False)


def less(neutral: float = 1.0) -> Claim:
    return Claim(neutral - 1.0, neutral, neutral, has_number=False)


@dataclass(frozen=True)
class Row:
    figure: str  # such as "Sarathi-Serve, figure 9"
    name: str
    paper: Claim | None
    ours: Spread
    reason: str  # one line: why the numbers agree or differ
    form: str = "{:.2f} x"

    @property
    def verdict(self) -> str:
        return NO_CLAIM if self.paper is None else self.paper.verdict(self.ours)

    @property
    def paper_shown(self) -> str:
        return NO_CLAIM if self.paper is None else self.paper.shown(self.form)

    @property
    def ours_shown(self) -> str:
        return self.ours.shown(self.form)


@dataclass(frozen=True)
class Extent:
    """How much is simulated for each figure."""

    seeds: int = 3
    # Conversations (Pensieve).
    warm_seconds: float = 100.0  # not counted
    seconds: float = 600.0  # counted, per simulation
    confirming: int = 3  # rates on each side of the limit; see equal_latency.py
    halvings: int = 2
    # Capacities (Sarathi-Serve).
    capacity_warm_seconds: float = 30.0
    capacity_seconds: float = 150.0
    capacity_requests: float = 100.0  # minimum in a simulation at the first rate of a search
    resolution: float = 1.1  # ratio of rates at which the search ends
    requests: int = 128  # table 4
    # Panels of FluidInfer.
    panel_fills: float = 6.0  # number of requests, as a multiple of what fits on the device
    bound_seeds: int = 5  # loads for each latency bound
    batch_share: float = 1.0  # of the requests of a batch (BatchLLM)
    repeats: int = 30  # timed calls of a kernel


QUICK = Extent(
    seeds=1,
    warm_seconds=60.0,
    seconds=150.0,
    confirming=1,
    halvings=2,
    capacity_warm_seconds=20.0,
    capacity_seconds=60.0,
    capacity_requests=40.0,
    resolution=1.2,
    panel_fills=2.0,
    bound_seeds=3,
    batch_share=0.5,
    repeats=5,
)
Figure = Callable[[Extent], Iterator[Row]]
