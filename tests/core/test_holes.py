"""Positions without KV are recomputed in the same iteration as the tokens after them."""

from __future__ import annotations

from typing import Any

from pensieve.core.turn import Turn
from tests.core.world import ScriptedWorld


def world_with_hole(budget: int = 16) -> tuple[ScriptedWorld, Turn]:
    """Return a world and a turn of `a`. The first of the three chunks of `a` is lost."""
    world = ScriptedWorld(16, 0, batch_tokens_max=budget)
    world.say("a", 12)
    world.wait(1.0)
    world.say("filler", 55)
    world.delete("filler")
    assert world.where("a") == "-xx"
    return world, world.ask("a", 3, 2)


def test_a_hole_is_repaired_in_the_same_iteration_as_the_new_tokens() -> None:
    world, turn = world_with_hole()
    world.next()
    assert world.slices() == [("a", 0, 4), ("a", 12, 16)]
    assert world.scheduler.counters.repaired_ranges_max == 2
    assert (turn.usage.recomputed_tokens, turn.usage.device_tokens) == (4, 8)
    assert world.scheduler.counters.recomputed_tokens == 4


def test_with_a_small_budget_holes_are_repaired_before_the_new_tokens() -> None:
    world, _ = world_with_hole(budget=3)
    seen = []
    for _ in range(3):
        world.next()
        seen.append(world.slices())
    assert seen == [[("a", 0, 3)], [("a", 3, 4), ("a", 12, 14)], [("a", 14, 16)]]


def test_three_disconnected_ranges_are_computed_in_one_iteration() -> None:
    """Chunks 0 and 3 of five are missing, and the new tokens are the third range."""
    world = ScriptedWorld(20, 0, batch_tokens_max=64)
    world.say("a", 20)
    for chunk in (world.chunks("a")[0], world.chunks("a")[3]):
        world.cache.tiers.count_reclaimable(chunk, -1)
        world.cache.tiers.free_device(chunk)
    turn = world.ask("a", 1)
    world.next()
    assert world.slices() == [("a", 0, 4), ("a", 12, 16), ("a", 20, 22)]
    assert world.latest is not None
    assert [piece.needs_token for piece in world.latest.slices] == [False, False, True]
    assert (turn.usage.recomputed_tokens, turn.usage.device_tokens) == (8, 12)


def shared_hole(**shape: Any) -> ScriptedWorld:
    """`a` and `b` share 8 tokens of KV, in two chunks. The first chunk is lost."""
    world = ScriptedWorld(16, 0, **shape)
    world.say("a", 8)
    world.fork_at("a", 8, "b")
    world.wait(1.0)
    world.say("filler", 58, 2)
    world.delete("filler")
    assert (world.where("a"), world.where("b")) == ("-x", "-x")
    return world


def test_two_conversations_that_miss_the_same_chunk_compute_it_once() -> None:
    world = shared_hole()
    world.ask("a", 3)
    world.ask("b", 4)
    world.next()
    assert world.slices() == [("a", 0, 4), ("a", 8, 12), ("b", 8, 12)]
    world.run_until_idle()


def test_two_turns_share_the_repair_of_a_chunk_when_the_budget_cuts_it() -> None:
    world = shared_hole(batch_tokens_max=6)
    a = world.ask("a", 3)
    world.next()
    assert world.slices() == [("a", 0, 4), ("a", 8, 10)]
    world.cancel_at(a, a.history_tokens)  # the chunks that `a` has recomputed stay
    b = world.ask("b", 4)
    world.next()
    assert world.slices() == [("b", 8, 12)]
    assert (b.usage.device_tokens, b.usage.recomputed_tokens) == (7, 0)
