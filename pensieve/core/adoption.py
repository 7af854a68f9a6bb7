"""Adopt KV from another engine: the received chunks become chunks of the host tier.

The other engine sends the last chunks of a conversation first, because they cost most to recompute. A
transfer may stop early (no room, a broken connection, no time left). The chunks that have arrived are usable
even then, because the cache allows holes at the front of a conversation. A transfer arrives in parts:

    first part    the conversation is unknown here: it gets its log and its own branch, with as many chunks as
                  the KV covers; all of them are holes except the chunks of this part
    later parts   fill holes of this branch

A chunk is adopted only if no tier has KV of it and no running turn holds it, because a part may arrive after
the chunk was computed here. An adopted chunk gets an empty host page, or the page of the least valuable chunk
on the host if that chunk is worth less. Pages of chunks that a running turn or a copy in flight uses are
never taken. Pages of the same conversation are not taken either, because its later chunks are worth at least
as much as the earlier chunk that is adopted. A chunk that would not be swapped in (`worth_swapping_in`) is
not adopted.

From then on, an adopted chunk is treated like a chunk that was swapped out here. The caller must write the
bytes of the pages at once, so that no page is used without them. The engine ensures that nothing else uses
the conversation between two parts (engine/hand_over.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from pensieve.core.cache import KVCache
from pensieve.core.prefix_tree import CachedConversation, Chunk


class KvPlace(NamedTuple):
    """Leading slots of a page whose KV is sent to another engine."""

    on_host: bool  # else on the device
    page: int
    num_slots: int


class Adopted(NamedTuple):
    """A host page to be filled with the received slots of a chunk."""

    chunk_index: int
    host_page: int
    num_slots: int


class Adoption:
    def __init__(self, cache: KVCache) -> None:
        self._tree, self._candidates, self._eviction = cache.tree, cache.candidates, cache.eviction

    def adopt(
        self,
        conversation_id: str,
        log: array[int],
        first_chunk: int,
        slots: Sequence[int],
        now: float,
    ) -> list[Adopted]:
        """Adopt chunks from `first_chunk` on.

        `slots`: how many leading slots of each chunk have KV; 0: the chunk has none. The last chunks are
        tried first, until one cannot be adopted. If the conversation is unknown, it is added with the log
        `log`, up to the end of the last chunk.
        """
        conversation = self._tree.conversations.get(conversation_id)
        if conversation is None:
            conversation = self._add_conversation(conversation_id, log, first_chunk, slots, now)
        if conversation.attempt_id is not None:
            return []
        chunks = conversation.chunks()
        adopted: list[Adopted] = []
        for index in range(first_chunk + len(slots) - 1, first_chunk - 1, -1):
            num_slots = slots[index - first_chunk]
            if index >= len(chunks) or not num_slots or not self._is_hole(chunks[index]):
                continue
            if not self._adopt(chunks[index], num_slots, now):
                break
            page = chunks[index].host_page
            assert page is not None
            adopted.append(Adopted(index, page, num_slots))
        self._tree.prune(conversation.leaf, now)  # removes a new branch if no chunk was adopted
        return adopted

    def _add_conversation(
        self,
        conversation_id: str,
        log: array[int],
        first_chunk: int,
        slots: Sequence[int],
        now: float,
    ) -> CachedConversation:
        """Add a conversation that has no running turn. All its chunks are holes."""
        num_chunks = first_chunk + len(slots)
        num_tokens = (num_chunks - 1) * self._tree.chunk_tokens + slots[-1]
        assert slots[-1] > 0
        assert num_tokens <= len(log), "KV of more tokens than the log has"
        conversation = CachedConversation(conversation_id, now)
        conversation.log = log
        conversation.num_tokens = num_tokens
        self._tree.add_holes(conversation, num_chunks)
        return conversation

    @staticmethod
    def _is_hole(chunk: Chunk) -> bool:
        return chunk.idle and not chunk.resident and not chunk.in_flight

    def _adopt(self, chunk: Chunk, num_slots: int, now: float) -> bool:
        """Adopt a chunk. Return False if it is not worth swapping in, or if there is no room for it."""
        branch, candidates = chunk.branch, self._candidates
        assert branch is not None
        if not candidates.policy.worth_swapping_in(chunk.index):
            return False
        value = candidates.value_of(chunk, branch, now)
        page = self._eviction.take_host_page_for(value, now)
        if page is None:
            return False
        chunk.host_page = page
        chunk.filled = chunk.host_filled = num_slots
        branch.num_resident += 1
        candidates.tiers.counters.adopted += 1
        candidates.requalify(chunk, now)
        return True
