"""Single turns through the whole stack in one process: cancellation, stale drafts and attempts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from pensieve.conversations.draft import Draft, TurnRequest
from pensieve.conversations.live_turn import RetriedTurn, StartedTurn
from pensieve.core.turn import FinishReason, TurnOptions
from pensieve.errors import StaleRevision
from pensieve.sampling import Sampling
from pensieve.store.records import StoredTurnState
from pensieve.text import Message
from tests.conversations.in_process import Runtime
from tests.conversations.rig import ask, finish, started, step, write_model
from tests.text.families import QWEN_2_5


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    root = tmp_path_factory.mktemp("conversations")
    with started(write_model(root / "model", QWEN_2_5), root / "data") as runtime:
        yield runtime


def test_a_cancelled_turn_keeps_the_text_of_all_its_tokens(runtime: Runtime) -> None:
    """This includes text that was held back because it might have begun a stop string."""
    conversations = runtime.conversations
    conversations.create("plain")
    conversations.create("stopped")
    long = Sampling(max_tokens=12, ignore_eos=True)
    text = ask(runtime, "plain", "Oslo", sampling=long).text
    stop = Sampling(max_tokens=50, ignore_eos=True, stop=(text[-3:] + "never",))
    live = conversations.send("stopped", "Oslo", sampling=stop)
    while live.num_tokens < 12:
        step(runtime)
    assert live.text == text[:-3]
    conversations.cancel(live)
    step(runtime)
    assert live.finish is FinishReason.CANCELLED
    assert live.tail == text[-3:]
    _, reply = runtime.store.messages("stopped", include_token_ids=True)
    assert reply.content == text
    assert list(reply.token_ids or ()) == live.reply.token_ids


def test_a_draft_of_an_old_revision_cannot_begin(runtime: Runtime) -> None:
    """A draft must not begin after the log has changed, even if the `expected_revision` was correct."""
    conversations = runtime.conversations
    conversations.create("moved")
    wanted = TurnRequest("moved", (Message("user", "one"),), TurnOptions(Sampling(max_tokens=2)))
    with pytest.raises(StaleRevision):
        conversations.draft(replace(wanted, expected_revision=1))
    draft = conversations.draft(replace(wanted, expected_revision=0))
    assert isinstance(draft, Draft)
    ask(runtime, "moved", "before", sampling=Sampling(max_tokens=2))
    with pytest.raises(StaleRevision):
        conversations.begin(draft, draft.prompt())


def test_a_draft_cannot_begin_on_a_recreated_conversation(runtime: Runtime) -> None:
    """The other conversation has the same revision and number of tokens, but other tokens."""
    conversations = runtime.conversations
    for name, content in (("named", "aaa"), ("other", "bbb")):
        conversations.create(name)
        ask(runtime, name, content, sampling=Sampling(max_tokens=2, ignore_eos=True))
    wanted = TurnRequest("named", (Message("user", "go on"),), TurnOptions(Sampling(max_tokens=2)))
    draft = conversations.draft(wanted)
    assert isinstance(draft, Draft)
    runtime.store.delete_conversation("named")
    conversations.fork("other", "named", 1)
    assert runtime.store.get_conversation("named").revision == draft.conversation.revision
    with pytest.raises(StaleRevision):
        conversations.begin(draft, draft.prompt())


def test_a_turn_that_ends_during_its_lookup_is_restarted_by_the_next_draft(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lookup finds the turn running, but the turn then ends. The next draft must begin the turn again."""
    conversations, store = runtime.conversations, runtime.store
    conversations.create("ends")
    wanted = TurnRequest(
        *("ends", (Message("user", "one"),), TurnOptions(Sampling(max_tokens=2))), request_id="r"
    )
    draft = conversations.draft(wanted)
    assert isinstance(draft, Draft)
    first = as_started_turn(conversations.history.begin(draft, draft.prompt())).turn
    look_up = store.look_up

    def look_before_it_ends(*given: Any, **named: Any) -> Any:
        found = look_up(*given, **named)
        store.interrupt_turn(first.turn_id)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(store, "look_up", look_before_it_ends)
        known = conversations.draft(wanted)
    assert isinstance(known, RetriedTurn)
    assert (known.turn.turn_id, known.reply) == (first.turn_id, None)
    assert store.get_turn(first.turn_id).state is StoredTurnState.INTERRUPTED
    again = conversations.draft(wanted)
    assert isinstance(again, Draft)
    third = as_started_turn(conversations.history.begin(again, again.prompt())).turn
    assert (third.turn_id, third.attempts) == (first.turn_id, 3)
    store.interrupt_turn(first.turn_id)


def as_started_turn(found: object) -> StartedTurn:
    assert isinstance(found, StartedTurn)
    return found


def test_each_attempt_of_a_turn_has_its_own_attempt_id(runtime: Runtime) -> None:
    """A late event of an attempt that was given up must not end the next attempt."""
    conversations = runtime.conversations
    conversations.create("again")
    sampling = Sampling(max_tokens=20, ignore_eos=True)
    first = conversations.send("again", "Oslo", request_id="r", sampling=sampling)
    step(runtime)
    conversations.interrupt(first.turn_id)
    second = conversations.send("again", "Oslo", request_id="r", sampling=sampling)
    assert (second.turn_id, second.attempt) == (first.turn_id, 2)
    assert second.attempt_id != first.attempt_id
    finish(runtime, [second])
    assert second.num_tokens == 20
    assert second.finish is FinishReason.LENGTH
