"""The pages of the device and the host, which may be taken, and the copies between them.

Pages of the device are, at any time, exactly one of

    empty         in the pool
    pinned        held by a running turn
    moving        an unfinished copy reads or writes them
    reclaimable   idle, and the host has a copy (clean) or they are marked to be dropped
    dirty         idle, and their loss would cost recompute

and `available` = empty + reclaimable.  Which of these a chunk's page is follows from
`Chunk.reclaimable` and `Chunk.idle` (prefix_tree.py).

Why no page is taken while it is in use:

* A running turn pins every branch of its path; the retention queues skip pinned branches, and
  `available` does not count them.
* A copy in flight counts in `chunk.in_flight`; such a chunk does not qualify for any role, and when
  its last holder is gone, its pages go back only after the last copy has finished.
* The pages of a turn are given up only after every iteration with a slice of it was committed (the
  scheduler's duty).

Here a page is given back and a copy is begun or finished; which chunk that happens to is decided in
eviction.py and cache.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from pensieve.core.iteration import PageCopy, SwapIn, SwapOut
from pensieve.core.prefix_tree import Chunk

IsIntact = Callable[[int], bool]  # of a host page: it holds what was copied to it


def trusted(host_page: int) -> bool:
    """Trust every page: nobody looks, and nothing else writes to the host tier."""
    return True


@dataclass(frozen=True)
class CacheConfig:
    """The sizes of the two tiers, and the marks for copying out and for the reserve."""

    device_pages: int
    host_pages: int
    chunk_tokens: int = 32
    swap_out_below: float = 0.25  # of device pages available: copy to the host ahead of need
    reserve: float = 0.10  # of device pages: kept for turns that are generating
    swap_outs_max: int = 64  # copies started by one iteration
    staging_pages: int = (
        0  # of each of two arenas, for one layer of streamed turns; 0: none is streamed
    )

    def __post_init__(self) -> None:
        if self.device_pages < 2:
            raise ValueError("the device tier needs two or more pages")
        if (
            min(self.host_pages, self.staging_pages) < 0
            or min(self.chunk_tokens, self.swap_outs_max) < 1
        ):
            raise ValueError("page counts must not be negative, and chunks hold at least one token")
        if not 0.0 <= self.reserve <= self.swap_out_below <= 1.0:
            raise ValueError("0 <= reserve <= swap_out_below <= 1 does not hold")

    @property
    def can_stream(self) -> bool:
        """There is room for turns whose KV stays on the host."""
        return self.staging_pages > 0 and self.host_pages > 0

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


class PagePool:
    """Hands out page numbers, last freed first (its rows are the warmest), and refuses double frees."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._empty = list(range(num_pages - 1, -1, -1))
        self._taken = bytearray(num_pages)

    @property
    def num_empty(self) -> int:
        return len(self._empty)

    def take(self) -> int | None:
        if not self._empty:
            return None
        page = self._empty.pop()
        self._taken[page] = 1
        return page

    def give_back(self, page: int) -> None:
        assert self._taken[page], f"page {page} is freed twice"
        self._taken[page] = 0
        self._empty.append(page)

    def check(self, used_pages: list[int]) -> None:
        """`used_pages` are all pages that are not empty, each once."""
        assert len(set(used_pages)) == len(used_pages), "a page has two holders"
        assert sorted(used_pages) == [i for i, taken in enumerate(self._taken) if taken], (
            "the pool and its users disagree on which pages are taken"
        )
        assert len(self._empty) + len(used_pages) == self.num_pages, "a page leaked"


@dataclass
class CacheCounters:
    """What has happened since the start, in chunks unless the name says tokens."""

    swapped_out: int = 0
    swapped_in: int = 0
    reclaimed: int = 0  # device page taken, host copy stays
    reclaim_hits: int = 0  # copied to the host ahead of need, and still on the device on return
    dropped: int = 0  # last copy forgotten
    marked_to_drop: int = 0  # not copied to the host, or no longer there
    copied_on_write: int = 0
    discarded: int = 0  # computed by a turn that failed
    damaged: int = 0  # not on the host any more as they were copied there
    adopted: int = 0  # came from another engine


@dataclass(slots=True)
class PageReservation:
    """The pages of a turn's whole present context are reserved; what has to move for that."""

    copies: list[PageCopy] = field(default_factory=list)
    swap_ins: list[SwapIn] = field(default_factory=list)
    sources: list[Chunk] = field(default_factory=list)  # of `copies`; released at the commit
    device_tokens: int = 0  # of the turn's history, found on the device
    host_tokens: int = 0  # of the turn's history, on their way from the host
    copied: tuple[Chunk, Chunk] | None = None  # (source, target) of a copy on write


class Shortage(NamedTuple):
    """The turn does not fit now; it would if so many pages were available."""

    required_pages: int


@dataclass(slots=True)
class SwapInFlight:
    """A swap-in or swap-out that has not finished."""

    source: Chunk
    target: Chunk  # the same chunk but for a swap-in that is a copy on write
    inward: bool
    num_slots: int  # valid at the target when it has finished


class Tiers:
    """Both tiers' pages, the copies in flight, and how many device pages may be taken at once."""

    def __init__(self, device_pages: int, host_pages: int) -> None:
        self.device = PagePool(device_pages)
        self.host = PagePool(host_pages)
        self.counters = CacheCounters()
        self.swaps: dict[int, SwapInFlight] = {}  # by copy_id
        self.held_sources: list[Chunk] = []  # of unfinished page-to-page copies
        self.num_reclaimable = 0  # over idle branches
        self.num_swapping_in = 0
        self.num_swapping_out = 0
        self._num_copies = 0

    @property
    def available(self) -> int:
        return self.device.num_empty + self.num_reclaimable

    # -- a chunk's pages --

    def free_device(self, chunk: Chunk) -> None:
        assert chunk.device_page is not None
        assert not chunk.in_flight, f"{chunk} is being copied"
        self.device.give_back(chunk.device_page)
        chunk.device_page = None
        chunk.marked_to_drop = False
        chunk.filled = chunk.host_filled
        if chunk.host_page is None and chunk.branch is not None:
            chunk.branch.num_resident -= 1

    def free_host(self, chunk: Chunk) -> None:
        assert chunk.host_page is not None
        assert not chunk.in_flight, f"{chunk} is being copied"
        self.host.give_back(chunk.host_page)
        chunk.host_page = None
        chunk.host_filled = 0
        if chunk.device_page is None:
            chunk.filled = 0
            if chunk.branch is not None:
                chunk.branch.num_resident -= 1

    def free_pages(self, chunk: Chunk) -> None:
        if chunk.host_page is not None:
            self.free_host(chunk)
        if chunk.device_page is not None:
            self.free_device(chunk)

    def free_unfilled_pages(self, chunk: Chunk) -> None:
        """Give back pages that hold no KV, unless a copy is in flight."""
        if chunk.in_flight:
            return
        if chunk.host_page is not None and not chunk.host_filled:
            self.free_host(chunk)
        if chunk.device_page is not None and not chunk.filled:
            self.free_device(chunk)

    def count_reclaimable(self, chunk: Chunk, sign: int) -> None:
        """Called with -1 before, and with +1 after, something changes whether it is reclaimable."""
        if chunk.reclaimable and chunk.idle:
            assert chunk.branch is not None
            chunk.branch.num_reclaimable += sign
            self.num_reclaimable += sign

    # -- copies --

    def start_swap_in(self, source: Chunk, target: Chunk, num_slots: int) -> SwapIn:
        assert source.host_page is not None
        assert target.device_page is not None
        for chunk in {source, target}:
            chunk.in_flight += 1
        target.swapping_in = True
        self.num_swapping_in += 1
        self.counters.swapped_in += 1
        copy_id = self._add(SwapInFlight(source, target, True, num_slots))
        return SwapIn(copy_id, source.host_page, target.device_page, num_slots)

    def start_swap_out(self, chunk: Chunk) -> SwapOut:
        assert chunk.host_page is not None
        assert chunk.device_page is not None
        chunk.in_flight += 1
        self.num_swapping_out += 1
        self.counters.swapped_out += 1
        copy_id = self._add(SwapInFlight(chunk, chunk, False, chunk.filled))
        return SwapOut(copy_id, chunk.device_page, chunk.host_page, chunk.filled)

    def finish_swap(self, copy_id: int) -> SwapInFlight:
        """What is copied is valid now; its source and target are still to be released."""
        swap = self.swaps.pop(copy_id)
        if swap.inward:
            self.num_swapping_in -= 1
            swap.target.swapping_in = False
        else:
            self.num_swapping_out -= 1
            swap.target.host_filled = max(swap.target.host_filled, swap.num_slots)
        return swap

    def hold_source(self, chunk: Chunk) -> None:
        """A page-to-page copy is going to read it."""
        self.count_reclaimable(chunk, -1)
        chunk.in_flight += 1
        self.held_sources.append(chunk)

    def release(self, chunk: Chunk) -> bool:
        """One copy of it has finished; True if it was the last and the chunk is idle now."""
        chunk.in_flight -= 1
        if chunk.in_flight:
            return False
        if chunk.branch is None:
            self.free_pages(chunk)
            return False
        if not chunk.idle:
            return False
        self.free_unfilled_pages(chunk)
        return True

    def invalidate(self, chunk: Chunk) -> None:
        """Its KV is not to be trusted: copies in flight of it will yield nothing valid."""
        self.count_reclaimable(chunk, -1)
        chunk.filled = chunk.host_filled = 0
        for swap in self.swaps.values():
            if swap.target is chunk or swap.source is chunk:
                swap.num_slots = 0

    def _add(self, swap: SwapInFlight) -> int:
        self._num_copies += 1
        self.swaps[self._num_copies] = swap
        return self._num_copies
