"""Decide when a chunk is evicted or copied to the host: when a page is needed, and ahead of need.

The policy (policies/) only gives the chunks a value.

**Candidates.** A branch is *pinned* while a running turn holds it, otherwise *idle*. Only chunks of idle
branches may be evicted. `Candidates` has one queue per role (policies/queue.py): chunks to copy to the host,
device pages to take, host pages to take. `Candidates` updates queues and counts whenever

    a turn pins or unpins a branch       `pin`, `unpin`
    a copy of a chunk has finished       `release`
    one chunk's state has changed        `requalify`
    the tree changes                     `branch_split`, `holders_changed`, `branch_removed`

A pinned branch stays in its queues, but the queues skip it. When a branch is unpinned, its chunks are counted
again and the branch is queued again. So a turn costs one pass over its chunks when it begins, and one pass
when it ends.

**When a chunk needs a device page**, it gets an empty page. If there is none, it gets the page of the least
valuable reclaimable chunk. If a conversation returns before its pages are taken, its chunks are still on the
device.

**Ahead of need**, when fewer than a configured number of pages is available, the least valuable dirty chunks
are copied to the host (`plan_swap_outs`). If the host is full, the chunk to be copied is compared with the
least valuable chunk on the host. The chunk that is worth less is dropped:

    the host chunk is worth less     its host page is taken for the copy
    the device chunk is worth less   it is marked to drop: reclaimable without a copy

So the page of every idle dirty chunk can become available, whatever the host holds, and no turn waits for
ever. A less valuable chunk may become idle before the page of a marked chunk is taken. Then the marked chunk
is unmarked, and the less valuable chunk is dropped instead (`_cheaper_to_drop`).

While a swap-in is in flight, no swap-out starts.

**On request**, operators move conversations. `evict` drops their pages. `move_to_host` copies their chunks to
the host, as far as the host has empty pages or less valuable chunks. `copy_out` does the same for the chunks
of a turn that will be streamed (streamed_pages.py). If another running turn holds a chunk, the chunk also
stays on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from itertools import islice
from typing import NamedTuple

from pensieve.core.iteration import SwapOut
from pensieve.core.policies.protocol import EvictionPolicy
from pensieve.core.policies.queue import EvictionQueue, Role
from pensieve.core.prefix_tree import Branch, CachedConversation, Chunk, PrefixTree
from pensieve.core.tiers import CacheConfig, Tiers

EVENTS_MAX = 8192
HOLDERS_NAMED_MAX = 4


class Candidates:
    """The queues of evictable chunks. Listens to the tree, and frees the pages of removed branches."""

    def __init__(self, policy: EvictionPolicy, tiers: Tiers) -> None:
        self.policy = policy
        self.tiers = tiers
        self.queues = [EvictionQueue(role, policy) for role in Role]

    def pin(self, branch: Branch, streamed: bool = False) -> None:
        if not branch.num_running:
            self.tiers.num_reclaimable -= branch.num_reclaimable
            branch.num_reclaimable = 0
            for chunk in branch.chunks:
                if chunk.marked_to_drop:
                    chunk.marked_to_drop = False
                elif chunk.reclaimable:
                    self.tiers.counters.reclaim_hits += 1
        branch.num_running += 1
        branch.num_streamed += streamed

    def unpin(self, branch: Branch, now: float, streamed: bool = False) -> None:
        branch.num_running -= 1
        branch.num_streamed -= streamed
        if not branch.num_running:
            self._recount(branch, now)
        elif branch.num_running == branch.num_streamed:
            self.leave_device(branch)

    def leave_device(self, branch: Branch) -> None:
        """Free the device pages of a branch that only streamed turns hold, if the host has copies."""
        for chunk in branch.chunks:
            if chunk.reclaimable:
                self.tiers.free_device(chunk)

    def scan_again(self) -> None:
        """Call this after branches were pinned, or after the policy has learned of a turn's begin or end."""
        for queue in self.queues:
            queue.scan_again()

    def release(self, chunk: Chunk, now: float) -> None:
        """Note that a copy of a chunk has finished."""
        if self.tiers.release(chunk):
            self.requalify(chunk, now)
        branch = chunk.branch
        if branch is not None and branch.num_running == branch.num_streamed > 0:
            self.leave_device(branch)

    def requalify(self, chunk: Chunk, now: float) -> None:
        """Queue an idle chunk that may now qualify for a role."""
        self.tiers.count_reclaimable(chunk, +1)
        branch = chunk.branch
        assert branch is not None
        for queue in self.queues:
            queue.requalify(chunk, branch, now)

    def value_of(self, chunk: Chunk, branch: Branch, now: float) -> float:
        """Return the retention value of a chunk of an idle branch."""
        value_class = self.policy.value_class_of(branch, chunk.index, now)
        return self.policy.value(value_class, now - branch.idle_since)

    def least_value_of(self, conversation: CachedConversation, now: float) -> float | None:
        """Return the value of a conversation's least valuable chunk; None while a turn runs or without KV."""
        values = []
        for branch in conversation.path():
            if branch.num_running:
                return None
            first = next((chunk for chunk in branch.chunks if chunk.resident), None)
            if first is not None:
                values.append(self.value_of(first, branch, now))
        return min(values, default=None)

    # -- BranchListener --

    def branch_split(self, upper: Branch, lower: Branch, now: float) -> None:
        for queue in self.queues:
            queue.withdraw(lower)
        if not lower.num_running:
            self._recount(lower, now)
            self._recount(upper, now)

    def branches_joined(self, upper: Branch, lower: Branch, first: int, now: float) -> None:
        upper.num_reclaimable += lower.num_reclaimable
        for queue in self.queues:
            queue.withdraw(lower)
            if upper.cursors[queue.role] >= first:
                upper.cursors[queue.role] = first + lower.cursors[queue.role]
            if not upper.num_running:
                queue.offer(upper, now)

    def holders_changed(self, branch: Branch, now: float) -> None:
        """Queue a branch again, because its value may have fallen."""
        if not branch.num_running:
            for queue in self.queues:
                queue.offer(branch, now)

    def branch_removed(self, branch: Branch) -> None:
        """Free the pages of a removed branch. Pages with a copy in flight are kept until `release`."""
        for chunk in branch.chunks if branch.num_resident else ():
            self.tiers.count_reclaimable(chunk, -1)
            if not chunk.in_flight:
                self.tiers.free_pages(chunk)
        for queue in self.queues:
            queue.withdraw(branch)

    # -- counting --

    def _recount(self, branch: Branch, now: float) -> None:
        """Count the chunks of an idle branch and queue the branch, in one pass over its chunks.

        The conditions of `Chunk.dirty`, `reclaimable` and `droppable` are checked together here for speed,
        because a long turn ends with a thousand chunks.
        """
        num_chunks = len(branch.chunks)
        first_dirty = first_reclaimable = first_droppable = num_chunks
        num_reclaimable = 0
        for i, chunk in enumerate(branch.chunks):
            if chunk.in_flight:
                continue
            if not chunk.filled or (chunk.host_page is not None and not chunk.host_filled):
                self.tiers.free_unfilled_pages(chunk)
            if chunk.host_page is not None and i < first_droppable:
                first_droppable = i
            if chunk.device_page is None:
                continue
            if chunk.host_filled >= chunk.filled or chunk.marked_to_drop:
                num_reclaimable += 1
                if i < first_reclaimable:
                    first_reclaimable = i
            elif i < first_dirty:
                first_dirty = i
        self.tiers.num_reclaimable += num_reclaimable - branch.num_reclaimable
        branch.num_reclaimable = num_reclaimable
        firsts = {
            Role.SWAP_OUT: first_dirty,
            Role.RECLAIM: first_reclaimable,
            Role.DROP: first_droppable,
        }
        for queue in self.queues:
            branch.cursors[queue.role] = firsts[queue.role]
            if firsts[queue.role] < num_chunks:
                queue.offer(branch, now)


class Eviction:
    def __init__(self, config: CacheConfig, tree: PrefixTree, candidates: Candidates) -> None:
        self.log = EvictionLog()
        self._tree = tree
        self.candidates = candidates
        self._tiers = candidates.tiers
        self._policy = candidates.policy
        self._counters = candidates.tiers.counters
        self._dirty = candidates.queues[Role.SWAP_OUT]
        self._reclaimable = candidates.queues[Role.RECLAIM]
        self._droppable = candidates.queues[Role.DROP]
        self._swap_out_mark_pages = config.swap_out_mark_pages
        self._swap_outs_max = config.swap_outs_max
        self._size = config.chunk_tokens
        # Chunks to be copied for `move_to_host` (False) or `copy_out` (True). If a running turn holds a chunk
        # when its copy is planned, the chunk is copied only for `copy_out`, and only if it is full.
        self._to_move: dict[Chunk, bool] = {}

    # -- a page for a chunk --

    def take_device_page(self, chunk: Chunk, now: float) -> None:
        """Give a chunk a device page. The caller has checked that one is available."""
        device = self._tiers.device
        page = device.take()
        if page is None:
            found = self._reclaimable.least(now)
            assert found is not None, "pages were counted as available, and none can be taken"
            value, victim = self._cheaper_to_drop(found, now) or found
            if victim.filled > victim.host_filled:
                self._counters.dropped += 1
                self.log.record(victim, now, "lost", value)
            else:
                self._counters.reclaimed += 1
            self._tiers.count_reclaimable(victim, -1)
            self._tiers.free_device(victim)
            self._tree.prune(victim.branch, now)
            page = device.take()
        chunk.device_page = page
        if chunk.host_page is None and chunk.branch is not None:
            chunk.branch.num_resident += 1

    def _cheaper_to_drop(
        self, found: tuple[float, Chunk], now: float
    ) -> tuple[float, Chunk] | None:
        """Return a dirty chunk that may also be dropped without a copy and is worth less than `found`.

        If there is such a chunk, the chunk of `found` is unmarked.
        """
        value, chunk = found
        if not chunk.marked_to_drop or (other := self._dirty.least(now)) is None:
            return None
        if other[0] >= value or other[1].host_page is not None:
            return None
        if self._worth_a_copy(other[1], now):
            if self._tiers.host.num_empty:
                return None
            droppable = self._droppable.least(now)
            if droppable is not None and droppable[0] <= other[0]:
                return None
        self._tiers.count_reclaimable(chunk, -1)
        chunk.marked_to_drop = False
        self.candidates.requalify(chunk, now)
        return other

    def drop_to_recompute(self, chunk: Chunk, now: float) -> None:
        """Drop a chunk from the host because computing it is faster than copying it in."""
        self.log.record(chunk, now, "recomputed")
        self._tiers.free_host(chunk)
        chunk.filled = 0
        chunk.generation += 1
        self._counters.dropped += 1

    def drop_damaged(self, chunk: Chunk, now: float) -> None:
        """Drop a chunk whose host page is damaged: it becomes a hole for every turn that needs it."""
        self.log.record(chunk, now, "damaged")
        self._counters.damaged += 1
        self._tiers.invalidate(chunk)
        if not chunk.in_flight:
            self._tiers.free_host(chunk)

    # -- ahead of need --

    def plan_swap_outs(
        self, now: float, required_pages: int, written: Collection[Chunk] = ()
    ) -> list[SwapOut]:
        """Plan copies to the host so that max(`required_pages`, configured minimum) pages are available.

        `written`: the chunks that this iteration writes.
        """
        tiers = self._tiers
        if tiers.num_swapping_in:
            return []
        target = max(required_pages, self._swap_out_mark_pages)
        swap_outs = self._plan_moves(now, written) if self._to_move else []
        while (
            tiers.available + tiers.num_swapping_out < target
            and len(swap_outs) < self._swap_outs_max
            and (found := self._dirty.least(now)) is not None
        ):
            value, chunk = found
            if chunk.host_page is None and not (
                self._worth_a_copy(chunk, now) and self._take_host_page(chunk, value, now)
            ):
                self._mark_to_drop(chunk, now, value)
                continue
            swap_outs.append(tiers.start_swap_out(chunk))
        return swap_outs

    def relief_expected(self, now: float) -> bool:
        """Whether idle pages are about to become available, so that no turn needs to be suspended."""
        return self._tiers.num_swapping_out > 0 or self._dirty.least(now) is not None

    def finish_swap(self, copy_id: int, now: float) -> None:
        swap = self._tiers.finish_swap(copy_id)
        if swap.source is not swap.target:
            self.candidates.release(swap.source, now)
        self.candidates.release(swap.target, now)
        if swap.source in self._to_move and not swap.source.in_flight:
            del self._to_move[swap.source]
            self._reclaim(swap.source)

    def _worth_a_copy(self, chunk: Chunk, now: float) -> bool:
        return chunk.branch is None or self._policy.worth_swapping_out(
            chunk.branch, chunk.index, now
        )

    def _take_host_page(self, chunk: Chunk, value: float, now: float) -> bool:
        """Give a chunk on the device a host page; False if the host is full of more valuable chunks."""
        while (page := self._tiers.host.take()) is None:
            victim = self._droppable.least(now)
            if victim is None or victim[0] > value:
                return False
            self._drop_host_copy(victim[1], now, victim[0], value)
        chunk.host_page = page
        return True

    def take_host_page_for(self, value: float, now: float) -> int | None:
        """Take a host page for a chunk of this value: an empty page, or the page of a less valuable chunk.

        Returns None if there is no such page.
        """
        if (page := self._tiers.host.take()) is None:
            victim = self._droppable.least(now)
            if victim is None or victim[0] >= value:
                return None
            self._drop_host_copy(victim[1], now, victim[0], value)
            page = self._tiers.host.take()
        return page

    def take_host_pages(self, count: int, now: float) -> list[int] | None:
        """Take host pages for running turns, even from more valuable chunks; None if there are too few."""
        pages: list[int] = []
        while len(pages) < count:
            if (page := self._tiers.host.take()) is not None:
                pages.append(page)
            elif (victim := self._droppable.least(now)) is not None:
                self._drop_host_copy(victim[1], now, victim[0], float("inf"))
            else:
                for page in pages:
                    self._tiers.host.give_back(page)
                return None
        return pages

    def _drop_host_copy(self, chunk: Chunk, now: float, value: float, kept_value: float) -> None:
        """Drop a chunk from the host. If it is also on the device, mark it to drop there."""
        self.log.record(chunk, now, "dropped", value, kept_value)
        self._tiers.count_reclaimable(chunk, -1)
        self._tiers.free_host(chunk)
        if chunk.device_page is not None:
            chunk.marked_to_drop = True
            self._counters.marked_to_drop += 1
            self.candidates.requalify(chunk, now)
        else:
            self._counters.dropped += 1
            self._tree.prune(chunk.branch, now)

    def _mark_to_drop(self, chunk: Chunk, now: float, value: float) -> None:
        self.log.record(chunk, now, "marked_to_drop", value)
        chunk.marked_to_drop = True
        self._counters.marked_to_drop += 1
        self.candidates.requalify(chunk, now)

    # -- on request --

    def evict(self, conversation: CachedConversation, now: float) -> int:
        """Drop every idle page that only this conversation holds. Return how many chunks lost a page."""
        num_dropped = 0
        for branch in reversed(conversation.path()):
            if branch.num_running or len(branch.holders) > 1:
                continue
            for chunk in branch.chunks:
                if chunk.resident and not chunk.in_flight:
                    num_dropped += 1
                    self.log.record(chunk, now, "evicted")
                    self._tiers.count_reclaimable(chunk, -1)
                    self._tiers.free_pages(chunk)
        self._tree.prune(conversation.leaf, now)
        self._counters.dropped += num_dropped
        return num_dropped

    def move_to_host(self, conversation: CachedConversation, now: float) -> int:
        """Move the idle pages that only this conversation holds to the host; return the number of chunks.

        A chunk is copied if the host has room or a less valuable chunk. Copies may still be in flight.
        """
        num_moving = 0
        for branch in conversation.path():
            if branch.num_running or len(branch.holders) > 1:
                continue
            for chunk in branch.chunks:
                if chunk.device_page is None or not chunk.filled or chunk.marked_to_drop:
                    continue
                num_moving += 1
                self.log.record(chunk, now, "moved")
                if not self._reclaim(chunk):
                    self._to_move[chunk] = False
        return num_moving

    def copy_out(self, chunks: Iterable[Chunk], now: float) -> None:
        """Request copies of chunks to the host, as far as the host has empty or less valuable pages."""
        for chunk in chunks:
            if chunk.marked_to_drop:
                self._tiers.count_reclaimable(chunk, -1)
                chunk.marked_to_drop = False
                self.candidates.requalify(chunk, now)
            self._to_move[chunk] = True

    def _plan_moves(self, now: float, written: Collection[Chunk]) -> list[SwapOut]:
        """Plan the copies for `move_to_host` and `copy_out`."""
        swap_outs: list[SwapOut] = []
        for chunk in [each for each in self._to_move if not each.in_flight]:
            if len(swap_outs) == self._swap_outs_max:
                break
            branch = chunk.branch
            may_copy = branch is not None and (
                not branch.num_running
                or (self._to_move[chunk] and chunk.filled == self._size and chunk not in written)
            )
            if branch is not None and may_copy and chunk.dirty:
                value = self.candidates.value_of(chunk, branch, now)
                if chunk.host_page is not None or self._take_host_page(chunk, value, now):
                    swap_outs.append(self._tiers.start_swap_out(chunk))
                    continue
            del self._to_move[chunk]
        return swap_outs

    def _reclaim(self, chunk: Chunk) -> bool:
        """Give back the device page of an idle chunk, if the host has a copy."""
        if not chunk.idle or not chunk.reclaimable or chunk.marked_to_drop:
            return False
        self._tiers.count_reclaimable(chunk, -1)
        self._tiers.free_device(chunk)
        self._counters.reclaimed += 1
        return True


class EvictionEvent(NamedTuple):
    at: float
    conversation_ids: tuple[str, ...]  # some of the holders
    chunk_index: int
    reason: str  # a key of DESCRIPTIONS
    value: float | None = None  # retention value of the chunk
    kept_value: float | None = None  # retention value of the chunk that was kept instead


DESCRIPTIONS = {
    "dropped": "dropped from the host tier, which was full",
    "marked_to_drop": "not copied to the host tier: it was full of more valuable chunks, "
    "or the copy was not worth it",
    "recomputed": "dropped from the host tier: recomputing was faster than copying",
    "damaged": "dropped from the host tier: the page was damaged",
    "lost": "dropped from the device tier: the page was needed and the host had no copy",
    "discarded": "discarded: the turn that computed it failed",
    "evicted": "dropped on request",
    "moved": "moved to the host on request",
}


class EvictionLog:
    """A bounded log, for operators, of evictions and their reasons."""

    def __init__(self) -> None:
        self._events: deque[EvictionEvent] = deque(maxlen=EVENTS_MAX)

    def record(
        self,
        chunk: Chunk,
        now: float,
        reason: str,
        value: float | None = None,
        kept_value: float | None = None,
    ) -> None:
        if chunk.branch is not None:
            names = (holder.conversation_id for holder in reversed(chunk.branch.holders))
            holders = tuple(islice(names, HOLDERS_NAMED_MAX))
            event = EvictionEvent(now, holders, chunk.index, reason, value, kept_value)
            self._events.append(event)

    def lines_of(self, conversation_id: str, now: float) -> list[tuple[float, str]]:
        """Return (seconds ago, sentence), the latest last; events at the same moment share a sentence."""
        lines: list[tuple[float, str]] = []
        group: list[EvictionEvent] = []
        for event in self._events:
            if conversation_id not in event.conversation_ids:
                continue
            if group and (event.at, event.reason) != (group[0].at, group[0].reason):
                lines.append((now - group[0].at, _sentence(group)))
                group = []
            group.append(event)
        if group:
            lines.append((now - group[0].at, _sentence(group)))
        return lines


def _sentence(group: list[EvictionEvent]) -> str:
    first, last = group[0].chunk_index, group[-1].chunk_index
    subject = f"chunk {first}" if len(group) == 1 else f"{len(group)} chunks, {first} to {last},"
    text = f"{subject} {DESCRIPTIONS[group[0].reason]}"
    value, kept_value = group[-1].value, group[-1].kept_value
    if value is not None and kept_value is not None:
        text += f" (retention value {value:.3g}; the chunk kept instead: {kept_value:.3g})"
    elif value is not None:
        text += f" (retention value {value:.3g})"
    return text
