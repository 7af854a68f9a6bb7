"""What two token logs have in common."""

from __future__ import annotations

from array import array


def common_prefix(one: array[int], other: array[int]) -> int:
    """How many leading tokens are the same."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
