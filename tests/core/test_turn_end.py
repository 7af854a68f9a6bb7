"""What remains of a turn that is cancelled, or whose conversation is deleted."""

from __future__ import annotations

from pensieve.core.turn import FinishReason, TurnState
from tests.core.world import ScriptedWorld


def test_cancelling_a_queued_turn_keeps_only_kv_of_logged_tokens() -> None:
    world = ScriptedWorld(8, 0)
    world.say("a", 4)
    turn = world.ask("a", 4)
    world.cancel_at(turn, 5)
    assert turn.state is TurnState.FINISHED
    assert world.where("a") == "d"
    world.cancel_at(world.ask("a", 4), 0)
    assert world.where("a") == ""
    assert world.scheduler.num_turns == 0


def test_cancelling_keeps_exactly_the_tokens_that_the_reader_has_seen() -> None:
    world = ScriptedWorld(8, 0)
    turn = world.ask("a", 4, 10)
    for _ in range(4):
        world.next()
    assert len(turn.tokens) == 8
    world.cancel_at(turn, 6)
    assert world.logs["a"] == list(turn.tokens[:6])
    assert world.cache.conversations["a"].num_tokens == 6
    again = world.ask("a", 1)
    world.next()
    assert world.slices() == [("a", 6, 7)]
    assert (again.usage.device_tokens, again.usage.new_tokens) == (5, 2)


def test_a_cancelled_turn_in_flight_ends_at_once_but_keeps_pages_until_the_commit() -> None:
    world = ScriptedWorld(8, 0, overlap=True)
    turn = world.ask("a", 4, 10)
    world.step()
    world.cancel_at(turn, 0)
    assert turn.finish is FinishReason.CANCELLED
    assert world.cache.device.num_empty == 7
    world.run_until_idle()
    assert world.cache.device.num_empty == 8
    assert world.scheduler.counters.idle_tokens == 1


def test_a_conversation_can_be_deleted_while_its_turn_is_in_flight() -> None:
    world = ScriptedWorld(8, 0, overlap=True)
    world.say("a", 4)
    world.ask("a", 4, 10)
    world.step()
    world.delete("a")
    world.run_until_idle()
    assert world.cache.conversations == {}
    assert world.cache.device.num_empty == 8


def test_cancelling_a_queued_turn_drops_the_kv_of_an_unlogged_turn() -> None:
    """The store lost the first turn. The second turn, cancelled in the queue, keeps its prompt but no KV."""
    world = ScriptedWorld(12, 10)
    world.say("a", 6)
    world.logs["a"], world.commits["a"] = [], [0]
    world.cancel_at(world.ask("a", 9), 9)
    assert world.where("a") == ""
    world.say("a", 3)


def test_cancelling_a_queued_turn_drops_the_kv_of_an_unlogged_turn_in_flight() -> None:
    world = ScriptedWorld(12, 10, overlap=True)
    lost = world.ask("a", 6)
    world.step()
    world.cancel_at(lost, 6)
    world.logs["a"], world.commits["a"] = [], [0]
    world.cancel_at(world.ask("a", 9), 9)
    last = world.ask("a", 3)
    world.until_ended(last)
    assert last.usage.recomputed_tokens == 8
