"""A policy that learns who comes back.

    value = cost(l) · sum over the holders of (ratio) · worth(idle time)

The ratio and the worth are what a life table has learned (life_table.py), so a value is seconds of
recompute saved per second of keeping.  The ratio of a conversation is known when it comes to rest and
goes, with the cost, into the class; what changes with time is the same for all, so a queue keeps its
order (retention.py).  What a client says about its return is a trait like others: evidence, weighed by
how true it proved.

Where the seconds of a copy between the tiers are known (`CostProfile.copy_seconds`), they are weighed
against those of recomputing.  A chunk is computed again if that is quicker than copying it in, and it
does not go to the host if the copy out would cost more than copying it in saves, times how likely its
conversation is to return.
"""

from __future__ import annotations

import math

from pensieve.core.chunk import Branch
from pensieve.core.cost import CostProfile
from pensieve.core.life_table import LifeTable, Turned

NUM_CLASSES = 64
CLASS_RATIO = 1.15
UNIT_CLASS = 24  # of a chunk without context, of a conversation of ratio 1


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

    def rested(self, name: str, turned: Turned, now: float) -> float:
        return self.table.rested(name, turned, now)

    def returned(self, name: str, now: float) -> None:
        self.table.returned(name, now)

    def forked(self, source: str, target: str, now: float) -> None:
        self.table.forked(source, target, now)

    def counts_as_idle(self, away_seconds: float) -> float:
        return 0.0  # it is a trait

    def class_of(self, branch: Branch, chunk_index: int, now: float) -> int:
        while chunk_index >= len(self._steps):
            seconds = self._cost.chunk_seconds((len(self._steps) + 1) * self._chunk_tokens)
            self._steps.append(math.log(seconds / self._least_cost, CLASS_RATIO))
        steps = self._steps[chunk_index] + math.log(branch.weight(now), CLASS_RATIO)
        return min(max(int(steps + UNIT_CLASS), 0), NUM_CLASSES - 1)

    def value(self, class_index: int, idle_seconds: float) -> float:
        return self._of_class[class_index] * self.table.worth(idle_seconds)

    def fetches(self, chunk_index: int) -> bool:
        context = (chunk_index + 1) * self._chunk_tokens
        return self._cost.copy_seconds <= self._cost.chunk_seconds(context)

    def saves(self, branch: Branch, chunk_index: int, now: float) -> bool:
        copy = self._cost.copy_seconds
        if not copy:
            return True
        gain = self._cost.chunk_seconds((chunk_index + 1) * self._chunk_tokens) - copy
        returns = self.table.likelihood(branch.weight(now), now - branch.idle_since)
        return returns * gain > copy
