"""The pages of streamed turns.

The KV of a streamed turn is on the host. Each layer copies its part of this KV to a staging arena on the
device (iteration.py).

A running turn is either *resident* (each chunk of its context has a device page) or *streamed* (each chunk
has a host page). The mode is chosen when the turn is admitted. It does not change until the turn gives up its
pages. In a branch, `num_running` counts both kinds of turns, and `num_streamed` only streamed turns.

No turn reads slots that another turn writes at the same time:

* A resident turn writes only device pages, and a streamed turn only host pages. Each kind reads only its own
  tier. So a chunk that both kinds of turns use must be *complete*: before the planned iteration, both tiers
  have all slots that any of these turns uses. (For a chunk without a device page, `filled` equals
  `host_filled`.)
* If a streamed turn uses a chunk that is not complete, any other turn that needs this chunk waits
  (`is_clear_of_streamed`, `may_take`). So if two groups (iteration.py) share a page, neither group writes it.
* A discarded chunk (`KVCache.discard`) is not complete: the scheduler suspends the streamed turns that hold
  the chunk.
* Host pages of a running turn are pinned: the retention queues skip its branches.

Chunks that are only on the device are copied to the host first (`Eviction.copy_out`). Chunks that only
streamed turns use give up their device pages. A partly used chunk to which the turn may not append is
recomputed; a resident turn would copy it (copy on write).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pensieve.core.eviction import Eviction
from pensieve.core.prefix_tree import CachedConversation, Chunk, PrefixTree
from pensieve.core.tiers import CacheConfig, IsIntact, PageReservation
from pensieve.core.turn import Turn


class StreamedPages:
    def __init__(
        self,
        config: CacheConfig,
        tree: PrefixTree,
        eviction: Eviction,
        is_intact: IsIntact,
    ) -> None:
        self._config = config
        self._size = config.chunk_tokens
        self._tree = tree
        self._candidates = eviction.candidates
        self._eviction = eviction
        self._is_intact = is_intact

    def is_clear_of_streamed(
        self, chunks: Sequence[Chunk], num_tokens: int, filled_before: Mapping[Chunk, int]
    ) -> bool:
        """Whether a resident turn may use these chunks: no streamed turn is still filling a chunk."""
        return all(
            not chunk.branch.num_streamed  # type: ignore[union-attr]
            or filled_before.get(chunk, chunk.filled) >= self._used(chunk, num_tokens)
            for chunk in chunks
        )

    def may_take(
        self,
        turn: Turn,
        chunks: Sequence[Chunk],
        num_tokens: int,
        filled_before: Mapping[Chunk, int],
        now: float,
    ) -> bool:
        """Whether a turn may stream these chunks. `num_tokens`: how many slots its conversation uses.

        If chunks must be copied out first, their copies are requested, and the answer is False.
        """
        if -(-len(turn.tokens) // self._size) > self._config.staging_pages:
            return False
        to_copy: list[Chunk] = []
        for chunk in chunks:
            assert chunk.branch is not None
            used, is_shared = self._used(chunk, num_tokens), chunk.branch.num_running > 0
            if is_shared and filled_before.get(chunk, chunk.filled) < used:
                return False  # another turn is still filling the chunk
            if chunk.filled > chunk.host_filled:
                to_copy.append(chunk)
            elif chunk.in_flight:
                return False
        if to_copy:
            self._eviction.copy_out(to_copy, now)
        return not to_copy

    def take(
        self, conversation: CachedConversation, turn: Turn, now: float
    ) -> PageReservation | None:
        """Pin the turn's chunks and give its whole context host pages; None if there are too few."""
        for chunk in conversation.chunks():
            assert chunk.branch is not None
            page = None if chunk.branch.num_running else chunk.host_page
            if page is not None and not self._is_intact(page):
                self._eviction.drop_damaged(chunk, now)
        path, chunks = conversation.path(), conversation.chunks()
        for branch in path:
            self._candidates.pin(branch, streamed=True)
        self._candidates.scan_again()
        num_chunks = -(-len(turn.tokens) // self._size)
        missing = [chunk for chunk in chunks if chunk.host_page is None]
        pages = self._eviction.take_host_pages(len(missing) + num_chunks - len(chunks), now)
        if pages is None:
            for branch in path:
                self._candidates.unpin(branch, now, streamed=True)
            self._candidates.scan_again()
            self._tree.prune(conversation.leaf, now)
            return None
        conversation.is_streamed = True
        for chunk in missing:
            self._give(chunk, pages.pop())
        for branch in path:
            if branch.num_running == branch.num_streamed:
                self._candidates.leave_device(branch)
        admission = PageReservation()
        for chunk in chunks:
            base = chunk.index * self._size
            admission.host_tokens += min(chunk.filled, max(turn.history_kv - base, 0))
        while pages:
            chunk = self._tree.append_chunk(conversation)
            self._give(chunk, pages.pop())
        return admission

    def extend(self, conversation: CachedConversation, turn: Turn, now: float) -> bool:
        """Take a host page for the turn's next chunk.

        Return False if there is none, or if the context would not fit into a group.
        """
        if len(turn.chunks) >= self._config.staging_pages:
            return False
        pages = self._eviction.take_host_pages(1, now)
        if pages is None:
            return False
        chunk = self._tree.append_chunk(conversation)
        self._give(chunk, pages[0])
        turn.chunks.append(chunk)
        turn.page_table.append(pages[0])
        return True

    def _give(self, chunk: Chunk, page: int) -> None:
        if chunk.device_page is None and chunk.branch is not None:
            chunk.branch.num_resident += 1
        chunk.host_page = page

    def _used(self, chunk: Chunk, num_tokens: int) -> int:
        """Return how many slots of a chunk a conversation of `num_tokens` tokens uses."""
        return min(self._size, num_tokens - chunk.index * self._size)
