"""An eviction policy that knows the trace: evict the conversation whose next message is furthest away.

This is Belady's rule. Policies that do not know the trace can hardly do better. So the row of this policy in
a report shows how much other policies could still gain. The bound is practical, not proven: the policy
ignores costs, and distinguishes only times that are `APART_SECONDS` apart (or more, in traces of many hours).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from itertools import islice

from pensieve.core.policies.protocol import EndedTurn, StaticPolicy
from pensieve.core.prefix_tree import HOLDERS_SUMMED_MAX, Branch
from pensieve.sim.trace import Arrival

NUM_VALUE_CLASSES = 1024
APART_SECONDS = 15.0
REFUSED_SECONDS = 600.0  # a turn that has not begun this long after its time counts as refused


class ClairvoyantPolicy(StaticPolicy):
    name = "clairvoyant"
    num_value_classes = NUM_VALUE_CLASSES
    value_class_ratio = math.inf

    def __init__(self, arrivals: Iterable[Arrival]) -> None:
        self._own: dict[str, deque[Arrival]] = {}  # by conversation: turns that have not begun
        self._forks: dict[str, deque[float]] = {}  # by conversation: when others fork from it
        self._next: dict[str, float] = {}  # by conversation: when its history is used next
        end = 1.0
        for arrival in arrivals:
            self._own.setdefault(arrival.conversation, deque()).append(arrival)
            if arrival.fork_of and arrival.at is not None:
                self._forks.setdefault(arrival.fork_of, deque()).append(arrival.at)
            end = max(end, (arrival.at or 0.0) + arrival.after)
        self._width = max(end / (NUM_VALUE_CLASSES - 2), APART_SECONDS)

    def turn_ended(self, conversation_id: str, ended: EndedTurn, now: float) -> float:
        forks, own = self._forks.get(conversation_id, deque()), self._own.get(conversation_id)
        while forks and forks[0] <= now:
            forks.popleft()
        soonest = forks[0] if forks else math.inf
        while own and own[0].at is not None and own[0].at < now - REFUSED_SECONDS:
            own.popleft()
        if own:
            soonest = min(soonest, max(own[0].at or 0.0, now + own[0].after))
        self._next[conversation_id] = soonest
        return 1.0

    def turn_began(self, conversation_id: str, now: float) -> None:
        if own := self._own.get(conversation_id):
            own.popleft()

    def forked(self, source_id: str, target_id: str, now: float) -> None:
        self._next[target_id] = now  # its first message arrives immediately

    def initial_idle_seconds(self, away_seconds: float) -> float:
        return 0.0

    def value_class_of(self, branch: Branch, chunk_index: int, now: float) -> int:
        """Return the value class of a chunk: the sooner its next use, the higher; 0 without a next use."""
        holders = islice(reversed(branch.holders), HOLDERS_SUMMED_MAX)
        soonest = min(self._next.get(holder.conversation_id, math.inf) for holder in holders)
        if soonest == math.inf:
            return 0
        return max(NUM_VALUE_CLASSES - 1 - int(soonest / self._width), 1)

    def value(self, value_class: int, idle_seconds: float) -> float:
        return float(value_class)
