"""What each block of threads does in `multi_token_attention`: planned once per iteration, for all layers.

A **tile** is a run of rows of one slice (a row: one query token with one head of its group, so a slice of n
tokens has n · group rows); all its rows see the context up to its last token.  A tile becomes one
**item** of work, or several **parts** that are merged afterwards; csrc/include/work.h has both records.

How tiles are cut along the rows: a slice of few rows (`narrow_max`) is one narrow tile; a longer one is
wide tiles of `wide` rows, and what is left over is narrow if it fits.

How a context is cut.  Let `slots` be how many blocks the device runs at once, and the cost of an item its
pages (a page of a wide tile costs twice).  With parts no longer than `limit` there are n blocks, which take
⌈n / slots⌉ waves, so the time is at most

    min(⌈n / slots⌉ · limit, total / slots + limit)        (longest first, any of them may be last)

and each wave costs something besides.  For one to a few waves the smallest possible limit is looked for, and
the best of these is taken.  So a single long context fills the machine, three hundred equal ones on a
machine of 264 slots do not leave half of it idle in a second wave, and where there are many blocks
anyway nothing is cut but what exceeds the mean share.  No part is shorter than `PART_PAGES_MIN`.

Items lie longest first: blocks start in this order, and the short ones fill the gaps at the end.

The functions are pure: lengths and starts in, lists out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

PAGE = 32
PART_PAGES_MIN = 4
WAVE_COST = 2  # pages: starting a block and merging what it found
WAVES_MORE = 3  # that are tried beyond the fewest possible


class Item(NamedTuple):
    slice_index: int
    row_begin: int
    num_rows: int
    key_begin: int
    key_end: int
    part_row: int  # -1: the whole of its context


class Merge(NamedTuple):
    slice_index: int
    row_begin: int
    num_rows: int
    first_part_row: int
    num_parts: int


class Tiling(NamedTuple):
    """What a kernel takes: rows of its largest narrow tile, and of a wide one."""

    narrow_max: int
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
        return -(-self.key_end // PAGE)


class Plan(NamedTuple):
    items: list[Item]  # longest first
    merges: list[Merge]
    num_part_rows: int


class Work(NamedTuple):
    """A plan on its device, with room for the results of parts."""

    items: torch.Tensor  # int32 (items, 6)
    wide_items: torch.Tensor  # int32 (items, 6): those for a kernel of their own, if there is one
    merges: torch.Tensor  # int32 (merges, 5)
    part_values: torch.Tensor  # float (part rows, kv_heads, head_size)
    part_sums: torch.Tensor  # float (part rows, kv_heads)

    @classmethod
    def of(
        cls,
        plan: Plan,
        kv_heads: int,
        head_size: int,
        device: torch.device | str,
        wide_above: int | None = None,  # items of more rows are put among the wide ones
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
            torch.empty(rows, kv_heads, head_size, dtype=torch.float32, device=device),
            torch.empty(rows, kv_heads, dtype=torch.float32, device=device),
        )


def plan_work(
    lengths: Sequence[int],
    starts: Sequence[int],
    group: int,
    kv_heads: int,
    tiling: Tiling,
    slots: int,
    waves_more: int | None = None,
) -> Plan:
    """Work for slices of these lengths that begin at these positions.

    With `waves_more` 0 there are at most slots / kv_heads + 1 items more than tiles.
    """
    tiles = [
        tile
        for index, (length, start) in enumerate(zip(lengths, starts, strict=True))
        for tile in tiles_of(index, length, start, group, tiling)
    ]
    limit = part_limit([tile.cost for tile in tiles], kv_heads, slots, waves_more)
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
            item = Item(*tile[:3], page * PAGE, min(end * PAGE, tile.key_end), row)
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
        cost = -(-key_end // PAGE) * page_cost
        tiles.append(Tile(slice_index, begin, num_rows, key_end, cost, page_cost))
        begin += num_rows
    return tiles


def part_limit(
    costs: Sequence[int], kv_heads: int, slots: int, waves_more: int | None = None
) -> int:
    """How long a part may be."""
    if not costs:
        return PART_PAGES_MIN
    mean = sum(costs) * kv_heads / slots
    fewest = -(-len(costs) * kv_heads // slots)
    if fewest > WAVES_MORE:
        return max(int(mean) + 1, PART_PAGES_MIN)
    best, least = max(costs), float("inf")
    last = fewest + (WAVES_MORE if waves_more is None else waves_more)
    for waves in range(fewest, last + 1):
        limit = _smallest_limit(costs, waves * slots // kv_heads)
        time = min(waves * limit, mean + limit) + waves * WAVE_COST
        if time < least:
            best, least = limit, time
    return best


def _smallest_limit(costs: Sequence[int], blocks_max: int) -> int:
    """With which there are at most so many parts (at least as many as there are costs)."""
    low, high = PART_PAGES_MIN, max(max(costs), PART_PAGES_MIN)
    while low < high:
        middle = (low + high) // 2
        if sum(-(-cost // middle) for cost in costs) <= blocks_max:
            high = middle
        else:
            low = middle + 1
    return low
