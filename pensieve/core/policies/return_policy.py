"""The policy `return`: learn which conversations return, and when, and keep their KV.

    value = cost(l) · sum over the holders of (return_ratio) · worth(idle time)

The return_ratio and the worth come from a model of returns (return_model.py). A value is the seconds of
recompute saved per second of keeping the chunk. A conversation's return_ratio is known when its turn ends.
The return_ratio and the cost determine the value class of a chunk. The worth changes with time, but in the
same way for all conversations. So a queue keeps its order (queue.py). The model of returns gives each trait
of a conversation a learned weight. The absence that a client announces is one of these traits.

The model may be wrong, especially when the workload changes. Also, many conversations may return one after
the other (a *scan*). So three orders of eviction are compared: by learned value, plain lru, and by learned
value times a random factor, which resists scans. The cache follows the order that would recently have cost
least (shadow_cache.py).

If the time of a copy between the tiers is known (`CostProfile.copy_seconds`), it is compared with the time to
recompute a chunk. A needed chunk is recomputed if that is faster than the copy from the host. The expected
gain of a copy to the host is the time saved by the later copy back, times the probability that the
conversation returns. If the copy costs more than that, it is not made.
"""

from __future__ import annotations

import math

from pensieve.core.cost import CostProfile, CostSteps, value_class_at
from pensieve.core.policies.protocol import EndedTurn
from pensieve.core.policies.return_model import ReturnModel
from pensieve.core.policies.shadow_cache import BUCKET_STEP, Order, Trial, random_factor
from pensieve.core.prefix_tree import Branch

VALUE_CLASS_RATIO = 1.15
NUM_VALUE_CLASSES = 96
UNIT_VALUE_CLASS = 40  # value class of a chunk without context, if the return_ratio is 1


class ReturnPolicy:
    name = "return"
    num_value_classes = NUM_VALUE_CLASSES
    value_class_ratio = VALUE_CLASS_RATIO

    def __init__(self, cost: CostProfile, chunk_tokens: int) -> None:
        self._cost = cost
        self._chunk_tokens = chunk_tokens
        self._least_cost = cost.chunk_seconds(0)
        self._steps = CostSteps(cost, chunk_tokens, VALUE_CLASS_RATIO)
        self._value_of_class = [
            self._least_cost * VALUE_CLASS_RATIO ** (i - UNIT_VALUE_CLASS)
            for i in range(NUM_VALUE_CLASSES)
        ]
        self.model = ReturnModel()
        self.trial = Trial(self._value_of_bucket, self._seconds_of)

    def set_capacity(self, num_tokens: int) -> None:
        self.trial.set_capacity(num_tokens)

    def turn_began(self, conversation_id: str, now: float) -> None:
        length = self.model.turn_began(conversation_id, now)
        if length is not None:
            is_hit = self.trial.turn_began(conversation_id, length, now)
            self.model.count_hits(conversation_id, is_hit)

    def turn_ended(self, conversation_id: str, ended: EndedTurn, now: float) -> float:
        return_ratio = self.model.turn_ended(conversation_id, ended, now)
        factor = random_factor(self.model.draw_of(conversation_id))
        self.trial.turn_ended(conversation_id, return_ratio, factor, ended, now)
        return return_ratio

    def value_factor_of(self, conversation_id: str) -> float:
        if self.trial.followed is not Order.RANDOM:
            return 1.0
        return random_factor(self.model.draw_of(conversation_id))

    def forked(self, source_id: str, target_id: str, now: float) -> None:
        self.model.forked(source_id, target_id, now)

    def continued(self, conversation_id: str, new_id: str) -> None:
        self.model.continued(conversation_id, new_id)
        self.trial.continued(conversation_id, new_id)

    def initial_idle_seconds(self, away_seconds: float) -> float:
        # The learned values have the announced absence as a trait.
        return away_seconds if self.trial.followed is Order.LRU else 0.0

    def value_class_of(self, branch: Branch, chunk_index: int, now: float) -> int:
        steps = self._steps[chunk_index] + math.log(branch.holders_weight(now), VALUE_CLASS_RATIO)
        return value_class_at(steps + UNIT_VALUE_CLASS, NUM_VALUE_CLASSES)

    def value(self, value_class: int, idle_seconds: float) -> float:
        if self.trial.followed is Order.LRU:
            return self._least_cost / max(idle_seconds, 1e-9)
        return self._value_of_class[value_class] * self.model.worth(idle_seconds)

    def worth_swapping_in(self, chunk_index: int) -> bool:
        context = (chunk_index + 1) * self._chunk_tokens
        return self._cost.copy_seconds <= self._cost.chunk_seconds(context)

    def worth_swapping_out(self, branch: Branch, chunk_index: int, now: float) -> bool:
        copy_seconds = self._cost.copy_seconds
        if not copy_seconds or self.trial.followed is Order.LRU:
            return True
        context = (chunk_index + 1) * self._chunk_tokens
        gain = self._cost.chunk_seconds(context) - copy_seconds
        return_ratio = branch.holders_weight(now, with_value_factors=False)
        probability = self.model.likelihood(return_ratio, now - branch.idle_since)
        return probability * gain > copy_seconds

    def _value_of_bucket(self, bucket: int, idle_seconds: float) -> float:
        return math.exp(bucket * BUCKET_STEP) * self.model.worth(idle_seconds)

    def _seconds_of(self, num_tokens: int) -> float:
        return num_tokens / self._chunk_tokens * self._cost.chunk_seconds(num_tokens // 2)
