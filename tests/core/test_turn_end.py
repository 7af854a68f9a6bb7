"""What remains of a turn that is cancelled, or whose conversation is deleted."""

from __future__ import annotations

from pensieve.core.turn import FinishReason, TurnState
from tests.core.world import Stage


def test_cancelling_a_queued_turn_keeps_only_kv_of_logged_tokens() -> None:
    stage = Stage(8, 0)
    stage.say("a", 4)
    turn = stage.ask("a", 4)
    stage.cancel_at(turn, 5)
    assert turn.state is TurnState.FINISHED
    assert stage.where("a") == "d"
    stage.cancel_at(stage.ask("a", 4), 0)
    assert stage.where("a") == ""
    assert stage.scheduler.num_turns == 0


def test_cancelling_keeps_exactly_the_tokens_that_the_reader_has_seen() -> None:
    stage = Stage(8, 0)
    turn = stage.ask("a", 4, 10)
    for _ in range(4):
        stage.next()
    assert len(turn.tokens) == 8
    stage.cancel_at(turn, 6)
    assert stage.logs["a"] == list(turn.tokens[:6])
    assert stage.cache.conversations["a"].num_tokens == 6
    again = stage.ask("a", 1)
    stage.next()
    assert stage.slices() == [("a", 6, 7)]
    assert (again.usage.device_tokens, again.usage.new_tokens) == (5, 2)


def test_a_cancelled_turn_in_flight_ends_at_once_but_keeps_pages_until_the_commit() -> None:
    stage = Stage(8, 0, overlap=True)
    turn = stage.ask("a", 4, 10)
    stage.step()
    stage.cancel_at(turn, 0)
    assert turn.finish is FinishReason.CANCELLED
    assert stage.cache.device.num_empty == 7
    stage.run_until_idle()
    assert stage.cache.device.num_empty == 8
    assert stage.scheduler.counters.idle_tokens == 1


def test_a_conversation_can_be_deleted_while_its_turn_is_in_flight() -> None:
    stage = Stage(8, 0, overlap=True)
    stage.say("a", 4)
    stage.ask("a", 4, 10)
    stage.step()
    stage.delete("a")
    stage.run_until_idle()
    assert stage.cache.conversations == {}
    assert stage.cache.device.num_empty == 8


def test_cancelling_a_queued_turn_drops_the_kv_of_an_unlogged_turn() -> None:
    """The store lost the first turn. The second turn, cancelled in the queue, keeps its prompt but no KV."""
    stage = Stage(12, 10)
    stage.say("a", 6)
    stage.logs["a"], stage.commits["a"] = [], [0]
    stage.cancel_at(stage.ask("a", 9), 9)
    assert stage.where("a") == ""
    stage.say("a", 3)


def test_cancelling_a_queued_turn_drops_the_kv_of_an_unlogged_turn_in_flight() -> None:
    stage = Stage(12, 10, overlap=True)
    lost = stage.ask("a", 6)
    stage.step()
    stage.cancel_at(lost, 6)
    stage.logs["a"], stage.commits["a"] = [], [0]
    stage.cancel_at(stage.ask("a", 9), 9)
    last = stage.ask("a", 3)
    stage.until_ended(last)
    assert last.usage.recomputed_tokens == 8
