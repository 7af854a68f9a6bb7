"""What a paper says about a value, and the verdict that compares it with our values.

A verdict needs a claim of the paper. It compares the paper's number with the median of ours over the seeds.
The *effect* of a ratio is its distance from 1. An absolute value (a time, a rate) has no effect.

    reproduced      within TOLERANCE of the paper's number or range, and at least half of the paper's effect
    same shape      the effect has the paper's direction in every seed, and its size is within the factor
                    SHAPE; an absolute value is within the factor TIME
    not reproduced  otherwise

If the paper's text has a direction but no number, the best verdict is "same shape", and the effect must be at
least EFFECT_MIN times the neutral value (the value without any effect), or 1 if the neutral value is 0 (a
percentage point). Without a claim of the paper there is no verdict.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

TOLERANCE = 0.15
SHAPE = 4.0
TIME = 2.0
EFFECT_MIN = 0.005
REPRODUCED, SAME_SHAPE, NOT_REPRODUCED = "reproduced", "same shape", "not reproduced"
NO_VERDICT = "-"
VERDICTS = (REPRODUCED, SAME_SHAPE, NOT_REPRODUCED, NO_VERDICT)
TIMES = "{:.2f} x"


@dataclass(frozen=True)
class Claim:
    """What a paper says about a value, and how the value is printed.

    In a range, `least` has the smaller effect. If the number equals `neutral`, the paper claims that there is
    no effect, and the verdict is never "same shape".
    """

    least: float
    most: float
    neutral: float | None  # the value without any effect; None: an absolute value
    form: str
    has_number: bool = True

    def __post_init__(self) -> None:
        neutral = self.neutral or 0.0
        assert not self.has_number or abs(self.least - neutral) <= abs(self.most - neutral), self

    @property
    def is_empty(self) -> bool:
        return math.isnan(self.least)

    def verdict(self, ours: Sequence[float]) -> str:
        if self.is_empty:
            return NO_VERDICT
        median = statistics.median(ours)
        if not all(map(math.isfinite, ours)):
            return NOT_REPRODUCED
        low, high = sorted((self.least * (1 - TOLERANCE), self.least * (1 + TOLERANCE)))
        high = max(high, self.most * (1 + TOLERANCE))
        if self.has_number and low <= median <= high and self._has_half(median):
            return REPRODUCED
        if self.neutral is None:
            is_near = self.least / TIME <= median <= self.most * TIME
            return SAME_SHAPE if is_near else NOT_REPRODUCED
        effect = self.least - self.neutral
        same_side = all((value - self.neutral) * effect > 0 for value in ours)
        size = abs(median - self.neutral)
        least, most = abs(effect) / SHAPE, abs(self.most - self.neutral) * SHAPE
        if not self.has_number:
            least, most = EFFECT_MIN * abs(self.neutral) or 1.0, math.inf
        return SAME_SHAPE if same_side and least <= size <= most else NOT_REPRODUCED

    def _has_half(self, value: float) -> bool:
        """Return whether a value has at least half of the claimed effect.

        If the claimed effect is small, even a value without any effect is within TOLERANCE.
        """
        if self.neutral is None or self.least == self.neutral:
            return True
        return (value - self.neutral) / (self.least - self.neutral) >= 0.5

    @property
    def shown(self) -> str:
        if self.is_empty:
            return NO_VERDICT
        if not self.has_number:
            direction = "more" if self.least > (self.neutral or 0.0) else "less"
            return f"{direction} than {self.form.format(self.neutral)}"
        least, most = self.form.format(self.least), self.form.format(self.most)
        return least if self.least == self.most else f"{least} to {most}"


def about(
    value: float, most: float | None = None, form: str = TIMES, neutral: float = 1.0
) -> Claim:
    """The paper has this number, or a range."""
    return Claim(value, value if most is None else most, neutral, form)


def improvement(value: float, most: float | None = None, form: str = "{:.1f} %") -> Claim:
    """The paper has this difference, or a range; without any effect it is 0."""
    return about(value, most, form, neutral=0.0)


def absolute(value: float, form: str) -> Claim:
    """The paper has this time or rate."""
    return Claim(value, value, None, form)


def more(neutral: float = 1.0, form: str = TIMES) -> Claim:
    """The paper has only the direction: more than `neutral`."""
    return Claim(neutral + 1.0, math.inf, neutral, form, has_number=False)


def less(neutral: float = 1.0, form: str = TIMES) -> Claim:
    return Claim(neutral - 1.0, neutral, neutral, form, has_number=False)


def no_claim(form: str = TIMES) -> Claim:
    """The paper says nothing about this value."""
    return Claim(math.nan, math.nan, None, form, has_number=False)
