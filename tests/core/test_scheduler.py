"""What runs next, one behaviour at a time."""

from __future__ import annotations

import pytest

from pensieve.core.iteration import Iteration
from pensieve.core.turn import Turn, TurnState
from tests.core.world import Shape, World

CALM = Shape(device_pages=20, host_pages=20, late=0.0, reply_max=1, batch_tokens_max=64)


def world_of(shape: Shape = CALM, **logs: list[int]) -> World:
    """A world whose conversations have these logs already, computed and at rest."""
    world = World(0, shape)
    for name, prompt in logs.items():
        world.logs[name], world.commits[name] = [], [0]
        world.submit(name, prompt=prompt)
        world.settle()
        world.clock.advance(10.0)
    return world


def planned(world: World) -> Iteration:
    """Plan and carry out one iteration."""
    iteration = world.scheduler.plan(world.clock.now())
    assert iteration is not None
    world.executor.launch(iteration)
    for progress in world.scheduler.commit(iteration, world.executor.collect(), world.clock.now()):
        world._take(progress)
    world.scheduler.check(world.clock.now())
    return iteration


def spans(iteration: Iteration, turn: Turn) -> list[tuple[int, int]]:
    return [(piece.start, piece.stop) for piece in iteration.slices if piece.turn is turn]


def with_reply(world: World, name: str, prompt: list[int], reply: int) -> Turn:
    world.submit(name, prompt=prompt)
    turn = world.turns[name]
    turn.length_max = len(turn.tokens) + reply
    return turn


def test_a_returning_conversation_computes_only_what_is_new() -> None:
    world = world_of(a=[1, 2, 3, 4, 5])
    turn = with_reply(world, "a", [7, 8], 1)
    iteration = planned(world)
    assert spans(iteration, turn) == [(5, 8)]  # the last sampled token, and the two new ones
    usage = turn.usage
    assert (usage.new_tokens, usage.device_tokens, usage.recomputed_tokens) == (3, 5, 0)
    assert usage.prompt_tokens == 8


def test_what_was_copied_ahead_of_need_and_not_taken_costs_nothing() -> None:
    shape = Shape(device_pages=8, host_pages=20, late=0.0, reply_max=1)
    world = world_of(shape, a=[1] * 25)
    world.settle()
    clean = world.cache.clean_pages
    assert clean > 0
    turn = with_reply(world, "a", [7], 1)
    assert not planned(world).swap_ins
    assert turn.usage.device_tokens == 25
    assert world.cache.counters.reclaim_hits == clean


def test_dropped_chunks_are_recomputed_as_disconnected_slices() -> None:
    world = world_of(a=list(range(1, 21)))
    chunks = world.cache.conversations["a"].chunks()
    for chunk in (chunks[0], chunks[3]):  # a hole in front and one in the middle
        world.cache._count_reclaimable(chunk, -1)
        world.cache._free_device(chunk)
    turn = with_reply(world, "a", [9], 1)
    iteration = planned(world)
    assert spans(iteration, turn) == [(0, 4), (12, 16), (20, 22)]
    assert turn.usage.recomputed_tokens == 8
    assert [piece.needs_token for piece in iteration.slices] == [False, False, True]


def test_a_long_prefill_is_cut_and_others_generate_meanwhile() -> None:
    shape = Shape(device_pages=30, host_pages=0, batch_tokens_max=8, reply_max=1)
    world = World(0, shape)
    for name in "ab":
        world.logs[name], world.commits[name] = [], [0]
    talker = with_reply(world, "a", [1, 2], 12)
    planned(world)
    long = with_reply(world, "b", [5] * 20, 1)
    pieces = []
    while long.state is not TurnState.FINISHED:
        iteration = planned(world)
        assert iteration.num_tokens <= 8
        assert len(spans(iteration, talker)) == 1 or talker.finish is not None
        pieces += spans(iteration, long)
    assert [start for start, _ in pieces] == [0, *(stop for _, stop in pieces[:-1])]
    assert len(pieces) >= 3
    assert pieces[0] == (0, 7)  # one token of the budget is the talker's


def test_new_turns_leave_the_reserve_to_those_who_generate() -> None:
    shape = Shape(device_pages=20, host_pages=0, late=0.0, reply_max=1, batch_tokens_max=200)
    world = World(0, shape)
    for name in "abc":
        world.logs[name], world.commits[name] = [], [0]
    with_reply(world, "a", [1] * 40, 9)  # 10 of 20 pages
    with_reply(world, "b", [2] * 32, 9)  # 8 more would leave 2, the reserve
    with_reply(world, "c", [3] * 4, 9)  # waits: first come, first served
    iteration = planned(world)
    assert {piece.turn.conversation_id for piece in iteration.slices} == {"a", "b"}
    assert world.turns["c"].state is TurnState.QUEUED


def test_nothing_running_means_no_reserve() -> None:
    shape = Shape(device_pages=10, host_pages=0, late=0.0, reply_max=1, batch_tokens_max=200)
    world = World(0, shape)
    world.logs["a"], world.commits["a"] = [], [0]
    turn = with_reply(world, "a", [1] * 35, 1)  # 9 of 10 pages
    assert spans(planned(world), turn) == [(0, 35)]


def test_the_latest_arrived_is_suspended_and_resumes_first_computing_nothing_twice() -> None:
    shape = Shape(device_pages=8, host_pages=20, late=0.0, batch_tokens_max=64)
    for seed in range(40):  # replies end where the ledger says; take one that goes on
        world = World(seed, shape)
        for name in "abc":
            world.logs[name], world.commits[name] = [], [0]
        first = with_reply(world, "a", [seed + 1] * 11, 14)
        second = with_reply(world, "b", [seed + 2] * 11, 14)
        for _ in range(30):
            if second.state is TurnState.SUSPENDED or not world.step():
                break
        if second.state is not TurnState.SUSPENDED:
            continue
        assert first.state is TurnState.RUNNING
        third = with_reply(world, "c", [3], 1)
        world.settle()
        assert second.usage.admitted_at is not None
        assert third.usage.admitted_at is not None
        assert world.scheduler.counters.resumptions >= 1
        assert world.scheduler.counters.recomputed_tokens == 0
        assert second.usage.suspensions >= 1
        return
    pytest.fail("no seed suspended a turn")


def test_a_fork_inside_a_chunk_copies_its_first_slots_at_its_next_turn() -> None:
    world = world_of(a=[1, 2, 3, 4, 5, 6])  # one chunk of four and one of two, and the reply
    world.logs["f"], world.commits["f"] = world.logs["a"][:6], [0, 6]
    world.cache.fork("a", 6, "f", world.clock.now())
    assert world.cache.counters.copied_on_write == 0
    turn = with_reply(world, "f", [9], 1)
    iteration = planned(world)
    (copy,) = iteration.copies
    assert copy.num_slots == 2
    assert spans(iteration, turn) == [(6, 7)]
    assert turn.usage.recomputed_tokens == 0


def test_a_rewind_gives_the_cut_chunk_a_new_identity() -> None:
    world = world_of(a=[1, 2, 3, 4, 5, 6, 7])
    old = world.cache.conversations["a"].chunks()[1]
    world.logs["a"] = world.logs["a"][:6]
    world.scheduler.rewind("a", 6, world.clock.now())
    with_reply(world, "a", [9], 1)
    (copy,) = planned(world).copies
    assert copy.source_page == old.device_page or old.device_page is None
    assert world.cache.conversations["a"].chunks()[1] is not old


def test_a_chunk_that_two_miss_is_computed_once() -> None:
    world = world_of(a=[1, 2, 3, 4, 5, 6, 7, 8])
    world.logs["f"], world.commits["f"] = world.logs["a"][:8], [0, 8]
    world.cache.fork("a", 8, "f", world.clock.now())
    for chunk in world.cache.conversations["a"].chunks()[:2]:
        world.cache._count_reclaimable(chunk, -1)
        world.cache._free_device(chunk)
    one, two = with_reply(world, "a", [9], 1), with_reply(world, "f", [9], 1)
    iteration = planned(world)
    assert spans(iteration, one) == [(0, 10)]
    assert spans(iteration, two) == [(8, 9)]


def test_a_failed_turn_leaves_no_kv_behind() -> None:
    world = world_of(a=[1, 2, 3, 4, 5])
    world.executor.failing = 1.0
    with_reply(world, "a", [6, 7], 1)
    planned(world)
    assert world.scheduler.counters.failed == 1
    world.executor.failing = 0.0
    turn = with_reply(world, "a", [6, 7], 1)
    planned(world)
    assert turn.usage.recomputed_tokens == 5
    world.settle()


def test_a_warm_turn_fills_holes_and_says_nothing() -> None:
    world = world_of(a=list(range(1, 13)))
    assert world.cache.evict("a", world.clock.now()) > 0
    world.submit("a", warm=True)
    world.settle()
    turn = with_reply(world, "a", [5], 1)
    planned(world)
    assert turn.usage.recomputed_tokens == 0
    assert turn.usage.device_tokens == 12


def test_deleting_during_a_copy_frees_the_pages_after_it() -> None:
    shape = Shape(device_pages=8, host_pages=20, late=1.0, reply_max=1, batch_tokens_max=64)
    world = World(0, shape)
    world.logs["a"], world.commits["a"] = [], [0]
    with_reply(world, "a", [1] * 26, 1)
    planned(world)
    iteration = world.scheduler.plan(world.clock.now())
    assert iteration is not None
    assert iteration.swap_outs
    world.executor.launch(iteration)
    world.delete("a")
    held = shape.device_pages - world.cache.device.num_empty
    assert held == len(iteration.swap_outs)
    world.scheduler.commit(iteration, world.executor.collect(), world.clock.now())
    world.settle()
    assert world.cache.device.num_empty == shape.device_pages
    assert world.cache.host.num_empty == shape.host_pages


def test_a_host_of_no_pages_still_serves_everything_by_recompute() -> None:
    world = world_of(Shape(device_pages=8, host_pages=0, late=0.0, reply_max=1), a=[1] * 20)
    for name, prompt in (("b", [2] * 20), ("c", [3] * 20)):
        world.logs[name], world.commits[name] = [], [0]
        world.submit(name, prompt=prompt)
        world.settle()
    turn = with_reply(world, "a", [4], 1)
    world.settle()
    assert turn.usage.recomputed_tokens > 0
    assert world.cache.counters.swapped_out == 0
