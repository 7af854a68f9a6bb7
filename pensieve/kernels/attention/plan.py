"""Divide an iteration's attention into work for a GPU's blocks, once for all layers.

A *row* is one query token with one of the query heads that share a KV head.  The rows of a slice are cut into
*tiles*.  Tiles of slices that begin with the same pages may form *packs* (tiles.py).  A tile becomes one
*item* of work, or several *parts* that are merged afterwards.  csrc/include/work.h defines the records of
items and merges.

Kernels.  A tile of at most `narrow_max` rows is *narrow*, and a larger tile is *wide*.  On Hopper, wide tiles
have their own kernel.  It runs before the kernel of the narrow tiles, with another number of blocks.  Each
kind of tile is planned separately, for the number of blocks that its kernel can run at once (`BlocksAtOnce`).
On other GPUs one kernel does both kinds of tiles, and a page costs twice as much in a wide tile as in a
narrow tile.  The kernel of narrow tiles also does all packs, whatever their number of rows.  So a batch that
only decodes stays one launch on Hopper, and its plan has the form that graphs need.

Cutting a context.  The device runs B blocks at once.  With parts of at most `limit` pages there are n blocks,
which read `total` pages in ⌈n / B⌉ waves, so the time is at most

    min(⌈n / B⌉ · limit, total / B + limit)

The first bound holds because no wave takes longer than `limit`.  The second holds because the device has no
free place until the last block starts, and this block takes at most `limit`.  To this time, the planner adds
a cost for each wave (`WAVE_COST`).  Cutting also costs a merge, which is one more launch (`MERGE_COST`), and
one more write and read of each row of a part (`ROWS_OF_A_PAGE`).  For the 128 rows of a wide tile, this write
and read cost as much as eight pages.  The planner tries the fewest possible number of waves and a few more,
and finds the smallest limit for each number.  It uses the limit with the least time, or cuts nothing if that
takes less time.  So a single long context uses all blocks, and 300 equal contexts on 264 blocks do not leave
most blocks idle in a second wave.  No part is shorter than `PART_PAGES_MIN`.

Sharing pages.  The result of a pack is always a part, even if the pack is not cut.  For each member of the
pack, a merge combines the parts of the member's own context with the member's rows in the pack's parts.  So a
pack costs one more part for each row, and one more block.  A pack is made if this costs less than reading the
shared pages again (`_worthwhile`).  The plan with packs is used if it takes less time than the plan without
packs, by the formula above.  On an otherwise idle GPU, reading pages twice may cost less than the merge.

Items are sorted longest first: blocks start in this order, and short items fill the gaps at the end.
Hopper's blocks are persistent: the block with the longest item of one wave gets the shortest item of the next
wave (csrc/cuda/multi_token_attention_hopper.cu).

The functions are pure: lengths and starts in, lists out.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from typing import NamedTuple

import torch

from pensieve.kernels.attention.input import SharedPages
from pensieve.kernels.attention.tiles import (
    Pack,
    PackedTiles,
    Tile,
    Tiling,
    packed,
    packs_of,
    tiles_of,
)
from pensieve.kernels.shapes import PAGE_SLOTS

PART_PAGES_MIN = 4
WAVE_COST = 2  # cost in pages of starting and finishing a block
WAVES_MORE = 3  # how many waves to try beyond the fewest possible
MERGE_COST = 4  # cost in pages of one more launch
# A page moves as many bytes as this number of rows of a part: a page has keys and values of two bytes each,
# and a row has floats that are written and read.
ROWS_OF_A_PAGE = PAGE_SLOTS * 2 * 2 // (2 * 4)
ITEM, MERGE = 7, 8  # numbers per record


class Item(NamedTuple):
    slice_index: int
    row_begin: int
    num_rows: int
    key_begin: int
    key_end: int
    part_row: int  # first row of its partial result; -1: its result is complete
    pack_row: int = -1  # a pack's first row in the table of packs; -1: not a pack


class Merge(NamedTuple):
    slice_index: int
    row_begin: int
    num_rows: int
    first_part_row: int
    num_parts: int  # parts of its own context; each begins `num_rows` rows after the previous part
    first_pack_row: int = 0  # its first row in the first part of its pack
    pack_stride: int = 0  # rows from one part of the pack to the next part
    num_pack_parts: int = 0


class Cut(NamedTuple):
    limit: int  # the longest allowed part, in pages
    time: float  # time of the work, in units of a page's time


WorkCounts = Counter[tuple[int, int, bool]]  # cost, rows, whether it is always a part


class TileCosts(NamedTuple):
    """The work of a kernel: packs and tiles, with their costs."""

    made: PackedTiles
    step: int  # pages that the kernel reads at once
    # For each pack or tile: the cost of a page, and of all its pages (rounded up to a multiple of `step`).
    pack_costs: list[tuple[int, int]]
    tile_costs: list[tuple[int, int]]

    @classmethod
    def of(cls, made: PackedTiles, tiling: Tiling | None = None, step: int = 1) -> TileCosts:
        """Compute the costs; without a `tiling` every page costs 1."""

        def costs(tiles: Sequence[Tile]) -> list[tuple[int, int]]:
            found = []
            for tile in tiles:
                page_cost = 1 if tiling is None else tiling.page_cost(tile.num_rows)
                found.append((page_cost, -(-tile.num_pages // step) * step * page_cost))
            return found

        return cls(made, step, costs(made.packs), costs(made.tiles))

    def kinds(self) -> WorkCounts:
        tiles, packs, _, places = self.made
        rows = [tile.num_rows for tile in tiles]
        are_parts = map(places.__contains__, range(len(tiles))) if places else repeat(False)
        costs = [cost for _, cost in self.tile_costs]
        kinds: WorkCounts = Counter(zip(costs, rows, are_parts, strict=False))
        for pack, (_, cost) in zip(packs, self.pack_costs, strict=True):
            kinds[cost, pack.num_rows, True] += 1
        return kinds


class BlocksAtOnce(NamedTuple):
    """How many blocks of a kernel a device runs at once."""

    narrow: int  # blocks of the kernel for narrow tiles, which does wide tiles if `wide` is None
    wide: int | None = None  # blocks of the kernel for wide tiles
    wide_step: int = 4  # pages that the wide kernel reads at once, even if it needs fewer


class Plan(NamedTuple):
    items: list[Item]  # longest first
    wide_items: list[Item]  # longest first: for the kernel of wide tiles, if there is one
    merges: list[Merge]
    num_part_rows: int
    pack_rows: tuple[int, ...] = ()  # rows of all packs: token · group + number of the query head


class DevicePlan(NamedTuple):
    """A plan on its device, with memory for the results of parts."""

    items: torch.Tensor  # int32 (items, ITEM)
    wide_items: torch.Tensor  # int32 (items, ITEM): for Hopper's kernel, if it is used
    merges: torch.Tensor  # int32 (merges, MERGE)
    pack_rows: torch.Tensor  # int32 (rows of packs)
    merge_rows: int  # the largest number of rows of a merge
    part_values: torch.Tensor  # float (part rows, kv_heads, head_size)
    part_sums: torch.Tensor  # float (part rows, kv_heads)

    @classmethod
    def of(
        cls,
        plan: Plan,
        num_kv_heads: int,
        head_size: int,
        device: torch.device | str,
        upload: Callable[[torch.Tensor, torch.device], torch.Tensor] = torch.Tensor.to,
    ) -> DevicePlan:
        lists: tuple[Sequence[tuple[int, ...]], ...] = (plan.items, plan.wide_items, plan.merges)
        numbers = array("i", chain.from_iterable(chain(*lists)))
        numbers.extend(plan.pack_rows)
        made = torch.frombuffer(numbers, dtype=torch.int32) if numbers else torch.empty(0).int()
        sizes = [
            len(rows) * columns for rows, columns in zip(lists, (ITEM, ITEM, MERGE), strict=True)
        ]
        sizes.append(len(plan.pack_rows))
        items, wide_items, merges, pack_rows = torch.split(
            upload(made, torch.device(device)), sizes
        )
        rows = plan.num_part_rows
        return cls(
            items.view(-1, ITEM),
            wide_items.view(-1, ITEM),
            merges.view(-1, MERGE),
            pack_rows,
            max((merge.num_rows for merge in plan.merges), default=0),
            torch.empty(rows, num_kv_heads, head_size, dtype=torch.float32, device=device),
            torch.empty(rows, num_kv_heads, dtype=torch.float32, device=device),
        )


def plan_work(
    lengths: Sequence[int],
    starts: Sequence[int],
    group: int,
    num_kv_heads: int,
    tiling: Tiling,
    blocks: BlocksAtOnce,
    waves_more: int | None = None,
    shared: SharedPages | None = None,
) -> Plan:
    """Plan the work for slices of these lengths that begin at these positions.

    If `waves_more` is 0, `Plan.items` has at most n + `blocks.narrow` / num_kv_heads + 1 items, including
    items of packs. n is the number of narrow tiles before cutting.
    """
    tiles = [
        tile
        for index, (length, start) in enumerate(zip(lengths, starts, strict=True))
        for tile in tiles_of(index, length, start, group, tiling)
    ]
    wide: list[Tile] = []
    if blocks.wide is not None:
        wide = [tile for tile in tiles if tile.num_rows > tiling.narrow_max]
        if wide:
            tiles = [tile for tile in tiles if tile.num_rows <= tiling.narrow_max]
    count = blocks.narrow
    load = TileCosts.of(PackedTiles(tiles, [], [], {}), tiling)
    cut = part_limit(load.kinds(), num_kv_heads, count, waves_more)
    if shared is not None:
        items_more = count // num_kv_heads + 1 if waves_more == 0 else None
        packs = _worthwhile(packs_of(tiles, shared, tiling), tiles, tiling)[:items_more]
        packed_load = TileCosts.of(packed(tiles, packs, lengths, group), tiling)
        items_max = None if items_more is None else len(tiles) + items_more
        # The limit is even, because a page of a wide pack costs 2: an odd limit would only give more parts.
        with_packs = part_limit(
            packed_load.kinds(), num_kv_heads, count, step=2, items_max=items_max
        )
        if packs and with_packs.time < cut.time:
            load, cut = packed_load, with_packs
    parts = _ItemCutter()
    items = parts.cut(load, cut.limit)
    wide_items: list[Item] = []
    if wide:
        assert blocks.wide is not None
        wide_load = TileCosts.of(PackedTiles(wide, [], [], {}), step=blocks.wide_step)
        cut = part_limit(
            wide_load.kinds(), num_kv_heads, blocks.wide, waves_more, step=blocks.wide_step
        )
        wide_items = parts.cut(wide_load, cut.limit)
    rows = tuple(load.made.rows)
    return Plan(items, wide_items, parts.merges, parts.num_rows, rows)


def _worthwhile(packs: Sequence[Pack], tiles: Sequence[Tile], tiling: Tiling) -> list[Pack]:
    """Return the packs that save more than they cost, the best first."""

    def gain(pack: Pack) -> float:  # in pages
        costs = sum(tiling.page_cost(tiles[member].num_rows) for member in pack.members)
        saved = pack.num_pages * (costs - tiling.page_cost(pack.num_rows))
        return saved - 2 * pack.num_rows / ROWS_OF_A_PAGE - WAVE_COST  # 2: own part, pack's part

    return sorted((pack for pack in packs if gain(pack) > 0), key=gain, reverse=True)


class _ItemCutter:
    """Cut tiles and packs into items, and number the rows of their parts."""

    def __init__(self) -> None:
        self.merges: list[Merge] = []
        self.num_rows = 0

    def cut(self, load: TileCosts, limit: int) -> list[Item]:
        """Return the items, longest first; parts begin at multiples of `step` pages."""
        (tiles, packs, _, places), step = load.made, load.step
        found: list[tuple[int, Item]] = []
        pack_parts = []  # the first part's first row, and the number of parts
        for pack, costs in zip(packs, load.pack_costs, strict=True):
            num_parts = _num_parts_of(costs, step, limit)
            pack_parts.append((self.num_rows, num_parts))
            found += self._parts_of(pack, costs, step, num_parts)
        for index, (tile, costs) in enumerate(zip(tiles, load.tile_costs, strict=True)):
            num_parts = _num_parts_of(costs, step, limit)
            place = places.get(index)
            if num_parts == 1 and place is None:
                found.append((-costs[1], Item(*tile[:5], -1)))
                continue
            merge = (*tile[:3], self.num_rows, num_parts)
            found += self._parts_of(tile, costs, step, num_parts)
            if place is None:
                self.merges.append(Merge(*merge))
                continue
            pack_index, row = place
            first_part_row, num_pack_parts = pack_parts[pack_index]
            pack_fields = (first_part_row + row, packs[pack_index].num_rows, num_pack_parts)
            self.merges.append(Merge(*merge, *pack_fields))
        found.sort(key=_sort_key)
        return [item for _, item in found]

    def _parts_of(
        self, tile: Tile, costs: tuple[int, int], step: int, num_parts: int
    ) -> list[tuple[int, Item]]:
        """Return the items of a tile's parts with their sort keys."""
        page_cost, cost = costs
        num_steps = cost // page_cost // step
        found, begin = [], 0
        for part in range(1, num_parts + 1):
            end = num_steps * part // num_parts
            first = tile.key_begin + begin * step * PAGE_SLOTS
            last = min(tile.key_begin + end * step * PAGE_SLOTS, tile.key_end)
            item = Item(*tile[:3], first, last, self.num_rows, tile.pack_row)
            found.append(((begin - end) * step * page_cost, item))
            self.num_rows += tile.num_rows
            begin = end
        return found


def _num_parts_of(costs: tuple[int, int], step: int, limit: int) -> int:
    page_cost, cost = costs
    if cost <= limit:
        return 1
    steps_max = max(limit // page_cost, PART_PAGES_MIN) // step
    return -(-(cost // page_cost // step) // steps_max)


def _sort_key(pair: tuple[int, Item]) -> int:
    return pair[0]


def part_limit(
    kinds: WorkCounts,
    num_kv_heads: int,
    blocks_at_once: int,
    waves_more: int | None = None,
    step: int = 1,
    items_max: int | None = None,
) -> Cut:
    """Return the best limit of parts (a multiple of `step`, unless nothing is cut), and its time.

    There are at most `items_max` items after cutting. If there are more before cutting, nothing is cut.
    """
    if not kinds:
        return Cut(PART_PAGES_MIN, 0.0)
    num_pieces = kinds.total()
    mean = sum(cost * count for (cost, *_), count in kinds.items()) * num_kv_heads / blocks_at_once
    fewest = -(-num_pieces * num_kv_heads // blocks_at_once)

    def time_of(waves: int, limit: int) -> float:
        part_rows = sum(
            -(-cost // limit) * num_rows * count
            for (cost, num_rows, is_part), count in kinds.items()
            if cost > limit or is_part
        )
        price = MERGE_COST + part_rows * num_kv_heads / ROWS_OF_A_PAGE / blocks_at_once
        merged = price if part_rows else 0.0
        return min(waves * limit, mean + limit) + waves * WAVE_COST + merged

    longest = max(cost for cost, *_ in kinds)
    best = Cut(max(longest, PART_PAGES_MIN), time_of(fewest, max(longest, PART_PAGES_MIN)))
    tried: list[tuple[int, int]]  # waves, limit
    if fewest > WAVES_MORE:
        tried = [(fewest, max(-(-(int(mean) + 1) // step) * step, PART_PAGES_MIN))]
    else:
        last = fewest + (WAVES_MORE if waves_more is None else waves_more)
        tried = [
            (waves, _smallest_limit(kinds, waves * blocks_at_once // num_kv_heads, step))
            for waves in range(fewest, last + 1)
        ]
    if items_max is not None:
        least = _smallest_limit(kinds, items_max, step)
        tried = [(waves, max(limit, least)) for waves, limit in tried]
    for waves, limit in tried:
        if limit >= longest:
            continue
        time = time_of(waves, limit)
        if time < best.time:
            best = Cut(limit, time)
    return best


def _num_parts(kinds: WorkCounts, limit: int) -> int:
    return sum(-(-cost // limit) * count for (cost, *_), count in kinds.items())


def _smallest_limit(kinds: WorkCounts, parts_max: int, step: int) -> int:
    """Return the smallest limit with at most `parts_max` parts; every piece has at least one part."""
    low = -(-PART_PAGES_MIN // step)
    high = max(-(-max(cost for cost, *_ in kinds) // step), low)
    while low < high:
        middle = (low + high) // 2
        if _num_parts(kinds, middle * step) <= parts_max:
            high = middle
        else:
            low = middle + 1
    return low * step
