"""End times of iterations with streamed groups, compared with times computed by hand.

A range such as 3-6 means: from second 3 to second 6.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import replace
from itertools import pairwise

import pytest

from pensieve.core.iteration import Iteration, PageGroup, Slice, SwapIn, SwapOut, TurnStart
from pensieve.sampling import Sampling
from pensieve.sim.cost import CostModel
from pensieve.sim.executor import (
    GroupSeconds,
    LayerArrivals,
    Links,
    ModelledExecutor,
    VirtualClock,
    staged,
)

NOTHING = LayerArrivals()


def end_of(layers: int, layer_seconds: float, *groups: GroupSeconds) -> float:
    return staged(0.0, layers, layer_seconds, groups, Links(), NOTHING)[0]


def test_one_group_alternates_between_both_arenas() -> None:
    """Loads at 0-3 and 3-6, independent of the device; attention at 3-4 and 6-7; stores after each."""
    ends, links = staged(0.0, 2, 1.0, [GroupSeconds(3.0, 1.0, 0.5)], Links(), NOTHING)
    assert ends == 7.0
    assert links == Links(6.0, (4.5, 7.5))


def test_loads_overlap_with_a_slower_device() -> None:
    """Each load runs while the device computes something else, so loads add no time."""
    assert end_of(2, 1.0, GroupSeconds(1.0, 1.0, 0.0), GroupSeconds(1.0, 1.0, 0.0)) == 6.0


def test_with_a_slow_link_loads_determine_the_time() -> None:
    """Six loads of 5 s, one after another, and then the attention of the last one."""
    assert end_of(3, 1.0, GroupSeconds(5.0, 1.0, 0.0), GroupSeconds(5.0, 1.0, 0.0)) == 31.0


def test_an_arena_is_free_after_its_store() -> None:
    """Stores run at 2-6 and 6-10. So load 2 runs at 6-7, load 3 at 10-11, and the last attention at 11-12."""
    group = GroupSeconds(1.0, 1.0, 4.0)
    ends, links = staged(0.0, 2, 1.0, [group, group], Links(), NOTHING)
    assert ends == 12.0
    assert links == Links(11.0, (14.0, 18.0))
    # In the next iteration the arenas are still in use. Its first load runs at 14-15, attention until 16.
    assert staged(ends, 1, 1.0, [group], links, NOTHING)[0] == 16.0


def test_a_layer_waits_for_its_swap_ins_and_loads_follow_all_swap_ins() -> None:
    """Swap-ins end at 2 and 4. Loads run at 4-5 and 5-6. The layers' dense parts run at 2-3 and 6-7."""
    group = GroupSeconds(1.0, 1.0, 0.0)
    ends, _ = staged(0.0, 2, 1.0, [group], Links(4.0), LayerArrivals(2.0, 2.0))
    assert ends == 8.0
    assert staged(0.0, 2, 1.0, [group], Links(4.0), LayerArrivals(9.0, 2.0))[0] == 13.0


def test_the_end_is_between_the_longest_lane_and_the_sum_of_all_lanes() -> None:
    draw = random.Random(7)
    for _ in range(300):
        layers, dense = draw.randint(1, 6), draw.random()
        groups = [
            GroupSeconds(*(draw.random() for _ in range(3))) for _ in range(draw.randint(1, 5))
        ]
        loads, attends, stores = (layers * sum(each) for each in zip(*groups, strict=True))
        ends, links = staged(0.0, layers, dense, groups, Links(), NOTHING)
        assert ends >= max(layers * dense + attends, loads + groups[-1].attend) - 1e-9
        assert max(links.arenas) >= stores
        assert ends <= layers * dense + loads + attends + stores + 1e-9
        slower = [replace_load(each) for each in groups]
        assert staged(0.0, layers, dense, slower, Links(), NOTHING)[0] >= ends


def replace_load(group: GroupSeconds) -> GroupSeconds:
    return group._replace(load=group.load * 1.5)


# A token takes 1 s in the dense part, and a key takes 1 s in attention. There are 2 layers. A token's KV has
# 2 bytes, and the link copies one byte a second.
COST = CostModel(1.0, 0.0, 0.0, 1.0, 0.0, 2, 2, 1.0, "made up")


def an_iteration(index: int, *, with_copies: bool = False) -> Iteration:
    """Return decodes: a resident turn with 3 tokens of context, and streamed turns with 4 and 5."""
    tokens = array("I", [0])
    slices = tuple(
        Slice(turn, length, length + 1, tokens, array("i", [0]), True)
        for turn, length in ((1, 3), (2, 4), (3, 5))
    )
    started = tuple(
        TurnStart(piece.attempt_id, array("I", bytes(4 * piece.start)), Sampling())
        for piece in slices
    )
    groups = tuple(
        PageGroup(first, stop, array("i", [7]), array("i", [loaded]), array("i", [1]))
        for (first, stop), loaded in zip(pairwise((1, 2, 3)), (4, 5), strict=True)
    )
    copies = {
        "swap_ins": (SwapIn(1, 0, 0, 3),),
        "swap_outs": (SwapOut(2, 0, 0, 4),),
    }
    iteration = Iteration(index, slices, started=started, groups=groups)
    return replace(iteration, **copies) if with_copies else iteration  # type: ignore[arg-type]


def test_an_executor_takes_the_time_of_its_lanes() -> None:
    """In each layer: dense 1.5 s, resident attention 2 s, groups 2.5 and 3 s, loads 4 and 5 s, stores 1 s.

    Loads end at 4, 9, 13 and 18, so the arenas are free in time. Layer 0: dense and resident until 3.5, then
    groups at 4-6.5 and 9-12. Layer 1: until 15.5, then groups at 15.5-18 and 18-21.
    """
    clock = VirtualClock()
    executor = ModelledExecutor(COST, clock)
    executor.launch(an_iteration(1))
    outcome = executor.collect()
    assert clock.now() == pytest.approx(21.0)
    assert [sample.attempt_id for sample in outcome.samples] == [1, 2, 3]
    # Arena 1 was stored at 22. Loads at 21-25, 25-30, 30-34 and 34-39, so the last attention is at 39-42.
    executor.launch(replace(an_iteration(2), started=()))
    executor.collect()
    assert clock.now() == pytest.approx(42.0)


def test_loads_wait_for_swap_ins_but_stores_do_not_wait_for_swap_outs() -> None:
    """Swap-ins use the link until 6, and layers wait for theirs until 3 and 6. Loads run at 6-10, … 19-24.

    Swap-outs of 8 s end at 12, because stores of 4 s go before them.
    """
    clock = VirtualClock()
    executor = ModelledExecutor(COST, clock)
    executor.launch(an_iteration(1, with_copies=True))
    outcome = executor.collect()
    assert clock.now() == pytest.approx(27.0)
    assert sorted(outcome.finished_copies) == [1, 2]


def test_long_stores_delay_loads_of_the_next_iteration_and_swap_outs() -> None:
    """In each layer of the only turn: dense 0.5 s, load 4 s, attention 2.5 s, store 20 s.

    Stores run at 6.5-26.5 and 26.5-46.5, and then a swap-out of 8 s. The next loads begin at 26.5 and 46.5.
    """
    both = an_iteration(1, with_copies=True)
    stored = PageGroup(0, 1, array("i", [7]), array("i", [4]), array("i", [20]))
    iteration = replace(both, slices=both.slices[1:2], groups=(stored,), swap_ins=())
    clock = VirtualClock()
    executor = ModelledExecutor(COST, clock)
    executor.launch(iteration)
    assert executor.collect().finished_copies == ()
    assert clock.now() == pytest.approx(10.5)
    executor.launch(replace(iteration, index=2, started=(), swap_outs=()))
    assert executor.collect().finished_copies == (2,)
    assert clock.now() == pytest.approx(53.0)


def test_groups_without_copies_take_as_long_as_resident_slices() -> None:
    """In this cost model attention depends on keys only. So it takes the same time in groups."""
    iteration = an_iteration(1)
    empty = array("i", [0])
    free = replace(
        iteration,
        groups=tuple(
            each._replace(loaded_slots=empty, stored_slots=empty) for each in iteration.groups
        ),
    )
    times = []
    for each in (free, replace(iteration, groups=())):
        clock = VirtualClock()
        executor = ModelledExecutor(COST, clock)
        executor.launch(each)
        executor.collect()
        times.append(clock.now())
    assert times[0] == pytest.approx(times[1])
