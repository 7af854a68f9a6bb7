"""Who owns which conversation of a simulated cluster, and the loads that follow from it.

A conversation is *active*, and one of its owner's load, from the begin of a turn until `active_seconds` after
the begin of its last one.  Beside them are the loads that hashing alone would give, to compare with: each
conversation counts where the ring has it at its turn, whoever owns it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from pensieve.core.placement import Loads, Placement
from pensieve.sim.cluster.conversations import Conversation


class Owners:
    def __init__(
        self, names: Iterable[str], bound: float, keep_bound: float, active_seconds: float
    ) -> None:
        self.placement = Placement(names, bound=bound, keep_bound=keep_bound)
        self.loads, self.plain_loads = Loads(), Loads()
        self._active_seconds = active_seconds
        self._active: deque[tuple[float, Conversation]] = deque()  # by the begins of their turns

    def fill(self, conversations: Iterable[Conversation]) -> None:
        """Those in progress when the clock starts, which have their homes."""
        for conversation in sorted(conversations, key=active_at):
            self._active.append((conversation.active_at, conversation))
            self._count(conversation)

    def own(self, conversation: Conversation, home: str, incarnation: int) -> None:
        """It has a new owner, and a higher epoch."""
        if conversation.counted:
            self.loads.add(conversation.owner, -1)
            self.loads.add(home)
        conversation.owner, conversation.incarnation = home, incarnation
        conversation.epoch += 1

    def begin(self, conversation: Conversation, now: float) -> None:
        """A turn of it begins, with its owner."""
        conversation.active_at = now
        self._active.append((now, conversation))
        self._count(conversation)

    def _count(self, conversation: Conversation) -> None:
        if not conversation.counted:
            conversation.counted = True
            self.loads.add(conversation.owner)
        if conversation.plain_counted != conversation.plain:
            if conversation.plain_counted:
                self.plain_loads.add(conversation.plain_counted, -1)
            self.plain_loads.add(conversation.plain)
            conversation.plain_counted = conversation.plain

    def expire(self, now: float) -> None:
        """Who has not talked for so long is no load any more."""
        active, least = self._active, now - self._active_seconds
        while active and active[0][0] < least:
            at, conversation = active.popleft()
            if conversation.counted and conversation.active_at == at:
                conversation.counted = False
                self.loads.add(conversation.owner, -1)
                self.plain_loads.add(conversation.plain_counted, -1)
                conversation.plain_counted = ""

    def active_of(self, names: Collection[str]) -> list[Conversation]:
        """What these own and is active, the latest first."""
        found = [
            conversation
            for at, conversation in reversed(self._active)
            if conversation.owner in names and conversation.active_at == at
        ]
        return list(dict.fromkeys(found))


def active_at(conversation: Conversation) -> float:
    return conversation.active_at
