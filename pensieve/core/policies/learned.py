"""A policy that learns who comes back.

    value = cost(l) · sum over the holders of (ratio) · worth(idle time)

The ratio and the worth are what a life table has learned (life_table.py), so a value is seconds of
recompute saved per second of keeping.  The ratio of a conversation is known when it comes to rest and
goes, with the cost, into the class; what changes with time is the same for all, so a queue keeps its
order (retention.py).  What a client says about its return is a trait like others: evidence, weighed by
how true it proved.

What was learned may be wrong, most of all when the workload shifts: the cache follows it as long as it would
have lost less than plain lru lately, and lru otherwise (ghost.py).

Where the seconds of a copy between the tiers are known (`CostProfile.copy_seconds`), they are weighed
against those of recomputing.  A chunk is computed again if that is quicker than copying it in, and it
does not go to the host if the copy out would cost more than copying it in saves, times how likely its
conversation is to return.
"""

from __future__ import annotations

import math

from pensieve.core.cost import CostProfile
from pensieve.core.policies.return_model import LifeTable, Turned
from pensieve.core.policies.shadow_cache import Trial
from pensieve.core.prefix_tree import Branch

NUM_CLASSES = 64
CLASS_RATIO = 1.15
UNIT_CLASS = 16  # of a chunk without context, of a conversation of ratio 1
ORDER_STEP = 0.25  # ratios that differ by less than exp of it are alike to a ghost


class ReturnPolicy:
    name = "return"
    num_classes = NUM_CLASSES
    class_ratio = CLASS_RATIO

    def __init__(self, cost: CostProfile, chunk_tokens: int) -> None:
        self._cost = cost
        self._chunk_tokens = chunk_tokens
        self._least_cost = cost.chunk_seconds(0)
        self._steps: list[float] = []  # by chunk index: log(cost / least cost) / log(class ratio)
        self._of_class = [
            self._least_cost * CLASS_RATIO ** (i - UNIT_CLASS) for i in range(NUM_CLASSES)
        ]
        self.table = LifeTable()
        self.trial = Trial(self._value_of_order, self._seconds_of)

    def holds(self, num_tokens: int) -> None:
        self.trial.holds(num_tokens)

    def rested(self, name: str, turned: Turned, now: float) -> float:
        ratio = self.table.rested(name, turned, now)
        order = round(math.log(ratio) / ORDER_STEP)
        self.trial.rested(name, order, turned.length, now, turned.away_seconds)
        return ratio

    def returned(self, name: str, now: float) -> None:
        length = self.table.returned(name, now)
        if length is not None:
            self.trial.returned(name, length, now)

    def forked(self, source: str, target: str, now: float) -> None:
        self.table.forked(source, target, now)

    def counts_as_idle(self, away_seconds: float) -> float:
        return 0.0 if self.trial.trusted else away_seconds  # else it is a trait

    def class_of(self, branch: Branch, chunk_index: int, now: float) -> int:
        while chunk_index >= len(self._steps):
            seconds = self._cost.chunk_seconds((len(self._steps) + 1) * self._chunk_tokens)
            self._steps.append(math.log(seconds / self._least_cost, CLASS_RATIO))
        steps = self._steps[chunk_index] + math.log(branch.weight(now), CLASS_RATIO)
        return min(max(int(steps + UNIT_CLASS), 0), NUM_CLASSES - 1)

    def value(self, class_index: int, idle_seconds: float) -> float:
        if not self.trial.trusted:
            return self._least_cost / max(idle_seconds, 1e-9)
        return self._of_class[class_index] * self.table.worth(idle_seconds)

    def fetches(self, chunk_index: int) -> bool:
        context = (chunk_index + 1) * self._chunk_tokens
        return self._cost.copy_seconds <= self._cost.chunk_seconds(context)

    def saves(self, branch: Branch, chunk_index: int, now: float) -> bool:
        copy = self._cost.copy_seconds
        if not copy or not self.trial.trusted:
            return True
        gain = self._cost.chunk_seconds((chunk_index + 1) * self._chunk_tokens) - copy
        returns = self.table.likelihood(branch.weight(now), now - branch.idle_since)
        return returns * gain > copy

    def _value_of_order(self, order: int, idle_seconds: float) -> float:
        return math.exp(order * ORDER_STEP) * self.table.worth(idle_seconds)

    def _seconds_of(self, num_tokens: int) -> float:
        return num_tokens / self._chunk_tokens * self._cost.chunk_seconds(num_tokens // 2)
