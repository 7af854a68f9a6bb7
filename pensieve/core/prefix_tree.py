"""The prefix tree: chunks of KV, and the branches of chunks that conversations share.

The KV of a chunk depends on all tokens up to its end, so only conversations with the same prefix share a
chunk. The conversations that use a chunk are its *holders*. Consecutive chunks with the same holders form one
*branch*. Branches form a forest, and a conversation is the path from a root to its leaf:

    system prompt            trip-42
    [c0 c1 c2 c3] ────┬──── [c4 c5 c6]          holders of the left branch: trip-42, trip-43
                      └──── [c4' c5']           trip-43

A fork splits a branch where the shared part ends; nothing is copied. A conversation may use only the first
slots of its last chunk (up to `num_tokens`). So a fork or a rewind inside a chunk keeps the chunk. When the
conversation next writes there, it gets a new chunk with a copy of these slots (copy on write).

A chunk's pages determine its location:

    device_page  host_page     name
    -            -             dropped (a hole)
    page         -             dirty: only on the device
    page         page          clean if the host copy has all filled slots, otherwise dirty
    -            page          host

* `filled` counts the leading slots that have KV, or whose KV a launched iteration computes. It describes the
  chunk's device page, if there is one. The slots after the first `filled` slots are a hole. There is no hole
  between filled slots, because missing positions are computed from the lowest upward.
* A host copy has the first `host_filled` slots. Chunks are append-only, so an old copy may lack slots, but
  its slots are correct.
* At most one turn at a time appends to a partly used chunk. A turn appends only if its conversation was the
  only holder when the turn was admitted, or if the turn made the chunk. If all holders use a chunk
  completely, its slots are the same for all of them, so any holder may compute missing slots.
* A chunk that is *marked to drop* is only on the device and will not be copied, because the host is full of
  more valuable chunks. It stays valid until its page is needed.

The tree owns neither pages nor queues. They belong to its `BranchListener`, which is told of each change.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple, Protocol

from pensieve.core.identities import Identities

HOLDERS_SUMMED_MAX = 64  # holders of a branch that `Branch.holders_weight` counts individually


class Chunk:
    __slots__ = (
        "branch",
        "device_page",
        "filled",
        "generation",
        "host_filled",
        "host_page",
        "identity",
        "in_flight",
        "index",
        "marked_to_drop",
        "swapping_in",
    )

    def __init__(self, index: int, branch: Branch) -> None:
        self.index = index  # its positions begin at index * chunk_tokens
        self.branch: Branch | None = branch  # None: no holder, but a copy is still in flight
        self.filled = 0
        self.device_page: int | None = None
        self.host_page: int | None = None
        self.host_filled = 0
        self.in_flight = 0  # unfinished copies that read or write one of its pages
        self.swapping_in = False
        self.marked_to_drop = False
        self.identity: bytes | None = None  # set by the `ContentIndex` while it is registered there
        self.generation = 0  # counts how often it has lost KV

    @property
    def resident(self) -> bool:
        return self.device_page is not None or self.host_page is not None

    @property
    def location(self) -> str:
        if self.device_page is None:
            return "dropped" if self.host_page is None else "host"
        return "device" if self.host_page is None else "device+host"

    @property
    def idle(self) -> bool:
        """Whether a conversation holds it, but no running turn does."""
        return self.branch is not None and not self.branch.num_running

    @property
    def is_streamed(self) -> bool:
        """Whether a running turn uses its host page."""
        return self.branch is not None and self.branch.num_streamed > 0

    @property
    def dirty(self) -> bool:
        """Whether it is on the device, and would have to be recomputed if its device page were lost."""
        return (
            self.device_page is not None
            and self.host_filled < self.filled
            and not self.marked_to_drop
            and not self.in_flight
        )

    @property
    def reclaimable(self) -> bool:
        """Whether its device page may be taken at once (if no running turn holds it)."""
        return (
            self.device_page is not None
            and (self.marked_to_drop or self.host_filled >= self.filled)
            and not self.in_flight
        )

    @property
    def droppable(self) -> bool:
        """Whether its host page may be taken at once (if no running turn holds it)."""
        return self.host_page is not None and not self.in_flight

    def __repr__(self) -> str:
        return (
            f"Chunk({self.index}, filled={self.filled}, device={self.device_page}, "
            f"host={self.host_page}:{self.host_filled}, in_flight={self.in_flight})"
        )


class CachedConversation:
    """A conversation in the cache: its path of chunks, and when it was last active."""

    __slots__ = (
        "attempt_id",
        "conversation_id",
        "identities",
        "idle_since",
        "is_streamed",
        "is_temporary",
        "leaf",
        "log",
        "num_tokens",
        "return_ratio",
        "value_factor",
    )

    def __init__(self, conversation_id: str, now: float) -> None:
        self.conversation_id = conversation_id
        self.leaf: Branch | None = None
        self.log = array("I")  # token ids; while a turn runs, the same array as `turn.tokens`
        self.identities: Identities | None = None  # of `log`; while a turn runs, `turn.identities`
        self.is_temporary = False  # no turn continues it; others may find its chunks (content.py)
        self.num_tokens = 0  # positions [0, num_tokens) have chunks, but not necessarily KV
        self.idle_since = now  # end of its last turn
        self.return_ratio = 1.0  # how much likelier than others it is to return; from the policy
        self.value_factor = 1.0  # lowers the value of its chunks (at most 1); from the policy
        self.attempt_id: int | None = None  # the turn that holds its pages
        self.is_streamed = False  # that turn holds host pages

    def path(self) -> list[Branch]:
        """Return its branches, root first."""
        branches = []
        branch = self.leaf
        while branch is not None:
            branches.append(branch)
            branch = branch.parent
        branches.reverse()
        return branches

    def chunks(self) -> list[Chunk]:
        return [chunk for branch in self.path() for chunk in branch.chunks]

    def __repr__(self) -> str:
        return f"Conversation({self.conversation_id!r}, num_tokens={self.num_tokens})"


class Branch:
    """A run of chunks with the same holders: the unit of retention.

    Its chunks have the same idle time, and later chunks cost more. So the first chunk that qualifies for an
    eviction is the least valuable one. There are three kinds (roles) of eviction: swap out, reclaim and drop
    (policies/queue.py). For each role, a cursor finds the first chunk that qualifies.
    """

    __slots__ = (
        "chunks",
        "cursors",
        "entries",
        "holders",
        "idle_since",
        "num_children",
        "num_reclaimable",
        "num_resident",
        "num_running",
        "num_streamed",
        "parent",
        "start",
    )

    def __init__(self, parent: Branch | None, start: int, since: float, num_roles: int) -> None:
        self.num_children = 0
        self.parent: Branch | None = parent
        if parent is not None:
            parent.num_children += 1
        self.start = start  # index of its first chunk
        self.chunks: list[Chunk] = []
        self.holders: dict[CachedConversation, None] = {}  # least recently active first
        self.idle_since = since  # of the most recently active holder
        self.num_running = 0  # running turns that hold it, which pins its pages
        self.num_streamed = 0  # running turns that use its host pages
        self.num_resident = 0  # chunks with a page in any tier; updated only while idle
        self.num_reclaimable = 0  # updated only while idle
        self.cursors = [0] * num_roles  # for each role: no chunk before this index qualifies
        self.entries: list[QueueEntry | None] = [None] * num_roles  # owned by the queues

    @property
    def end(self) -> int:
        return self.start + len(self.chunks)

    def holders_weight(self, now: float, with_value_factors: bool = True) -> float:
        """Return the factor that a branch's holders contribute to the retention value of its chunks.

        With several holders, this is the sum over the holders of

            return_ratio · value_factor · T_min / T_holder

        T_holder is the idle time of a holder. T_min is the idle time of the most recent holder, but at least
        one second.

        As long as no holder becomes active, the weight only grows (towards the sum of the return_ratios), so
        an older weight is a lower bound. Only the HOLDERS_SUMMED_MAX most recent holders count with their own
        idle time and return_ratio. All others count with the idle time and the return_ratio (at most 1) of
        the longest idle holder, so that the weight still only grows. Without `with_value_factors`, all
        value_factors count as 1.
        """
        count = len(self.holders)
        if count <= 1:
            if not count:
                return 1.0
            holder = next(iter(self.holders))
            return (
                holder.return_ratio * holder.value_factor
                if with_value_factors
                else holder.return_ratio
            )
        now = max(now, self.idle_since + 1.0)
        least = now - self.idle_since
        total = 0.0
        for holder in islice(reversed(self.holders), HOLDERS_SUMMED_MAX):
            factor = holder.value_factor if with_value_factors else 1.0
            total += holder.return_ratio * factor * least / (now - holder.idle_since)
        if count > HOLDERS_SUMMED_MAX:
            longest = next(iter(self.holders))
            others = count - HOLDERS_SUMMED_MAX
            ratio = min(longest.return_ratio, 1.0) * (
                longest.value_factor if with_value_factors else 1.0
            )
            total += others * ratio * least / (now - longest.idle_since)
        return total

    def touch(self, holder: CachedConversation) -> None:
        """Sort the holders again after the idle time of `holder` (usually the last holder) has changed."""
        del self.holders[holder]
        later = []
        for other in reversed(self.holders):
            if other.idle_since <= holder.idle_since:
                break
            later.append(other)
        for other in later:
            del self.holders[other]
        for each in (holder, *reversed(later)):
            self.holders[each] = None
        self.idle_since = next(reversed(self.holders)).idle_since

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self.chunks)

    def __repr__(self) -> str:
        names = ",".join(holder.conversation_id for holder in islice(self.holders, 3))
        return f"Branch({self.start}:{self.end}, holders={len(self.holders)}[{names}])"


class ChunkRun(NamedTuple):
    """Consecutive chunks of a conversation with the same location and number of holders."""

    first_index: int
    num_chunks: int
    location: str
    num_holders: int


def chunk_runs(conversation: CachedConversation) -> list[ChunkRun]:
    runs: list[ChunkRun] = []
    for branch in conversation.path():
        for chunk in branch.chunks:
            location, num_holders = chunk.location, len(branch.holders)
            if runs and (runs[-1].location, runs[-1].num_holders) == (location, num_holders):
                runs[-1] = runs[-1]._replace(num_chunks=runs[-1].num_chunks + 1)
            else:
                runs.append(ChunkRun(chunk.index, 1, location, num_holders))
    return runs


class QueueEntry:
    """A branch in an eviction queue, with a lower bound of its value (policies/queue.py)."""

    __slots__ = ("branch", "serial", "since", "start", "value_class")

    def __init__(self, branch: Branch, value_class: int, serial: int) -> None:
        self.branch: Branch | None = branch  # None: stale
        self.value_class = value_class
        self.serial = serial
        self.since = branch.idle_since
        self.start = branch.start

    def __lt__(self, other: QueueEntry) -> bool:
        """Sort the longest idle branch first. In one conversation, sort the earlier branch first."""
        if self.since != other.since:
            return self.since < other.since
        if self.start != other.start:
            return self.start < other.start
        return self.serial < other.serial


class BranchListener(Protocol):
    """The owner of pages and queues, which the tree tells about changes of branches."""

    def branch_split(self, upper: Branch, lower: Branch, now: float) -> None:
        """Called when `upper` has taken the first chunks of `lower`."""

    def branches_joined(self, upper: Branch, lower: Branch, first: int, now: float) -> None:
        """Called when `upper` has taken all chunks of `lower`, which leaves the tree.

        `first`: the index of the first of these chunks in `upper.chunks`.
        """

    def holders_changed(self, branch: Branch, now: float) -> None:
        """Called when a branch has a new holder, or has lost one of several holders."""

    def branch_removed(self, branch: Branch) -> None:
        """Called when a branch has no holder any more, or when it and its descendants have no pages.

        Its chunks leave the tree.
        """


def _ancestors(branch: Branch | None) -> list[Branch]:
    """Return a branch and all branches above it, the lowest first."""
    ancestors = []
    while branch is not None:
        ancestors.append(branch)
        branch = branch.parent
    return ancestors


class PrefixTree:
    """The cached conversations, and the operations that change which chunks they hold."""

    def __init__(
        self,
        chunk_tokens: int,
        num_roles: int,
        listener: BranchListener,
        forget_content: Callable[[Chunk], None],
    ) -> None:
        """`forget_content` is called with each chunk that leaves the tree and has an identity."""
        self.chunk_tokens = chunk_tokens
        self._forget_content = forget_content
        self.conversations: dict[str, CachedConversation] = {}
        self._num_roles = num_roles
        self._listener = listener

    def fork(self, source: CachedConversation, num_tokens: int, target_id: str, now: float) -> None:
        """Make another conversation that shares the first `num_tokens` positions. Nothing is copied.

        If `source` holds no chunk of these positions, no conversation is made.
        """
        target = CachedConversation(target_id, now)
        target.return_ratio, target.value_factor = source.return_ratio, source.value_factor
        target.log = source.log[:num_tokens]
        if source.identities is not None:
            target.identities = source.identities.beginning(num_tokens)
        # While the source runs a turn, its `num_tokens` may be outdated, so all its chunks count. This is
        # safe, because callers fork only committed positions.
        held = source.num_tokens
        if source.attempt_id is not None:
            held = sum(len(branch.chunks) for branch in source.path()) * self.chunk_tokens
        # If a cut of the source is pending, its log is already cut, but its chunks are not.
        target.num_tokens = min(num_tokens, held, len(source.log))
        branch, end = source.leaf, -(-target.num_tokens // self.chunk_tokens)
        while branch is not None and branch.start >= end:
            branch = branch.parent
        if branch is not None:
            self.conversations[target_id] = target
            last = min(end, branch.end) - 1 - branch.start
            self.rebase(target, branch.chunks[last], now)

    def rebase(self, conversation: CachedConversation, chunk: Chunk, now: float) -> bool:
        """Let a conversation's path begin with the path of `chunk`, in place of its own first chunks.

        The caller must ensure that both paths have the same tokens, as far as the conversation's path goes.
        Return False and change nothing if another conversation also holds later chunks of `conversation`.
        """
        end, branch = chunk.index + 1, chunk.branch
        assert branch is not None
        own = _ancestors(conversation.leaf)
        if (
            own
            and own[0].end > end
            and any(len(each.holders) > 1 for each in own if each.end > end)
        ):
            return False
        if end < branch.end:
            branch = self._split(branch, end, now)
        path = _ancestors(branch)
        kept = {id(each) for each in path}
        rest = next((each for each in reversed(own) if each.end > end), None)
        if rest is None:
            conversation.leaf = branch
        elif id(rest) in kept or rest.parent is branch:
            return True  # the path begins with the path of `chunk` already
        else:
            if rest.start < end:
                own.append(self._split(rest, end, now))
            assert rest.parent is not None
            rest.parent.num_children -= 1
            rest.parent = branch
            branch.num_children += 1
        replaced = [each for each in own if each.end <= end and id(each) not in kept]
        replaced.sort(key=lambda each: -each.start)
        for each in replaced:
            self._remove_holder(each, conversation, now)
        for each in path:
            if rest is None or conversation not in each.holders:
                each.holders[conversation] = None
                each.touch(conversation)
                self._listener.holders_changed(each, now)
        return True

    def truncate(self, conversation: CachedConversation, num_tokens: int, now: float) -> None:
        """Cut the path after `num_tokens`, and free chunks that no other conversation holds."""
        conversation.num_tokens = num_tokens
        end = -(-num_tokens // self.chunk_tokens)
        while (leaf := conversation.leaf) is not None and leaf.end > end:
            if leaf.start < end:
                self._split(leaf, end, now)
            conversation.leaf = leaf.parent
            self._remove_holder(leaf, conversation, now)

    def append_chunk(self, conversation: CachedConversation) -> Chunk:
        """Add the next chunk of a conversation whose turn runs."""
        leaf = conversation.leaf
        if leaf is None or len(leaf.holders) > 1:
            start, since = leaf.end if leaf else 0, conversation.idle_since
            leaf = Branch(leaf, start, since, self._num_roles)
            leaf.holders[conversation] = None
            leaf.num_running = 1
            leaf.num_streamed = int(conversation.is_streamed)
            conversation.leaf = leaf
        chunk = Chunk(leaf.end, leaf)
        leaf.chunks.append(chunk)
        return chunk

    def add_holes(self, conversation: CachedConversation, num_chunks: int) -> None:
        """Add a new conversation with `num_chunks` unshared chunks, which have no pages yet."""
        assert conversation.conversation_id not in self.conversations
        leaf = Branch(None, 0, conversation.idle_since, self._num_roles)
        leaf.holders[conversation] = None
        leaf.chunks = [Chunk(index, leaf) for index in range(num_chunks)]
        conversation.leaf = leaf
        self.conversations[conversation.conversation_id] = conversation

    def prune(self, branch: Branch | None, now: float) -> None:
        """Remove `branch` and its ancestors while they have no page and no child.

        Trailing chunks without a page need no bookkeeping, because their tokens are in the log. An idle
        conversation with identities then also gives up chunks that others hold, because its next turn can
        find them again. Otherwise every conversation that ever began with a common prompt would be kept.
        """
        while (
            branch is not None
            and not branch.num_resident
            and not branch.num_running
            and not branch.num_children
        ):
            tokens, parent = branch.start * self.chunk_tokens, branch.parent
            holders = list(branch.holders)
            for conversation in holders:
                conversation.leaf = parent
                conversation.num_tokens = min(conversation.num_tokens, tokens)
            self._remove(branch)
            is_held_by_others = parent is not None and len(parent.holders) > len(holders)
            for conversation in holders:
                if conversation.attempt_id is None:
                    if is_held_by_others and conversation.identities is not None:
                        self.truncate(conversation, 0, now)
                    self.forget_if_empty(conversation)
            branch = parent

    def join(self, conversation: CachedConversation, now: float) -> None:
        """Join the last branches of a conversation's path that have the same holders."""
        leaf = conversation.leaf
        if leaf is None or leaf.num_children:
            return
        lower, upper = list[Branch](), leaf
        while (
            (above := upper.parent) is not None
            and above.num_children == 1
            and len(above.holders) == len(leaf.holders)
        ):
            lower.append(upper)
            upper = above
        if not lower:
            return
        for branch in reversed(lower):
            moved, branch.chunks = branch.chunks, []
            for chunk in moved:
                chunk.branch = upper
            first = len(upper.chunks)
            upper.chunks += moved
            upper.num_resident += branch.num_resident
            self._listener.branches_joined(upper, branch, first, now)
        upper.num_children = 0
        for holder in leaf.holders:
            holder.leaf = upper

    def forget_if_empty(self, conversation: CachedConversation) -> None:
        """Remove a conversation that has no chunk."""
        if conversation.leaf is None:
            self.conversations.pop(conversation.conversation_id, None)

    def _split(self, branch: Branch, end: int, now: float) -> Branch:
        """Split `branch` before chunk `end`; return the new upper part."""
        upper = Branch(branch.parent, branch.start, branch.idle_since, self._num_roles)
        if branch.parent is not None:
            branch.parent.num_children -= 1
        size = end - branch.start
        upper.chunks = branch.chunks[:size]
        del branch.chunks[:size]
        branch.start, branch.parent = end, upper
        upper.num_children = 1
        upper.holders = dict(branch.holders)
        upper.num_running, upper.num_streamed = branch.num_running, branch.num_streamed
        for chunk in upper.chunks:
            chunk.branch = upper
        upper.num_resident = sum(chunk.resident for chunk in upper.chunks)
        branch.num_resident -= upper.num_resident
        self._listener.branch_split(upper, branch, now)
        return upper

    def _remove_holder(self, branch: Branch, conversation: CachedConversation, now: float) -> None:
        del branch.holders[conversation]
        if branch.holders:
            branch.idle_since = next(reversed(branch.holders)).idle_since
            self._listener.holders_changed(branch, now)
        else:
            self._remove(branch)

    def _remove(self, branch: Branch) -> None:
        self._listener.branch_removed(branch)
        for chunk in branch.chunks:
            if chunk.identity is not None:
                self._forget_content(chunk)
            chunk.branch = None
        branch.chunks = []
        if branch.parent is not None:
            branch.parent.num_children -= 1
