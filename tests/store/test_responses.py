"""Responses are found by id, are deleted with their conversation, and leave nothing when deleted."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pensieve.errors import AlreadyExists, NotFound
from pensieve.store import ConversationStore
from pensieve.store.postgres.connection import PostgresLanes
from pensieve.store.responses import StoredResponse
from tests.store.faulty import disable_foreign_keys, writer_of
from tests.store.talk import begin, create, reply, say, user


def found(store: ConversationStore, response_id: str, tenant: str = "") -> StoredResponse | None:
    reader = store.reader()
    try:
        return reader.response(response_id, tenant=tenant)
    finally:
        reader.close()


def raw(store: ConversationStore) -> bytes:
    """Return the bytes of SQLite's files, or the contents of all bodies in PostgreSQL."""
    if isinstance(writer := writer_of(store), PostgresLanes):
        with writer.reading() as conn:
            rows = conn.execute("SELECT coalesce(private, '') || coalesce(tokens, '') FROM bodies")
            return b"".join(private for (private,) in rows)
    names = ("conversations.db", "conversations.db-wal")
    return b"".join((store.folder.path / name).read_bytes() for name in names)


def tea_response(
    response_id: str = "resp_1", revision: int | None = 1, **more: Any
) -> StoredResponse:
    values: dict[str, Any] = {
        "body": {"id": response_id, "text": "SECRET-hello"},
        "request": "a1",
        **more,
    }
    return StoredResponse(response_id, "tea", revision=revision, **values)


@pytest.fixture
def tea_store(store: ConversationStore) -> ConversationStore:
    """Conversation tea with one turn, and conversation cup."""
    create(store, "tea")
    create(store, "cup")
    say(store, "tea", "r1", user("hi", 10, 11), reply("hello", 20, 21))
    return store


def test_a_response_is_found_by_its_id_and_tenant(tea_store: ConversationStore) -> None:
    response = tea_response(is_ours=True)
    tea_store.responses.save(response)
    assert found(tea_store, "resp_1") == response
    assert found(tea_store, "resp_2") is None
    assert found(tea_store, "resp_1", "somebody") is None
    assert tea_store.verify() == []


def test_saving_a_response_again_replaces_it_and_wipes_the_old_text(
    tea_store: ConversationStore,
) -> None:
    tea_store.responses.save(tea_response(revision=None, body={"status": "SECRET-queued"}))
    tea_store.responses.save(tea_response(body={"status": "completed"}))
    again = found(tea_store, "resp_1")
    assert again is not None
    assert (again.body, again.revision) == ({"status": "completed"}, 1)
    tea_store.responses.delete("resp_1")
    assert b"SECRET" not in raw(tea_store)
    assert tea_store.verify() == []


def test_a_response_needs_an_existing_conversation_and_cannot_move_to_another(
    tea_store: ConversationStore,
) -> None:
    with pytest.raises(NotFound):
        tea_store.responses.save(dataclasses.replace(tea_response(), conversation_id="none"))
    tea_store.responses.save(tea_response())
    with pytest.raises(AlreadyExists):
        tea_store.responses.save(dataclasses.replace(tea_response(), conversation_id="cup"))


@pytest.mark.sqlite  # reads SQLite's files
def test_nothing_of_a_deleted_response_is_on_the_disk(tea_store: ConversationStore) -> None:
    tea_store.responses.save(tea_response())
    assert b"SECRET" in raw(tea_store)
    assert tea_store.responses.delete("resp_1").conversation_id == ""
    assert b"SECRET" not in raw(tea_store)
    assert found(tea_store, "resp_1") is None
    assert tea_store.verify() == []
    with pytest.raises(NotFound):
        tea_store.responses.delete("resp_1")


def test_a_response_is_deleted_with_its_conversation(tea_store: ConversationStore) -> None:
    tea_store.responses.save(tea_response())
    tea_store.delete_conversation("tea")
    assert b"SECRET" not in raw(tea_store)
    assert found(tea_store, "resp_1") is None
    assert tea_store.verify() == []


def test_a_conversation_created_for_a_response_is_to_be_deleted_with_its_last_response(
    tea_store: ConversationStore,
) -> None:
    tea_store.responses.save(tea_response("resp_1", is_ours=True))
    say(tea_store, "tea", "r2", user("more", 30), reply("yes", 40))
    tea_store.responses.save(tea_response("resp_2", 2, is_ours=True))
    assert tea_store.responses.delete("resp_2").conversation_id == ""
    assert tea_store.responses.delete("resp_1").conversation_id == "tea"


def test_a_continued_conversation_is_kept_after_its_last_response_is_deleted(
    tea_store: ConversationStore,
) -> None:
    tea_store.responses.save(tea_response(is_ours=True))
    say(tea_store, "tea", "r2", user("more", 30), reply("yes", 40))
    assert tea_store.responses.delete("resp_1").conversation_id == ""


def test_a_conversation_with_a_running_turn_is_kept_after_its_last_response_is_deleted(
    tea_store: ConversationStore,
) -> None:
    tea_store.responses.save(tea_response(is_ours=True))
    begin(tea_store, "tea", "r2", "more", 30)
    assert tea_store.responses.delete("resp_1").conversation_id == ""


def test_a_conversation_created_by_a_client_is_kept_after_its_last_response_is_deleted(
    tea_store: ConversationStore,
) -> None:
    tea_store.responses.save(tea_response())
    assert tea_store.responses.delete("resp_1").conversation_id == ""


def test_verify_finds_a_response_without_its_conversation(tea_store: ConversationStore) -> None:
    tea_store.responses.save(tea_response())
    with writer_of(tea_store).reading() as conn:
        disable_foreign_keys(conn)
        conn.execute("UPDATE responses SET conversation = 77")
    assert "response number 1: its conversation does not exist" in tea_store.verify()


def test_a_response_is_stored_in_the_transaction_of_its_reply(tea_store: ConversationStore) -> None:
    tea_store.responses.save(tea_response(revision=None, body={"status": "queued"}))
    turn_id = begin(tea_store, "tea", "r2", "again", 12)
    cup_response = dataclasses.replace(tea_response("resp_2"), conversation_id="cup")
    tea_store.responses.save(cup_response)
    with pytest.raises(AlreadyExists):  # neither the turn's end nor the response is stored
        tea_store.finish_turn(
            turn_id, reply("yes", 22), "stop", {}, response=tea_response("resp_2")
        )
    assert tea_store.get_conversation("tea").revision == 1
    turn_id = begin(tea_store, "tea", "r2", "again", 12)  # the failed end has interrupted the turn
    done = tea_response(revision=None, body={"status": "completed"})
    assert tea_store.finish_turn(turn_id, reply("yes", 22), "stop", {}, response=done) == 2
    again = found(tea_store, "resp_1")
    assert again is not None
    assert (again.body, again.revision) == ({"status": "completed"}, 2)
    tea_store.responses.save(
        tea_response(revision=None, body={"status": "in_progress"})
    )  # ignored: late
    assert found(tea_store, "resp_1") == again
    assert tea_store.verify() == []
