"""A warm request brings KV to the device before a turn, in pages that no turn needs."""

from __future__ import annotations

from pensieve.core.turn import FinishReason, TurnState
from tests.core.world import ScriptedWorld


def test_a_warm_brings_a_conversation_to_the_device_and_generates_no_tokens() -> None:
    world = ScriptedWorld(12, 20)
    world.say("a", 8)
    world.say("filler", 43)
    world.run_until_idle()
    world.delete("filler")
    assert world.where("a") == "hc"
    warm = world.warm("a")
    world.run_until_idle()
    assert warm.finish is FinishReason.WARMED
    assert warm.usage.output_tokens == 0
    assert world.where("a") == "ccd"
    turn = world.say("a", 2)
    assert (turn.usage.device_tokens, turn.usage.host_tokens) == (8, 0)


def test_a_warm_uses_only_pages_above_the_mark_and_ends_when_there_are_none() -> None:
    world = ScriptedWorld(12, 0, batch_tokens_max=32)
    world.say("a", 8)
    running = world.ask("b", 24, 9)
    world.next()
    assert world.cache.available == 4
    # The next token of "b" takes a page. A third page for "a" would leave 2 pages, which is the minimum.
    warm = world.warm("a")
    world.next()
    assert warm.finish is FinishReason.WARMED
    assert world.where("a") == "dd"
    world.until_ended(running)


def test_a_warm_that_had_nothing_to_compute_is_forgotten() -> None:
    """Such a warm starts and ends in one iteration."""
    world = ScriptedWorld(12, 20)
    world.say("a", 8)
    world.cache.evict("a", world.now)
    for _ in range(3):
        world.warm("a")
        world.run_until_idle()
        world.warm("a")  # all its KV is on the device already
        world.run_until_idle()
    turn = world.ask("b", 2, 3)
    world.next()
    assert world.executor.known_turns == [turn.attempt_id]


def test_a_warm_ends_first_when_a_turn_needs_pages() -> None:
    world = ScriptedWorld(16, 0, batch_tokens_max=2, swap_out_below=0.1)
    world.say("w", 20, 1)
    world.cache.evict("w", world.now)
    warm = world.warm("w")  # needs 6 pages, which are filled 2 tokens at a time
    world.next()
    assert warm.state is TurnState.RUNNING
    running = world.ask("a", 1, 50)
    world.until_ended(running)
    assert warm.finish is FinishReason.WARMED
    assert running.usage.suspensions == 0
