"""Scales, ticks and text positions for figures.

An axis is logarithmic if its values differ by a factor of `LOGARITHMIC_FROM` or more. Its ticks are then 1,
2, 5 and 10 times a power of ten. A linear axis begins at zero, unless it has negative values. Swept values
are the ticks of their axis. Ticks are plain numbers, never powers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

LOGARITHMIC_FROM = 20.0
SWEPT_LOGARITHMIC_FROM = 8.0  # for swept values, which people usually double
TICKS_MAX = 7
TICKS_APART = 0.11  # minimum distance, as a share of the axis

Numbers = Sequence[float]


def plain(value: float) -> str:
    """Format a number: 0.05, 20, 1.5k, 2,048, 3M."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    rounded = float(f"{value:.3g}")
    if 1e3 <= abs(value) < 1e5 and value == round(value) != rounded:
        return f"{value:,.0f}"
    for unit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit * 0.9995:
            return f"{value / unit:.3g}{suffix}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def time_unit(seconds: Numbers) -> tuple[float, str]:
    """Return the factor for seconds and the unit it gives: milliseconds for short times."""
    return (1.0, "s") if max(seconds, default=0.0) >= 1 else (1e3, "ms")


def spread(wanted: Numbers, distance: float, most: float) -> list[float]:
    """Move positions as little as possible, until they are at least `distance` apart, between 0 and `most`.

    The order stays. If two positions are equal, the first ends up above the second.
    """
    order = sorted(range(len(wanted)), key=lambda index: (wanted[index], -index))
    # indices of positions that touch, and their common centre
    groups: list[tuple[list[int], float]] = []
    for index in order:
        members, middle = [index], min(max(wanted[index], 0.0), most)
        while groups:
            previous, previous_middle = groups[-1]
            if middle - previous_middle >= distance * (len(members) + len(previous)) / 2:
                break
            total = previous_middle * len(previous) + middle * len(members)
            members = previous + members
            half = distance * (len(members) - 1) / 2
            middle = min(max(total / len(members), half), max(most - half, half))
            groups.pop()
        groups.append((members, middle))
    positions = [0.0] * len(wanted)
    for members, middle in groups:
        for place, index in enumerate(members):
            positions[index] = middle + distance * (place - (len(members) - 1) / 2)
    return positions


@cache
def inches(text: str, size: float, bold: bool = False) -> float:
    """Return the width of a line of text, in inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    if not text.strip():
        return 0.0
    font = FontProperties(weight="bold" if bold else "normal")
    return float(TextPath((0, 0), text, size=size, prop=font).get_extents().x1) / 72


def wrap_lines(text: str, size: float, width: float, bold: bool = False) -> list[str]:
    """Break text into lines of whole words that are at most `width` inches wide."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and inches(longer, size, bold) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


@dataclass
class Scale:
    """The ends of an axis, and its ticks."""

    least: float
    most: float
    logarithmic: bool
    ticks: list[float] | None  # None: matplotlib's choice, which is round on a linear axis

    def share(self, value: float) -> float:
        """Return the position of a value along the axis, from 0 to 1."""
        if self.logarithmic:
            return math.log(value / self.least) / math.log(self.most / self.least)
        return (value - self.least) / (self.most - self.least)


def scale_of(values: Iterable[float], swept: Numbers = (), most: float | None = None) -> Scale:
    """Return a scale from zero, or a logarithmic scale if the values differ by a large factor.

    `swept`: the swept values, which become the ticks. An axis with a `most`, such as 100 %, is linear.
    """
    known = [value for value in (*values, *swept) if math.isfinite(value)] or [0.0, 1.0]
    least, largest = min(known), max(known)
    ratio_min = SWEPT_LOGARITHMIC_FROM if swept else LOGARITHMIC_FROM
    if most is None and least > 0 and largest / least >= ratio_min:
        steps = _steps(least, largest)
        low, high = steps[0] * 0.9, steps[-1] * 1.1
        return Scale(
            low, high, True, _without_overlaps(swept or steps, low, high, logarithmic=True)
        )
    room = 0.06 * (largest - min(least, 0.0)) or 1.0
    end = largest + room if most is None else most + 0.02 * most
    begin = least - room if least < 0 else 0.0
    return Scale(begin, end, False, _without_overlaps(swept, begin, end) if swept else None)


def _steps(least: float, most: float) -> list[float]:
    """Return 1, 2, 5, 10, … around these values; only powers of ten if these are too many."""
    first, last = math.floor(math.log10(least)), math.ceil(math.log10(most))
    for factors in ((1, 2, 5), (1,)):
        found = [
            factor * 10.0**exponent for exponent in range(first, last + 1) for factor in factors
        ]
        below = max((i for i, each in enumerate(found) if each <= least * 1.0001), default=0)
        above = min(
            (i for i, each in enumerate(found) if each >= most * 0.9999), default=len(found) - 1
        )
        found = found[below : above + 1]
        if len(found) <= TICKS_MAX:
            break
    return found


def _without_overlaps(
    values: Numbers, least: float, most: float, *, logarithmic: bool = False
) -> list[float]:
    """Drop the values whose labels would overlap."""
    scale, kept = Scale(least, most, logarithmic, None), list[float]()
    for value in sorted(set(values)):
        if not kept or scale.share(value) - scale.share(kept[-1]) >= TICKS_APART:
            kept.append(value)
    return kept
