"""Cuts an iteration's attention into work for a GPU's blocks, once for all layers.

A *row* is one query token with one query head of a KV head's group, so a slice of n tokens has n · group
rows.  A *tile* is a run of rows of one slice; all its rows see the context up to its last token.  A tile
becomes one *item* of work, or several *parts* that are merged afterwards.  csrc/include/work.h has the
records of items and merges.

How rows are cut.  A slice of few rows (`narrow_max`) is one narrow tile.  A longer one is wide tiles of
`wide` rows, and what remains is a narrow tile if it fits.

How a context is cut.  The device runs B blocks at once (`blocks_at_once`).  An item costs as much as it has
pages, twice that in a wide tile.  With parts no longer than `limit` there are n blocks, which take ⌈n / B⌉
waves, so the time is at most

    min(⌈n / B⌉ · limit, total / B + limit)        (longest first; any block may be the last to end)

and each wave has a cost of its own (`WAVE_COST`).  For the fewest waves possible, and for a few more, the
smallest limit is searched, and the best of these is taken.  So a single long context fills the machine,
and 300 equal contexts on 264 blocks do not leave half of the machine idle in a second wave.  Where there are
many blocks anyway, only what exceeds the mean share is cut.  No part is shorter than `PART_PAGES_MIN`.

Items are sorted longest first: blocks start in this order, and the short ones fill the gaps at the end.

The functions are pure: lengths and starts in, lists out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from pensieve.kernels.shapes import PAGE_SLOTS

PART_PAGES_MIN = 4
WAVE_COST = 2  # in pages: to start a block, and to merge its result
WAVES_MORE = 3  # how many waves are tried beyond the fewest possible


class Item(NamedTuple):
    slice_index: int
    row_begin: int
    num_rows: int
    key_begin: int
    key_end: int
    part_row: int  # where its partial result lies; -1: it is no part


class Merge(NamedTuple):
    slice_index: int
    row_begin: int
    num_rows: int
    first_part_row: int
    num_parts: int


class Tiling(NamedTuple):
    """How many rows a kernel's tiles have."""

    narrow_max: int  # of a narrow tile, at most
    wide: int


class Tile(NamedTuple):
    slice_index: int
    row_begin: int
    num_rows: int
    key_end: int
    cost: int  # of its whole context
    page_cost: int

    @property
    def num_pages(self) -> int:
        return -(-self.key_end // PAGE_SLOTS)


class Plan(NamedTuple):
    items: list[Item]  # longest first
    merges: list[Merge]
    num_part_rows: int


class Work(NamedTuple):
    """A plan on its device, with memory for the results of parts."""

    items: torch.Tensor  # int32 (items, 6)
    wide_items: torch.Tensor  # int32 (items, 6): those for Hopper's kernel, where it is used
    merges: torch.Tensor  # int32 (merges, 5)
    part_values: torch.Tensor  # float (part rows, kv_heads, head_size)
    part_sums: torch.Tensor  # float (part rows, kv_heads)

    @classmethod
    def of(
        cls,
        plan: Plan,
        num_kv_heads: int,
        head_size: int,
        device: torch.device | str,
        wide_above: int | None = None,  # rows of an item, beyond which it is a wide one
        upload: Callable[[torch.Tensor, torch.device], torch.Tensor] = torch.Tensor.to,
    ) -> Work:
        def table(rows: Sequence[tuple[int, ...]], columns: int) -> torch.Tensor:
            made = torch.tensor(rows, dtype=torch.int32).reshape(-1, columns)
            return upload(made, torch.device(device))

        most = wide_above or float("inf")
        rows = plan.num_part_rows
        return cls(
            table([item for item in plan.items if item.num_rows <= most], 6),
            table([item for item in plan.items if item.num_rows > most], 6),
            table(plan.merges, 5),
            torch.empty(rows, num_kv_heads, head_size, dtype=torch.float32, device=device),
            torch.empty(rows, num_kv_heads, dtype=torch.float32, device=device),
        )


def plan_work(
    lengths: Sequence[int],
    starts: Sequence[int],
    group: int,
    num_kv_heads: int,
    tiling: Tiling,
    blocks_at_once: int,
    waves_more: int | None = None,
) -> Plan:
    """Work for slices of these lengths that begin at these positions.

    With `waves_more` 0 there are at most blocks_at_once / num_kv_heads + 1 items more than tiles.
    """
    tiles = [
        tile
        for index, (length, start) in enumerate(zip(lengths, starts, strict=True))
        for tile in tiles_of(index, length, start, group, tiling)
    ]
    limit = part_limit([tile.cost for tile in tiles], num_kv_heads, blocks_at_once, waves_more)
    items: list[tuple[int, Item]] = []
    merges: list[Merge] = []
    num_part_rows = 0
    for tile in tiles:
        pages_max = max(limit // tile.page_cost, PART_PAGES_MIN)
        num_parts = -(-tile.num_pages // pages_max)
        if num_parts > 1:
            merges.append(Merge(*tile[:3], num_part_rows, num_parts))
        page = 0
        for part in range(num_parts):
            end = tile.num_pages * (part + 1) // num_parts
            row = -1
            if num_parts > 1:
                row = num_part_rows
                num_part_rows += tile.num_rows
            item = Item(*tile[:3], page * PAGE_SLOTS, min(end * PAGE_SLOTS, tile.key_end), row)
            items.append(((end - page) * tile.page_cost, item))
            page = end
    items.sort(key=lambda each: -each[0])
    return Plan([item for _, item in items], merges, num_part_rows)


def tiles_of(slice_index: int, length: int, start: int, group: int, tiling: Tiling) -> list[Tile]:
    rows, begin = length * group, 0
    tiles = []
    while begin < rows:
        left = rows - begin
        num_rows = left if left <= tiling.narrow_max else min(left, tiling.wide)
        key_end = start + (begin + num_rows - 1) // group + 1
        page_cost = 1 if num_rows <= tiling.narrow_max else 2
        cost = -(-key_end // PAGE_SLOTS) * page_cost
        tiles.append(Tile(slice_index, begin, num_rows, key_end, cost, page_cost))
        begin += num_rows
    return tiles


def part_limit(
    costs: Sequence[int], num_kv_heads: int, blocks_at_once: int, waves_more: int | None = None
) -> int:
    """The longest that a part may be, in pages."""
    if not costs:
        return PART_PAGES_MIN
    mean = sum(costs) * num_kv_heads / blocks_at_once
    fewest = -(-len(costs) * num_kv_heads // blocks_at_once)
    if fewest > WAVES_MORE:
        return max(int(mean) + 1, PART_PAGES_MIN)
    best, least = max(costs), float("inf")
    last = fewest + (WAVES_MORE if waves_more is None else waves_more)
    for waves in range(fewest, last + 1):
        limit = _smallest_limit(costs, waves * blocks_at_once // num_kv_heads)
        time = min(waves * limit, mean + limit) + waves * WAVE_COST
        if time < least:
            best, least = limit, time
    return best


def _smallest_limit(costs: Sequence[int], blocks_max: int) -> int:
    """The smallest limit with which there are at most `blocks_max` parts (`len(costs)` or more)."""
    low, high = PART_PAGES_MIN, max(max(costs), PART_PAGES_MIN)
    while low < high:
        middle = (low + high) // 2
        if sum(-(-cost // middle) for cost in costs) <= blocks_max:
            high = middle
        else:
            low = middle + 1
    return low
