"""Which replicas are there, as the history service sees them.

    open ──> connected ──its stream breaks──> away ──it comes back──> connected
                │                               └──its lease runs out─┐
                └──silent for as long as its lease, or it leaves──────┴──> ended

A replica is heard of with every message; away, it has the rest of its lease to come back, for its turns are
computed all the same.  Another one that cannot reach it may end it sooner, but not before it has been away
for a moment: a stream may break for no reason of its replica's, and comes back at once then.  When the
service itself begins, the sessions that had not ended are away.  Where it was stopped for a while (a paused
process, a machine that slept), what was sent meanwhile is read afterwards, so that time counts for nobody.
All of it belongs to the loop, but `may_be_back`, which any thread may ask.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from pensieve.store.replica_sessions import Session
from pensieve.v1 import history_pb2 as pb

BREAK_SECONDS_MAX = 3.0  # that a stream takes to come back, at most
BREAK_SHARE = 4  # of them in a lease, at least
RECENT_SECONDS = 600.0  # since a conversation's last turn: it counts as its replica's load
RECENT_MAX = 100_000
SHARE_MAX = 1.25  # of the mean, that a replica has of the conversations in use
SHARE_SLACK = 8  # conversations, for those who have few


@dataclass(eq=False)
class Present:
    """A session that has not ended."""

    session: Session
    heard_at: float
    away_since: float = 0.0  # while it has no stream
    follows: int | None = None  # the session that its replica had before; not known after a start
    outgoing: asyncio.Queue[pb.ServeResponse] | None = None
    task: asyncio.Task[None] | None = None  # that reads its stream
    is_draining: bool = False
    running: set[int] = field(default_factory=set)  # turns
    under_way: set[int] = field(default_factory=set)  # numbers of calls that have no answer yet
    recent: OrderedDict[tuple[str, str], float] = field(default_factory=OrderedDict)

    def used(self, tenant: str, conversation_id: str, now: float) -> None:
        """A conversation has a turn there."""
        key = tenant, conversation_id
        self.recent[key] = now
        self.recent.move_to_end(key)
        while self.recent and (
            len(self.recent) > RECENT_MAX or now - next(iter(self.recent.values())) > RECENT_SECONDS
        ):
            self.recent.popitem(last=False)

    def num_recent(self, now: float) -> int:
        while self.recent and now - next(iter(self.recent.values())) > RECENT_SECONDS:
            self.recent.popitem(last=False)
        return len(self.recent)


class Presence:
    def __init__(self, lease_seconds: float, now: Callable[[], float]) -> None:
        self.lease_seconds = lease_seconds
        self.break_seconds = min(BREAK_SECONDS_MAX, lease_seconds / BREAK_SHARE)
        self._now = now
        self._present: dict[int, Present] = {}
        self._connected: set[int] = set()

    def begin(self, sessions: Iterable[Session], running: Mapping[int, Iterable[int]]) -> None:
        """Those that had not ended when the service began, and their turns: away, with a whole lease."""
        now = self._now()
        for session in sessions:
            present = self._present[session.number] = Present(session, now, now)
            present.running.update(running.get(session.number, ()))

    def all(self) -> list[Present]:
        return list(self._present.values())

    def find(self, number: int) -> Present | None:
        return self._present.get(number)

    def is_connected(self, number: int) -> bool:
        return number in self._connected

    def may_be_back(self, number: int) -> bool:
        """It is connected, or was so a moment ago."""
        present = self._present.get(number)
        return number in self._connected or (
            present is not None and self._now() - present.away_since < self.break_seconds
        )

    def connect(self, session: Session, outgoing: asyncio.Queue[pb.ServeResponse]) -> Present:
        """The stream of a session, in the place of the one that it had."""
        present = self._present.get(session.number)
        if present is None:
            present = self._present[session.number] = Present(session, self._now())
        elif present.task is not None:
            present.task.cancel()
        present.outgoing, present.task = outgoing, asyncio.current_task()
        present.heard_at = self._now()
        self._connected.add(session.number)
        return present

    def heard(self, present: Present) -> None:
        present.heard_at = self._now()

    def away(self, present: Present, outgoing: asyncio.Queue[pb.ServeResponse]) -> None:
        """Its stream ended; unless it has another one by now."""
        if present.outgoing is outgoing:
            present.outgoing = present.task = None
            present.away_since = self._now()
            self._connected.discard(present.session.number)

    def remove(self, number: int) -> Present | None:
        """It has ended."""
        present = self._present.pop(number, None)
        self._connected.discard(number)
        if present is not None:
            task, present.outgoing, present.task = present.task, None, None
            if task is not None:
                task.cancel()
        return present

    def over_share(self) -> list[tuple[Present, list[tuple[str, str]]]]:
        """Who has more than its share of the conversations in use, and those that were used least lately."""
        now = self._now()
        here = [
            each
            for each in self._present.values()
            if each.session.number in self._connected and not each.is_draining
        ]
        if len(here) < 2:
            return []
        counts = [each.num_recent(now) for each in here]
        most = int(SHARE_MAX * sum(counts) / len(here)) + SHARE_SLACK
        return [
            (each, list(each.recent)[: count - most])
            for each, count in zip(here, counts, strict=True)
            if count > most
        ]

    def excuse(self, seconds: float) -> None:
        """The service itself was away for so long, and has heard of nobody."""
        now = self._now()
        for each in self._present.values():  # some have been heard of since
            each.heard_at = min(now, each.heard_at + seconds)
            each.away_since = min(now, each.away_since + seconds)

    def overdue(self) -> list[Present]:
        """Not heard of for as long as the lease."""
        end = self._now() - self.lease_seconds
        return [each for each in self._present.values() if each.heard_at < end]
