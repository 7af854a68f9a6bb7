"""Metadata, the system prompt, pending messages and the last message can be changed without a turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pensieve.errors import InvalidArgument, NotFound, StaleRevision, TurnRunning
from pensieve.store import ConversationStore, NewConversation, NewMessage, NewTurn
from pensieve.store.conversation_changes import LastDeleted, Pending
from pensieve.store.records import NewPrefix
from tests.store.faulty import writer_of
from tests.store.talk import begin, create, reply, say, user
from tests.store.test_deletion import reader
from tests.store.test_responses import raw

TWO = (NewMessage("user", "one"), NewMessage("tool", "two", tool_call_id="call_1"))


def pending(store: ConversationStore, name: str = "tea") -> Pending:
    reader = store.reader()
    try:
        return reader.with_pending(name)[1]
    finally:
        reader.close()


def add(store: ConversationStore, *messages: NewMessage) -> None:
    store.changes.change_pending(
        "tea", lambda found: replace(found, messages=(*found.messages, *messages))
    )


def test_new_metadata_replaces_the_old_metadata_and_wipes_it(store: ConversationStore) -> None:
    store.create_conversation(NewConversation("tea", "f", metadata={"topic": "SECRET"}))
    say(store, "tea", "r1", user("hi", 1), reply("hello", 2))
    changed = store.changes.set_metadata("tea", {"topic": "milk"})
    assert changed.metadata == {"topic": "milk"}
    assert changed == store.get_conversation("tea")
    assert changed.revision == 1
    assert store.verify() == []
    store.delete_conversation("tea")
    assert b"SECRET" not in raw(store)


def test_set_beginning_sets_system_prompt_tools_and_options_of_an_empty_conversation(
    store: ConversationStore,
) -> None:
    create(store, "tea")
    changed = store.changes.set_beginning("tea", "Be brief.", [{"name": "kettle"}], {"depth": 1})
    assert (changed.tools, changed.template_options) == (({"name": "kettle"},), {"depth": 1})
    assert [(each.role, each.content) for each in store.messages("tea")] == [
        ("system", "Be brief.")
    ]
    assert store.verify() == []
    with pytest.raises(StaleRevision):
        store.changes.set_beginning("tea", "Be long.", [], {})


def test_set_beginning_is_refused_while_a_turn_runs(store: ConversationStore) -> None:
    create(store, "tea")
    begin(store, "tea", "r1", "hi", 1)
    with pytest.raises(TurnRunning):
        store.changes.set_beginning("tea", "Be brief.", [], {})


def test_pending_messages_are_stored_but_are_not_part_of_the_history(
    store: ConversationStore,
) -> None:
    create(store, "tea")
    assert pending(store) == Pending()
    add(store, *TWO)
    assert pending(store).messages == TWO
    assert store.messages("tea") == []
    assert store.verify() == []
    store.fork_conversation("tea", 0, "cup")
    assert pending(store, "cup") == Pending()


def begin_with_pending(store: ConversationStore, request_id: str, *messages: NewMessage) -> int:
    """Begin a turn that takes these pending messages."""
    asked = NewTurn(request_id, [*messages, user("and?", 1)], pending=messages)
    return store.begin_turn("tea", asked).turn.turn_id


def test_pending_messages_are_removed_when_the_turn_that_took_them_finishes(
    store: ConversationStore,
) -> None:
    create(store, "tea")
    add(store, *TWO)
    turn_id = begin_with_pending(store, "r1", *TWO)
    assert pending(store) == Pending(TWO, taken_at=0)
    store.finish_turn(turn_id, reply("hello", 2), "stop", {})
    assert pending(store) == Pending()
    add(store, TWO[0])
    assert pending(store) == Pending((TWO[0],))


def test_taken_messages_are_removed_once_by_the_next_turn(store: ConversationStore) -> None:
    create(store, "tea")
    add(store, *TWO)
    store.finish_turn(begin_with_pending(store, "r1", *TWO), reply("hello", 2), "stop", {})
    bodies = []
    for number in range(2, 4):
        say(store, "tea", f"r{number}", user("more", 1), reply("yes", 2))
        with writer_of(store).reading() as conn:
            bodies += conn.execute("SELECT body FROM conversations").fetchall()
        assert not store.get_conversation("tea").has_pending
    assert bodies[0] == bodies[1]  # the second turn writes nothing more
    assert pending(store) == Pending()
    assert store.verify() == []


def test_pending_messages_taken_by_a_failed_turn_survive_the_next_revision(
    store: ConversationStore,
) -> None:
    create(store, "tea")
    add(store, *TWO)
    store.fail_turn(begin_with_pending(store, "r1", *TWO), "NAN_LOGITS")
    assert pending(store).messages == TWO
    say(store, "tea", "r2", user("another", 1), reply("hello", 2))
    assert pending(store) == Pending(TWO)
    store.interrupt_turn(begin_with_pending(store, "r3", *TWO))
    store.rewind_conversation("tea", 0)
    assert pending(store) == Pending(TWO)
    store.finish_turn(begin_with_pending(store, "r3", *TWO), reply("hello", 2), "stop", {})
    assert pending(store) == Pending()


def test_a_turn_takes_exactly_the_pending_messages_or_is_refused_and_takes_none(
    store: ConversationStore,
) -> None:
    create(store, "tea")
    add(store, *TWO)
    with pytest.raises(StaleRevision, match="pending at revision 0 have changed since"):
        begin_with_pending(store, "r1", *TWO[:1])
    assert store.find_turn("tea", "r1") is None
    assert pending(store) == Pending(TWO)
    begin(store, "tea", "r2", "another", 1)
    with pytest.raises(TurnRunning):
        begin_with_pending(store, "r1", *TWO)
    assert pending(store) == Pending(TWO)


def test_a_turn_that_expects_no_pending_messages_is_refused_if_there_are_some(
    store: ConversationStore,
) -> None:
    create(store, "tea")
    add(store, *TWO)
    with pytest.raises(StaleRevision, match="have changed since"):
        store.begin_turn("tea", NewTurn("r1", [user("and?", 1)], pending=()))
    assert pending(store) == Pending(TWO)
    begin(store, "tea", "r2", "and?", 1)  # this turn expects no pending messages


def test_a_conversation_is_created_with_pending_messages(store: ConversationStore) -> None:
    made = store.create_conversation(NewConversation("tea", "f", pending=TWO))
    assert made.has_pending
    assert pending(store) == Pending(TWO)
    store.finish_turn(begin_with_pending(store, "r1", *TWO), reply("hello", 2), "stop", {})
    assert pending(store) == Pending()


def test_a_conversation_under_a_prefix_is_created_with_pending_messages(
    store: ConversationStore,
) -> None:
    store.prefixes.declare(NewPrefix("shots", "f", [NewMessage("system", "Be brief.", (1,))]))
    store.prefixes.begin(NewConversation("tea", "f", prefix_id="shots", pending=TWO))
    assert pending(store) == Pending(TWO)


def delete_last(store: ConversationStore, name: str = "tea") -> LastDeleted:
    """Delete the last message. The caller is assumed to have just read the conversation."""
    seen, waiting = store.get_conversation(name), pending(store, name).messages
    return store.changes.delete_last(name, seen.revision, seen.created_at, waiting)


def contents(store: ConversationStore, name: str = "tea") -> list[str]:
    return [each.content for each in store.messages(name)]


def test_messages_are_deleted_from_the_end_one_by_one(store: ConversationStore) -> None:
    create(store, "tea", user("head", 9))
    say(store, "tea", "r1", user("hi", 1), reply("hello", 2))
    add(store, *TWO)
    store.finish_turn(begin_with_pending(store, "r2", *TWO), reply("yes", 3), "stop", {})
    taken_back = delete_last(store)
    assert (taken_back.is_rewound, taken_back.is_erasure_due) == (True, False)
    assert taken_back.conversation == store.get_conversation("tea")
    assert (taken_back.conversation.revision, taken_back.conversation.num_tokens) == (3, 3)
    assert contents(store) == ["head", "hi", "hello"]
    assert pending(store) == Pending((*TWO, NewMessage("user", "and?")))
    for number in (2, 1, 0):
        assert not delete_last(store).is_rewound
        assert len(pending(store).messages) == number
    assert delete_last(store).is_rewound
    assert (contents(store), pending(store)) == (["head"], Pending((NewMessage("user", "hi"),)))
    delete_last(store)
    with pytest.raises(InvalidArgument):
        delete_last(store)
    assert contents(store) == ["head"]
    assert store.verify() == []


def test_deleting_the_last_reply_of_a_fork_leaves_the_source_unchanged(
    store: ConversationStore,
) -> None:
    create(store, "tea")
    say(store, "tea", "r1", user("hi", 1), reply("hello", 2))
    store.fork_conversation("tea", 1, "cup")
    delete_last(store, "cup")
    assert (contents(store, "cup"), contents(store)) == ([], ["hi", "hello"])
    assert pending(store, "cup") == Pending((NewMessage("user", "hi"),))
    assert store.verify() == []


def test_delete_last_is_refused_if_the_conversation_changed_since_it_was_read(
    store: ConversationStore,
) -> None:
    create(store, "tea")
    say(store, "tea", "r1", user("hi", 1), reply("hello", 2))
    seen = store.get_conversation("tea")
    stale = [
        (seen.revision - 1, seen.created_at, ()),
        (seen.revision, seen.created_at - 1, ()),
        (seen.revision, seen.created_at, TWO),
    ]
    for revision, created_at, waiting in stale:
        with pytest.raises(StaleRevision):
            store.changes.delete_last("tea", revision, created_at, waiting)
    add(store, *TWO)
    for waiting in ((), TWO[:1], TWO[1:]):
        with pytest.raises(StaleRevision):
            store.changes.delete_last("tea", seen.revision, seen.created_at, waiting)
    assert (contents(store), pending(store)) == (["hi", "hello"], Pending(TWO))
    begin(store, "tea", "r2", "more", 3)
    with pytest.raises(TurnRunning):
        store.changes.delete_last("tea", seen.revision, seen.created_at, TWO)


@pytest.mark.sqlite  # reads SQLite's files
def test_no_text_of_a_pending_message_stays_on_disk_after_delete_last(
    store: ConversationStore,
) -> None:
    create(store, "tea")
    add(store, NewMessage("user", "kept"), NewMessage("user", "SECRET"))
    with reader(store):
        assert delete_last(store).is_erasure_due
    store.erasure.finish()
    assert b"SECRET" not in raw(store)
    assert b"kept" in raw(store)


@pytest.mark.sqlite  # reads SQLite's files
def test_no_text_of_a_removed_pending_message_stays_on_disk(
    store: ConversationStore,
) -> None:
    create(store, "tea")
    add(store, NewMessage("user", "kept"), NewMessage("user", "SECRET"))
    assert b"SECRET" in raw(store)
    changed = store.changes.change_pending(
        "tea", lambda found: replace(found, messages=found.messages[:1])
    )
    assert [each.content for each in changed.after.messages] == ["kept"]
    assert not changed.is_erasure_due
    assert b"SECRET" not in raw(store)


@pytest.mark.sqlite  # reads SQLite's files
def test_removing_pending_messages_reports_an_erasure_that_must_wait(
    store: ConversationStore,
) -> None:
    create(store, "tea")
    add(store, NewMessage("user", "SECRET"))
    with reader(store):
        changed = store.changes.change_pending("tea", lambda found: Pending())
    assert changed.is_erasure_due
    assert store.erasure.pending
    store.erasure.finish()
    assert b"SECRET" not in raw(store)


def test_a_conversation_that_changed_since_it_was_seen_is_not_deleted(
    store: ConversationStore,
) -> None:
    """New metadata and pending messages count as changes, although the revision stays the same."""
    store.create_conversation(NewConversation("tea", "f"))
    brought = (NewMessage("user", "And now?"),)
    changes: list[Callable[[], object]] = [
        lambda: store.changes.set_metadata("tea", {"title": "Mine"}),
        lambda: store.changes.change_pending("tea", lambda found: Pending(brought)),
    ]
    for change in changes:
        seen = store.get_conversation("tea")
        change()
        assert store.get_conversation("tea").updated_at > seen.updated_at
        with pytest.raises(StaleRevision):
            store.delete_conversation("tea", unchanged=seen)
    store.delete_conversation("tea", unchanged=store.get_conversation("tea"))
    with pytest.raises(NotFound):
        store.get_conversation("tea")
