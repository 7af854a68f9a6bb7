"""Positions without KV are recomputed in the same iteration as the tokens after them."""

from __future__ import annotations

from typing import Any

from pensieve.core.turn import Turn
from tests.core.world import Stage


def repaired(budget: int = 16) -> tuple[Stage, Turn]:
    """Return a stage and a turn of `a`. The first of the three chunks of `a` is lost."""
    stage = Stage(16, 0, batch_tokens_max=budget)
    stage.say("a", 12)
    stage.wait(1.0)
    stage.say("filler", 55)
    stage.delete("filler")
    assert stage.where("a") == "-xx"
    return stage, stage.ask("a", 3, 2)


def test_a_hole_is_repaired_in_the_same_iteration_as_the_new_tokens() -> None:
    stage, turn = repaired()
    stage.next()
    assert stage.slices() == [("a", 0, 4), ("a", 12, 16)]
    assert stage.scheduler.counters.repaired_ranges_max == 2
    assert (turn.usage.recomputed_tokens, turn.usage.device_tokens) == (4, 8)
    assert stage.scheduler.counters.recomputed_tokens == 4


def test_with_a_small_budget_holes_are_repaired_before_the_new_tokens() -> None:
    stage, _ = repaired(budget=3)
    seen = []
    for _ in range(3):
        stage.next()
        seen.append(stage.slices())
    assert seen == [[("a", 0, 3)], [("a", 3, 4), ("a", 12, 14)], [("a", 14, 16)]]


def test_three_disconnected_ranges_are_computed_in_one_iteration() -> None:
    """Chunks 0 and 3 of five are missing, and the new tokens are the third range."""
    stage = Stage(20, 0, batch_tokens_max=64)
    stage.say("a", 20)
    for chunk in (stage.chunks("a")[0], stage.chunks("a")[3]):
        stage.cache.tiers.count_reclaimable(chunk, -1)
        stage.cache.tiers.free_device(chunk)
    turn = stage.ask("a", 1)
    stage.next()
    assert stage.slices() == [("a", 0, 4), ("a", 12, 16), ("a", 20, 22)]
    assert stage.latest is not None
    assert [piece.needs_token for piece in stage.latest.slices] == [False, False, True]
    assert (turn.usage.recomputed_tokens, turn.usage.device_tokens) == (8, 12)


def shared_hole(**shape: Any) -> Stage:
    """`a` and `b` share 8 tokens of KV, in two chunks. The first chunk is lost."""
    stage = Stage(16, 0, **shape)
    stage.say("a", 8)
    stage.fork_at("a", 8, "b")
    stage.wait(1.0)
    stage.say("filler", 58, 2)
    stage.delete("filler")
    assert (stage.where("a"), stage.where("b")) == ("-x", "-x")
    return stage


def test_two_conversations_that_miss_the_same_chunk_compute_it_once() -> None:
    stage = shared_hole()
    stage.ask("a", 3)
    stage.ask("b", 4)
    stage.next()
    assert stage.slices() == [("a", 0, 4), ("a", 8, 12), ("b", 8, 12)]
    stage.run_until_idle()


def test_two_turns_share_the_repair_of_a_chunk_when_the_budget_cuts_it() -> None:
    stage = shared_hole(batch_tokens_max=6)
    a = stage.ask("a", 3)
    stage.next()
    assert stage.slices() == [("a", 0, 4), ("a", 8, 10)]
    stage.cancel_at(a, a.history_tokens)  # the chunks that `a` has recomputed stay
    b = stage.ask("b", 4)
    stage.next()
    assert stage.slices() == [("b", 8, 12)]
    assert (b.usage.device_tokens, b.usage.recomputed_tokens) == (7, 0)
