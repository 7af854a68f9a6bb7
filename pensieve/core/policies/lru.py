"""The policy `lru`: evict the least recently active conversation first."""

from __future__ import annotations

from pensieve.core.policies.protocol import StaticPolicy
from pensieve.core.prefix_tree import Branch


class LruPolicy(StaticPolicy):
    name = "lru"
    num_value_classes = 1
    value_class_ratio = 1.0

    def value_class_of(self, branch: Branch, chunk_index: int, now: float) -> int:
        return 0

    def value(self, value_class: int, idle_seconds: float) -> float:
        return 1.0 / max(idle_seconds, 1e-9)
