"""Find chunks by their content, so that conversations share a prefix that nobody has declared.

Chunks with the same identity have the same KV (identities.py). Only turns with `identities` look for chunks.

**When a chunk is found.** A turn's completed chunks are registered after its next token was sampled from
finite logits, because wrong KV (NaN) would reach these logits. A warm samples nothing, so its chunks are
registered after its iterations are collected. A chunk that was invalidated in the meantime is not registered
(`Chunk.generation`). If a turn fails in a way that may spoil KV (`TurnFailure.spoils_kv`), all chunks of its
context are invalidated and forgotten. A chunk stays registered while a conversation holds it, even without
pages. A turn that finds a chunk without pages computes it again, for all holders. A partly filled chunk has
no identity.

**Equal chunks.** If two turns compute the same chunk at once, the first to complete it is registered. The
other chunk is private until its turn has ended. Then the conversation continues on the registered chunk
(`KVCache.settle`). If the registered chunk is forgotten before that, the private chunk is registered. The
pages of a running turn never change.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import islice, takewhile
from typing import NamedTuple

from pensieve.core.prefix_tree import CachedConversation, Chunk
from pensieve.core.turn import Turn

TAILS_MAX = 4  # holders whose next chunk is compared


class Found(NamedTuple):
    holder: CachedConversation
    num_tokens: int  # length of the common beginning


class ContentIndex:
    """The registered chunks, by identity."""

    def __init__(self, chunk_tokens: int) -> None:
        self._size = chunk_tokens
        self._chunks: dict[bytes, Chunk] = {}
        # Private chunks with the content of a registered chunk, and their generations.
        self._private: dict[bytes, dict[Chunk, int]] = {}
        self.num_lookups = 0
        # Called with the number of each successful lookup and its result; a journal records both.
        self.note_found: Callable[[int, Found], None] = lambda number, found: None

    def register(self, turn: Turn, chunk: Chunk) -> None:
        """Register a chunk that the turn has computed, unless another chunk has its identity."""
        identities = turn.identities
        if identities is None or chunk.identity is not None or chunk.branch is None:
            return
        if len(identities.known) <= chunk.index:
            identities.extend(turn.tokens)
        identity = identities.known[chunk.index]
        if self._chunks.setdefault(identity, chunk) is chunk:
            chunk.identity = identity
        else:
            turn.has_twins = True
            others = self._private.setdefault(identity, {})
            for gone in [each for each in others if each.branch is None]:
                del others[gone]
            others[chunk] = chunk.generation

    def forget(self, chunk: Chunk) -> None:
        """Remove a registered chunk. A private chunk with the same content takes its place."""
        identity = chunk.identity
        assert identity is not None
        del self._chunks[identity]
        chunk.identity = None
        for other, generation in self._private.pop(identity, {}).items():
            if other.branch is None or other.identity or other.generation != generation:
                continue
            if self._chunks.setdefault(identity, other) is other:
                other.identity = identity
            else:
                self._private.setdefault(identity, {})[other] = generation

    def find_for_turn(self, turn: Turn, conversation: CachedConversation) -> Found | None:
        """Return the conversation with the longest known beginning of the turn's context.

        Returns None if the turn's own conversation already holds as many whole chunks. At least one token is
        left for the turn to compute.
        """
        assert turn.identities is not None
        self.num_lookups += 1
        turn.identities.extend(turn.tokens)
        num_held = conversation.num_tokens // self._size
        last, known = None, turn.identities.known
        for index in range(num_held, min((len(turn.tokens) - 1) // self._size, len(known))):
            chunk = self._chunks.get(known[index])
            if chunk is None:
                break
            last = chunk
        if last is None:
            return None
        return self._accept(conversation, self._with_tail(turn, last))

    def find_for_ended(self, conversation: CachedConversation, has_twins: bool) -> Found | None:
        """Return a conversation whose registered chunks equal private chunks of the ended conversation.

        Without `has_twins`, the ended conversation has no such chunks.
        """
        if conversation.identities is None:
            return None
        self.num_lookups += 1
        if not has_twins:
            return None
        found = None
        num_whole = conversation.num_tokens // self._size
        for own, identity in zip(
            conversation.chunks()[:num_whole], conversation.identities.known, strict=False
        ):
            if own.identity is not None:
                if found is not None:
                    break
            elif (other := self._chunks.get(identity)) is not None:
                found = other
            else:
                break
        if found is None:
            return None
        assert found.branch is not None
        holder = next(iter(found.branch.holders))
        found_tokens = (found.index + 1) * self._size
        return self._accept(conversation, Found(holder, found_tokens))

    def check(self) -> None:
        for identity, chunk in self._chunks.items():
            assert chunk.identity == identity, f"{chunk} is registered under another identity"
            assert chunk.branch is not None, f"{chunk} is registered, and nobody holds it"

    def __len__(self) -> int:
        return len(self._chunks)

    def _with_tail(self, turn: Turn, last: Chunk) -> Found:
        """Look for a holder whose next, perhaps partly filled, chunk begins like the rest of the context."""
        assert last.branch is not None
        start = (last.index + 1) * self._size
        rest = turn.tokens[start : min(start + self._size, len(turn.tokens)) - 1]
        best = Found(next(iter(last.branch.holders)), start)
        root = turn.identities.root if turn.identities is not None else ""
        for holder in islice(reversed(last.branch.holders), TAILS_MAX):
            if holder.identities is None or holder.identities.root != root:
                continue  # the rest of its log may be of another root
            # A resting conversation may use less of its last chunk than its log and the chunk have. The last
            # token of a running conversation may be without KV.
            known = len(holder.log) - 1 if holder.attempt_id is not None else holder.num_tokens
            count = _num_common(rest, holder.log[start : min(start + len(rest), known)])
            if start + count > best.num_tokens:
                chunks = holder.chunks()
                if len(chunks) > last.index + 1 and chunks[last.index + 1].filled >= count:
                    best = Found(holder, start + count)
        return best

    def _accept(self, conversation: CachedConversation, found: Found) -> Found | None:
        """Note and return `found`; None if the conversation would lose a registered chunk or KV."""
        pairs = zip(conversation.chunks(), found.holder.chunks(), strict=False)
        for own, other in islice(
            pairs, min(found.num_tokens, conversation.num_tokens) // self._size
        ):
            if own is not other and (own.identity is not None or own.filled > other.filled):
                return None
        self.note_found(self.num_lookups, found)
        return found


def _num_common(first: array[int], second: array[int]) -> int:
    """Return the length of the common beginning of two short arrays."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    )
