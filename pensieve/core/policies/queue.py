"""Which chunk to give up next: the least valuable one, found without looking at the others.

Three roles give something up, each with its own queue and its own question to a chunk:

    SWAP_OUT  device to host copy    dirty: on the device, and its loss would cost recompute
    RECLAIM   free a device page     reclaimable: clean, or condemned
    DROP      free a host page       droppable: on the host, no copy in flight

The unit in a queue is a branch, not a chunk: within a branch the first chunk that qualifies is the
least valuable.  A policy puts (branch, that chunk) into one of at most 64 *classes*; a class has one
value for each idle time, and it falls with the idle time.  So inside a class the order by idle time
is the order by value and never changes, and the least valuable branch of all is the least of the
classes' heads.

An entry states a *lower bound* of its branch's value: a holder that becomes active raises the value,
and so do time (see `Branch.weight`) and a cursor that moves on.  Nothing is updated when that
happens; an entry is looked at again when it becomes the least, and then corrected.  What *lowers* a
value (a holder leaves, an earlier chunk qualifies again) is offered again at once, and the entry it
replaces goes stale.  Entries of branches that a running turn holds are thrown away when met; `offer`
brings them back when the branch comes to rest.

So a decision costs O(classes + log branches), amortised over what happened to the branch, and never
a walk over what is cached.  The value found is exact up to one class (a ratio of 1.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum
from heapq import heapify, heappop, heappush
from typing import Protocol

from pensieve.core.cost import CostProfile
from pensieve.core.policies.learned import ReturnPolicy
from pensieve.core.policies.return_model import Turned
from pensieve.core.prefix_tree import Branch, Chunk, Entry

NUM_CLASSES = 64
CLASS_RATIO = 1.1


class Role(IntEnum):
    SWAP_OUT = 0
    RECLAIM = 1
    DROP = 2


QUALIFIES: dict[Role, Callable[[Chunk], bool]] = {
    Role.SWAP_OUT: Chunk.dirty.fget,  # type: ignore[attr-defined]
    Role.RECLAIM: Chunk.reclaimable.fget,  # type: ignore[attr-defined]
    Role.DROP: Chunk.droppable.fget,  # type: ignore[attr-defined]
}


class RetentionPolicy(Protocol):
    """What a chunk is worth, by its class and idle time; within a class the longer idle is worth less."""

    name: str
    num_classes: int
    class_ratio: float  # between the values of neighbouring classes, at most; they rise

    def class_of(self, branch: Branch, chunk_index: int, now: float) -> int:
        """A class 0 <= i < num_classes that does not exceed the chunk's value."""

    def value(self, class_index: int, idle_seconds: float) -> float: ...

    def holds(self, num_tokens: int) -> None:
        """What the tiers have room for."""

    def rested(self, name: str, turned: Turned, now: float) -> float:
        """A turn of that conversation has ended; how much likelier than others it is to return."""

    def returned(self, name: str, now: float) -> None:
        """A turn of it begins."""

    def forked(self, source: str, target: str, now: float) -> None:
        """A conversation `target` begins with the past of another."""

    def counts_as_idle(self, away_seconds: float) -> float:
        """Idle time that one has from the start whose client expects to be away for so long."""

    def fetches(self, chunk_index: int) -> bool:
        """Is a chunk on the host copied in when it is needed, or computed again?"""

    def saves(self, branch: Branch, chunk_index: int, now: float) -> bool:
        """Is a copy of the chunk on the host worth its while?"""


class Oblivious:
    """A policy that learns nothing, takes its client's word, and never computes what it could copy."""

    def holds(self, num_tokens: int) -> None:
        pass

    def rested(self, name: str, turned: Turned, now: float) -> float:
        return 1.0

    def returned(self, name: str, now: float) -> None:
        pass

    def forked(self, source: str, target: str, now: float) -> None:
        pass

    def counts_as_idle(self, away_seconds: float) -> float:
        return away_seconds

    def fetches(self, chunk_index: int) -> bool:
        return True

    def saves(self, branch: Branch, chunk_index: int, now: float) -> bool:
        return True


class LruPolicy(Oblivious):
    """Least recently active conversation first, leading chunk first."""

    name = "lru"
    num_classes = 1
    class_ratio = 1.0

    def class_of(self, branch: Branch, chunk_index: int, now: float) -> int:
        return 0

    def value(self, class_index: int, idle_seconds: float) -> float:
        return 1.0 / max(idle_seconds, 1e-9)


class ValuePolicy(Oblivious):
    """retention_value = cost(l) / T, summed over the holders (seconds of recompute per second idle)."""

    name = "value"
    num_classes = NUM_CLASSES
    class_ratio = CLASS_RATIO

    def __init__(self, cost: CostProfile, chunk_tokens: int) -> None:
        self._cost = cost
        self._chunk_tokens = chunk_tokens
        self._least_cost = cost.chunk_seconds(0)
        self._steps: list[float] = []  # by chunk index: log(cost / least cost) / log(ratio)
        self._values = [self._least_cost * CLASS_RATIO**i for i in range(NUM_CLASSES)]

    def class_of(self, branch: Branch, chunk_index: int, now: float) -> int:
        while chunk_index >= len(self._steps):
            seconds = self._cost.chunk_seconds((len(self._steps) + 1) * self._chunk_tokens)
            self._steps.append(math.log(seconds / self._least_cost, CLASS_RATIO))
        steps = self._steps[chunk_index]
        if len(branch.holders) > 1:
            steps += math.log(branch.weight(now), CLASS_RATIO)
        return min(max(int(steps), 0), NUM_CLASSES - 1)

    def value(self, class_index: int, idle_seconds: float) -> float:
        return self._values[class_index] / (idle_seconds if idle_seconds > 1.0 else 1.0)


POLICIES = ("lru", "value", "return")


def policy_named(name: str, cost: CostProfile, chunk_tokens: int) -> RetentionPolicy:
    if name == "lru":
        return LruPolicy()
    if name == "value":
        return ValuePolicy(cost, chunk_tokens)
    if name == "return":
        return ReturnPolicy(cost, chunk_tokens)
    raise ValueError(f"no retention policy is named {name!r} ({', '.join(POLICIES)})")


class RetentionQueue:
    """The branches that have something to give up in one role, least valuable first."""

    def __init__(self, role: Role, policy: RetentionPolicy) -> None:
        self.role = role
        self.policy = policy
        self._qualifies = QUALIFIES[role]
        self._heaps: list[list[Entry]] = [[] for _ in range(policy.num_classes)]
        self._occupied: list[int] = []  # classes whose heap is not empty
        self._serial = 0
        self._num_live = 0
        self._num_stale = 0

    def least(self, now: float) -> tuple[float, Chunk] | None:
        """The least valuable chunk that qualifies, and its value."""
        heaps, value_of = self._heaps, self.policy.value
        while True:
            best_value, best_since, best_class = math.inf, math.inf, -1
            unsettled = -1
            for class_index in self._occupied:
                entry = heaps[class_index][0]
                branch, since = entry.branch, entry.since
                if branch is None or branch.num_running or since != branch.idle_since:
                    unsettled = class_index
                    break
                value = value_of(class_index, now - since)
                if value < best_value or (value == best_value and since < best_since):
                    best_value, best_since, best_class = value, since, class_index
            if unsettled >= 0:
                self._settle(unsettled, now)
                continue
            if best_class < 0:
                return None
            branch = heaps[best_class][0].branch
            assert branch is not None
            chunk = self.candidate(branch)
            if chunk is None:
                self._remove_head(best_class)
            elif (now_class := self.policy.class_of(branch, chunk.index, now)) > best_class:
                self._remove_head(best_class)
                self._push(branch, now_class)
            else:
                return best_value, chunk

    def offer(self, branch: Branch, now: float) -> None:
        """Something in `branch` may qualify, or its value may have fallen."""
        chunk = self.candidate(branch)
        if chunk is None:
            return
        class_index = self.policy.class_of(branch, chunk.index, now)
        entry = branch.entries[self.role]
        if entry is not None:
            if entry.class_index <= class_index and entry.since <= branch.idle_since:
                return  # still a lower bound
            self.withdraw(branch)
        self._push(branch, class_index)

    def requalify(self, chunk: Chunk, branch: Branch, now: float) -> None:
        """`chunk` of an idle branch did not qualify and may do so now."""
        if self._qualifies(chunk):
            place = chunk.index - branch.start
            if place < branch.cursors[self.role]:
                branch.cursors[self.role] = place
            self.offer(branch, now)

    def withdraw(self, branch: Branch) -> None:
        entry = branch.entries[self.role]
        if entry is not None:
            entry.branch = None
            branch.entries[self.role] = None
            self._num_live -= 1
            self._num_stale += 1
            if self._num_stale > 64 + self._num_live:
                self._forget_stale()

    def candidate(self, branch: Branch) -> Chunk | None:
        """The first chunk of `branch` that qualifies."""
        chunks, qualifies, cursors, role = branch.chunks, self._qualifies, branch.cursors, self.role
        for i in range(cursors[role], len(chunks)):
            if qualifies(chunks[i]):
                cursors[role] = i
                return chunks[i]
        cursors[role] = len(chunks)
        return None

    def _settle(self, class_index: int, now: float) -> None:
        """The head of a class is stale, pinned, or became active since: take it away."""
        entry = self._pop(class_index)
        branch = entry.branch
        if branch is None:
            self._num_stale -= 1
            return
        self._num_live -= 1
        branch.entries[self.role] = None
        if not branch.num_running:
            self.offer(branch, now)

    def _push(self, branch: Branch, class_index: int) -> None:
        self._serial += 1
        entry = Entry(branch, class_index, self._serial)
        branch.entries[self.role] = entry
        heap = self._heaps[class_index]
        if not heap:
            self._occupied.append(class_index)
        heappush(heap, entry)
        self._num_live += 1

    def _pop(self, class_index: int) -> Entry:
        heap = self._heaps[class_index]
        entry = heappop(heap)
        if not heap:
            self._occupied.remove(class_index)
        return entry

    def _remove_head(self, class_index: int) -> None:
        branch = self._pop(class_index).branch
        assert branch is not None
        branch.entries[self.role] = None
        self._num_live -= 1

    def _forget_stale(self) -> None:
        """Amortised: as many entries went stale as are live."""
        for heap in self._heaps:
            heap[:] = [entry for entry in heap if entry.branch is not None]
            heapify(heap)
        self._occupied = [i for i, heap in enumerate(self._heaps) if heap]
        self._num_stale = 0

    def check(self, idle_branches: list[Branch], now: float) -> None:
        """Every idle branch with something to give up is in the queue, not above its value."""
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
            since, class_index = entry.since, entry.class_index
            assert since <= branch.idle_since, f"{self.role.name}: {branch} is overvalued by time"
            assert entry.start == branch.start, f"{self.role.name}: {branch} was offered elsewhere"
            believed = self.policy.value(class_index, now - since)
            true_class = self.policy.class_of(branch, first.index, now)
            value = self.policy.value(true_class, now - branch.idle_since)
            slack = 1.0 if since == branch.idle_since else self.policy.class_ratio  # rounded down
            assert believed <= value * slack * (1 + 1e-9), (
                f"{self.role.name}: {branch} is overvalued, {believed} > {value}"
            )
