"""Collect time series and quantiles in a fixed amount of memory.

A `Series` has bins of equal width. When time exceeds the last bin, pairs of bins merge and the width doubles.
So a minute and a month take the same memory, and every value still counts in the bin of its time.

A `Distribution` counts values in classes of 0.5 % width (and one class for values of zero or less), so a
quantile is exact to within 0.25 %. Sums are exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

BINS = 256
CLASS_RATIO = 1.005
CLASSES_PER_E = 1 / math.log(CLASS_RATIO)
NOT_POSITIVE = -(1 << 30)  # the class of values of zero or less


class Series:
    """Means of several values over stretches of time."""

    def __init__(self, names: Sequence[str], bins: int = BINS, width_seconds: float = 1.0) -> None:
        assert bins >= 2, "a Series needs at least two bins, because bins are merged in pairs"
        assert bins % 2 == 0, "bins are merged in pairs"
        self.names = tuple(names)
        self.width_seconds = width_seconds
        self._counts = [0.0] * bins
        self._sums = [[0.0] * bins for _ in names]

    def add(self, at: float, values: Sequence[float]) -> None:
        bin_index = int(at / self.width_seconds)
        while bin_index >= len(self._counts):
            self._merge()
            bin_index = int(at / self.width_seconds)
        self._counts[bin_index] += 1
        for sums, value in zip(self._sums, values, strict=True):
            sums[bin_index] += value

    def _merge(self) -> None:
        self.width_seconds *= 2
        for row in (self._counts, *self._sums):
            half = len(row) // 2
            row[:half] = [left + right for left, right in zip(row[::2], row[1::2], strict=True)]
            row[half:] = [0.0] * half

    def means(self) -> dict[str, list[float | None]]:
        """Return the means by name, and the beginning of each bin as `seconds`; None for empty bins."""
        used = max((index + 1 for index, count in enumerate(self._counts) if count), default=0)
        means: dict[str, list[float | None]] = {
            "seconds": [index * self.width_seconds for index in range(used)]
        }
        for name, sums in zip(self.names, self._sums, strict=True):
            means[name] = [
                total / count if count else None
                for total, count in zip(sums[:used], self._counts[:used], strict=True)
            ]
        return means


@dataclass
class Distribution:
    """Counts of values by class, and quantiles computed from them."""

    count: int = 0
    total: float = 0.0
    classes: dict[int, int] = field(default_factory=dict)

    def add(self, value: float, times: int = 1) -> None:
        self.count += times
        self.total += value * times
        index = math.floor(math.log(value) * CLASSES_PER_E) if value > 0 else NOT_POSITIVE
        self.classes[index] = self.classes.get(index, 0) + times

    def quantile(self, share: float) -> float | None:
        """Return the middle of the class that contains the quantile."""
        left = min(int(share * self.count), self.count - 1)
        for index in sorted(self.classes):
            left -= self.classes[index]
            if left < 0:
                return 0.0 if index == NOT_POSITIVE else CLASS_RATIO ** (index + 0.5)
        return None
