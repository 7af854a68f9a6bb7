"""The two-tier cache: where each chunk lies, and every movement between the tiers.

Pages of the device are, at any time, exactly one of

    empty         in the pool
    pinned        held by a running turn
    moving        an unfinished copy reads or writes them
    reclaimable   idle, and the host has a copy (clean) or nobody will miss them (condemned)
    dirty         idle, and their loss would cost recompute

and `available` = empty + reclaimable.  Who asks for pages gets empty ones first and then the least
valuable reclaimable ones; whoever comes back before that finds its chunks where they were.  Ahead of
need, when `available` falls below a mark, the least valuable dirty chunks are copied to the host.
If the host is full, the less valuable of (that chunk, the least valuable chunk on the host) goes:
either the host chunk is dropped, or the device chunk is condemned.  Every idle dirty chunk can
therefore become available, whatever the host holds, so nobody waits for ever.

Why no page is taken while somebody uses it:

* A running turn pins every branch of its path; queues of retention skip pinned branches, and
  `available` does not count them.
* A copy in flight counts in `chunk.in_flight`; such a chunk does not qualify for any role, and when
  its last holder leaves, its pages go back only after the last copy has finished.
* The pages of a turn are given up only after every iteration with a slice of it was committed (the
  scheduler's duty).

Retrieval goes before eviction: while a swap-in is in flight no swap-out starts.

`check()` recomputes all of this from the chunks alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from pensieve.core.audit import audit
from pensieve.core.eviction_log import Chronicle
from pensieve.core.iteration import PageCopy, SwapIn, SwapOut
from pensieve.core.policies.queue import RetentionPolicy, RetentionQueue, Role
from pensieve.core.policies.return_model import Turned
from pensieve.core.prefix_tree import Branch, Chunk, Conversation
from pensieve.core.tiers import PagePool
from pensieve.core.turn import Turn


@dataclass(frozen=True)
class CacheConfig:
    device_pages: int
    host_pages: int
    chunk_tokens: int = 32
    swap_out_below: float = 0.25  # of device pages available: copy to the host ahead of need
    reserve: float = 0.10  # of device pages: kept for turns that are generating
    swap_outs_max: int = 64  # copies started by one iteration

    def __post_init__(self) -> None:
        if self.device_pages < 2:
            raise ValueError("the device tier needs two or more pages")
        if self.host_pages < 0 or self.chunk_tokens < 1 or self.swap_outs_max < 1:
            raise ValueError("page counts must not be negative, and chunks hold at least one token")
        if not 0.0 <= self.reserve <= self.swap_out_below <= 1.0:
            raise ValueError("0 <= reserve <= swap_out_below <= 1 does not hold")

    @property
    def device_tokens_max(self) -> int:
        """The longest context that fits the device tier, one chunk set aside for copy on write."""
        return (self.device_pages - 1) * self.chunk_tokens

    @property
    def swap_out_mark_pages(self) -> int:
        return -int(-self.device_pages * self.swap_out_below // 1)

    @property
    def reserve_pages(self) -> int:
        return -int(-self.device_pages * self.reserve // 1)


@dataclass
class CacheCounters:
    """What has happened since the start, in chunks unless the name says tokens."""

    swapped_out: int = 0
    swapped_in: int = 0
    reclaimed: int = 0  # device page taken, host copy stays
    reclaim_hits: int = 0  # copied to the host ahead of need, and still on the device on return
    dropped: int = 0  # last copy forgotten
    condemned: int = 0
    copied_on_write: int = 0
    discarded: int = 0  # computed by a turn that failed


class Admission(NamedTuple):
    """The pages of a turn's whole present context are reserved; what has to move for that."""

    copies: list[PageCopy]
    swap_ins: list[SwapIn]
    sources: list[Chunk]  # of `copies`; to be released when the iteration is committed
    device_tokens: int  # of the turn's history, found on the device
    host_tokens: int  # of the turn's history, on their way from the host
    copied: tuple[Chunk, Chunk] | None  # (source, target) of a copy on write


class Shortage(NamedTuple):
    """The turn does not fit now; it would if so many pages were available."""

    required_pages: int


@dataclass(slots=True)
class _Copy:
    """A swap-in or swap-out on its way."""

    source: Chunk
    target: Chunk  # the same chunk but for a swap-in that is a copy on write
    inward: bool
    num_slots: int  # valid at the target when it has finished


@dataclass
class KVCache:
    config: CacheConfig
    policy: RetentionPolicy
    counters: CacheCounters = field(default_factory=CacheCounters)

    def __post_init__(self) -> None:
        self.device = PagePool(self.config.device_pages)
        self.host = PagePool(self.config.host_pages)
        self.conversations: dict[str, Conversation] = {}
        self.chronicle = Chronicle()
        self._queues = [RetentionQueue(role, self.policy) for role in Role]
        num_pages = self.config.device_pages + self.config.host_pages
        self.policy.holds(num_pages * self.config.chunk_tokens)
        self._copies: dict[int, _Copy] = {}
        self._held: list[Chunk] = []  # sources of unfinished page-to-page copies
        self._leaving: dict[Chunk, None] = {}  # asked to go to the host; those in use by then stay
        self._num_copies = 0
        self._num_reclaimable = 0  # over idle branches
        self._num_swapping_in = 0
        self._num_swapping_out = 0

    # -- what there is --

    @property
    def available(self) -> int:
        return self.device.num_empty + self._num_reclaimable

    @property
    def clean_pages(self) -> int:
        return self._num_reclaimable

    @property
    def swap_ins_in_flight(self) -> int:
        return self._num_swapping_in

    @property
    def swap_outs_in_flight(self) -> int:
        return self._num_swapping_out

    def relief_expected(self, now: float) -> bool:
        """Idle pages are about to become available, so nobody need be suspended for them."""
        return self._num_swapping_out > 0 or self._queues[Role.SWAP_OUT].least(now) is not None

    # -- a turn takes, extends and returns its pages --

    def begin(
        self, turn: Turn, now: float, reserve_pages: int, before: dict[Chunk, int]
    ) -> Admission | Shortage:
        """Pin and reserve the pages of the turn's whole present context, or say what is missing.

        `before` holds, for chunks that this iteration writes, how far they were filled before it:
        page copies run before the slices.
        """
        conversation = self.conversations.get(turn.conversation_id)
        if conversation is None:
            conversation = Conversation(turn.conversation_id, now)
        assert conversation.turn_id is None, f"{conversation} already runs {conversation.turn_id}"
        kept_max = turn.history_tokens if turn.usage.admitted_at is None else len(turn.tokens)
        if conversation.num_tokens > kept_max:
            self._truncate(conversation, kept_max, now)
        size = self.config.chunk_tokens
        chunks = conversation.chunks()
        used_of_tail = conversation.num_tokens - size * (len(chunks) - 1)
        tail = None  # a last chunk that this turn may not append to
        if (
            chunks
            and used_of_tail < size
            and not self._sole(conversation, chunks[-1], used_of_tail)
        ):
            tail = chunks.pop()

        needed, own = -(-len(turn.tokens) // size) - len(chunks), 0
        for chunk in chunks:
            if chunk.device_page is None:
                needed += 1
            elif chunk.reclaimable and self._idle(chunk):
                own += 1
        if tail is not None and tail.reclaimable and self._idle(tail):
            own += 1
        required = needed + own + reserve_pages
        if self.available < required:
            if conversation.leaf is None:
                self.conversations.pop(turn.conversation_id, None)
            return Shortage(required)

        self.conversations[turn.conversation_id] = conversation
        conversation.turn_id = turn.turn_id
        conversation.log = turn.tokens  # which grows until the turn gives up its pages
        if turn.usage.admitted_at is None:  # else it resumes
            self.policy.returned(turn.conversation_id, now)
        if tail is not None:
            self._hold(tail)
            self._truncate(conversation, tail.index * size, now)
        for branch in conversation.path():
            self._pin(branch)
        copies: list[PageCopy] = []
        swap_ins: list[SwapIn] = []
        sources: list[Chunk] = []
        copied: tuple[Chunk, Chunk] | None = None
        on_device = 0
        from_host = 0
        history_kv = max(turn.history_tokens - 1, 0)
        for chunk in chunks:
            limit = min(size, max(history_kv - chunk.index * size, 0))
            if chunk.device_page is not None:
                on_device += min(limit, chunk.filled)
                continue
            self._place(chunk, now)
            if chunk.host_page is None:
                continue
            if self.policy.fetches(chunk.index) or chunk.in_flight:
                swap_ins.append(self._start_swap_in(chunk, chunk, chunk.host_filled))
                from_host += min(limit, chunk.filled)
            else:
                self._compute_again(chunk, now)
        if tail is not None:
            chunk = self._append_chunk(conversation)
            self._place(chunk, now)
            chunks.append(chunk)
            limit = min(used_of_tail, max(history_kv - chunk.index * size, 0))
            if tail.device_page is not None and not tail.swapping_in:
                chunk.filled = min(used_of_tail, before.get(tail, tail.filled))
                on_device += min(limit, chunk.filled)
                if chunk.filled:
                    copies.append(PageCopy(tail.device_page, chunk.device_page, chunk.filled))  # type: ignore[arg-type]
                    self.counters.copied_on_write += 1
            elif tail.host_page is not None:
                chunk.filled = min(used_of_tail, tail.host_filled)
                from_host += min(limit, chunk.filled)
                swap_ins.append(self._start_swap_in(tail, chunk, chunk.filled))
                self.counters.copied_on_write += 1
            copied = (tail, chunk)
            if copies:
                sources.append(tail)
            else:
                self._let_go(tail, now)
        while len(chunks) * size < len(turn.tokens):
            chunk = self._append_chunk(conversation)
            self._place(chunk, now)
            chunks.append(chunk)
        turn.chunks = chunks
        turn.page_table = array("i", [chunk.device_page for chunk in chunks])  # type: ignore[misc]
        turn.frontier = 0
        return Admission(copies, swap_ins, sources, on_device, from_host, copied)

    def extend(self, turn: Turn, now: float) -> bool:
        """A page for the turn's next chunk; False when none is available."""
        if not self.available:
            return False
        chunk = self._append_chunk(self.conversations[turn.conversation_id])
        self._place(chunk, now)
        turn.chunks.append(chunk)
        turn.page_table.append(chunk.device_page)  # type: ignore[arg-type]
        return True

    def end(self, turn: Turn, now: float, keep_tokens: int, away_seconds: float = 0.0) -> None:
        """Unpin what the turn held; positions from `keep_tokens` on leave the conversation.

        What its client says about its return is the policy's to weigh.
        """
        conversation = self.conversations[turn.conversation_id]
        assert conversation.turn_id == turn.turn_id
        size = self.config.chunk_tokens
        extent = 0  # behind it nothing has KV
        for chunk in reversed(turn.chunks):
            if chunk.filled:
                extent = min(chunk.index * size + chunk.filled, len(turn.tokens))
                break
        conversation.turn_id = None
        conversation.idle_since = now - self.policy.counts_as_idle(away_seconds)
        if turn.finish is not None:  # else it is suspended
            said = Turned(
                turn.prompt_end - turn.history_tokens,
                turn.num_output_tokens,
                len(turn.tokens),
                away_seconds,
            )
            conversation.ratio = self.policy.rested(turn.conversation_id, said, now)
        conversation.num_tokens = len(turn.chunks) * size
        conversation.log = turn.tokens[:keep_tokens]
        turn.chunks, turn.page_table = [], array("i")
        path = conversation.path()
        for branch in path:
            branch.touch(conversation)
        for branch in path:
            self._unpin(branch, now)
        self._truncate(conversation, min(extent, keep_tokens), now)
        self._forget_if_bare(conversation.leaf)
        if conversation.leaf is None:
            self.conversations.pop(conversation.conversation_id, None)

    def discard(self, turn: Turn, now: float) -> list[Chunk]:
        """What the turn computed is not to be trusted: it becomes holes, for all holders.

        So does whatever else only its conversation holds: should the fault lie there, it heals.
        """
        alone = [c for c in turn.chunks if c.branch is not None and len(c.branch.holders) == 1]
        suspects = list(dict.fromkeys((*turn.written, *alone)))
        for chunk in suspects:
            if chunk.device_page is None and chunk.host_page is None:
                continue
            self.counters.discarded += 1
            self.chronicle.note(chunk, now, "discarded")
            self._count_reclaimable(chunk, -1)
            chunk.filled = chunk.host_filled = 0
            if self._idle(chunk):
                self._rest(chunk)
                self._forget_if_bare(chunk.branch)
            elif chunk.host_page is not None and not chunk.in_flight:
                self._free_host(chunk)
            for copy in self._copies.values():
                if copy.target is chunk or copy.source is chunk:
                    copy.num_slots = 0
        return suspects

    # -- movements between the tiers --

    def plan_swap_outs(self, now: float, required_pages: int) -> list[SwapOut]:
        """Copies to the host until so many pages, or the mark, will be available."""
        if self._num_swapping_in:
            return []
        target = max(required_pages, self.config.swap_out_mark_pages)
        queue = self._queues[Role.SWAP_OUT]
        swap_outs = self._plan_leaving(now) if self._leaving else []
        while (
            self.available + self._num_swapping_out < target
            and len(swap_outs) < self.config.swap_outs_max
            and (found := queue.least(now)) is not None
        ):
            value, chunk = found
            if chunk.host_page is None and not (
                self._saves(chunk, now) and self._take_host_page(chunk, value, now)
            ):
                self._condemn(chunk, now, value)
                continue
            swap_outs.append(self._start_swap_out(chunk))
        return swap_outs

    def _plan_leaving(self, now: float) -> list[SwapOut]:
        swap_outs: list[SwapOut] = []
        for chunk in [each for each in self._leaving if not each.in_flight]:
            if len(swap_outs) == self.config.swap_outs_max:
                break
            branch = chunk.branch
            if branch is not None and not branch.num_running and chunk.dirty:
                in_class = self.policy.class_of(branch, chunk.index, now)
                value = self.policy.value(in_class, now - branch.idle_since)
                if chunk.host_page is not None or self._take_host_page(chunk, value, now):
                    swap_outs.append(self._start_swap_out(chunk))
                    continue
            del self._leaving[chunk]
        return swap_outs

    def _saves(self, chunk: Chunk, now: float) -> bool:
        return chunk.branch is None or self.policy.saves(chunk.branch, chunk.index, now)

    def _take_host_page(self, chunk: Chunk, value: float, now: float) -> bool:
        """For a chunk on the device only; False when the host is full of more valuable ones."""
        while (page := self.host.take()) is None:
            victim = self._queues[Role.DROP].least(now)
            if victim is None or victim[0] > value:
                return False
            self._drop_host_copy(victim[1], now, victim[0], value)
        chunk.host_page = page
        return True

    def finish_copy(self, copy_id: int, now: float) -> None:
        copy = self._copies.pop(copy_id)
        if copy.inward:
            self._num_swapping_in -= 1
            copy.target.swapping_in = False
        else:
            self._num_swapping_out -= 1
            copy.target.host_filled = max(copy.target.host_filled, copy.num_slots)
        if copy.source is not copy.target:
            self._release(copy.source, now)
        self._release(copy.target, now)
        if copy.source in self._leaving and not copy.source.in_flight:
            del self._leaving[copy.source]
            self._leave_device(copy.source)

    def release_sources(self, sources: Iterable[Chunk], now: float) -> None:
        """The page copies of an admission are done."""
        for chunk in sources:
            self._let_go(chunk, now)

    # -- operations on a resting conversation --

    def fork(self, source_id: str, num_tokens: int, target_id: str, now: float) -> None:
        """A second conversation over the first `num_tokens` positions; nothing is copied."""
        assert target_id not in self.conversations, f"{target_id} is cached already"
        source = self.conversations.get(source_id)
        if source is None:
            return
        self.policy.forked(source_id, target_id, now)
        target = Conversation(target_id, now)
        target.ratio = source.ratio
        target.log = source.log[:num_tokens]
        # A running source's chunks count as far as they go: only committed positions are forked.
        held = source.num_tokens
        if source.turn_id is not None:
            held = sum(len(branch.chunks) for branch in source.path()) * self.config.chunk_tokens
        target.num_tokens = min(num_tokens, held)
        branch, end = source.leaf, -(-target.num_tokens // self.config.chunk_tokens)
        while branch is not None and branch.start >= end:
            branch = branch.parent
        if branch is None:
            return
        target.leaf = self._split(branch, end, now) if end < branch.end else branch
        for each in target.path():
            each.holders[target] = None
            each.idle_since = now
            if not each.num_running:  # a policy that learns may think less of it now
                for queue in self._queues:
                    queue.offer(each, now)
        self.conversations[target_id] = target

    def rewind(self, conversation_id: str, num_tokens: int, now: float) -> None:
        conversation = self.conversations.get(conversation_id)
        if conversation is not None:
            assert conversation.turn_id is None, f"{conversation} runs {conversation.turn_id}"
            del conversation.log[num_tokens:]
            self._truncate(conversation, min(num_tokens, conversation.num_tokens), now)
            self._forget_if_bare(conversation.leaf)
            if conversation.leaf is None:
                self.conversations.pop(conversation_id, None)

    def delete(self, conversation_id: str, now: float) -> None:
        self.rewind(conversation_id, 0, now)

    def evict(self, conversation_id: str, now: float) -> int:
        """Drop every idle page that only this conversation holds; how many chunks lost theirs."""
        conversation = self.conversations.get(conversation_id)
        num_dropped = 0
        for branch in reversed(conversation.path()) if conversation else ():
            if branch.num_running or len(branch.holders) > 1:
                continue
            for chunk in branch.chunks:
                if chunk.resident and not chunk.in_flight:
                    num_dropped += 1
                    self.chronicle.note(chunk, now, "evicted")
                    self._count_reclaimable(chunk, -1)
                    if chunk.host_page is not None:
                        self._free_host(chunk)
                    if chunk.device_page is not None:
                        self._free_device(chunk)
        if conversation is not None:
            self._forget_if_bare(conversation.leaf)
        self.counters.dropped += num_dropped
        return num_dropped

    def move_to_host(self, conversation_id: str, now: float) -> int:
        """Have the idle pages that only this conversation holds leave the device, as far as the host
        has room for more than what is worth more; how many chunks are gone or on their way."""
        conversation = self.conversations.get(conversation_id)
        num_leaving = 0
        for branch in conversation.path() if conversation else ():
            if branch.num_running or len(branch.holders) > 1:
                continue
            for chunk in branch.chunks:
                if chunk.device_page is None or not chunk.filled or chunk.condemned:
                    continue
                num_leaving += 1
                self.chronicle.note(chunk, now, "moved")
                if not self._leave_device(chunk):
                    self._leaving[chunk] = None
        return num_leaving

    def _leave_device(self, chunk: Chunk) -> bool:
        """Give back the device page of an idle chunk that the host has, too."""
        if not self._idle(chunk) or not chunk.reclaimable or chunk.condemned:
            return False
        self._count_reclaimable(chunk, -1)
        self._free_device(chunk)
        self.counters.reclaimed += 1
        return True

    def places(self, conversation_id: str) -> list[tuple[int, int, str, int]]:
        """(first chunk, how many, where, holders) of each run of its chunks in the same place."""
        conversation = self.conversations.get(conversation_id)
        runs: list[tuple[int, int, str, int]] = []
        for branch in conversation.path() if conversation is not None else ():
            for chunk in branch.chunks:
                place, holders = chunk.place, len(branch.holders)
                if runs and runs[-1][2:] == (place, holders):
                    first, count = runs[-1][:2]
                    runs[-1] = (first, count + 1, place, holders)
                else:
                    runs.append((chunk.index, 1, place, holders))
        return runs

    def retention_value(self, conversation: Conversation, now: float) -> float | None:
        """Of its least valuable chunk in either tier; None while a turn runs or nothing is held."""
        values = []
        for branch in conversation.path():
            if branch.num_running:
                return None
            for chunk in branch.chunks:
                if chunk.resident:
                    in_class = self.policy.class_of(branch, chunk.index, now)
                    values.append(self.policy.value(in_class, now - branch.idle_since))
                    break
        return min(values, default=None)

    # -- pages of one chunk --

    def _idle(self, chunk: Chunk) -> bool:
        return chunk.branch is not None and not chunk.branch.num_running

    def _sole(self, conversation: Conversation, tail: Chunk, used: int) -> bool:
        """May `conversation` append to its partly used last chunk?"""
        assert tail.branch is not None
        return len(tail.branch.holders) == 1 and tail.filled <= used

    def _place(self, chunk: Chunk, now: float) -> None:
        page = self.device.take()
        if page is None:
            found = self._queues[Role.RECLAIM].least(now)
            assert found is not None, "pages were said to be available"
            found = self._pardoned(found, now) or found
            victim = found[1]
            if victim.filled > victim.host_filled:
                self.counters.dropped += 1
                self.chronicle.note(victim, now, "lost", found[0])
            else:
                self.counters.reclaimed += 1
            self._count_reclaimable(victim, -1)
            self._free_device(victim)
            self._forget_if_bare(victim.branch)
            page = self.device.take()
        chunk.device_page = page
        if chunk.host_page is None and chunk.branch is not None:
            chunk.branch.num_resident += 1

    def _pardoned(self, found: tuple[float, Chunk], now: float) -> tuple[float, Chunk] | None:
        """Chunks are condemned ahead of need, and something worth less may have come to rest since:
        that goes instead of the condemned one, if it would be condemned as well."""
        value, chunk = found
        if not chunk.condemned or (rival := self._queues[Role.SWAP_OUT].least(now)) is None:
            return None
        if rival[0] >= value or rival[1].host_page is not None:
            return None
        if self._saves(rival[1], now):
            if self.host.num_empty:
                return None
            dropped = self._queues[Role.DROP].least(now)
            if dropped is not None and dropped[0] <= rival[0]:
                return None
        self._count_reclaimable(chunk, -1)
        chunk.condemned = False
        self._requalify(chunk, now)
        return rival

    def _free_device(self, chunk: Chunk) -> None:
        assert chunk.device_page is not None
        assert not chunk.in_flight, f"{chunk} is being copied"
        self.device.give_back(chunk.device_page)
        chunk.device_page = None
        chunk.condemned = False
        chunk.filled = chunk.host_filled
        if chunk.host_page is None and chunk.branch is not None:
            chunk.branch.num_resident -= 1

    def _free_host(self, chunk: Chunk) -> None:
        assert chunk.host_page is not None
        assert not chunk.in_flight, f"{chunk} is being copied"
        self.host.give_back(chunk.host_page)
        chunk.host_page = None
        chunk.host_filled = 0
        if chunk.device_page is None:
            chunk.filled = 0
            if chunk.branch is not None:
                chunk.branch.num_resident -= 1

    def _drop_host_copy(self, chunk: Chunk, now: float, value: float, rival: float) -> None:
        """Least valuable on the host; if it is on the device as well, it is so there, too."""
        self.chronicle.note(chunk, now, "dropped", value, rival)
        self._count_reclaimable(chunk, -1)
        self._free_host(chunk)
        if chunk.device_page is not None:
            chunk.condemned = True
            self.counters.condemned += 1
            self._requalify(chunk, now)
        else:
            self.counters.dropped += 1
            self._forget_if_bare(chunk.branch)

    def _condemn(self, chunk: Chunk, now: float, value: float) -> None:
        self.chronicle.note(chunk, now, "condemned", value)
        chunk.condemned = True
        self.counters.condemned += 1
        self._requalify(chunk, now)

    def _compute_again(self, chunk: Chunk, now: float) -> None:
        """That is quicker than to copy it in: a hole on the device, and nothing on the host."""
        self.chronicle.note(chunk, now, "recomputed")
        self._free_host(chunk)
        chunk.filled = 0
        self.counters.dropped += 1

    def _start_swap_in(self, source: Chunk, target: Chunk, num_slots: int) -> SwapIn:
        assert source.host_page is not None
        assert target.device_page is not None
        for chunk in {source, target}:
            chunk.in_flight += 1
        target.swapping_in = True
        self._num_swapping_in += 1
        self.counters.swapped_in += 1
        copy_id = self._number(_Copy(source, target, True, num_slots))
        return SwapIn(copy_id, source.host_page, target.device_page, num_slots)

    def _start_swap_out(self, chunk: Chunk) -> SwapOut:
        assert chunk.host_page is not None
        assert chunk.device_page is not None
        assert self._idle(chunk), f"{chunk} is in use"
        chunk.in_flight += 1
        self._num_swapping_out += 1
        self.counters.swapped_out += 1
        copy_id = self._number(_Copy(chunk, chunk, False, chunk.filled))
        return SwapOut(copy_id, chunk.device_page, chunk.host_page, chunk.filled)

    def _number(self, copy: _Copy) -> int:
        self._num_copies += 1
        self._copies[self._num_copies] = copy
        return self._num_copies

    def _hold(self, chunk: Chunk) -> None:
        """A copy on write is going to read it."""
        self._count_reclaimable(chunk, -1)
        chunk.in_flight += 1
        self._held.append(chunk)

    def _let_go(self, chunk: Chunk, now: float) -> None:
        self._held.remove(chunk)
        self._release(chunk, now)

    def _release(self, chunk: Chunk, now: float) -> None:
        """A copy has finished."""
        chunk.in_flight -= 1
        if chunk.in_flight:
            return
        if chunk.branch is None:
            self._free_pages(chunk)
        elif self._idle(chunk):
            self._rest(chunk)
            self._requalify(chunk, now)

    def _rest(self, chunk: Chunk) -> None:
        """Give back pages that hold nothing."""
        if chunk.in_flight:
            return
        if chunk.host_page is not None and not chunk.host_filled:
            self._free_host(chunk)
        if chunk.device_page is not None and not chunk.filled:
            self._free_device(chunk)

    def _free_pages(self, chunk: Chunk) -> None:
        if chunk.host_page is not None:
            self._free_host(chunk)
        if chunk.device_page is not None:
            self._free_device(chunk)

    def _requalify(self, chunk: Chunk, now: float) -> None:
        """An idle chunk that did not qualify may do so now."""
        self._count_reclaimable(chunk, +1)
        branch = chunk.branch
        assert branch is not None
        for queue in self._queues:
            queue.requalify(chunk, branch, now)

    def _count_reclaimable(self, chunk: Chunk, sign: int) -> None:
        if chunk.reclaimable and self._idle(chunk):
            assert chunk.branch is not None
            chunk.branch.num_reclaimable += sign
            self._num_reclaimable += sign

    # -- branches --

    def _pin(self, branch: Branch) -> None:
        if not branch.num_running:
            self._num_reclaimable -= branch.num_reclaimable
            branch.num_reclaimable = 0
            for chunk in branch.chunks:
                if chunk.condemned:
                    chunk.condemned = False
                elif chunk.reclaimable:
                    self.counters.reclaim_hits += 1
        branch.num_running += 1

    def _unpin(self, branch: Branch, now: float) -> None:
        branch.num_running -= 1
        if not branch.num_running:
            self._settle(branch, now)

    def _settle(self, branch: Branch, now: float) -> None:
        """Count and offer an idle branch from scratch: one pass over its chunks.

        The same questions as `Chunk.dirty`, `reclaimable` and `droppable`, asked together, because
        the end of a long turn asks them of a thousand chunks.
        """
        nowhere = len(branch.chunks)
        first_dirty = first_reclaimable = first_droppable = nowhere
        count = 0
        for place, chunk in enumerate(branch.chunks):
            if chunk.in_flight:
                continue
            if not chunk.filled or (chunk.host_page is not None and not chunk.host_filled):
                self._rest(chunk)
            if chunk.host_page is not None and place < first_droppable:
                first_droppable = place
            if chunk.device_page is None:
                continue
            if chunk.host_filled >= chunk.filled or chunk.condemned:
                count += 1
                if place < first_reclaimable:
                    first_reclaimable = place
            elif place < first_dirty:
                first_dirty = place
        self._num_reclaimable += count - branch.num_reclaimable
        branch.num_reclaimable = count
        firsts = {
            Role.SWAP_OUT: first_dirty,
            Role.RECLAIM: first_reclaimable,
            Role.DROP: first_droppable,
        }
        for queue in self._queues:
            branch.cursors[queue.role] = firsts[queue.role]
            if firsts[queue.role] < nowhere:
                queue.offer(branch, now)

    def _append_chunk(self, conversation: Conversation) -> Chunk:
        """The next chunk of a conversation whose turn runs."""
        leaf = conversation.leaf
        if leaf is None or len(leaf.holders) > 1:
            start, since = leaf.end if leaf else 0, conversation.idle_since
            leaf = Branch(leaf, start, since, len(self._queues))
            leaf.holders[conversation] = None
            leaf.num_running = 1
            conversation.leaf = leaf
        chunk = Chunk(leaf.end, leaf)
        leaf.chunks.append(chunk)
        return chunk

    def _split(self, branch: Branch, end: int, now: float) -> Branch:
        """Part `branch` before chunk `end`; the new upper part."""
        upper = Branch(branch.parent, branch.start, branch.idle_since, len(self._queues))
        if branch.parent is not None:
            branch.parent.num_children -= 1
        for queue in self._queues:
            queue.withdraw(branch)
        size = end - branch.start
        upper.chunks = branch.chunks[:size]
        del branch.chunks[:size]
        branch.start, branch.parent = end, upper
        upper.num_children = 1
        upper.holders = dict(branch.holders)
        upper.num_running = branch.num_running
        for chunk in upper.chunks:
            chunk.branch = upper
        upper.num_resident = sum(chunk.resident for chunk in upper.chunks)
        branch.num_resident -= upper.num_resident
        if not branch.num_running:
            self._settle(branch, now)
            self._settle(upper, now)
        return upper

    def _truncate(self, conversation: Conversation, num_tokens: int, now: float) -> None:
        """Cut the path behind `num_tokens`; what nobody else holds is freed."""
        conversation.num_tokens = num_tokens
        end = -(-num_tokens // self.config.chunk_tokens)
        while (leaf := conversation.leaf) is not None and leaf.start >= end:
            conversation.leaf = leaf.parent
            self._remove_holder(leaf, conversation, now)
        if leaf is not None and leaf.end > end:
            conversation.leaf = self._split(leaf, end, now)
            self._remove_holder(leaf, conversation, now)

    def _remove_holder(self, branch: Branch, conversation: Conversation, now: float) -> None:
        del branch.holders[conversation]
        if branch.holders:
            branch.idle_since = next(reversed(branch.holders)).idle_since
            if not branch.num_running:
                for queue in self._queues:
                    queue.offer(branch, now)
            return
        for chunk in branch.chunks:
            self._count_reclaimable(chunk, -1)
            chunk.branch = None
            if not chunk.in_flight:
                self._free_pages(chunk)
        self._unlink(branch)

    def _unlink(self, branch: Branch) -> None:
        for queue in self._queues:
            queue.withdraw(branch)
        branch.chunks = []
        if branch.parent is not None:
            branch.parent.num_children -= 1

    def _forget_if_bare(self, branch: Branch | None) -> None:
        """Trailing chunks without a page need no bookkeeping: their tokens are in the log."""
        while (
            branch is not None
            and not branch.num_resident
            and not branch.num_running
            and not branch.num_children
        ):
            tokens = branch.start * self.config.chunk_tokens
            for conversation in branch.holders:
                conversation.leaf = branch.parent
                conversation.num_tokens = min(conversation.num_tokens, tokens)
                if conversation.leaf is None and conversation.turn_id is None:
                    self.conversations.pop(conversation.conversation_id, None)
            for chunk in branch.chunks:
                chunk.branch = None
            self._unlink(branch)
            branch = branch.parent

    def check(self, now: float) -> None:
        """Recompute every invariant from the chunks alone."""
        audit(self, now)
