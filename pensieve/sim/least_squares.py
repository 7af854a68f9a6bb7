"""Solve nonnegative least squares from the normal equations (Lawson and Hanson).

Unknowns are added one by one, each time the unknown that improves the fit most, until none improves it.
Unknowns that would become negative are removed again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pensieve.core.streaming import solve

RIDGE = 1e-12  # relative; proportional columns then share what they explain
IMPROVEMENT_MIN = 1e-9  # relative to the largest target; a smaller improvement is only rounding


def nonnegative(products: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """Return each unknown; 0 for an empty column."""
    scales = [math.sqrt(products[i][i]) or 1.0 for i in range(len(targets))]
    right = [target / scale for target, scale in zip(targets, scales, strict=True)]
    matrix = [
        [each / (scales[i] * scales[j]) + (RIDGE if i == j else 0.0) for j, each in enumerate(row)]
        for i, row in enumerate(products)
    ]
    found, chosen = [0.0] * len(right), list[int]()
    improvement_min = IMPROVEMENT_MIN * max(map(abs, right), default=0.0)
    for _ in range(3 * len(right)):
        improvements = {
            i: right[i] - sum(matrix[i][j] * found[j] for j in chosen)
            for i in range(len(right))
            if i not in chosen and products[i][i] > 0
        }
        best = max(improvements, key=lambda i: improvements[i], default=None)
        if best is None or improvements[best] <= improvement_min:
            break
        chosen.append(best)
        while chosen:
            solution = solve(
                [[matrix[i][j] for j in chosen] for i in chosen], [right[i] for i in chosen]
            )
            if min(solution) > 0:
                for i, value in zip(chosen, solution, strict=True):
                    found[i] = value
                break
            step = min(  # the largest step before an unknown becomes negative
                found[i] / (found[i] - value)
                for i, value in zip(chosen, solution, strict=True)
                if value <= 0
            )
            for i, value in zip(chosen, solution, strict=True):
                found[i] += step * (value - found[i])
            zeros = [i for i in chosen if found[i] <= 1e-15]
            for i in zeros:
                found[i] = 0.0
            chosen = [i for i in chosen if i not in zeros]
    return [value / scale for value, scale in zip(found, scales, strict=True)]
