"""A warm request brings KV to the device before a turn, in pages that no turn needs."""

from __future__ import annotations

from pensieve.core.turn import FinishReason, TurnState
from tests.core.world import Stage


def test_a_warm_brings_a_conversation_to_the_device_and_generates_no_tokens() -> None:
    stage = Stage(12, 20)
    stage.say("a", 8)
    stage.say("filler", 43)
    stage.run_until_idle()
    stage.delete("filler")
    assert stage.where("a") == "hc"
    warm = stage.warm("a")
    stage.run_until_idle()
    assert warm.finish is FinishReason.WARMED
    assert warm.usage.output_tokens == 0
    assert stage.where("a") == "ccd"
    turn = stage.say("a", 2)
    assert (turn.usage.device_tokens, turn.usage.host_tokens) == (8, 0)


def test_a_warm_uses_only_pages_above_the_mark_and_ends_when_there_are_none() -> None:
    stage = Stage(12, 0, batch_tokens_max=32)
    stage.say("a", 8)
    running = stage.ask("b", 24, 9)
    stage.next()
    assert stage.cache.available == 4
    # The next token of "b" takes a page. A third page for "a" would leave 2 pages, which is the minimum.
    warm = stage.warm("a")
    stage.next()
    assert warm.finish is FinishReason.WARMED
    assert stage.where("a") == "dd"
    stage.until_ended(running)


def test_a_warm_that_had_nothing_to_compute_is_forgotten() -> None:
    """Such a warm starts and ends in one iteration."""
    stage = Stage(12, 20)
    stage.say("a", 8)
    stage.cache.evict("a", stage.now)
    for _ in range(3):
        stage.warm("a")
        stage.run_until_idle()
        stage.warm("a")  # all its KV is on the device already
        stage.run_until_idle()
    turn = stage.ask("b", 2, 3)
    stage.next()
    assert stage.executor.known_turns == [turn.attempt_id]


def test_a_warm_ends_first_when_a_turn_needs_pages() -> None:
    stage = Stage(16, 0, batch_tokens_max=2, swap_out_below=0.1)
    stage.say("w", 20, 1)
    stage.cache.evict("w", stage.now)
    warm = stage.warm("w")  # needs 6 pages, which are filled 2 tokens at a time
    stage.next()
    assert warm.state is TurnState.RUNNING
    running = stage.ask("a", 1, 50)
    stage.until_ended(running)
    assert warm.finish is FinishReason.WARMED
    assert running.usage.suspensions == 0
