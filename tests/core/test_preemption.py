"""Which turns preempt which other turns, what a preemption costs, and that every turn ends."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pensieve.core.turn import PRIORITY_MAX, FinishReason, Turn, TurnState
from tests.core.world import ScriptedWorld


def full_world(
    num_turns: int, reply: int = 40, overlap: bool = False, **shape: Any
) -> ScriptedWorld:
    """Return a world that is full: `num_turns` turns generate, and no other may run beside them."""
    shape = {
        "batch_tokens_max": 64,
        "turns_max": num_turns,
        "overlap": overlap,
        "late": 0.0,
        **shape,
    }
    world = ScriptedWorld(20 * num_turns + reply // 4, 400, **shape)
    for number in range(num_turns):
        world.ask(f"low{number}", 6, reply)
    for _ in range(4):
        world.next()
    assert all(turn.usage.output_tokens >= 1 for turn in world.turns.values())
    return world


def iterations_until(world: ScriptedWorld, turn: Turn) -> int:
    """Return the number of iterations until the one that computes the turn's prompt."""
    for number in range(50):
        world.step()
        pieces = world.latest.slices if world.latest is not None else ()
        if any(piece.attempt_id == turn.attempt_id for piece in pieces):
            return number
    raise AssertionError("the turn was not scheduled within 50 iterations")


# -- by priority --


@pytest.mark.parametrize("overlap", [False, True])
def test_a_higher_priority_waits_for_at_most_two_iterations(overlap: bool) -> None:
    """The batch is full, and 1,100 other turns wait."""
    world = full_world(6, overlap=overlap)
    waiting = [world.ask(f"more{number}", 6, 4) for number in range(1100)]
    high = world.ask("high", 6, 4, priority=1)
    assert iterations_until(world, high) <= int(overlap)
    assert world.scheduler.counters.preemptions == 1
    assert not any(turn.usage.admitted_at for turn in waiting)
    world.run_until_idle(checks_every=50)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_higher_priority_waits_for_at_most_two_iterations_for_pages(overlap: bool) -> None:
    """The turns that must give way have no host copies yet."""
    world = ScriptedWorld(40, 400, batch_tokens_max=64, turns_max=64, overlap=overlap, late=0.0)
    low = [world.ask(f"low{number}", 6, 60) for number in range(10)]
    while world.cache.available > 3:
        world.next()
    high = world.ask("high", 24, 2, priority=3)
    assert iterations_until(world, high) <= 2
    world.run_until_idle()
    assert any(turn.usage.suspensions for turn in low)
    assert high.usage.suspensions == 0


def test_the_latest_turn_of_lowest_priority_is_preempted_and_resumes_first() -> None:
    world = ScriptedWorld(100, 100, batch_tokens_max=64, turns_max=3)
    a, b, c = (
        world.ask(name, 4, 30, priority=level) for name, level in (("a", 0), ("b", -1), ("c", 0))
    )
    world.next()
    late = world.ask("late", 4, 3)
    high = world.ask("high", 4, 3, priority=2)
    world.next()
    states = [turn.state for turn in (a, b, c, high, late)]
    assert states[1] is TurnState.SUSPENDED
    assert states[0] is states[2] is states[3] is TurnState.RUNNING
    world.until_ended(high)
    world.next()
    assert b.state is TurnState.RUNNING, (
        "it must run before the turn of the same level that never ran"
    )
    assert late.state is TurnState.QUEUED
    world.run_until_idle()


def test_a_turn_of_equal_priority_waits() -> None:
    world = full_world(2)
    other = world.ask("other", 6, 2)
    for _ in range(10):
        world.next()
    assert other.state is TurnState.QUEUED
    assert not world.scheduler.counters.preemptions


def test_preemption_recomputes_no_position_that_is_still_held() -> None:
    """With a host that holds everything, each position is computed once despite all preemptions."""
    world = ScriptedWorld(24, 400, batch_tokens_max=64, turns_max=64)
    turns = [world.ask(f"low{number}", 9, 40) for number in range(6)]
    draw = random.Random(1)
    for number in range(12):
        for _ in range(draw.randrange(2, 9)):
            world.next()
        turns.append(world.ask(f"high{number}", draw.randrange(1, 30), 5, priority=1 + number % 3))
    world.run_until_idle()
    counters = world.scheduler.counters
    assert counters.preemptions >= 3
    assert world.cache.counters.dropped == 0
    assert counters.recomputed_tokens == 0
    assert counters.tokens == sum(len(turn.tokens) - 1 for turn in turns)


def test_a_preempted_turn_rises_a_level_so_preemptions_are_bounded() -> None:
    world = full_world(1, reply=400)
    (low,) = world.turns.values()
    for number in range(40):
        world.until_ended(world.ask(f"high{number}", 2, 1, priority=2))
        world.step()
    assert low.usage.suspensions == 2, "suspended once at level 0 and once at level 1"
    world.run_until_idle()
    assert low.level == 2

    world = full_world(1, reply=400)
    (low,) = world.turns.values()
    for number in range(40):
        world.until_ended(world.ask(f"high{number}", 2, 1, priority=PRIORITY_MAX))
        world.step()
    assert low.usage.suspensions == PRIORITY_MAX


def test_low_priority_turns_end_beside_a_stream_of_high_priority_turns() -> None:
    """A waiting turn runs after at most TURNS_A_PRIORITY turns of the next higher priority."""
    world = ScriptedWorld(64, 0, batch_tokens_max=64, turns_max=2)
    low = [world.ask(f"low{number}", 4, 3) for number in range(4)]
    for number in range(600):
        world.ask(f"high{number}", 4, 3, priority=1)
        world.next()
    assert all(turn.finish is not None for turn in low)


def test_a_turn_that_claims_pages_gives_them_up_to_a_higher_level() -> None:
    """Copies are slow, so the pages of the preempted turns become free late."""
    world = ScriptedWorld(80, 400, batch_tokens_max=64, turns_max=64, swap_outs_max=1, late=0.5)
    low = [world.ask(f"low{number}", 20, 60) for number in range(10)]
    while world.cache.available > 8:
        world.next()
    middle = world.ask("middle", 180, 4, priority=1)
    world.next()
    assert world.scheduler.preemption.claimant is middle
    high = world.ask("high", 4, 2, priority=8)
    assert iterations_until(world, high) <= 6
    assert middle.state is TurnState.QUEUED
    world.run_until_idle()
    assert all(turn.finish is not None for turn in low)


def test_no_turn_is_preempted_if_the_objective_is_missed_anyway() -> None:
    """An iteration takes 10 ms, plus 0.1 ms per position. Two long contexts exceed the objective."""
    world = ScriptedWorld(
        400,
        400,
        batch_tokens_max=256,
        turns_max=64,
        iteration_seconds=0.010,
        key_seconds=0.0001,
        tbt_seconds=0.045,
        late=0.0,
    )
    high = world.ask("high", 180, 60, priority=5)
    for number in range(8):
        world.ask(f"low{number}", 4, 40)
    for _ in range(6):
        world.next()
    middle = world.ask("middle", 200, 2, priority=1)
    for _ in range(20):
        world.next()
    assert middle.state is TurnState.QUEUED
    assert world.scheduler.counters.preemptions == 0
    assert len(world.scheduler.running) >= 5
    world.run_until_idle()
    assert high.finish is middle.finish


def test_a_warm_is_suspended_first_and_suspends_no_turn() -> None:
    world = ScriptedWorld(60, 200, batch_tokens_max=64, turns_max=64, late=0.0)
    world.say("b", 40)
    world.cache.evict("b", world.now)
    for number in range(12):
        world.ask(f"a{number}", 8, 40, share="a")
    for _ in range(12):
        world.next()
    for _ in range(4):
        if "b" not in world.turns:
            world.submit("b", warm=True, share="b")
        world.step()
    assert world.scheduler.counters.preemptions == 0
    world.run_until_idle()

    world = ScriptedWorld(60, 200, batch_tokens_max=16, turns_max=2, late=0.0)
    world.say("b", 60)
    world.cache.evict("b", world.now)
    other = world.ask("a", 4, 40)
    world.next()
    warm = world.warm("b")
    world.next()
    assert warm.state is TurnState.RUNNING
    new = world.ask("c", 4, 2)
    assert iterations_until(world, new) <= 1
    assert warm.finish is FinishReason.WARMED
    assert other.usage.suspensions == 0
    world.run_until_idle()


def test_a_shared_prefix_is_freed_when_all_its_turns_are_preempted() -> None:
    world = ScriptedWorld(100, 400, batch_tokens_max=256, turns_max=64, late=0.0)
    world.say("root", 200)
    for number in range(8):
        world.fork_at("root", 200, f"low{number}")
        world.ask(f"low{number}", 4, 12)
    world.next()
    world.next()
    high = world.ask("high", 240, 2, priority=8)
    assert iterations_until(world, high) <= 3
    world.run_until_idle()


# -- between shares --


def test_a_share_that_holds_all_pages_gives_up_a_part() -> None:
    """96 pages for three shares, about 32 each. The late shares get pages before any turn ends."""
    world = ScriptedWorld(96, 1000, batch_tokens_max=64, turns_max=64, late=0.0)
    for number in range(40):
        world.ask(f"flood{number}", 8, 300, share="flood", priority=PRIORITY_MAX)
    for _ in range(60):
        world.next()
    assert world.cache.available < 20
    ended = world.scheduler.counters.finished
    mine = [world.ask(f"mine{number}", 8, 12, share="mine") for number in range(3)]
    world.next()
    others = [world.ask(f"other{number}", 8, 12, share="other") for number in range(3)]
    for _ in range(12):
        world.next()
    assert all(turn.usage.admitted_at is not None for turn in mine + others)
    assert world.scheduler.counters.finished - ended <= 6
    assert world.scheduler.counters.preemptions >= 2


def test_two_shares_do_not_swap_pages_in_every_iteration() -> None:
    """Two shares want all pages. They swap pages a few times, not in every iteration."""
    world = ScriptedWorld(96, 1000, batch_tokens_max=64, turns_max=64, late=0.0)
    for name in ("a", "b"):
        for number in range(30):
            world.ask(f"{name}{number}", 8, 60, share=name)
        for _ in range(20):
            world.next()
    for _ in range(100):
        world.next()
    assert world.scheduler.counters.preemptions <= 30
    world.run_until_idle(checks_every=100)


def first_tokens(seed: int, slower: int = 1, only: str = "", flood: int = 0) -> list[float]:
    """Return the times to first token of two tenants whose turns arrive at random.

    A third tenant sends `flood` turns at once. With `only`, one of the two tenants runs alone, on a machine
    with memory, places and speed divided by `slower`.
    """
    world = ScriptedWorld(
        240 // slower,
        20_000,
        batch_tokens_max=256,
        turns_max=24 // slower,
        iteration_seconds=0.01 * slower,
        token_seconds=0.0002 * slower,
        late=0.0,
        seed=seed,
    )
    draw = random.Random(seed)
    for number in range(flood):
        world.ask(f"f{number}", 24, 40, share="flood", priority=PRIORITY_MAX)
    arrivals = sorted(
        (draw.uniform(1.5, 13.0), name, draw.randrange(8, 40)) for name in "ab" for _ in range(60)
    )
    mine = []
    for number, (at, name, size) in enumerate(arrivals):
        if only and name != only:
            continue
        while world.now < at:
            if not world.step(check=False):
                world.wait(at - world.now)
        mine.append(world.ask(f"{name}{number}", size, 20, share=name))
    for turn in mine:
        world.until_ended(turn)
    return [
        turn.usage.first_token_at - turn.usage.submitted_at
        for turn in mine
        if turn.usage.first_token_at is not None
    ]


def test_a_flood_does_not_pass_a_tenant_whose_long_reply_ran_alone() -> None:
    """A tenant's long reply runs alone. Then a tenant that has used almost nothing sends a flood."""
    world = ScriptedWorld(400, 400, batch_tokens_max=64, turns_max=8, late=0.0)
    long = world.ask("long", 4, 900, share="a")
    world.next()
    world.until_ended(world.ask("before", 4, 1, share="b"))
    for _ in range(600):
        world.next()
    flood = [world.ask(f"flood{number}", 4, 20, share="b") for number in range(200)]
    for _ in range(10):
        world.next()
    mine = world.ask("mine", 4, 2, share="a")
    ended = sum(turn.finish is not None for turn in flood)
    world.until_ended(mine)
    assert sum(turn.finish is not None for turn in flood) - ended <= 16
    assert long.usage.suspensions == 0


@pytest.mark.parametrize("seed", range(3))
def test_a_flood_at_the_highest_priority_leaves_other_tenants_their_share(seed: int) -> None:
    """The P99 time to first token is at most 1.1 times the P99 of runs alone on a third of the machine."""
    beside = first_tokens(seed, flood=1100)
    alone = first_tokens(seed, 3, "a") + first_tokens(seed, 3, "b")
    assert len(alone) == len(beside) == 120
    assert sorted(beside)[118] <= 1.1 * sorted(alone)[118]


# -- by time --


def run_rounds(time_share: int) -> tuple[float, float, ScriptedWorld]:
    """Let 24 turns compete for 8 places. Return the median time to first token, the total time, the world."""
    world = ScriptedWorld(
        400, 400, batch_tokens_max=64, turns_max=8, late=0.0, time_share=time_share
    )
    begun, turns = world.now, [world.ask(f"t{number}", 16, 40) for number in range(24)]
    world.run_until_idle(checks_every=20)
    firsts = sorted(turn.usage.first_token_at or 0.0 for turn in turns)
    return firsts[12] - begun, world.now - begun, world


def test_time_sharing_lowers_the_median_time_to_first_token() -> None:
    kept, end_kept, _ = run_rounds(0)
    shared, end_shared, world = run_rounds(8)
    assert shared < 0.6 * kept
    assert end_shared < 1.4 * end_kept
    assert world.scheduler.counters.preemptions > 10
    assert world.scheduler.counters.recomputed_tokens == 0


@pytest.mark.parametrize("time_share", [1, 2, 5])
def test_time_sharing_rotates_all_places(time_share: int) -> None:
    world = ScriptedWorld(
        400, 400, batch_tokens_max=64, turns_max=8, late=0.0, time_share=time_share
    )
    turns = [world.ask(f"t{number}", 8, 30) for number in range(24)]
    for _ in range(12 * 3):
        world.next()
    counts = [turn.num_output_tokens for turn in turns]
    assert max(counts) - min(counts) <= 4 + 4 * time_share, counts
    world.run_until_idle(checks_every=20)


def test_time_sharing_preempts_no_turn_before_its_time_is_over() -> None:
    world = ScriptedWorld(64, 64, batch_tokens_max=64, turns_max=1, time_share=5)
    a, b = world.ask("a", 4, 12), world.ask("b", 4, 12)
    said: list[str] = []
    while a.finish is None or b.finish is None:
        before = (a.num_output_tokens, b.num_output_tokens)
        world.next()
        said += ["a"] * (a.num_output_tokens - before[0]) + ["b"] * (
            b.num_output_tokens - before[1]
        )
    assert "".join(said) == "aaaaabbbbbaaaaabbbbbaabb"
