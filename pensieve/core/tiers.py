"""The pages of device and host, and the copies in flight between them.

At any time, a device page is exactly one of

    empty         in the pool
    pinned        held by a running turn
    moving        read or written by an unfinished copy
    reclaimable   idle, and the host has a copy (clean) or its chunk is marked to drop
    dirty         idle, and its KV would have to be recomputed if the page were lost

The number `available` is empty + reclaimable. `Chunk.reclaimable` and `Chunk.idle` are in prefix_tree.py.

No page is taken while it is in use:

* A running turn pins every branch of its path. The retention queues skip pinned branches, and `available`
  does not count them.
* A chunk with a copy in flight (`chunk.in_flight`) is not evicted in any way: no swap-out, reclaim or drop.
  If its last holder is gone, its pages are freed after the last copy has finished.
* The scheduler gives up the pages of a turn only after all iterations with slices of the turn are committed.

This module frees pages, and begins and finishes copies. eviction.py and cache.py choose the chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from pensieve.core.iteration import PageCopy, SwapIn, SwapOut
from pensieve.core.prefix_tree import Chunk

IsIntact = Callable[[int], bool]  # whether a host page still holds the bytes copied to it


def trusted(host_page: int) -> bool:
    """The `IsIntact` without checks: every page counts as intact."""
    return True


@dataclass(frozen=True)
class CacheConfig:
    """The sizes of the two tiers, and the thresholds for swap-outs and for the reserve."""

    device_pages: int
    host_pages: int
    chunk_tokens: int = 32
    # If a smaller fraction of the device pages is available, chunks are copied to the host.
    swap_out_below: float = 0.25
    reserve: float = 0.10  # fraction of the device pages kept for generating turns
    swap_outs_max: int = 64  # copies started by one iteration
    staging_pages: int = 0  # pages in each of two arenas for streamed turns; 0: no turn is streamed

    def __post_init__(self) -> None:
        if self.device_pages < 2:
            raise ValueError("the device tier needs at least two pages")
        if (
            min(self.host_pages, self.staging_pages) < 0
            or min(self.chunk_tokens, self.swap_outs_max) < 1
        ):
            raise ValueError("page counts must not be negative, and chunks hold at least one token")
        if not 0.0 <= self.reserve <= self.swap_out_below <= 1.0:
            raise ValueError("0 <= reserve <= swap_out_below <= 1 must hold")

    @property
    def can_stream(self) -> bool:
        """Whether there is room for turns whose KV stays on the host."""
        return self.staging_pages > 0 and self.host_pages > 0

    @property
    def device_tokens_max(self) -> int:
        """The longest context that fits the device tier, with one chunk reserved for copy on write."""
        return (self.device_pages - 1) * self.chunk_tokens

    @property
    def swap_out_mark_pages(self) -> int:
        return -int(-self.device_pages * self.swap_out_below // 1)

    @property
    def distinct_pages(self) -> int:
        """The pages of both tiers, less the host pages for copies of chunks that are also on the device."""
        copies = min(self.host_pages, self.swap_out_mark_pages)
        return self.device_pages + self.host_pages - copies

    @property
    def reserve_pages(self) -> int:
        return -int(-self.device_pages * self.reserve // 1)


class PagePool:
    """Hand out page numbers, the last freed page first, because it may still be in the CPU's caches.

    Freeing a page twice fails.
    """

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
        """Check the pool against `used_pages`: all pages that are not empty."""
        assert len(set(used_pages)) == len(used_pages), "a page has two holders"
        assert sorted(used_pages) == [i for i, taken in enumerate(self._taken) if taken], (
            "the pool and its users disagree on which pages are taken"
        )
        assert len(self._empty) + len(used_pages) == self.num_pages, "a page leaked"


@dataclass
class CacheCounters:
    """Counts of chunks since the start."""

    swapped_out: int = 0
    swapped_in: int = 0
    reclaimed: int = 0  # the device page was taken, the host copy stays
    reclaim_hits: int = 0  # copied to the host, but still on the device when needed again
    dropped: int = 0  # last copy dropped
    # Chunks on the device that may be dropped: their host copy was dropped, or was never made.
    marked_to_drop: int = 0
    copied_on_write: int = 0
    discarded: int = 0  # computed by a turn that failed
    damaged: int = 0  # host page changed since the copy
    adopted: int = 0  # came from another engine
    merged: int = 0  # conversations (not chunks) whose private chunks were replaced by equal chunks


@dataclass(slots=True)
class PageReservation:
    """The reserved pages of a turn's whole context, with the copies that they need."""

    copies: list[PageCopy] = field(default_factory=list)
    swap_ins: list[SwapIn] = field(default_factory=list)
    sources: list[Chunk] = field(default_factory=list)  # of `copies`; released at the commit
    device_tokens: int = 0  # of the turn's history, on the device
    host_tokens: int = 0  # of the turn's history, from the host
    copied: tuple[Chunk, Chunk] | None = None  # (source, target) of a copy on write


class Shortage(NamedTuple):
    """The pages that must be available before a turn fits."""

    required_pages: int


@dataclass(slots=True)
class UnfinishedSwap:
    """A swap-in or swap-out that has not finished."""

    source: Chunk
    target: Chunk  # differs from the source only in a swap-in that is a copy on write
    inward: bool  # True: swap-in; False: swap-out
    num_slots: int  # valid at the target when the copy has finished


class Tiers:
    """The pages of both tiers, the copies in flight, and the number of reclaimable device pages."""

    def __init__(self, device_pages: int, host_pages: int) -> None:
        self.device = PagePool(device_pages)
        self.host = PagePool(host_pages)
        self.counters = CacheCounters()
        self.swaps: dict[int, UnfinishedSwap] = {}  # by copy_id
        self.held_sources: list[Chunk] = []  # read by unfinished page-to-page copies
        self.num_reclaimable = 0  # sum over the idle branches
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
        chunk.generation += chunk.filled > chunk.host_filled
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
            chunk.generation += chunk.filled > 0
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
        """Call with -1 before a change that may make a chunk reclaimable or not, and with +1 after it."""
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
        copy_id = self._add(UnfinishedSwap(source, target, True, num_slots))
        return SwapIn(copy_id, source.host_page, target.device_page, num_slots)

    def start_swap_out(self, chunk: Chunk) -> SwapOut:
        assert chunk.host_page is not None
        assert chunk.device_page is not None
        chunk.in_flight += 1
        self.num_swapping_out += 1
        self.counters.swapped_out += 1
        copy_id = self._add(UnfinishedSwap(chunk, chunk, False, chunk.filled))
        return SwapOut(copy_id, chunk.device_page, chunk.host_page, chunk.filled)

    def finish_swap(self, copy_id: int) -> UnfinishedSwap:
        """Mark the copied slots as valid. The caller must then release source and target."""
        swap = self.swaps.pop(copy_id)
        if swap.inward:
            self.num_swapping_in -= 1
            swap.target.swapping_in = False
        else:
            self.num_swapping_out -= 1
            swap.target.host_filled = max(swap.target.host_filled, swap.num_slots)
        return swap

    def hold_source(self, chunk: Chunk) -> None:
        """Hold a chunk that a page-to-page copy is going to read."""
        self.count_reclaimable(chunk, -1)
        chunk.in_flight += 1
        self.held_sources.append(chunk)

    def release(self, chunk: Chunk) -> bool:
        """Note that a copy of a chunk has finished. Return True if no copy is left and the chunk is idle."""
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
        """Declare a chunk's KV invalid, also in its copies in flight."""
        self.count_reclaimable(chunk, -1)
        chunk.filled = chunk.host_filled = 0
        chunk.generation += 1
        for swap in self.swaps.values():
            if swap.target is chunk or swap.source is chunk:
                swap.num_slots = 0

    def _add(self, swap: UnfinishedSwap) -> int:
        self._num_copies += 1
        self.swaps[self._num_copies] = swap
        return self._num_copies
