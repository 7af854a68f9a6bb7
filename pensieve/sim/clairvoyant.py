"""A policy that knows the trace: whose next message is furthest away goes first (Belady's rule).

Who has to guess can hardly hold more of what will be used, so its row in a report tells what the others
could still gain: a bound in practice, not a proof, for it does not weigh by cost, and tells apart only times
that lie `APART_SECONDS` apart (or more, in traces of many hours).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from itertools import islice

from pensieve.core.policies.protocol import EndedTurn, StaticPolicy
from pensieve.core.prefix_tree import HOLDERS_SUMMED_MAX, Branch
from pensieve.sim.trace import Visit

NUM_CLASSES = 1024
APART_SECONDS = 15.0
REFUSED_SECONDS = 600.0  # a message that has not begun so long after its time never will


class ClairvoyantPolicy(StaticPolicy):
    name = "clairvoyant"
    num_classes = NUM_CLASSES
    class_ratio = math.inf

    def __init__(self, visits: Iterable[Visit]) -> None:
        self._own: dict[str, deque[Visit]] = {}  # of each conversation, that have not begun
        self._forks: dict[str, deque[float]] = {}  # when others begin with its past
        self._next: dict[str, float] = {}  # of those at rest
        end = 1.0
        for visit in visits:
            self._own.setdefault(visit.conversation, deque()).append(visit)
            if visit.fork_of and visit.at is not None:
                self._forks.setdefault(visit.fork_of, deque()).append(visit.at)
            end = max(end, (visit.at or 0.0) + visit.after)
        self._width = max(end / (NUM_CLASSES - 2), APART_SECONDS)

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
        self._next[target_id] = now  # it is about to speak

    def initial_idle_seconds(self, away_seconds: float) -> float:
        return 0.0

    def class_of(self, branch: Branch, chunk_index: int, now: float) -> int:
        """The sooner, the higher; 0 is never again."""
        holders = islice(reversed(branch.holders), HOLDERS_SUMMED_MAX)
        soonest = min(self._next.get(holder.conversation_id, math.inf) for holder in holders)
        if soonest == math.inf:
            return 0
        return max(NUM_CLASSES - 1 - int(soonest / self._width), 1)

    def value(self, class_index: int, idle_seconds: float) -> float:
        return float(class_index)
