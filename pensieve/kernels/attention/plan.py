"""Cuts an iteration's attention into work for a GPU's blocks, once for all layers.

A *row* is one query token with one query head of a KV head's group, so a slice of n tokens has n · group
rows.  A *tile* is a run of rows of one slice; all its rows see the context up to its last token.  A tile
becomes one *item* of work, or several *parts* that are merged afterwards.  csrc/include/work.h has the
records of items and merges.

How rows are cut.  A slice of few rows (`narrow_max`) is one narrow tile.  A longer one is wide tiles of
`wide` rows, and what remains is a narrow tile if it fits.

Who does them.  On Hopper the wide tiles have a kernel of their own, which runs before that of the narrow
ones, with another number of blocks: each kind is planned by itself, for as many blocks as really run
(`BlocksAtOnce`).  Elsewhere one kernel does both, and a page costs twice as much in a wide tile.

How a context is cut.  The device runs B blocks at once.  With parts no longer than `limit` there are n
blocks, which take ⌈n / B⌉ waves, so the time is at most

    min(⌈n / B⌉ · limit, total / B + limit)        (longest first; any block may be the last to end)

and each wave has a cost of its own (`WAVE_COST`).  Cutting has a price: the merge is one more launch
(`MERGE_COST`), and each row of a part is written and read once more (`ROWS_OF_A_PAGE`), which for the 128
rows of a wide tile is as much as eight pages.  For the fewest waves possible, and for a few more, the
smallest limit is searched, and the best of these and of no cut at all is taken.  So a single long context
fills the machine, and 300 equal contexts on 264 blocks do not leave half of the machine idle in a second
wave.  Where there are many blocks anyway, only what exceeds the mean share is cut.  No part is shorter than
`PART_PAGES_MIN`.

Items are sorted longest first: blocks start in this order, and the short ones fill the gaps at the end.
Hopper's blocks stay, and go through the items there and back (csrc/cuda/multi_token_attention_hopper.cu).

The functions are pure: lengths and starts in, lists out.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import torch

from pensieve.kernels.shapes import PAGE_SLOTS

PART_PAGES_MIN = 4
WAVE_COST = 2  # in pages: to start a block, and to finish it
WAVES_MORE = 3  # how many waves are tried beyond the fewest possible
MERGE_COST = 4  # in pages: a launch more
# Rows of a part that move as many bytes as a page: floats, written and read, against keys and values of
# two bytes each.
ROWS_OF_A_PAGE = PAGE_SLOTS * 2 * 2 // (2 * 4)
FEW_ROWS = 16  # of csrc/cuda/multi_token_attention.cu
ITEM, MERGE = 6, 5  # numbers of a record


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


class BlocksAtOnce(NamedTuple):
    """How many blocks of a kernel a device runs at once."""

    narrow: int  # of the kernel for narrow tiles; it does the wide ones too where they have none
    wide: int | None = None  # of the kernel for wide tiles alone
    wide_step: int = 4  # pages that it takes at once: a part that ends in between wastes the rest
    few: int | None = None  # of the narrow kernel compiled for at most FEW_ROWS rows

    def for_rows(self, most: int) -> tuple[int, bool]:
        """For narrow items of at most so many rows: how many blocks, and whether of the kernel for few."""
        if self.few is None or most > FEW_ROWS:
            return self.narrow, False
        return self.few, True


class Tile(NamedTuple):
    slice_index: int
    row_begin: int
    num_rows: int
    key_end: int

    @property
    def num_pages(self) -> int:
        return -(-self.key_end // PAGE_SLOTS)


class Plan(NamedTuple):
    items: list[Item]  # longest first
    wide_items: list[Item]  # alike: those for the kernel of wide tiles, where there is one
    merges: list[Merge]
    num_part_rows: int
    few_rows: bool = (
        False  # no item of `items` has more than FEW_ROWS, and their kernel is that for few
    )


class Work(NamedTuple):
    """A plan on its device, with memory for the results of parts."""

    items: torch.Tensor  # int32 (items, 6)
    wide_items: torch.Tensor  # int32 (items, 6): those for Hopper's kernel, where it is used
    merges: torch.Tensor  # int32 (merges, 5)
    merge_rows: int  # the most rows of a merge
    part_values: torch.Tensor  # float (part rows, kv_heads, head_size)
    part_sums: torch.Tensor  # float (part rows, kv_heads)
    few_rows: bool = False  # as in `Plan`

    @classmethod
    def of(
        cls,
        plan: Plan,
        num_kv_heads: int,
        head_size: int,
        device: torch.device | str,
        upload: Callable[[torch.Tensor, torch.device], torch.Tensor] = torch.Tensor.to,
    ) -> Work:
        lists: tuple[Sequence[tuple[int, ...]], ...] = (plan.items, plan.wide_items, plan.merges)
        numbers = array("i", chain.from_iterable(chain(*lists)))
        made = torch.frombuffer(numbers, dtype=torch.int32) if numbers else torch.empty(0).int()
        sizes = [
            len(rows) * columns for rows, columns in zip(lists, (ITEM, ITEM, MERGE), strict=True)
        ]
        items, wide_items, merges = torch.split(upload(made, torch.device(device)), sizes)
        rows = plan.num_part_rows
        return cls(
            items.view(-1, ITEM),
            wide_items.view(-1, ITEM),
            merges.view(-1, MERGE),
            max((merge.num_rows for merge in plan.merges), default=0),
            torch.empty(rows, num_kv_heads, head_size, dtype=torch.float32, device=device),
            torch.empty(rows, num_kv_heads, dtype=torch.float32, device=device),
            plan.few_rows,
        )


def plan_work(
    lengths: Sequence[int],
    starts: Sequence[int],
    group: int,
    num_kv_heads: int,
    tiling: Tiling,
    blocks: BlocksAtOnce,
    waves_more: int | None = None,
) -> Plan:
    """Work for slices of these lengths that begin at these positions.

    With `waves_more` 0 there are at most B / num_kv_heads + 1 items more than narrow tiles, where B is the
    number of blocks that narrow work is planned for.
    """
    tiles = [
        tile
        for index, (length, start) in enumerate(zip(lengths, starts, strict=True))
        for tile in tiles_of(index, length, start, group, tiling)
    ]
    parts = _Parts(num_kv_heads, waves_more)
    if blocks.wide is None:
        costs = [1 if tile.num_rows <= tiling.narrow_max else 2 for tile in tiles]
        count, few_rows = blocks.for_rows(max((tile.num_rows for tile in tiles), default=0))
        items = parts.cut(tiles, costs, 1, count)
        return Plan(items, [], parts.merges, parts.num_rows, few_rows)
    wide = [tile for tile in tiles if tile.num_rows > tiling.narrow_max]
    narrow = tiles
    if wide:
        narrow = [tile for tile in tiles if tile.num_rows <= tiling.narrow_max]
    count, few_rows = blocks.for_rows(max((tile.num_rows for tile in narrow), default=0))
    items = parts.cut(narrow, [1] * len(narrow), 1, count)
    wide_items = parts.cut(wide, [1] * len(wide), blocks.wide_step, blocks.wide)
    return Plan(items, wide_items, parts.merges, parts.num_rows, few_rows)


def tiles_of(slice_index: int, length: int, start: int, group: int, tiling: Tiling) -> list[Tile]:
    rows, begin = length * group, 0
    tiles = []
    while begin < rows:
        left = rows - begin
        num_rows = left if left <= tiling.narrow_max else min(left, tiling.wide)
        key_end = start + (begin + num_rows - 1) // group + 1
        tiles.append(Tile(slice_index, begin, num_rows, key_end))
        begin += num_rows
    return tiles


class _Parts:
    """Cuts tiles, and numbers the rows of their parts."""

    def __init__(self, num_kv_heads: int, waves_more: int | None) -> None:
        self._num_kv_heads = num_kv_heads
        self._waves_more = waves_more
        self.merges: list[Merge] = []
        self.num_rows = 0

    def cut(
        self, tiles: Sequence[Tile], page_costs: Sequence[int], step: int, blocks: int
    ) -> list[Item]:
        """The items of these tiles, longest first; parts begin at multiples of `step` pages."""
        steps = [-(-tile.num_pages // step) for tile in tiles]
        costs = [count * step * cost for count, cost in zip(steps, page_costs, strict=True)]
        rows = [tile.num_rows for tile in tiles]
        limit = part_limit(costs, rows, self._num_kv_heads, blocks, self._waves_more, step)
        found: list[tuple[int, Item]] = []
        for tile, num_steps, cost, page_cost in zip(tiles, steps, costs, page_costs, strict=True):
            if cost <= limit:
                found.append((-cost, Item(*tile[:3], 0, tile.key_end, -1)))
                continue
            steps_max = max(limit // page_cost, PART_PAGES_MIN) // step
            num_parts = -(-num_steps // steps_max)
            if num_parts == 1:
                found.append((-cost, Item(*tile[:3], 0, tile.key_end, -1)))
                continue
            self.merges.append(Merge(*tile[:3], self.num_rows, num_parts))
            begin = 0
            for part in range(1, num_parts + 1):
                end = num_steps * part // num_parts
                key_end = min(end * step * PAGE_SLOTS, tile.key_end)
                item = Item(*tile[:3], begin * step * PAGE_SLOTS, key_end, self.num_rows)
                found.append(((begin - end) * step * page_cost, item))
                self.num_rows += tile.num_rows
                begin = end
        found.sort(key=_first)
        return [item for _, item in found]


def _first(pair: tuple[int, Item]) -> int:
    return pair[0]


def part_limit(
    costs: Sequence[int],
    rows: Sequence[int],
    num_kv_heads: int,
    blocks_at_once: int,
    waves_more: int | None = None,
    step: int = 1,
) -> int:
    """The longest that a part may be, in pages (a multiple of `step`), for tiles of these costs and rows."""
    if not costs:
        return PART_PAGES_MIN
    mean = sum(costs) * num_kv_heads / blocks_at_once
    fewest = -(-len(costs) * num_kv_heads // blocks_at_once)
    kinds = Counter(zip(costs, rows, strict=True))
    best = max(max(costs), PART_PAGES_MIN)
    least = min(fewest * best, mean + best) + fewest * WAVE_COST  # uncut
    tried: list[tuple[int, int]]  # waves, limit
    if fewest > WAVES_MORE:
        tried = [(fewest, max(-(-(int(mean) + 1) // step) * step, PART_PAGES_MIN))]
    else:
        last = fewest + (WAVES_MORE if waves_more is None else waves_more)
        tried = [
            (waves, _smallest_limit(kinds, waves * blocks_at_once // num_kv_heads, step))
            for waves in range(fewest, last + 1)
        ]
    for waves, limit in tried:
        part_rows = sum(
            -(-cost // limit) * of_tile * count
            for (cost, of_tile), count in kinds.items()
            if cost > limit
        )
        if not part_rows:
            continue
        price = MERGE_COST + part_rows * num_kv_heads / ROWS_OF_A_PAGE / blocks_at_once
        time = min(waves * limit, mean + limit) + waves * WAVE_COST + price
        if time < least:
            best, least = limit, time
    return best


def _smallest_limit(kinds: Counter[tuple[int, int]], blocks_max: int, step: int) -> int:
    """The smallest limit with which there are at most `blocks_max` parts (one for each tile, or more)."""
    low = -(-PART_PAGES_MIN // step)
    high = max(-(-max(cost for cost, _ in kinds) // step), low)
    while low < high:
        middle = (low + high) // 2
        limit = middle * step
        if sum(-(-cost // limit) * count for (cost, _), count in kinds.items()) <= blocks_max:
            high = middle
        else:
            low = middle + 1
    return low * step
