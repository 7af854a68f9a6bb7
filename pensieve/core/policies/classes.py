"""The classes into which a policy sorts chunks by what recomputing them costs.

Neighboring classes differ by a factor, `class_ratio`.  A chunk's class therefore lies as many steps
above that of the cheapest chunk as the logarithm of its cost says, and of several factors (cost,
holders) the steps are added.
"""

from __future__ import annotations

import math

from pensieve.core.cost import CostProfile

NUM_CLASSES = 64


class CostSteps(dict[int, float]):
    """By chunk index: log(cost / cost of the cheapest chunk) / log(class_ratio), computed when first asked.

    Costs grow with the context, so there is one number per chunk index; a hit costs a dict lookup,
    because every decision asks.
    """

    def __init__(self, cost: CostProfile, chunk_tokens: int, class_ratio: float) -> None:
        super().__init__()
        self._cost = cost
        self._chunk_tokens = chunk_tokens
        self._class_ratio = class_ratio
        self._least_seconds = cost.chunk_seconds(0)

    def __missing__(self, chunk_index: int) -> float:
        seconds = self._cost.chunk_seconds((chunk_index + 1) * self._chunk_tokens)
        steps = math.log(seconds / self._least_seconds, self._class_ratio)
        self[chunk_index] = steps
        return steps


def class_at(steps: float) -> int:
    """The class so many steps above class 0, rounded down; those beyond the ends share the last one."""
    return min(max(int(steps), 0), NUM_CLASSES - 1)
