"""Chunks of a conversation whose KV comes from another engine, and that become chunks of the host tier.

The engine that had the conversation before hands its KV over from the end: the last chunks first, since they
cost most to recompute, and a conversation with holes in front is what eviction leaves, too.  So whenever a
transfer stops (no room, a broken connection, no time left) what has arrived is of use as it lies.

    first part    the conversation is not known here: it gets its log, and a branch of its own with as many
                  chunks as KV covers, all of them holes but for those of the part
    later parts   fill holes of it

A chunk is adopted where nothing is of it in either tier and no turn that runs holds it; else it is left as
it is, since a part may come late.  It gets a host page as a swap-out would: an empty one, or that of the
chunk on the host that is worth least, if that is worth less than the adopted one.  What a running turn or a
copy in flight uses is in no queue and therefore is never taken; neither is a chunk of the same conversation,
as later ones are worth no less than earlier ones.  A chunk that would not be swapped in (`worth_swapping_in`)
is not adopted.

From then on nothing tells such a chunk from one that was swapped out here: its value, its eviction, its
swap-in and the audit are the same.  The caller writes the bytes of the pages before anything else happens, so
no page is ever seen without them.  That nobody else has used the conversation between two parts is the
engine's to know (engine/hand_over.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from pensieve.core.cache import KVCache
from pensieve.core.prefix_tree import CachedConversation, Chunk


class KvPlace(NamedTuple):
    """Leading slots of a page, whose KV is handed over."""

    on_host: bool  # else on the device
    page: int
    num_slots: int


class Adopted(NamedTuple):
    """A host page to be filled with what has arrived of a chunk."""

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
        """Take in chunks from `first_chunk` on, each with KV of so many leading slots (0: of none).

        The last ones are tried first, until there is no room.  `log` is used where the conversation is not
        known yet: KV then ends where these chunks do.
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
        self._tree.prune(conversation.leaf)  # if it got nothing
        return adopted

    def _begun(
        self,
        conversation_id: str,
        log: array[int],
        first_chunk: int,
        slots: Sequence[int],
        now: float,
    ) -> CachedConversation:
        """A conversation that rests and is all holes."""
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
        """Whether there is room for it."""
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
