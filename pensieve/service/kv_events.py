"""Which blocks of unstored turns the engine holds, for routers that subscribe to it.

    engine ── CacheChanged ──> HeldBlocks of a tenant ── reported ──> its subscriptions ──> streams

A subscriber learns of what a request of its own tenant could use, and of nothing else: neither of
conversations nor of other tenants' requests.  The engine publishes while there is a subscription; without
one nothing is kept.

A router looks for the blocks that a prompt begins with, and may take a block whose predecessor it does not
know for a first one.  So a block is *reported* while it and all before it are held.  One that goes takes
those behind it along; should it be computed again, they are reported again.

A subscription begins with all that is reported, behind a sign that nothing else is, and goes on with what
changes.  What it has not sent yet is bounded: one that lags behind by more than BLOCKS_MAX blocks, or whose
engine has died, begins anew, in the same stream.  So a slow subscriber holds up nobody and is never wrong,
only late.

Plain values, and waiting subscribers, that belong to the loop.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from pensieve.engine.messages import CacheChanged, Message, WatchCache
from pensieve.errors import PensieveError, QueueFull
from pensieve.service.live_turn import UNSTORED_PREFIX, unstored_scope

SUBSCRIPTIONS_MAX = 16  # of a tenant
BLOCKS_MAX = 16_384  # that a subscription has not sent yet
BATCH_BLOCKS = 256


class Block(NamedTuple):
    number: int
    parent: int  # 0: it is a first one
    tokens: array[int]


class Batch(NamedTuple):
    """What changes, in this order."""

    cleared: bool = False  # nothing that was reported before is held
    removed: tuple[int, ...] = ()
    stored: tuple[Block, ...] = ()  # each behind the one before it


class HeldBlocks:
    """The blocks of one scope that are held, and those that are reported: all before them are held, too."""

    def __init__(self) -> None:
        self.reported: dict[int, Block] = {}  # each behind its parent
        self._held: dict[int, Block] = {}
        self._children: dict[int, dict[int, None]] = {}  # of a block, held or not

    def add(self, block: Block) -> list[Block]:
        """It is held; what is reported by that."""
        self._held[block.number] = block
        self._children.setdefault(block.parent, {})[block.number] = None
        if block.parent and block.parent not in self.reported:
            return []
        return self._each(block.number, self._report)

    def remove(self, number: int) -> list[Block]:
        """It is not held; what is no longer reported by that, the last ones first."""
        block = self._held.pop(number)
        children = self._children[block.parent]
        del children[number]
        if not children:
            del self._children[block.parent]
        if number not in self.reported:
            return []
        gone = [self.reported.pop(number)]
        for child in self._children.get(number, ()):
            gone += self._each(child, lambda each: self.reported.pop(each, None))
        gone.reverse()
        return gone

    def __len__(self) -> int:
        return len(self._held)

    def _report(self, number: int) -> Block | None:
        return self.reported.setdefault(number, self._held[number])

    def _each(self, number: int, act: Callable[[int], Block | None]) -> list[Block]:
        """What `act` yields for the block and what is behind it; where it yields None, not behind it."""
        found: list[Block] = []
        left = [number]
        while left:
            each = left.pop()
            if (block := act(each)) is not None:
                found.append(block)
                left += self._children.get(each, ())
        return found


class Subscription:
    """What one stream has not sent yet."""

    def __init__(self, reported: Callable[[], list[Block]]) -> None:
        self._reported = reported
        self._waiting: list[
            Block | int
        ] = []  # a block that is reported, or the number of one that is not
        self._is_anew = True
        self._news = asyncio.Event()
        self._news.set()

    def add(self, removed: list[Block], stored: list[Block]) -> None:
        if self._is_anew:  # what is reported then has these
            return
        self._waiting += [each.number for each in removed]
        self._waiting += stored
        if len(self._waiting) > BLOCKS_MAX:
            self.begin_anew()
        self._news.set()

    def begin_anew(self) -> None:
        self._waiting.clear()
        self._is_anew = True
        self._news.set()

    async def batches(self) -> list[Batch]:
        """What has come since the last call; waits until something has."""
        await self._news.wait()
        self._news.clear()
        waiting: list[Block | int] = []
        if self._is_anew:
            waiting += self._reported()
            batches = [Batch(cleared=True)]
        else:
            waiting, self._waiting = self._waiting, []
            batches = []
        self._is_anew = False
        for start in range(0, len(waiting), BATCH_BLOCKS):
            batches += _batches(waiting[start : start + BATCH_BLOCKS])
        return batches


class KvEvents:
    def __init__(self, put: Callable[[Message], None]) -> None:
        """`put` raises where the engine does not take a message."""
        self._put = put
        self._watch_id = 0
        self._held: dict[str, HeldBlocks] = {}  # by scope
        self._subscriptions: dict[Subscription, str] = {}  # and the scope of each

    @property
    def num_subscriptions(self) -> int:
        return len(self._subscriptions)

    @contextmanager
    def subscribed(self, tenant: str) -> Iterator[Subscription]:
        """Unavailable while there is no engine, QueueFull when there are too many subscriptions."""
        scope = unstored_scope(tenant)
        if list(self._subscriptions.values()).count(scope) >= SUBSCRIPTIONS_MAX:
            raise QueueFull(f"there are {SUBSCRIPTIONS_MAX} subscriptions already")
        if not self._subscriptions:
            self._watch()
        subscription = Subscription(lambda: self._reported(scope))
        self._subscriptions[subscription] = scope
        try:
            yield subscription
        finally:
            del self._subscriptions[subscription]
            if not self._subscriptions:
                self._watch_no_more()

    def take(self, event: CacheChanged) -> None:
        """The engine says it; an earlier watch's is not heard."""
        if event.watch_id == self._watch_id and self._subscriptions:
            self._changed(event)

    def engine_lost(self) -> None:
        """What it held is gone."""
        self._held.clear()
        for subscription in self._subscriptions:
            subscription.begin_anew()

    def engine_started(self) -> None:
        if self._subscriptions:
            self._watch()

    def _watch(self) -> None:
        """A watch has a number of its own, so that nothing of an earlier one is taken for its."""
        self._put(WatchCache(self._watch_id + 1, UNSTORED_PREFIX))
        self._watch_id += 1
        self._held.clear()

    def _watch_no_more(self) -> None:
        self._held.clear()
        try:
            self._put(WatchCache(0))
        except PensieveError:
            return  # an engine that is gone publishes nothing; a later watch ends this one

    def _reported(self, scope: str) -> list[Block]:
        held = self._held.get(scope)
        return list(held.reported.values()) if held is not None else []

    def _changed(self, event: CacheChanged) -> None:
        held = self._held.setdefault(event.scope, HeldBlocks())
        removed = [gone for number in event.removed for gone in held.remove(number)]
        stored: list[Block] = []
        for number, parent, *tokens in event.stored:
            stored += held.add(Block(number, parent, array("I", tokens)))
        if not held:
            del self._held[event.scope]
        if removed or stored:
            for subscription, scope in self._subscriptions.items():
                if scope == event.scope:
                    subscription.add(removed, stored)


def _batches(changes: list[Block | int]) -> Iterator[Batch]:
    """Removed ones go before stored ones in a batch, so one that follows stored ones begins the next."""
    removed: list[int] = []
    stored: list[Block] = []
    for each in changes:
        if isinstance(each, Block):
            stored.append(each)
            continue
        if stored:
            yield Batch(False, tuple(removed), tuple(stored))
            removed, stored = [], []
        removed.append(each)
    yield Batch(False, tuple(removed), tuple(stored))
