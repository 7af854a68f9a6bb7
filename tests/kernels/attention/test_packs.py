"""Pages that several slices share are planned once for all slices, and read once on emulated threads."""

from __future__ import annotations

import itertools
import random
from array import array
from collections import Counter
from typing import Any

import pytest
import torch

from pensieve.kernels import PAGE_SLOTS
from pensieve.kernels.attention.input import SharedPages
from pensieve.kernels.attention.plan import BlocksAtOnce, DevicePlan, Plan, plan_work
from pensieve.kernels.attention.tiles import Tiling
from tests.kernels.attention.cases import NAN, Case
from tests.kernels.attention.test_emulated import attend, launched
from tests.kernels.emulated import needs_x86

TILING = Tiling(32, 128)
HOPPER = BlocksAtOnce(264, 132)


def shared_of(groups: list[int], pages: list[int]) -> SharedPages:
    return SharedPages(array("i", groups), array("i", pages))


def check(plan: Plan, lengths: list[int], starts: list[int], group: int) -> None:
    """Check that each row sees each of its positions once, and that all its parts are merged once."""
    rows = [(s, r) for s, length in enumerate(lengths) for r in range(length * group)]
    of_row = {row: index for index, row in enumerate(rows)}
    seen: dict[int, list[tuple[int, int, int]]] = {}  # row -> (first key, end, part)
    taken = Counter[int]()
    for item in plan.items + plan.wide_items:
        assert item.num_rows > 0
        assert item.key_begin % PAGE_SLOTS == 0
        assert item.key_begin < item.key_end
        for each in range(item.num_rows):
            if item.pack_row < 0:
                row = of_row[item.slice_index, item.row_begin + each]
            else:
                row = plan.pack_rows[item.pack_row + each]
                index, _ = rows[row]
                assert item.key_end <= starts[index], "a row that does not see all of a pack's keys"
                assert item.part_row >= 0
            part = item.part_row + each if item.part_row >= 0 else -1
            taken[part] += 1
            seen.setdefault(row, []).append((item.key_begin, item.key_end, part))
    merged: dict[int, list[int]] = {}
    for merge in plan.merges:
        for each in range(merge.num_rows):
            row = of_row[merge.slice_index, merge.row_begin + each]
            assert row not in merged, "a row that is merged twice"
            own = range(merge.num_parts)
            packs = range(merge.num_pack_parts)
            merged[row] = [merge.first_part_row + n * merge.num_rows + each for n in own]
            merged[row] += [merge.first_pack_row + n * merge.pack_stride + each for n in packs]
    assert set(seen) == set(of_row.values())
    for row, runs in seen.items():
        index, number = rows[row]
        runs.sort()
        assert runs[0][0] == 0
        assert runs[-1][1] > starts[index] + number // group, "the row's own position is not seen"
        for (_, before, _), (after, _, _) in itertools.pairwise(runs):
            assert before == after
        parts = [part for _, _, part in runs if part >= 0]
        assert sorted(merged.get(row, [])) == sorted(parts)
        assert len(parts) == len(runs) or len(runs) == 1
    assert all(count == 1 for part, count in taken.items() if part >= 0), "two parts share rows"
    assert max(taken, default=-1) < max(plan.num_part_rows, 1)
    assert len(set(plan.pack_rows)) == len(plan.pack_rows), "a row in two packs"


def pages_read(plan: Plan) -> int:
    items = plan.items + plan.wide_items
    return sum(-(-(item.key_end - item.key_begin) // PAGE_SLOTS) for item in items)


@pytest.mark.parametrize("seed", range(150))
def test_each_row_sees_each_position_once(seed: int) -> None:
    draw = random.Random(seed)
    kv_heads, group = draw.choice((1, 2, 8)), draw.choice((1, 2, 4, 7))
    pages = [draw.choice((1, 5, 17, 64, 300)) for _ in range(draw.randint(1, 4))]
    lengths, starts, groups = [], [], []
    for _ in range(draw.choice((2, 5, 20, 60))):
        group_index = draw.randrange(-1, len(pages))
        groups.append(group_index)
        lengths.append(draw.choice((0, 1, 1, 1, 3, 20, 60, 300)))
        starts.append(
            (pages[group_index] if group_index >= 0 else 0) * PAGE_SLOTS
            + draw.choice((0, 1, 31, 100, 9000))
        )
    shared = shared_of(groups, pages)
    number = draw.choice((8, 132, 264))
    for blocks in (BlocksAtOnce(number), BlocksAtOnce(number, 132)):
        for waves_more in (None, 0):
            arguments = (lengths, starts, group, kv_heads, TILING, blocks, waves_more)
            plan = plan_work(*arguments, shared)
            check(plan, lengths, starts, group)
            alone = plan_work(*arguments)
            if plan.pack_rows:
                assert pages_read(plan) < pages_read(alone)
            else:
                assert plan == alone
            if blocks.wide is not None:
                assert all(item.num_rows > TILING.narrow_max for item in plan.wide_items)
                assert all(item.pack_row < 0 for item in plan.wide_items)


@pytest.mark.parametrize("waves_more", [None, 0])
@pytest.mark.parametrize("blocks", [BlocksAtOnce(216), HOPPER])
def test_decodes_over_shared_pages_read_them_once(
    blocks: BlocksAtOnce, waves_more: int | None
) -> None:
    """32 slices have one query each, 64 shared pages, and 5 pages of their own."""
    lengths, starts = [1] * 32, [2048 + 128] * 32
    shared = shared_of([0] * 32, [64])
    plan = plan_work(lengths, starts, 4, 8, TILING, blocks, waves_more, shared)
    check(plan, lengths, starts, 4)
    assert pages_read(plan) == 64 + 32 * 5
    assert plan.num_part_rows * 8 * 129 * 4 < 10e6, "too many bytes of partial results"
    assert len(plan.merges) == 32
    packs = [item for item in plan.items if item.pack_row >= 0]
    assert {item.num_rows for item in packs} == {128}, "each pack must have 128 rows"
    assert len(packs) > 1, "one long pack would be the last to end"
    assert pages_read(plan_work(lengths, starts, 4, 8, TILING, blocks)) == 32 * 69


def test_shared_pages_are_not_packed_if_that_costs_more_than_it_saves() -> None:
    two = plan_work([1] * 2, [5000, 5000], 4, 8, TILING, HOPPER, shared=shared_of([0, 0], [1]))
    assert not two.pack_rows, "one page saved does not pay for the parts and another block"
    idle = plan_work([1] * 2, [400, 400], 4, 1, TILING, HOPPER, shared=shared_of([0, 0], [12]))
    assert not idle.pack_rows, "packing does not shorten the longest block and adds a merge"
    many = [1] * 200
    plan = plan_work(many, [5000] * 200, 4, 8, TILING, HOPPER, shared=shared_of([0] * 200, [5]))
    assert plan.pack_rows


def test_a_slice_alone_in_its_group_is_planned_as_without_groups() -> None:
    lengths, starts = [1, 1, 1], [5000, 6000, 7000]
    plan = plan_work(lengths, starts, 4, 8, TILING, HOPPER, shared=shared_of([0, 1, -1], [90, 90]))
    assert plan == plan_work(lengths, starts, 4, 8, TILING, HOPPER)


def test_wide_tiles_are_packed_if_one_kernel_computes_all_tiles() -> None:
    """Four slices have 40, 48, 40 and 44 rows. The first three fill a pack of 128 rows."""
    lengths, starts = [10, 12, 10, 11], [3200] * 4
    shared = shared_of([0] * 4, [100])
    plan = plan_work(lengths, starts, 4, 8, TILING, BlocksAtOnce(216), shared=shared)
    check(plan, lengths, starts, 4)
    assert len(plan.pack_rows) == 128
    assert {item.num_rows for item in plan.items if item.pack_row >= 0} == {128}
    assert {item.key_begin for item in plan.items if item.slice_index == 3} >= {0}
    on_hopper = plan_work(lengths, starts, 4, 8, TILING, HOPPER, shared=shared)
    assert not on_hopper.pack_rows, "the kernel of these slices supports no packs"


# -- on emulated threads --


@needs_x86
@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 1), (6, 2)])
def test_shared_pages_beside_unshared_pages(head_size: int, heads: int, kv_heads: int) -> None:
    """The batch has two groups, a slice without shared pages, and a slice of several tiles."""
    slices = [(0, 200, 1), (1, 197, 2), (2, 20, 3), (3, 192, 1), (4, 400, 9), (5, 385, 30)]
    slices += [(6, 192, 12), (7, 300, 150)]
    fronts = [(6, [0, 1, 3, 6]), (12, [4, 5])]
    plan = attend(slices, heads, kv_heads, head_size, blocks_at_once=kv_heads, fronts=fronts)
    assert plan.pack_rows


@needs_x86
@pytest.mark.parametrize("kv_format", ["auto", "fp8"])
@pytest.mark.parametrize(("backwards", "early"), [(False, False), (True, True)])
@pytest.mark.parametrize("blocks_at_once", [1, 12])
def test_packs_are_cut_like_tiles(
    kv_format: str, backwards: bool, early: bool, blocks_at_once: int
) -> None:
    slices = [(turn, 640 + 40 * turn, 1 + turn % 2) for turn in range(9)]
    fronts = [(20, list(range(9)))]
    order: dict[str, Any] = {"backwards": backwards, "early": early, "kv_format": kv_format}
    for heads in (1, 4):  # 13 rows, or 52
        plan = attend(slices, heads, 1, 64, blocks_at_once=blocks_at_once, fronts=fronts, **order)
        packs = [item for item in plan.items if item.pack_row >= 0]
        assert len({item.pack_row for item in packs}) == 1
        assert (len(packs) > 1) == (blocks_at_once > 1)


@needs_x86
@pytest.mark.parametrize("kv_format", ["auto", "fp8"])
def test_decodes_make_one_pack(kv_format: str) -> None:
    slices = [(turn, 330 + 30 * turn, 1) for turn in range(6)]
    fronts = [(10, [0, 1, 2, 3, 4, 5])]
    plan = attend(slices, 4, 1, 128, kv_format=kv_format, fronts=fronts, blocks_at_once=2)
    assert len({item.pack_row for item in plan.items}) == 1 + 1
    assert max(item.num_rows for item in plan.items) == 6 * 4


@needs_x86
@pytest.mark.parametrize("head_size", [64, 128])
def test_packs_beside_hoppers_wide_tiles(head_size: int) -> None:
    """A long slice of the group has wide tiles for Hopper's kernel. A short slice is in the pack."""
    slices = [(0, 320, 1), (1, 350, 2), (2, 330, 66), (3, 5, 40), (4, 321, 1)]
    plan = attend(slices, 2, 1, head_size, hopper=True, fronts=[(10, [0, 1, 2, 4])])
    assert len(plan.pack_rows) == 2 * (1 + 2 + 2 + 1)


@needs_x86
def test_half_precision_far_from_zero() -> None:
    slices = [(turn, 200 + turn, 2) for turn in range(5)]
    arguments = {"fronts": [(6, [0, 1, 2, 3, 4])], "spread": 10.0}
    assert attend(slices, 4, 2, 128, torch.float16, **arguments).pack_rows  # type: ignore[arg-type]


@needs_x86
@pytest.mark.parametrize("seed", range(4))
def test_random_groups_match_the_reference(seed: int) -> None:
    draw = random.Random(seed)
    pages = [draw.choice((5, 6, 11)) for _ in range(draw.randint(1, 3))]
    slices, sharing = [], [list[int]() for _ in pages]
    for turn in range(draw.randint(4, 14)):
        group_index = draw.randrange(-1, len(pages))
        start = draw.choice((0, 1, 31, 64, 100))
        if group_index >= 0:
            sharing[group_index].append(turn)
            start += pages[group_index] * PAGE_SLOTS
        slices.append((turn, start, draw.choice((1, 1, 1, 2, 9, 40))))
    fronts = [(each, turns) for each, turns in zip(pages, sharing, strict=True) if turns]
    kv_heads = draw.choice((1, 2))
    attend(
        slices,
        kv_heads * draw.choice((1, 2, 3, 4)),
        kv_heads,
        draw.choice((64, 128)),
        blocks_at_once=draw.choice((1, 8)),
        seed=seed,
        fronts=fronts,
    )


@needs_x86
@pytest.mark.parametrize("kv_format", ["auto", "fp8"])
def test_nan_in_a_slices_own_pages_affects_no_other_slice_of_its_pack(
    kv_format: str,
) -> None:
    slices, fronts = [(turn, 236, 1) for turn in range(4)], [(7, [0, 1, 2, 3])]
    case = Case(slices, 2, 1, 64, torch.bfloat16, kv_format, fronts=fronts)
    case.poison(1, 227, 1)  # after the shared pages
    case.query[3, 0, 5] = NAN
    work = launched(case, BlocksAtOnce(1), shared=case.shared)
    assert len(work.pack_rows) == 8
    assert [bool(row.isfinite().all()) for row in case.out] == [True, False, True, False]
    assert case.out[3, 1].isfinite().all()


def test_a_plan_is_the_same_on_its_device() -> None:
    shared = shared_of([0] * 40, [64])
    plan = plan_work([1] * 40, [2100] * 40, 4, 8, TILING, HOPPER, shared=shared)
    work = DevicePlan.of(plan, 8, 64, "cpu")
    assert work.items.tolist() == [list(item) for item in plan.items]
    assert work.merges.tolist() == [list(merge) for merge in plan.merges]
    assert tuple(work.pack_rows.tolist()) == plan.pack_rows
    assert len(work.part_sums) == plan.num_part_rows
