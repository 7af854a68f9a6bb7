"""Keeps track of which chunks may be evicted, in one queue for each way to give one up.

A branch is *pinned* while a running turn holds it, else *idle*.  Only idle branches have chunks to
give up; there is one queue per role (policies/queue.py): chunks to copy to the host, device pages to
take, host pages to take.  This module keeps queues and counts true whenever

    a turn pins or unpins a branch       `pin`, `unpin`
    a copy of a chunk has finished       `release`
    one chunk's state has changed        `requalify`
    the tree changes                     `branch_split`, `holders_changed`, `branch_removed`

A pinned branch stays in its queues, which skip it; unpinning counts and queues it from scratch.  So
the beginning of a turn costs one pass over its chunks, its end another, and a step in between none.
"""

from __future__ import annotations

from pensieve.core.policies.protocol import RetentionPolicy
from pensieve.core.policies.queue import RetentionQueue, Role
from pensieve.core.prefix_tree import Branch, Chunk, Conversation
from pensieve.core.tiers import Tiers


class Candidates:
    """Listens to the tree; the pages of what the tree removes go back to the tiers here."""

    def __init__(self, policy: RetentionPolicy, tiers: Tiers) -> None:
        self.policy = policy
        self.tiers = tiers
        self.queues = [RetentionQueue(role, policy) for role in Role]

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
        """Only streamed turns hold it: what the host has is not needed on the device."""
        for chunk in branch.chunks:
            if chunk.reclaimable:
                self.tiers.free_device(chunk)

    def scan_again(self) -> None:
        """Branches were pinned, or the policy has learned from a turn's begin or end."""
        for queue in self.queues:
            queue.scan_again()

    def release(self, chunk: Chunk, now: float) -> None:
        """A copy of it has finished."""
        if self.tiers.release(chunk):
            self.requalify(chunk, now)
        branch = chunk.branch
        if branch is not None and branch.num_running == branch.num_streamed > 0:
            self.leave_device(branch)

    def requalify(self, chunk: Chunk, now: float) -> None:
        """An idle chunk that did not qualify for some role may do so now."""
        self.tiers.count_reclaimable(chunk, +1)
        branch = chunk.branch
        assert branch is not None
        for queue in self.queues:
            queue.requalify(chunk, branch, now)

    def value_of(self, chunk: Chunk, branch: Branch, now: float) -> float:
        """The retention value of a chunk of an idle branch."""
        class_index = self.policy.class_of(branch, chunk.index, now)
        return self.policy.value(class_index, now - branch.idle_since)

    def least_value_of(self, conversation: Conversation, now: float) -> float | None:
        """Of the chunks that it holds; None while a turn runs or nothing is held."""
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

    def holders_changed(self, branch: Branch, now: float) -> None:
        """Its value may have fallen: with a holder fewer, or by what the policy has learned."""
        if not branch.num_running:
            for queue in self.queues:
                queue.offer(branch, now)

    def branch_removed(self, branch: Branch) -> None:
        """Chunks with a copy in flight keep their pages until it has finished (`release`)."""
        for chunk in branch.chunks if branch.num_resident else ():
            self.tiers.count_reclaimable(chunk, -1)
            if not chunk.in_flight:
                self.tiers.free_pages(chunk)
        for queue in self.queues:
            queue.withdraw(branch)

    # -- counting --

    def _recount(self, branch: Branch, now: float) -> None:
        """Count and queue an idle branch from scratch: one pass over its chunks.

        The same conditions as `Chunk.dirty`, `reclaimable` and `droppable`, checked together, because
        a long turn ends with a thousand chunks.
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
