"""What a router knows of homes: who owns a key, and where it has sent keys that nobody owns yet.

The ownership table of the history service is the truth, and `Locate` reads it.  An answer is used for
LOCATED_SECONDS: a stale one sends a request to a replica that passes it on, which is right and slower; that
nobody owns a key is used so from its second request on.  A key without an owner goes to its home by
core/placement.py, and is remembered, so that its next request goes there even if loads have changed and the
history service does not answer.  One that begins with a declared prefix goes to the prefix's home, while that
has room: all routers agree on it, for it follows from the names alone.

At most KEYS_MAX keys are remembered, the digests of those that are longer than any conversation's id, since
anybody may send one; the least recently used are forgotten and placed anew, which costs nothing when their
owner can be located.  The bound on loads counts those alone that were used in the last ACTIVE_SECONDS: who
comes back is not known, and a new replica would get all new conversations until it had as many as the others
ever had.  So keys are kept in two orders of use, one of them cut off by age at its front with each key that
is placed.

Which replicas run may change while an owner is located, so that is asked for behind it: what went away
meanwhile is no home, and is counted nowhere.  All of this belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection
from hashlib import blake2b

from pensieve.core.placement import BOUND as PARENT_BOUND
from pensieve.core.placement import Loads, Placement
from pensieve.errors import PensieveError

Locate = Callable[[str], Awaitable[str | None]]  # a key to its owner's name

KEYS_MAX = 100_000
CHARACTERS_MAX = 128  # of a conversation's id
BEHIND = "\x1f"  # between a key and the prefix that it begins with, in what Ray carries as the session id
ACTIVE_SECONDS = 300.0
LOCATED_SECONDS = 5.0
# Of the mean, for what begins without a prefix: tighter than where nothing is remembered.  With 16 replicas
# of 32 conversations the fullest has 1.11 times the mean, for 1.22 at 1.25, and 18 % are not at home by hash,
# for 7 %: that matters to those alone whose owner cannot be located.
BOUND = 1.1
LOCATE_TIMEOUT = 0.25


class Homes:
    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._remembered: OrderedDict[str, str] = OrderedDict()
        self._active: OrderedDict[str, tuple[str, float]] = OrderedDict()  # home, and when used
        self._located: OrderedDict[str, tuple[str | None, float]] = OrderedDict()
        self._placement = Placement(bound=BOUND, parent_bound=PARENT_BOUND)
        self._counts = Loads()

    async def of(
        self, named: str, running_now: Callable[[], Collection[str]], locate: Locate | None
    ) -> str | None:
        """The replica for this key, or key and prefix (`named`); None when none runs."""
        key, prefix = map(short, named.partition(BEHIND)[::2])
        owner = await self._owner(key, locate) if key else None
        running = running_now()
        if not running:
            return None
        if not key:  # its id will be the replica's choice
            return self._new_home(key, prefix, running)
        if owner in running:
            assert owner is not None
            self._remember(key, owner)
            return owner
        remembered = self._remembered.get(key)
        if remembered in running:
            assert remembered is not None
            self._remember(key, remembered)
            return remembered
        chosen = self._new_home(key, prefix, running)
        self._remember(key, chosen)
        return chosen

    def _new_home(self, key: str, prefix: str, running: Collection[str]) -> str:
        self._see(running)
        self._expire()
        parent = self._placement.home(prefix) if prefix else ""
        return self._placement.home(key, self._counts, parent=parent)

    def forget(self, name: str) -> None:
        """A replica went away: its keys are placed anew, nobody else's."""
        for key in [key for key, at in self._remembered.items() if at == name]:
            del self._remembered[key]
            self._active.pop(key, None)
        self._counts.forget(name)
        for key in [key for key, (at, _) in self._located.items() if at == name]:
            del self._located[key]

    def load(self, name: str) -> int:
        """How many of its conversations are active."""
        self._expire()
        return self._counts.of(name)

    def check(self) -> None:
        """Raises AssertionError when the counts are not those of what is active, or that is out of order."""
        counts: dict[str, int] = {}
        for key, (name, _) in self._active.items():
            counts[name] = counts.get(name, 0) + 1
            assert self._remembered[key] == name, key
        times = [when for _, when in self._active.values()]
        assert times == sorted(times)
        for name in {*counts, *self._placement.serving}:
            assert counts.get(name, 0) == self._counts.of(name), name
        assert sum(counts.values()) == self._counts.total

    def _see(self, running: Collection[str]) -> None:
        """These take conversations, and no others."""
        before = self._placement.serving
        self._placement.remove(*(name for name in before if name not in running))
        self._placement.add(*sorted(set(running).difference(before)))

    async def _owner(self, key: str, locate: Locate | None) -> str | None:
        if locate is None:
            return None
        known = self._located.get(key)
        if known is not None and self._now() - known[1] < LOCATED_SECONDS:
            return known[0]
        try:
            owner = await asyncio.wait_for(locate(key), LOCATE_TIMEOUT)
        except (TimeoutError, PensieveError):
            return None
        if owner is not None or key in self._remembered:  # nobody owns it before its first turn
            self._located[key] = (owner, self._now())
            self._located.move_to_end(key)
            if len(self._located) > KEYS_MAX:
                self._located.popitem(last=False)
        return owner

    def _remember(self, key: str, name: str) -> None:
        self._remembered[key] = name
        self._remembered.move_to_end(key)
        self._deactivate(key)
        self._active[key] = (name, self._now())
        self._counts.add(name)
        if len(self._remembered) > KEYS_MAX:
            oldest, _ = self._remembered.popitem(last=False)
            self._deactivate(oldest)

    def _expire(self) -> None:
        """What was not used for long counts no more; each use is looked at once."""
        since = self._now() - ACTIVE_SECONDS
        while self._active:
            key, (_, when) = next(iter(self._active.items()))
            if when > since:
                return
            self._deactivate(key)

    def _deactivate(self, key: str) -> None:
        before = self._active.pop(key, None)
        if before is not None:
            self._counts.add(before[0], -1)


def short(name: str) -> str:
    """A key, or its digest where it is longer than any conversation's id."""
    if len(name) <= CHARACTERS_MAX:
        return name
    return blake2b(name.encode("utf-8", "replace"), digest_size=16).hexdigest()
