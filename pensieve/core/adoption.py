"""Adopt KV that comes from another engine: its chunks become chunks of the host tier.

The other engine sends its KV from the end, because the last chunks cost most to recompute. Eviction leaves
conversations with holes in front, too. So whenever a transfer stops (no room, a broken connection, no time
left), the chunks that have arrived are usable.

    first part    the conversation is unknown here: it gets its log, and a branch of its own with as many
                  chunks as KV covers, all of them holes except those of the part
    later parts   fill holes of this branch

A chunk is adopted if no tier has anything of it and no running turn holds it. Otherwise it is left alone,
because a part may come late. An adopted chunk gets a host page as a swap-out would: an empty page, or the
page of the least valuable chunk on the host, if that chunk is worth less. Chunks that a running turn or a
copy in flight uses are in no queue, so their pages are never taken. Neither are those of the same
conversation, because its later chunks are worth no less than its earlier ones. A chunk that would not be
swapped in (`worth_swapping_in`) is not adopted.

After that, an adopted chunk is the same as a chunk that was swapped out here. The caller writes the bytes of
the pages before anything else happens, so no page is ever used without them. The engine ensures that nothing
else uses the conversation between two parts (engine/hand_over.py).
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
        """Adopt chunks from `first_chunk` on. `slots`: how many leading slots of each have KV (0: none).

        The last chunks are tried first, until there is no room. `log` is used if the conversation is unknown:
        then its KV ends where these chunks end.
        """
        conversation = self._tree.conversations.get(conversation_id)
        if conversation is None:
            conversation = self._begun(conversation_id, log, first_chunk, slots, now)
        if conversation.turn_id is not None:
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
        self._tree.prune(conversation.leaf)  # if no chunk was adopted
        return adopted

    def _begun(
        self,
        conversation_id: str,
        log: array[int],
        first_chunk: int,
        slots: Sequence[int],
        now: float,
    ) -> CachedConversation:
        """Add a conversation without a turn, all of whose chunks are holes."""
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
        """Adopt a chunk; False if there is no room for it."""
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
