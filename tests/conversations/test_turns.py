"""Live turns as plain values: what each step says to the engine, and which steps there are."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from pensieve.builtin import MODEL_PATH
from pensieve.conversations.draft import TurnRequest
from pensieve.conversations.live_turn import (
    CommittedReply,
    LiveTurn,
    StartedTurn,
    TurnPhase,
    cache_key,
)
from pensieve.conversations.turns import Turns, failure_of
from pensieve.core.iteration import SampledToken
from pensieve.core.turn import FinishReason, TurnOptions, Usage
from pensieve.engine.messages import CancelTurn, SubmitTurn, TurnEnded
from pensieve.errors import QueueFull, TurnInterrupted
from pensieve.store import records
from pensieve.text import Message, Tokenizer

ENGINE_SINCE, NOW = 100.0, 7.0


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL_PATH)


@pytest.fixture
def turns(tokenizer: Tokenizer) -> Turns:
    return Turns(tokenizer, ENGINE_SINCE)


def begun(turn_id: int, *, tenant: str = "", changed_at: float = 200.0) -> StartedTurn:
    """A turn of three tokens behind a log of ten."""
    turn = records.StoredTurn(
        turn_id=turn_id,
        conversation_id=f"c{turn_id}",
        tenant=tenant,
        request_id=f"r{turn_id}",
        state=records.StoredTurnState.RUNNING,
        attempts=1,
        sampling={},
        seed=7,
        finish_reason=None,
        failure=None,
        usage={},
        revision=None,
        created_at=1.0,
        finished_at=None,
    )
    tokens = array("I", [5, 6, 7])
    key = cache_key(tenant, f"c{turn_id}")
    submit = SubmitTurn(0, key, tokens.tobytes(), 10, first_position=10)
    ask = TurnRequest(f"c{turn_id}", (Message("user", "?"),), TurnOptions(), tenant, f"r{turn_id}")
    return StartedTurn(turn, ask, submit, 2, tokens, changed_at, False)


def ended(live: LiveTurn, finish: FinishReason = FinishReason.LENGTH) -> TurnEnded:
    return TurnEnded(live.number, live.conversation_id, finish, Usage(recomputed_tokens=4))


def test_a_turn_says_where_its_tokens_begin(turns: Turns) -> None:
    live, submit = turns.begin(begun(1, tenant="acme"), NOW)
    assert (submit.turn_id, submit.conversation_id) == (live.number, "acme/c1")
    assert (submit.first_position, submit.history_tokens) == (10, 10)
    assert array("I", submit.tokens) == array("I", [5, 6, 7])
    assert turns.of_conversation("c1", "acme") is live
    assert turns.of_conversation("c1") is None
    assert turns.num_of_tenant("acme") == 1


def test_what_was_taken_before_a_cancel_is_kept_and_nothing_after_it(turns: Turns) -> None:
    live, _ = turns.begin(begun(1), NOW)
    turns.take(SampledToken(live.number, 8, "a"))
    assert turns.cancel(live) == CancelTurn(live.number, 14)  # 10 + 3 + 1
    assert turns.cancel(live) is None
    turns.take(SampledToken(live.number, 9, "b"))
    ending = turns.end(ended(live))
    assert ending is not None
    assert ending.reply is not None
    assert (ending.reply.token_ids, ending.reply.text) == ((8,), "a")
    assert (ending.reply.finish, ending.reply.is_cut) == (FinishReason.CANCELLED, True)
    assert live.finish is None  # until it is in the store
    turns.finish(live, ending.reply, CommittedReply(3, "c"))
    found: Any = (live.finish, live.revision, live.tail)
    assert found == (FinishReason.CANCELLED, 3, "c")
    assert turns.num_live == turns.num_of_tenant("") == 0


def test_a_cancel_keeps_so_many_tokens_and_a_later_one_may_keep_fewer(turns: Turns) -> None:
    live, _ = turns.begin(begun(1), NOW)
    for number, text in enumerate("abcd"):
        turns.take(SampledToken(live.number, number, text))
    assert turns.cancel(live, 9) == CancelTurn(live.number, 17)  # all four
    assert turns.cancel(live, 2) is None
    assert (live.num_tokens, live.text) == (2, "ab")
    assert turns.cancel(live, 3) is None
    ending = turns.end(ended(live, FinishReason.STOP))
    assert ending is not None
    assert ending.reply is not None
    assert (ending.reply.token_ids, ending.reply.text) == ((0, 1), "ab")
    assert (ending.reply.finish, ending.reply.is_cut) == (FinishReason.CANCELLED, True)


def test_what_began_to_end_a_turn_ends_it(turns: Turns) -> None:
    committing, _ = turns.begin(begun(1), NOW)
    interrupting, _ = turns.begin(begun(2), NOW)
    assert turns.end(ended(committing)) is not None
    assert turns.interrupt(committing) is None
    assert turns.cancel(committing) is None
    assert turns.interrupt(interrupting) == CancelTurn(interrupting.number, 10)
    assert turns.end(ended(interrupting)) is None
    assert turns.take(SampledToken(interrupting.number, 8, "a")) is interrupting
    assert interrupting.num_tokens == 0
    turns.fail(interrupting, TurnInterrupted("it was given up"))
    assert interrupting.phase is TurnPhase.ENDED
    with pytest.raises(AssertionError):
        interrupting.move_to(TurnPhase.RUNNING)


def test_events_of_turns_that_are_not_live_find_nothing(turns: Turns) -> None:
    live, _ = turns.begin(begun(1), NOW)
    turns.interrupt(live)
    turns.fail(live, TurnInterrupted("it was given up"))
    again, submit = turns.begin(begun(1), NOW)
    assert submit.turn_id != live.number
    assert turns.take(SampledToken(live.number, 8, "a")) is None
    assert turns.end(ended(live)) is None
    assert again.num_tokens == 0


@pytest.mark.parametrize(("changed_at", "reason"), [(200.0, "dropped"), (50.0, "engine_restarted")])
def test_recomputing_is_explained(turns: Turns, changed_at: float, reason: str) -> None:
    live, _ = turns.begin(begun(1, changed_at=changed_at), NOW)
    ending = turns.end(ended(live))
    assert ending is not None
    assert ending.reply is not None
    assert ending.reply.figures["recompute_reason"] == reason


def test_the_engines_reasons_are_errors_of_ours() -> None:
    assert isinstance(failure_of("QUEUE_FULL"), QueueFull)
    assert "not numbers" in str(failure_of("NAN_LOGITS"))
    assert "(NO_TOKENS)" in str(failure_of("NO_TOKENS"))
