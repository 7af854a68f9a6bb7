"""Order the chunks by the value that a policy gives them: find the least valuable chunk without a search.

There are three roles, each with its own queue and its own condition on a chunk:

    SWAP_OUT  copy device to host    dirty: on the device, and its loss would cost recompute
    RECLAIM   free a device page     reclaimable: clean, or marked to drop
    DROP      free a host page       droppable: on the host, no copy in flight

The entries of a queue are branches, not chunks. In a branch, the first chunk that qualifies is the least
valuable chunk that qualifies. The policy puts this chunk into one of its *value classes* (`value_class_of`),
and the branch is queued there. All entries of a value class have the same value at the same idle time, and
the value falls with the idle time. So a value class is ordered by idle time, and this order never changes.
The least valuable branch is therefore among the heads of the value classes.

An entry is a *lower bound* of its branch's value. The idle time lowers the values of all entries of a value
class alike. A branch's value rises in three cases: a holder becomes active, the weight of several holders
grows with time (`Branch.holders_weight`), or the chunk of the entry no longer qualifies. A rise changes no
entry: the entry is corrected when it becomes the least valuable entry. A branch's value also falls when the
branch loses a holder, or when an earlier chunk qualifies again. In these two cases the branch is offered
again at once, and its old entry becomes stale.

Entries of branches that a running turn holds are removed when they become the head of a value class. `offer`
queues such a branch again when it is idle.

So a decision costs O(`num_value_classes` + log branches), amortized over the changes of branches, and never
walks over the whole cache. All decisions of one plan have the same `now`. The branch found remains the least
valuable one as long as no branch is queued or pinned and the next chunk of the branch found has the same
value class. The value found may be off by one value class (for the policy `value`, a factor of 1.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum
from heapq import heapify, heappop, heappush

from pensieve.core.policies.protocol import EvictionPolicy
from pensieve.core.prefix_tree import Branch, Chunk, QueueEntry


class Role(IntEnum):
    SWAP_OUT = 0
    RECLAIM = 1
    DROP = 2


QUALIFIES: dict[Role, Callable[[Chunk], bool]] = {
    Role.SWAP_OUT: Chunk.dirty.fget,  # type: ignore[attr-defined]
    Role.RECLAIM: Chunk.reclaimable.fget,  # type: ignore[attr-defined]
    Role.DROP: Chunk.droppable.fget,  # type: ignore[attr-defined]
}


class EvictionQueue:
    """The branches with a chunk that qualifies for one role, least valuable first."""

    def __init__(self, role: Role, policy: EvictionPolicy) -> None:
        self.role = role
        self.policy = policy
        self._qualifies = QUALIFIES[role]
        self._heaps: list[list[QueueEntry]] = [[] for _ in range(policy.num_value_classes)]
        self._occupied: list[int] = []  # value classes whose heap is not empty
        self._serial = 0
        self._num_live = 0
        self._num_stale = 0
        self._found: tuple[float, QueueEntry] | None = None
        self._found_at: float | None = None  # None: outdated

    def least(self, now: float) -> tuple[float, Chunk] | None:
        """Return the least valuable chunk that qualifies, and its value."""
        while True:
            found = self._found if self._found_at == now else self._first(now)
            if found is None:
                return None
            value, entry = found
            branch, value_class = entry.branch, entry.value_class
            assert branch is not None
            chunk = self.candidate(branch)
            if chunk is None:
                self._remove_head(value_class)
            elif (
                present_class := self.policy.value_class_of(branch, chunk.index, now)
            ) > value_class:
                self._remove_head(value_class)
                self._push(branch, present_class)
            else:
                return value, chunk

    def scan_again(self) -> None:
        """Forget the branch found, because something was offered, withdrawn, removed or pinned."""
        self._found_at = None

    def _first(self, now: float) -> tuple[float, QueueEntry] | None:
        """Bring the heads of the value classes up to date and return the least of them."""
        heaps, value_of = self._heaps, self.policy.value
        while True:
            best_value, best_since = math.inf, math.inf
            best: QueueEntry | None = None
            outdated = -1
            for value_class in self._occupied:
                entry = heaps[value_class][0]
                branch, since = entry.branch, entry.since
                if branch is None or branch.num_running or since != branch.idle_since:
                    outdated = value_class
                    break
                value = value_of(value_class, now - since)
                if value < best_value or (value == best_value and since < best_since):
                    best_value, best_since, best = value, since, entry
            if outdated >= 0:
                self._refresh_head(outdated, now)
                continue
            self._found = None if best is None else (best_value, best)
            self._found_at = now
            return self._found

    def offer(self, branch: Branch, now: float) -> None:
        """Queue a branch, because a chunk of it may qualify or its value may have fallen."""
        self.scan_again()
        chunk = self.candidate(branch)
        if chunk is None:
            return
        value_class = self.policy.value_class_of(branch, chunk.index, now)
        entry = branch.entries[self.role]
        if entry is not None:
            if entry.value_class <= value_class and entry.since <= branch.idle_since:
                return  # still a lower bound
            self.withdraw(branch)
        self._push(branch, value_class)

    def requalify(self, chunk: Chunk, branch: Branch, now: float) -> None:
        """Queue an idle branch if `chunk`, which did not qualify before, does so now."""
        if self._qualifies(chunk):
            i = chunk.index - branch.start
            if i < branch.cursors[self.role]:
                branch.cursors[self.role] = i
            elif branch.entries[self.role] is not None:
                return  # its entry is for an earlier chunk, which is worth no more
            self.offer(branch, now)

    def withdraw(self, branch: Branch) -> None:
        """Make the branch's entry stale, if it has one."""
        self.scan_again()
        entry = branch.entries[self.role]
        if entry is not None:
            entry.branch = None
            branch.entries[self.role] = None
            self._num_live -= 1
            self._num_stale += 1
            if self._num_stale > 64 + self._num_live:
                self._forget_stale()

    def candidate(self, branch: Branch) -> Chunk | None:
        """Return the first chunk of `branch` that qualifies."""
        chunks, qualifies, cursors, role = branch.chunks, self._qualifies, branch.cursors, self.role
        for i in range(cursors[role], len(chunks)):
            if qualifies(chunks[i]):
                cursors[role] = i
                return chunks[i]
        cursors[role] = len(chunks)
        return None

    def _refresh_head(self, value_class: int, now: float) -> None:
        """Remove a stale, pinned or outdated head of a value class; queue its branch again if it is idle."""
        entry = self._pop(value_class)
        branch = entry.branch
        if branch is None:
            self._num_stale -= 1
            return
        self._num_live -= 1
        branch.entries[self.role] = None
        if not branch.num_running:
            self.offer(branch, now)

    def _push(self, branch: Branch, value_class: int) -> None:
        assert self._found_at is None, "the found branch may no longer be the least"
        self._serial += 1
        entry = QueueEntry(branch, value_class, self._serial)
        branch.entries[self.role] = entry
        heap = self._heaps[value_class]
        if not heap:
            self._occupied.append(value_class)
        heappush(heap, entry)
        self._num_live += 1

    def _pop(self, value_class: int) -> QueueEntry:
        self.scan_again()
        heap = self._heaps[value_class]
        entry = heappop(heap)
        if not heap:
            self._occupied.remove(value_class)
        return entry

    def _remove_head(self, value_class: int) -> None:
        branch = self._pop(value_class).branch
        assert branch is not None
        branch.entries[self.role] = None
        self._num_live -= 1

    def _forget_stale(self) -> None:
        """Rebuild the heaps without stale entries. Amortized over the entries that became stale."""
        for heap in self._heaps:
            heap[:] = [entry for entry in heap if entry.branch is not None]
            heapify(heap)
        self._occupied = [i for i, heap in enumerate(self._heaps) if heap]
        self._num_stale = 0

    def check(self, idle_branches: list[Branch], now: float) -> None:
        """Check that each idle branch with a chunk that qualifies has an entry, not above its value."""
        live = sum(entry.branch is not None for heap in self._heaps for entry in heap)
        assert live == self._num_live, "the queue lost count of its entries"
        for branch in idle_branches:
            first = next((chunk for chunk in branch.chunks if self._qualifies(chunk)), None)
            if first is None:
                continue
            assert branch.cursors[self.role] <= first.index - branch.start, (
                f"{self.role.name}: the cursor of {branch} passed {first}"
            )
            entry = branch.entries[self.role]
            assert entry is not None, f"{self.role.name}: {branch} is not offered"
            since, value_class = entry.since, entry.value_class
            assert since <= branch.idle_since, (
                f"{self.role.name}: the entry of {branch} has a later idle time than the branch"
            )
            assert entry.start == branch.start, (
                f"{self.role.name}: {branch} begins at another chunk than its entry"
            )
            entry_value = self.policy.value(value_class, now - since)
            true_class = self.policy.value_class_of(branch, first.index, now)
            value = self.policy.value(true_class, now - branch.idle_since)
            # The value class was rounded down, so an outdated entry may be too high by one value class.
            slack = 1.0 if since == branch.idle_since else self.policy.value_class_ratio
            assert entry_value <= value * slack * (1 + 1e-9), (
                f"{self.role.name}: {branch} is overvalued, {entry_value} > {value}"
            )
