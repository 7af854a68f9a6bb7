"""Live turns without a daemon: their phases, and the messages that they send to the engine."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any, cast

import pytest

from pensieve.builtin import MODEL_PATH
from pensieve.conversations.draft import TurnRequest
from pensieve.conversations.history import History
from pensieve.conversations.live_turn import (
    CommittedReply,
    LiveTurn,
    StartedTurn,
    TurnPhase,
    TurnReply,
    cache_key,
)
from pensieve.conversations.turn_ends import failure_of
from pensieve.conversations.turns import Turns
from pensieve.core.iteration import SampledToken
from pensieve.core.turn import FinishReason, TurnOptions, Usage
from pensieve.engine.messages import CancelTurn, SubmitTurn, TurnEnded
from pensieve.errors import QueueFull, TurnInterrupted
from pensieve.text import Message, Tokenizer
from tests.conversations.in_process import turn_ends
from tests.store.talk import stored_turn

ENGINE_SINCE, NOW = 100.0, 7.0


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL_PATH)


@pytest.fixture
def turns(tokenizer: Tokenizer) -> Turns:
    return Turns(tokenizer, ENGINE_SINCE)


def started_turn(turn_id: int, *, tenant: str = "", changed_at: float = 200.0) -> StartedTurn:
    """Return a turn with three new tokens after a log of ten."""
    turn = stored_turn(
        turn_id, conversation_id=f"c{turn_id}", tenant=tenant, request_id=f"r{turn_id}"
    )
    tokens = array("I", [5, 6, 7])
    key = cache_key(tenant, f"c{turn_id}")
    submit = SubmitTurn(0, key, tokens.tobytes(), 10, first_position=10)
    ask = TurnRequest(f"c{turn_id}", (Message("user", "?"),), TurnOptions(), tenant, f"r{turn_id}")
    return StartedTurn(turn, ask, submit, 2, tokens, changed_at, False)


def turn_ended(live: LiveTurn, finish: FinishReason = FinishReason.LENGTH) -> TurnEnded:
    return TurnEnded(live.attempt_id, live.conversation_id, finish, Usage(recomputed_tokens=4))


class EndsRig:
    """Records what the ends of turns write to the store and send to the engine."""

    def __init__(self, turns: Turns) -> None:
        self.sent: list[Any] = []
        self.replies: list[TurnReply] = []
        self.interrupted: list[int] = []
        self.in_store: Callable[[], None] = lambda: None
        self.finish_when_stored: FinishReason | None = None
        self._turns = turns
        self.ends = turn_ends(turns, cast(History, self), self._tell)

    def _tell(self, message: Any) -> None:
        if message is not None:
            self.sent.append(message)

    def finish(self, reply: TurnReply) -> CommittedReply:
        self.in_store()
        (live,) = (each for each in self._turns.all_live() if each.turn_id == reply.turn_id)
        self.finish_when_stored = live.finish
        self.replies.append(reply)
        return CommittedReply(3, "c")

    def interrupt(self, turn_id: int, attempt: int) -> None:
        self.in_store()
        self.interrupted.append(turn_id)


def test_a_submitted_turn_has_the_position_of_its_tokens(turns: Turns) -> None:
    live, submit = turns.begin(started_turn(1, tenant="acme"), NOW)
    assert (submit.attempt_id, submit.conversation_id) == (live.attempt_id, "acme/c1")
    assert (submit.first_position, submit.history_tokens) == (10, 10)
    assert array("I", submit.tokens) == array("I", [5, 6, 7])
    assert turns.of_conversation("c1", "acme") is live
    assert turns.of_conversation("c1") is None
    assert turns.num_of_tenant("acme") == 1


def test_a_cancelled_turn_keeps_earlier_tokens_and_ignores_later_ones(turns: Turns) -> None:
    live, _ = turns.begin(started_turn(1), NOW)
    rig = EndsRig(turns)
    turns.take(SampledToken(live.attempt_id, 8, "a"))
    rig.ends.stop(live)
    rig.ends.stop(live)
    assert rig.sent == [CancelTurn(live.attempt_id, 14)]  # 10 + 3 + 1 tokens
    turns.take(SampledToken(live.attempt_id, 9, "b"))
    rig.ends.engine_ended(turn_ended(live))
    (reply,) = rig.replies
    assert (reply.token_ids, reply.text) == ((8,), "a")
    assert (reply.finish, reply.is_cut) == (FinishReason.CANCELLED, True)
    assert rig.finish_when_stored is None
    found: Any = (live.finish, live.revision, live.tail)
    assert found == (FinishReason.CANCELLED, 3, "c")
    assert turns.num_live == turns.num_of_tenant("") == 0


def test_a_second_cancellation_may_keep_fewer_tokens(turns: Turns) -> None:
    live, _ = turns.begin(started_turn(1), NOW)
    rig = EndsRig(turns)
    for number, text in enumerate("abcd"):
        turns.take(SampledToken(live.attempt_id, number, text))
    rig.ends.stop(live, 9)
    rig.ends.stop(live, 2)
    assert (live.num_tokens, live.text) == (2, "ab")
    rig.ends.stop(live, 3)
    assert rig.sent == [CancelTurn(live.attempt_id, 17)]  # all four tokens of the reply
    rig.ends.engine_ended(turn_ended(live, FinishReason.STOP))
    (reply,) = rig.replies
    assert (reply.token_ids, reply.text) == ((0, 1), "ab")
    assert (reply.finish, reply.is_cut) == (FinishReason.CANCELLED, True)


def test_a_cancellation_that_keeps_nothing_gives_up_the_turn(turns: Turns) -> None:
    live, _ = turns.begin(started_turn(1), NOW)
    rig = EndsRig(turns)
    turns.take(SampledToken(live.attempt_id, 8, "a"))
    rig.ends.stop(live, 0)
    assert (rig.interrupted, rig.replies) == ([live.turn_id], [])
    assert rig.sent == [CancelTurn(live.attempt_id, 10)]
    assert live.finish is FinishReason.CANCELLED
    assert isinstance(live.failure, TurnInterrupted)


def test_the_first_end_of_a_turn_wins(turns: Turns) -> None:
    committing, _ = turns.begin(started_turn(1), NOW)
    giving_up, _ = turns.begin(started_turn(2), NOW)
    rig = EndsRig(turns)

    def while_committing() -> None:
        rig.ends.give_up(committing)
        rig.ends.stop(committing)
        assert committing.phase is TurnPhase.COMMITTING
        assert rig.sent == []

    rig.in_store = while_committing
    rig.ends.engine_ended(turn_ended(committing))
    assert committing.finish is FinishReason.LENGTH

    def while_giving_up() -> None:
        rig.ends.engine_ended(turn_ended(giving_up))
        rig.ends.stop(giving_up)
        assert turns.take(SampledToken(giving_up.attempt_id, 8, "a")) is giving_up
        assert giving_up.phase is TurnPhase.GIVING_UP

    rig.in_store = while_giving_up
    rig.ends.give_up(giving_up)
    assert rig.sent == [CancelTurn(giving_up.attempt_id, 10)]
    assert (giving_up.num_tokens, len(rig.replies)) == (0, 1)
    assert giving_up.phase is TurnPhase.ENDED
    with pytest.raises(AssertionError):
        giving_up.move_to(TurnPhase.RUNNING)


def test_a_turn_interrupted_by_the_store_is_not_written_again(turns: Turns) -> None:
    live, _ = turns.begin(started_turn(1), NOW)
    rig = EndsRig(turns)
    rig.ends.give_up(live, is_interrupted=True)
    assert (live.finish, rig.interrupted) == (FinishReason.CANCELLED, [])


def test_engine_events_of_an_ended_attempt_are_ignored(turns: Turns) -> None:
    live, _ = turns.begin(started_turn(1), NOW)
    rig = EndsRig(turns)
    rig.ends.give_up(live)
    again, submit = turns.begin(started_turn(1), NOW)
    assert submit.attempt_id != live.attempt_id
    assert turns.take(SampledToken(live.attempt_id, 8, "a")) is None
    rig.ends.engine_ended(turn_ended(live))
    assert rig.replies == []
    assert again.num_tokens == 0


@pytest.mark.parametrize(("changed_at", "reason"), [(200.0, "dropped"), (50.0, "engine_restarted")])
def test_the_reply_has_the_reason_for_recomputing(
    turns: Turns, changed_at: float, reason: str
) -> None:
    live, _ = turns.begin(started_turn(1, changed_at=changed_at), NOW)
    rig = EndsRig(turns)
    rig.ends.engine_ended(turn_ended(live))
    assert rig.replies[0].figures["recompute_reason"] == reason


def test_failure_reasons_of_the_engine_become_pensieve_errors() -> None:
    assert isinstance(failure_of("QUEUE_FULL"), QueueFull)
    assert "not numbers" in str(failure_of("NAN_LOGITS"))
    assert "(NO_TOKENS)" in str(failure_of("NO_TOKENS"))
