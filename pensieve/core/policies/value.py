"""The policy `value`: keep the chunks with the highest recompute cost per idle second.

    retention_value = cost(l) / T, summed over the holders     (seconds of recompute per second idle)

l is the length of the context before the chunk, and T the holder's idle time.
"""

from __future__ import annotations

import math

from pensieve.core.cost import CostProfile, CostSteps, value_class_at
from pensieve.core.policies.protocol import StaticPolicy
from pensieve.core.prefix_tree import Branch

VALUE_CLASS_RATIO = 1.1
NUM_VALUE_CLASSES = 64


class ValuePolicy(StaticPolicy):
    name = "value"
    num_value_classes = NUM_VALUE_CLASSES
    value_class_ratio = VALUE_CLASS_RATIO

    def __init__(self, cost: CostProfile, chunk_tokens: int) -> None:
        self._steps = CostSteps(cost, chunk_tokens, VALUE_CLASS_RATIO)
        least_cost = cost.chunk_seconds(0)
        self._values = [least_cost * VALUE_CLASS_RATIO**i for i in range(NUM_VALUE_CLASSES)]

    def value_class_of(self, branch: Branch, chunk_index: int, now: float) -> int:
        steps = self._steps[chunk_index]
        if len(branch.holders) > 1:
            steps += math.log(branch.holders_weight(now), VALUE_CLASS_RATIO)
        return value_class_at(steps, NUM_VALUE_CLASSES)

    def value(self, value_class: int, idle_seconds: float) -> float:
        return self._values[value_class] / (idle_seconds if idle_seconds > 1.0 else 1.0)
