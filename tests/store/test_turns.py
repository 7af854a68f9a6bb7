"""Turns are begun, finished, failed, interrupted, replayed and recovered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pensieve.errors import InvalidArgument, NotFound, StaleRevision, Unavailable
from pensieve.store import ConversationStore, NewMessage, NewTurn, StoredTurnState, TurnMessages
from pensieve.store.records import LEGAL_TRANSITIONS
from tests.store.talk import begin, create, reply, say, user


def test_a_begun_turn_is_running_and_not_in_the_history(store: ConversationStore) -> None:
    create(store, "tea")
    request = NewTurn("r1", [user("hi", 1, 2)], {"top_p": 0.5, "stop": ["x"]}, 2**64 - 1)
    turn, must_run = store.begin_turn("tea", request)
    assert must_run
    assert (turn.conversation_id, turn.request_id, turn.state) == (
        "tea",
        "r1",
        StoredTurnState.RUNNING,
    )
    assert (turn.sampling, turn.seed) == ({"top_p": 0.5, "stop": ["x"]}, 2**64 - 1)
    assert (turn.attempts, turn.revision, turn.finish_reason, turn.usage) == (1, None, None, {})
    assert store.get_turn(turn.turn_id) == store.find_turn("tea", "r1") == turn
    assert list(store.log("tea")) == []
    assert store.get_conversation("tea").revision == 0


def test_a_finished_turn_appends_prompt_and_reply_under_one_revision(
    store: ConversationStore,
) -> None:
    create(store, "tea")
    tool = NewMessage("tool", "42", (3,), "call-1")
    begun = store.begin_turn("tea", NewTurn("r1", [tool, user("so?", 4, 5)]))
    answer = NewMessage("assistant", "42.", (6, 7), extra={"thinking": "hm"})
    turn_id = begun.turn.turn_id
    assert store.finish_turn(turn_id, answer, "length", {"output_tokens": 2}) == 1
    assert list(store.log("tea")) == [3, 4, 5, 6, 7]
    turn = store.get_turn(turn_id)
    assert (turn.state, turn.finish_reason, turn.revision) == (
        StoredTurnState.COMPLETED,
        "length",
        1,
    )
    assert turn.usage == {"output_tokens": 2}
    assert turn.finished_at is not None
    assert turn.finished_at > turn.created_at
    messages = store.messages("tea")
    assert [(m.role, m.tool_call_id, m.revision) for m in messages] == [
        ("tool", "call-1", 1),
        ("user", "", 1),
        ("assistant", "", 1),
    ]
    assert messages[2].extra == {"thinking": "hm"}
    assert store.get_conversation("tea").updated_at == turn.finished_at
    assert store.verify() == []


def test_a_cancelled_turn_keeps_the_delivered_text(store: ConversationStore) -> None:
    create(store, "tea")
    turn_id = begin(store, "tea", "r1", "hi", 1)
    assert store.finish_turn(turn_id, reply("he", 2), "cancelled", {}) == 1
    assert store.get_turn(turn_id).state is StoredTurnState.CANCELLED
    assert list(store.log("tea")) == [1, 2]


@pytest.mark.parametrize("ended", ["failed", "interrupted"])
def test_a_failed_or_interrupted_turn_leaves_the_log_unchanged(
    store: ConversationStore, ended: str
) -> None:
    create(store, "tea")
    say(store, "tea", "r1", user("hi", 1), reply("hello", 2))
    turn_id = begin(store, "tea", "r2", "more", 3)
    if ended == "failed":
        turn = store.fail_turn(turn_id, "NAN_LOGITS")
        assert (turn.state, turn.failure) == (StoredTurnState.FAILED, "NAN_LOGITS")
    else:
        turn = store.interrupt_turn(turn_id)
        assert (turn.state, turn.failure) == (StoredTurnState.INTERRUPTED, None)
    assert turn.finished_at is not None
    assert list(store.log("tea")) == [1, 2]
    assert store.get_conversation("tea").revision == 1
    assert say(store, "tea", "r3", user("ok", 5), reply("fine", 6)) == 2
    assert list(store.log("tea")) == [1, 2, 5, 6]
    assert store.verify() == []


def test_ending_a_turn_twice_changes_nothing(store: ConversationStore) -> None:
    create(store, "tea")
    turn_id = begin(store, "tea", "r1", "hi", 1)
    assert store.finish_turn(turn_id, reply("hello", 2), "stop", {}) == 1
    assert store.finish_turn(turn_id, reply("hello", 2), "stop", {}) == 1
    assert store.interrupt_turn(turn_id).state is StoredTurnState.COMPLETED
    assert store.fail_turn(turn_id, "late").state is StoredTurnState.COMPLETED
    assert list(store.log("tea")) == [1, 2]


def test_an_interrupted_turn_cannot_be_finished(store: ConversationStore) -> None:
    create(store, "tea")
    turn_id = begin(store, "tea", "r1", "hi", 1)
    store.interrupt_turn(turn_id)
    refused = "is not running any more, it is interrupted|another daemon has taken over"
    with pytest.raises((NotFound, Unavailable), match=refused):
        store.finish_turn(turn_id, reply("hello", 2), "stop", {})
    with pytest.raises(NotFound, match="no turn 77"):
        store.finish_turn(77, reply("hello", 2), "stop", {})
    assert list(store.log("tea")) == []


def test_a_repeated_request_replays_the_stored_turn(store: ConversationStore) -> None:
    create(store, "tea")
    messages = [user("hi", 1)]
    turn_id = store.begin_turn("tea", NewTurn("r1", messages, seed=5)).turn.turn_id
    running, must_run = store.begin_turn("tea", NewTurn("r1", messages, seed=6))
    assert (running.turn_id, running.state, must_run) == (turn_id, StoredTurnState.RUNNING, False)
    store.finish_turn(turn_id, reply("hello", 2, 3), "stop", {"output_tokens": 2})
    stored, must_run = store.begin_turn("tea", NewTurn("r1", messages, expected_revision=0))
    assert (stored.turn_id, stored.state, must_run) == (turn_id, StoredTurnState.COMPLETED, False)
    assert (stored.seed, stored.revision, stored.usage) == (5, 1, {"output_tokens": 2})
    prompt, answer = store.turn_messages(turn_id)
    assert [(m.content, list(m.token_ids)) for m in prompt] == [("hi", [1])]
    assert answer is not None
    assert (answer.content, list(answer.token_ids)) == ("hello", [2, 3])
    assert list(store.log("tea")) == [1, 2, 3]


def test_a_request_id_belongs_to_its_conversation(store: ConversationStore) -> None:
    create(store, "tea")
    create(store, "cup")
    say(store, "tea", "r1", user("hi", 1), reply("hello", 2))
    assert store.find_turn("cup", "r1") is None
    assert begin(store, "cup", "r1", "other", 3)


def test_look_up_returns_the_conversation_the_known_turn_and_the_log_end(
    store: ConversationStore,
) -> None:
    create(store, "tea")
    new = store.look_up("tea", "r1", 2)
    assert (new.conversation.revision, new.known, list(new.log_end)) == (0, None, [])
    turn_id = begin(store, "tea", "r1", "hi", 1, 2)
    running = store.look_up("tea", "r1", 2)
    assert running.known == store.get_turn(turn_id)
    assert running.conversation == store.get_conversation("tea")
    store.finish_turn(turn_id, reply("hello", 3), "stop", {})
    after = store.look_up("tea", "r1", 2)
    assert after.known == store.get_turn(turn_id)
    assert list(after.log_end) == [2, 3]
    assert store.look_up("tea", "r2", 9).known is None
    assert store.look_up("tea", "", 9).known is None
    with pytest.raises(NotFound):
        store.look_up("coffee", "r1", 2)


def test_the_same_request_id_with_other_content_is_refused(store: ConversationStore) -> None:
    create(store, "tea")
    say(store, "tea", "r1", user("hi", 1), reply("hello", 2))
    for request in (
        NewTurn("r1", [user("ho", 1)]),
        NewTurn("r1", [NewMessage("tool", "hi", (1,))]),
        NewTurn("r1", [NewMessage("user", "hi", (1,), "call-1")]),
        NewTurn("r1", [user("hi", 1), user("hi", 1)]),
        NewTurn("r1", [user("hi", 1)], {"temperature": 1.0}),
    ):
        with pytest.raises(InvalidArgument) as refused:
            store.begin_turn("tea", request)
        assert refused.value.field == "request_id"


def test_a_repeated_request_may_have_other_tokens(store: ConversationStore) -> None:
    """A repeated message may have other tokens at another position of the log."""
    create(store, "tea")
    say(store, "tea", "r1", user("hi", 1), reply("hello", 2))
    assert not store.begin_turn("tea", NewTurn("r1", [user("hi", 9, 9)])).must_run


@pytest.mark.parametrize("ended", ["failed", "interrupted"])
def test_a_failed_or_interrupted_request_runs_again_with_its_first_seed(
    store: ConversationStore, ended: str
) -> None:
    create(store, "tea")
    first = store.begin_turn("tea", NewTurn("r1", [user("hi", 1)], seed=5)).turn
    if ended == "failed":
        store.fail_turn(first.turn_id, "NAN_LOGITS")
    else:
        store.interrupt_turn(first.turn_id)
    say(store, "tea", "r2", user("meanwhile", 7), reply("ok", 8))
    again, must_run = store.begin_turn("tea", NewTurn("r1", [user("hi", 3, 4)], seed=6))
    assert must_run
    assert (again.turn_id, again.seed, again.attempts) == (first.turn_id, 5, 2)
    assert (again.state, again.failure, again.finished_at) == (StoredTurnState.RUNNING, None, None)
    assert store.finish_turn(again.turn_id, reply("hello", 5), "stop", {}) == 2
    assert list(store.log("tea")) == [7, 8, 3, 4, 5]
    assert store.verify() == []


def test_a_stored_reply_is_replayed_after_a_rewind(store: ConversationStore) -> None:
    create(store, "tea")
    say(store, "tea", "r1", user("hi", 1), reply("hello", 2))
    store.rewind_conversation("tea", 0)
    stored, must_run = store.begin_turn("tea", NewTurn("r1", [user("hi", 1)]))
    assert not must_run
    answer = store.turn_messages(stored.turn_id).reply
    assert answer is not None
    assert answer.content == "hello"


def test_a_stored_reply_is_replayed_after_the_fork_that_shared_it_is_deleted(
    store: ConversationStore,
) -> None:
    create(store, "tea")
    say(store, "tea", "r1", user("hi", 1), reply("hello", 2))
    store.fork_conversation("tea", 1, "cup")
    store.rewind_conversation("tea", 0)
    store.delete_conversation("cup")
    turn = store.find_turn("tea", "r1")
    assert turn is not None
    answer = store.turn_messages(turn.turn_id).reply
    assert answer is not None
    assert answer.content == "hello"
    assert store.verify() == []


def test_a_stale_revision_is_refused(store: ConversationStore) -> None:
    create(store, "tea")
    say(store, "tea", "r1", user("hi", 1), reply("hello", 2))
    with pytest.raises(StaleRevision) as stale:
        store.begin_turn("tea", NewTurn("r2", [user("more", 3)], expected_revision=0))
    assert (stale.value.expected, stale.value.actual) == (0, 1)
    assert store.find_turn("tea", "r2") is None
    fresh = NewTurn("r2", [user("more", 3)], expected_revision=1)
    assert store.begin_turn("tea", fresh).must_run


def test_a_turn_needs_an_existing_conversation_and_a_request_id(store: ConversationStore) -> None:
    with pytest.raises(NotFound):
        store.begin_turn("nobody", NewTurn("r1", [user("hi", 1)]))
    create(store, "tea")
    with pytest.raises(InvalidArgument, match="request_id"):
        store.begin_turn("tea", NewTurn("", [user("hi", 1)]))
    with pytest.raises(InvalidArgument, match="surrogate"):
        store.begin_turn("tea", NewTurn("r1", [user("\udfff", 1)]))
    with pytest.raises(NotFound):
        store.get_turn(1)
    with pytest.raises(NotFound):
        store.turn_messages(1)


def test_a_reply_that_cannot_be_stored_does_not_block_the_conversation(
    store: ConversationStore,
) -> None:
    create(store, "tea")
    turn_id = begin(store, "tea", "r1", "hi", 1)
    with pytest.raises(InvalidArgument):
        store.finish_turn(turn_id, reply("\ud800", 2), "stop", {})
    assert say(store, "tea", "r2", user("hi", 3), reply("hello", 4)) == 1
    assert store.get_turn(turn_id).state is StoredTurnState.INTERRUPTED


def test_turn_ids_are_never_reused(store: ConversationStore) -> None:
    create(store, "tea")
    first = begin(store, "tea", "r1", "hi", 1)
    store.interrupt_turn(first)
    store.delete_conversation("tea")
    create(store, "tea")
    assert begin(store, "tea", "r1", "hi", 1) > first


def test_a_turn_that_has_not_ended_has_no_reply(store: ConversationStore) -> None:
    create(store, "tea")
    turn_id = begin(store, "tea", "r1", "hi", 1)
    assert store.turn_messages(turn_id) == TurnMessages(store.turn_messages(turn_id).prompt, None)


def test_running_turns_are_interrupted_when_the_store_opens(
    open_store: Callable[..., ConversationStore], driver: Any
) -> None:
    store = open_store()
    create(store, "tea")
    create(store, "cup")
    say(store, "tea", "r1", user("hi", 1), reply("hello", 2))
    begin(store, "tea", "r2", "more", 3)
    turn_id = begin(store, "cup", "r1", "hi", 1)
    store.close()
    store = open_store()
    ran = [("tea", "r2"), ("cup", "r1")]
    found = [(t.conversation_id, t.request_id) for t in store.interrupted_at_open]
    assert found == ([] if driver is None else ran)  # PostgreSQL: interrupted at close, not at open
    turns = [store.find_turn(*each) for each in ran]
    assert [turn and turn.state for turn in turns] == [StoredTurnState.INTERRUPTED] * 2
    assert store.begin_turn("cup", NewTurn("r1", [user("hi", 1)])).turn.turn_id == turn_id
    assert list(store.log("tea")) == [1, 2]
    store.close()
    again = open_store().find_turn("cup", "r1")
    assert again is not None
    assert (again.state, again.attempts) == (StoredTurnState.INTERRUPTED, 2)


def test_conversations_messages_and_turns_are_unchanged_after_a_restart(
    open_store: Callable[..., ConversationStore],
) -> None:
    store = open_store()
    create(store, "tea")
    say(store, "tea", "r1", user("hi", 1), reply("hello", 2))
    before = store.get_conversation("tea"), store.messages("tea"), store.find_turn("tea", "r1")
    store.close()
    store = open_store()
    after = store.get_conversation("tea"), store.messages("tea"), store.find_turn("tea", "r1")
    assert after == before
    assert store.interrupted_at_open == ()


def test_every_turn_state_is_in_the_table_of_transitions() -> None:
    assert set(LEGAL_TRANSITIONS) == set(StoredTurnState)
    final = {state for state, targets in LEGAL_TRANSITIONS.items() if not targets}
    assert final == {StoredTurnState.COMPLETED, StoredTurnState.CANCELLED}


def test_a_keyed_request_is_found_in_any_conversation_of_its_tenant(
    store: ConversationStore,
) -> None:
    def found(request_id: str, tenant: str = "") -> tuple[str, int] | None:
        got = store.find_turn_by_key(request_id, tenant=tenant)
        return None if got is None else (got.conversation_id, got.num_messages)

    create(store, "tea")
    say(store, "tea", "r1", user("hi", 1), reply("hello", 2))
    two = NewTurn("again", [user("one", 3), user("two", 4)], history_digest=b"digest")
    turn = store.begin_turn("tea", two).turn
    assert found("again") == ("tea", 2)  # the turn runs
    store.interrupt_turn(turn.turn_id)
    assert found("again") is None  # an interrupted turn must be begun again
    store.begin_turn("tea", two)
    store.finish_turn(turn.turn_id, reply("yes", 5), "stop", {})
    store.fork_conversation("tea", 2, "cup")
    assert found("again") == ("tea", 2)
    assert found("again", tenant="another") is None
    assert found("r1") is None  # this request had no key
    assert store.verify() == store.integrity_check() == []
    store.rewind_conversation("tea", 1)
    assert found("again") == ("tea", 2)  # the request may still be repeated
    store.delete_conversation("tea")
    assert found("again") is None
    assert store.verify() == store.integrity_check() == []


@pytest.mark.sqlite
def test_a_turn_that_begins_again_stores_a_key_that_is_missing_after_an_upgrade(
    store: ConversationStore,
) -> None:
    create(store, "tea")
    keyed = NewTurn("again", [user("one", 1)], history_digest=b"digest")
    turn = store.begin_turn("tea", keyed).turn
    store.interrupt_turn(turn.turn_id)
    with store._transactions.writing() as conn:
        conn.execute("UPDATE turns SET idempotency_key = NULL")
    store.begin_turn("tea", keyed)
    found = store.find_turn_by_key("again", tenant="")
    assert found is not None
    assert found.conversation_id == "tea"


def test_a_repeated_keyed_request_must_have_the_same_whole_history(
    store: ConversationStore,
) -> None:
    create(store, "tea")
    store.begin_turn("tea", NewTurn("r", [user("go on", 1)], history_digest=b"one"))
    again = store.begin_turn("tea", NewTurn("r", [user("go on", 1)], history_digest=b"one"))
    assert not again.must_run
    with pytest.raises(InvalidArgument, match="different content"):
        store.begin_turn("tea", NewTurn("r", [user("go on", 1)], history_digest=b"two"))
