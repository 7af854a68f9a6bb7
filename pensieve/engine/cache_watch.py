"""Which blocks of tokens the cache holds, reported as they come and go to whoever watches.

A *block* is the content of a full chunk: its tokens and all before them.  It is *held* while a chunk of it
has KV in some tier and somebody holds that chunk; who have computed the same tokens hold one block.  Only
conversations are watched whose ids begin with a prefix; what an id has before its last slash is their
*scope*, and blocks of two scopes are never one.

    a page or a holder goes, or trust in KV     Tiers.watched ──┐
    an iteration fills a chunk                  `planned` ──────┴──> changed ──> `news`, some each round

Nothing is decided where the cache changes: the chunk is only remembered, in a dictionary that is not there
while nobody watches.  `news` looks at what the remembered chunks are by then, at CHUNKS_MAX of them in a
round, so a round does not take longer the more has changed, and what has come and gone between is not
reported.  It begins with all that is cached.

    reported  chunk -> block, for chunks that were held when they were last looked at
    count     how many chunks are reported of a block: with the first it is stored, with the last removed

A block's number is a digest of the scope and its tokens from the first on: 63 bits, never 0, which stands for
what is before a first block.  A chunk counts as filled when the iteration that fills it is launched, as
everywhere in the cache; should that fail, the block is removed.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b
from itertools import islice
from typing import NamedTuple

from pensieve.core.cache import KVCache
from pensieve.core.iteration import Iteration
from pensieve.core.prefix_tree import Chunk, Conversation
from pensieve.core.scheduler import Scheduler
from pensieve.engine.messages import CacheChanged

CHUNKS_MAX = 256  # looked at in a round


class _Place(NamedTuple):
    """A block in its scope."""

    scope: str
    block: int


class CacheWatch:
    def __init__(self, cache: KVCache, watch_id: int, prefix: str) -> None:
        self._cache, self._watch_id, self._prefix = cache, watch_id, prefix
        self._size = cache.config.chunk_tokens
        self._changed: dict[Chunk, None] = {}
        self._reported: dict[Chunk, _Place] = {}
        self._count: dict[_Place, int] = {}
        for conversation in list(cache.conversations.values()):
            if self._scope_of(conversation) is not None:
                self._changed.update(dict.fromkeys(conversation.chunks()))
        cache.tiers.watched = self._changed

    def end(self) -> None:
        self._cache.tiers.watched = None

    def planned(self, iteration: Iteration, scheduler: Scheduler) -> None:
        """It fills chunks.

        The one before the first is looked at again: its last token may not have been known yet.
        """
        size = self._size
        for each in iteration.slices:
            first, stop = max(each.start - 1, 0) // size, each.stop // size
            if first < stop and (turn := scheduler.turn(each.turn_id)) is not None:
                self._changed.update(dict.fromkeys(turn.chunks[first:stop]))

    @property
    def pending(self) -> bool:
        """Whether the next round has more to look at."""
        return bool(self._changed)

    def news(self) -> list[CacheChanged]:
        """What has come and gone, as far as one round looks."""
        before: dict[_Place, int] = {}
        rows: dict[_Place, tuple[int, ...]] = {}
        for chunk in list(islice(self._changed, CHUNKS_MAX)):
            del self._changed[chunk]
            reported, place = self._reported.pop(chunk, None), None
            if self._is_held(chunk) and (found := self._row_of(chunk)) is not None:
                scope, row = found
                place = self._reported[chunk] = _Place(scope, row[0])
                rows[place] = row
            if place != reported:
                self._add(reported, -1, before)
                self._add(place, +1, before)
        stored: dict[str, list[tuple[int, ...]]] = {}
        removed: dict[str, list[int]] = {}
        for place, count in before.items():
            if place not in self._count:
                if count:
                    removed.setdefault(place.scope, []).append(place.block)
            elif not count:
                stored.setdefault(place.scope, []).append(rows[place])
        return [
            CacheChanged(
                self._watch_id, scope, tuple(stored.get(scope, ())), tuple(removed.get(scope, ()))
            )
            for scope in {**stored, **removed}
        ]

    def _add(self, place: _Place | None, sign: int, before: dict[_Place, int]) -> None:
        """One more chunk, or one fewer, that has this block."""
        if place is None:
            return
        count = self._count.get(place, 0)
        before.setdefault(place, count)
        if count + sign:
            self._count[place] = count + sign
        else:
            self._count.pop(place, None)

    def _is_held(self, chunk: Chunk) -> bool:
        return chunk.branch is not None and chunk.filled == self._size and chunk.resident

    def _row_of(self, chunk: Chunk) -> tuple[str, tuple[int, ...]] | None:
        """Scope, and number, parent and tokens, of what is in a chunk that is held.

        None where nobody who holds it is watched, or its last token is still being sampled.
        """
        assert chunk.branch is not None
        end = (chunk.index + 1) * self._size
        for holder in reversed(chunk.branch.holders):
            scope = self._scope_of(holder)
            if scope is not None and len(holder.log) >= end:
                parent = self._parent_of(chunk, holder.log, scope)
                tokens = holder.log[end - self._size : end]
                number = _number(parent or _number_of(scope), tokens)
                return scope, (number, parent, *tokens)
        return None

    def _parent_of(self, chunk: Chunk, log: array[int], scope: str) -> int:
        """The number of the block before it, from the last one that is reported."""
        branch, index = chunk.branch, chunk.index
        number = _number_of(scope)
        while index:
            index -= 1
            while branch is not None and index < branch.start:
                branch = branch.parent
            if branch is None:
                index = 0
            else:
                before = branch.chunks[index - branch.start]
                if before in self._reported and before not in self._changed:
                    number, index = self._reported[before].block, index + 1
                    break
        for start in range(index * self._size, chunk.index * self._size, self._size):
            number = _number(number, log[start : start + self._size])
        return number if chunk.index else 0

    def _scope_of(self, conversation: Conversation) -> str | None:
        scope, slash, _ = conversation.conversation_id.rpartition("/")
        return scope if slash and scope.startswith(self._prefix) else None


def _number_of(scope: str) -> int:
    return _digest(scope.encode())


def _number(parent: int, tokens: array[int]) -> int:
    return _digest(parent.to_bytes(8, "little") + tokens.tobytes())


def _digest(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") >> 1 or 1
