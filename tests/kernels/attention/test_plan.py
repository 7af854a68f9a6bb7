"""The plan of attention work: each row sees each of its positions once, and the load is balanced."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter

import pytest

from pensieve.kernels import PAGE_SLOTS
from pensieve.kernels.attention.plan import (
    PART_PAGES_MIN,
    WAVE_COST,
    BlocksAtOnce,
    Item,
    Plan,
    part_limit,
    plan_work,
)
from pensieve.kernels.attention.tiles import Tiling

NARROW = 32
TILING = Tiling(NARROW, 128)
HOPPER = BlocksAtOnce(264, 132)


def cost_of(key_begin: int, key_end: int, num_rows: int) -> int:
    return -(-(key_end - key_begin) // PAGE_SLOTS) * (1 if num_rows <= NARROW else 2)


def check(plan: Plan, lengths: list[int], starts: list[int], group: int, tiling: Tiling) -> None:
    """Recompute everything that the plan must satisfy."""
    merged = {merge[:3]: merge for merge in plan.merges}
    assert len(merged) == len(plan.merges)
    parts: dict[tuple[int, int, int], list[tuple[int, int, int]]] = {}
    for item in plan.items + plan.wide_items:
        assert item.pack_row == -1
        parts.setdefault(item[:3], []).append(item[3:6])
    covered: dict[int, list[tuple[int, int]]] = {}
    taken: list[tuple[int, int]] = []
    for (index, begin, num_rows), runs in parts.items():
        covered.setdefault(index, []).append((begin, num_rows))
        assert 0 < num_rows <= max(tiling)
        runs.sort()
        end = starts[index] + (begin + num_rows - 1) // group + 1
        assert runs[0][0] == 0
        assert runs[-1][1] == end, "the last row's own position is not seen"
        for (_, before, _), (after, _, _) in itertools.pairwise(runs):
            assert before == after
            assert after % PAGE_SLOTS == 0
        if len(runs) == 1:
            assert runs[0][2] == -1
            assert (index, begin, num_rows) not in merged
            continue
        merge = merged.pop((index, begin, num_rows))
        assert merge.num_parts == len(runs)
        rows = [row for _, _, row in runs]
        assert rows == [merge.first_part_row + i * num_rows for i in range(len(runs))]
        assert min(run[1] - run[0] for run in runs[:-1]) >= PART_PAGES_MIN * PAGE_SLOTS // 2
        taken += [(row, row + num_rows) for row in rows]
    assert not merged, "tiles that were not cut are merged"
    for (_, before), (after, _) in itertools.pairwise(sorted(taken)):
        assert before <= after, "two parts share rows"
    assert all(end <= plan.num_part_rows for _, end in taken)
    for index, length in enumerate(lengths):
        position = 0
        for begin, num_rows in sorted(covered.get(index, [])):
            assert begin == position
            position += num_rows
        assert position == length * group
    for costs in (
        [cost_of(item.key_begin, item.key_end, item.num_rows) for item in plan.items],
        [wide_cost(item) for item in plan.wide_items],
    ):
        assert costs == sorted(costs, reverse=True), "not longest first"


def makespan(plan: Plan, kv_heads: int, blocks_at_once: int) -> int:
    """Return the time of a device that starts the next block whenever a block ends."""
    free = [0] * blocks_at_once
    for item in plan.items:
        cost = cost_of(item.key_begin, item.key_end, item.num_rows)
        for _ in range(kv_heads):
            heapq.heapreplace(free, free[0] + cost + WAVE_COST)
    return max(free)


@pytest.mark.parametrize("group", [1, 2, 3, 8])
def test_every_small_batch_is_covered_exactly(group: int) -> None:
    sizes = (0, 1, 2, 5, 33)
    contexts = (0, 1, 31, 32, 200, 2000)
    pairs = list(itertools.product(sizes, contexts))
    for first, second in itertools.product(pairs, pairs):
        lengths, starts = [first[0], second[0]], [first[1], second[1]]
        for blocks in (BlocksAtOnce(1), BlocksAtOnce(7), BlocksAtOnce(64), BlocksAtOnce(9, 13)):
            plan = plan_work(lengths, starts, group, 2, TILING, blocks)
            check(plan, lengths, starts, group, TILING)
            if blocks.wide is None:
                assert not plan.wide_items
            else:
                assert all(item.num_rows <= NARROW for item in plan.items)
                assert all(item.num_rows > NARROW for item in plan.wide_items)


@pytest.mark.parametrize("seed", range(200))
def test_random_batches_are_exact_and_balanced(seed: int) -> None:
    draw = random.Random(seed)
    kv_heads, group = draw.choice((1, 2, 4, 8)), draw.choice((1, 2, 4, 7))
    blocks_at_once = draw.choice((16, 132, 216, 264))
    context_max = draw.choice((200, 4_000, 60_000))
    num_slices = draw.choice((1, 2, 8, 60, 256))
    lengths = [draw.choice((1, 1, 1, 4, 20, 300)) for _ in range(num_slices)]
    starts = [int(context_max * draw.random() ** 3) for _ in range(num_slices)]
    plan = plan_work(lengths, starts, group, kv_heads, TILING, BlocksAtOnce(blocks_at_once))
    check(plan, lengths, starts, group, TILING)
    total = sum(cost_of(item.key_begin, item.key_end, item.num_rows) for item in plan.items)
    mean = total * kv_heads / blocks_at_once
    # Longest-first is at most the mean plus one item. No part is shorter than the allowed minimum.
    assert (
        makespan(plan, kv_heads, blocks_at_once)
        <= 1.6 * mean + 2 * (PART_PAGES_MIN + WAVE_COST) * 2
    )


def test_one_long_context_fills_the_machine() -> None:
    plan = plan_work([1], [65_535], 4, 8, TILING, BlocksAtOnce(264))
    assert 0.9 * 264 <= len(plan.items) * 8 <= 264
    assert len(plan.merges) == 1


def test_a_last_wave_that_would_be_almost_empty_is_avoided() -> None:
    """Without cuts, 300 equal blocks would take two waves, because the device runs 264 blocks at once."""
    whole = 300 * (3200 // PAGE_SLOTS) / 264
    plan = plan_work([1] * 300, [3199] * 300, 1, 1, TILING, BlocksAtOnce(264))
    assert makespan(plan, 1, 264) < 1.3 * whole


def test_many_equal_contexts_are_not_cut() -> None:
    plan = plan_work([1] * 200, [4000] * 200, 4, 8, TILING, BlocksAtOnce(264))
    assert not plan.merges
    assert len(plan.items) == 200


def test_an_empty_batch_has_an_empty_plan() -> None:
    assert plan_work([], [], 4, 8, TILING, BlocksAtOnce(264)) == Plan([], [], [], 0)
    assert plan_work([0, 0], [5, 9], 4, 8, TILING, BlocksAtOnce(264)) == Plan([], [], [], 0)


def test_the_part_limit_is_never_below_the_minimum() -> None:
    for count, cost, blocks_at_once in itertools.product((1, 3, 50), (1, 2, 4, 100), (1, 8, 500)):
        kinds = Counter({(cost, 4, False): count})
        assert part_limit(kinds, 2, blocks_at_once).limit >= PART_PAGES_MIN


# -- Hopper: the kernel of wide tiles has persistent blocks of its own --

PAGES_OF_A_STAGE = 4


def wide_cost(item: Item) -> int:
    """Return the cost in pages. The kernel always processes whole stages."""
    pages = -(-(item.key_end - item.key_begin) // PAGE_SLOTS)
    return -(-pages // PAGES_OF_A_STAGE) * PAGES_OF_A_STAGE + WAVE_COST


def snake_time(plan: Plan, kv_heads: int, snake: bool = True) -> int:
    """Return the time of the slowest block. Blocks take items in alternating (snake) order."""
    costs = [wide_cost(item) for item in plan.wide_items for _ in range(kv_heads)]
    taken = [0] * 132
    for index, cost in enumerate(costs):
        turn, place = divmod(index, 132)
        taken[131 - place if snake and turn % 2 else place] += cost
    return max(taken)


def over_ideal(plan: Plan, kv_heads: int, snake: bool = True) -> float:
    """Return `snake_time` divided by the mean time of a block that only reads the pages."""
    whole = sum(-(-(i.key_end - i.key_begin) // PAGE_SLOTS) for i in plan.wide_items)
    return snake_time(plan, kv_heads, snake) / (whole * kv_heads / 132)


@pytest.mark.parametrize(
    ("length", "start", "limit"),
    [(512, 15_872, 1.08), (4096, 0, 1.09), (2048, 0, 1.15), (1024, 3000, 1.09), (512, 4000, 1.15)],
)
def test_wide_work_is_planned_for_the_blocks_that_hoppers_kernel_runs(
    length: int, start: int, limit: float
) -> None:
    """The plans are for the heads of Llama 3 8B on 132 multiprocessors."""
    plan = plan_work([length], [start], 4, 8, TILING, HOPPER)
    check(plan, [length], [start], 4, TILING)
    assert over_ideal(plan, 8) <= limit
    assert over_ideal(plan, 8) <= over_ideal(plan, 8, snake=False)


def test_a_plan_for_twice_as_many_blocks_cuts_and_merges_a_prompt() -> None:
    """That plan has 17 MB of partial results in every layer."""
    before = plan_work([512], [15_872], 4, 8, TILING, BlocksAtOnce(264, 264))
    now = plan_work([512], [15_872], 4, 8, TILING, HOPPER)
    assert len(now.wide_items) * 8 == 128
    assert not now.merges
    assert len(before.merges) == 16
    assert before.num_part_rows * 8 * 129 * 4 > 16e6


def test_a_prompt_beside_decodes_is_neither_cut_nor_merged() -> None:
    """512 tokens with a context of 4,000 run beside 64 decodes. Each kind fills its own kernel."""
    lengths, starts = [512] + [1] * 64, [4000] + [1000] * 64
    plan = plan_work(lengths, starts, 4, 8, TILING, HOPPER)
    check(plan, lengths, starts, 4, TILING)
    assert len(plan.wide_items) * 8 == 128
    assert len(plan.items) == 64
    assert plan.num_part_rows == 0


def test_wide_tiles_stay_whole_if_a_merge_costs_more_than_it_saves() -> None:
    """Merging a part of 128 rows moves as many bytes as eight pages, so short wide tiles are not cut."""
    plan = plan_work([512], [0], 4, 8, TILING, HOPPER)
    assert not plan.merges
    one = plan_work([32], [60_000], 4, 8, TILING, HOPPER)
    assert len(one.merges) == 1, (
        "a single wide tile over a long context is cut for the whole machine"
    )
    assert 0.8 * 132 <= len(one.wide_items) * 8 <= 132


@pytest.mark.parametrize("seed", range(60))
def test_random_batches_on_hopper_are_exact_and_balanced(seed: int) -> None:
    draw = random.Random(seed)
    kv_heads, group = draw.choice((1, 2, 4, 8)), draw.choice((1, 2, 4, 7))
    context_max = draw.choice((200, 4_000, 60_000))
    num_slices = draw.choice((1, 2, 8, 60))
    lengths = [draw.choice((1, 1, 20, 300, 2000)) for _ in range(num_slices)]
    starts = [int(context_max * draw.random() ** 3) for _ in range(num_slices)]
    plan = plan_work(lengths, starts, group, kv_heads, TILING, HOPPER)
    check(plan, lengths, starts, group, TILING)
    for item in plan.wide_items:
        assert item.key_begin % (PAGES_OF_A_STAGE * PAGE_SLOTS) == 0
    if plan.wide_items:
        costs = [wide_cost(item) * kv_heads for item in plan.wide_items]
        longest = max(costs) // kv_heads
        assert snake_time(plan, kv_heads) <= 1.1 * sum(costs) / 132 + longest
