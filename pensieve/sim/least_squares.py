"""Least squares with no negative number, for a handful of unknowns.

From the normal equations: what is best without a negative number is best without bounds on some subset of the
unknowns, the others being 0; so of few unknowns every subset is tried.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

RIDGE = 1e-12  # relative: columns that are proportional share what they explain


def nonnegative(
    products: Sequence[Sequence[float]],
    targets: Sequence[float],
    squares: float,
    allowed: Sequence[int],
) -> tuple[float, list[float]]:
    """The squares that are left, and each unknown; those that are not `allowed` are 0.

    `products` are the columns' with each other, `targets` with what is to be explained, `squares` its own.
    """
    best_left, best = squares, [0.0] * len(targets)
    for subset in range(1, 1 << len(allowed)):
        chosen = [each for bit, each in enumerate(allowed) if subset >> bit & 1]
        scales = {i: math.sqrt(products[i][i]) or 1.0 for i in chosen}
        right = [targets[i] / scales[i] for i in chosen]
        matrix = [
            [products[i][j] / (scales[i] * scales[j]) + (RIDGE if i == j else 0.0) for j in chosen]
            for i in chosen
        ]
        found = solved(matrix, right)
        if min(found) < 0:
            continue
        left = squares - sum(x * known for x, known in zip(found, right, strict=True))
        if left < best_left:
            best_left, best = left, [0.0] * len(targets)
            for i, x in zip(chosen, found, strict=True):
                best[i] = x / scales[i]
    return max(best_left, 0.0), best


def solved(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Gauss's elimination, for a positive definite matrix."""
    rows = [[*row, known] for row, known in zip(matrix, right, strict=True)]
    size = len(rows)
    for i, row in enumerate(rows):
        for below in rows[i + 1 :]:
            factor = below[i] / row[i]
            for k in range(i, size + 1):
                below[k] -= factor * row[k]
    found = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][k] * found[k] for k in range(i + 1, size))
        found[i] = (rows[i][size] - known) / rows[i][i]
    return found
