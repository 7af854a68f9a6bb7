"""The pages of streamed turns: their contexts lie on the host, and every layer stages them (iteration.py).

A running turn is *resident*, and then each chunk of its context has a device page, or *streamed*, and then
each has a host page.  Which of them is decided when it is admitted, and holds until it gives up its pages.
Of a branch that turns hold, `num_running` counts both kinds and `num_streamed` the latter.

Why nothing reads what another writes:

* A resident turn writes device pages only, a streamed one host pages only, and of a chunk without device page
  `filled` and `host_filled` are one number.  So a chunk that is used by both kinds must be *complete*: filled
  as far as either uses it, before the iteration that is planned, in both tiers.
* A chunk that is not complete has one turn at most, if that one is streamed.  A turn that would be the second
  waits (`is_clear_of_streamed`, `may_take`).  So a page that a group writes is in no other group.
* What is not to be trusted any more (`KVCache.discard`) is not complete: the scheduler suspends the streamed
  turns that hold it.
* Host pages of a running turn are pinned: the retention queues skip its branches.

What lies on the device alone is copied out first (`Eviction.copy_out`); what nobody but streamed turns uses
leaves the device.  A chunk that is used partly, and not appended to (copy on write), is computed again.
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
        """Whether a resident turn may use these: none is still being filled by a streamed one."""
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
        """Whether a turn may stream over its chunks, of which its conversation uses so many tokens.

        If something has to be copied out for that, it begins to be.
        """
        if -(-len(turn.tokens) // self._size) > self._config.staging_pages:
            return False
        to_copy: list[Chunk] = []
        for chunk in chunks:
            assert chunk.branch is not None
            used, is_shared = self._used(chunk, num_tokens), chunk.branch.num_running > 0
            if is_shared and filled_before.get(chunk, chunk.filled) < used:
                return False  # another turn is still filling it
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
        """Pin the turn's chunks, with a host page for each of its context; None: there are too few."""
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
            self._tree.prune(conversation.leaf)
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
        """A host page for the turn's next chunk; False: there is none, or a group cannot be so large."""
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
        """How many of its slots a conversation of so many tokens uses."""
        return min(self._size, num_tokens - chunk.index * self._size)
