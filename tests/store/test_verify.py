"""verify and the checksums report every change that was made without the store."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pensieve.errors import NotFound, StoreCorrupt
from pensieve.store import ConversationStore
from pensieve.store.postgres.session import SqlSession
from tests.store.faulty import disable_foreign_keys, writer_of
from tests.store.talk import begin, create, reply, say, user


@pytest.fixture
def tea_store(store: ConversationStore) -> ConversationStore:
    """Conversation `tea` has two turns and a failed turn. `cup` is a fork of `tea` after the first turn."""
    create(store, "tea", user("system", 1, 2))
    say(store, "tea", "r1", user("hi", 10, 11), reply("hello", 20, 21))
    say(store, "tea", "r2", user("more", 30), reply("yes", 40))
    store.fork_conversation("tea", 1, "cup")
    store.fail_turn(begin(store, "tea", "r3", "again", 50), "NAN_LOGITS")
    assert store.verify() == []
    assert store.integrity_check() == []
    return store


def change(store: ConversationStore, *statements: str) -> None:
    with writer_of(store).reading() as conn:
        disable_foreign_keys(conn)
        for statement in statements:
            conn.execute(for_postgres(statement) if isinstance(conn, SqlSession) else statement)


def for_postgres(statement: str) -> str:
    """Rewrite a statement for PostgreSQL's type of blobs."""
    return re.sub("x'([0-9a-f]*)'", r"'\\x\1'::bytea", statement).replace(
        "CAST(replace(private, 'hello', 'jello') AS BLOB)",
        "convert_to(replace(convert_from(private, 'UTF8'), 'hello', 'jello'), 'UTF8')",
    )


BODY = "(SELECT body FROM messages WHERE message = 3)"  # the body with the text "hello"


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        (
            f"UPDATE bodies SET tokens = x'1400000016000000' WHERE body = {BODY}",
            "conversation 'tea', message 2: a record fails its checksum",
        ),
        (
            "UPDATE bodies SET private = CAST(replace(private, 'hello', 'jello') AS BLOB) "
            f"WHERE body = {BODY}",
            "conversation 'tea', message 2: a record fails its checksum",
        ),
        (
            "INSERT INTO salts (tenant, salt) VALUES ('acme', x'01')",
            "tenant 'acme': its salt has 1 bytes",
        ),
        (
            f"UPDATE bodies SET crc = NULL, private = NULL, tokens = NULL WHERE body = {BODY}",
            "conversation 'tea', message 2: a record is missing",
        ),
        (
            f"DELETE FROM bodies WHERE body = {BODY}",
            "body 5: 1 records refer to it, and it is missing",
        ),
        (
            "UPDATE messages SET num_tokens = 3 WHERE message = 3",
            "conversation 'tea', message 2: has 8 bytes for 3 token ids",
        ),
        ("DELETE FROM messages WHERE message = 3", "conversation 'tea', message 2: does not exist"),
        (
            "DELETE FROM history WHERE conversation = 1 AND position = 1",
            "conversation 'tea', message 2: the message before it is missing",
        ),
        (
            "UPDATE history SET first_token = 5 WHERE conversation = 1 AND position = 2",
            "conversation 'tea', message 2: begins at token 5 instead of 4",
        ),
        (
            "UPDATE history SET revision = 0 WHERE conversation = 2 AND position = 2",
            "conversation 'cup', message 2: revision 0 is not in 1..1",
        ),
        (
            "UPDATE conversations SET revision = 1 WHERE conversation = 1",
            "conversation 'tea', message 3: revision 2 is not in 1..1",
        ),
        (
            "UPDATE history SET revision = 2 WHERE conversation = 1 AND position IN (1, 2)",
            "conversation 'tea', message 1: its turn made revision 1, the history says 2",
        ),
        (
            "DELETE FROM history WHERE conversation = 1 AND position = 4",
            "conversation 'tea', turn 2: is in the history in part",
        ),
        (
            "UPDATE turns SET state = 'interrupted' WHERE turn_id = 2",
            "conversation 'tea', turn 2: was not completed, but has a reply, or messages in the history",
        ),
        (
            "UPDATE turns SET revision = NULL WHERE turn_id = 2",
            "conversation 'tea', turn 2: has ended, but its revision is missing or too high",
        ),
        (
            "UPDATE messages SET finish_reason = NULL WHERE message = 5",
            "conversation 'tea', turn 2: ended without one reply",
        ),
        (
            "UPDATE turns SET state = 'dreaming' WHERE turn_id = 3",
            "conversation 'tea', turn 3: has an unknown state",
        ),
        (
            "UPDATE messages SET turn_id = NULL WHERE message = 6",
            "message 6: nothing holds it",
        ),
        (
            "UPDATE messages SET turn_id = 99 WHERE message = 6",
            "message 6: its turn 99 does not exist",
        ),
        (
            "DELETE FROM conversations WHERE conversation = 2",
            "history of conversation number 2: there is no such conversation",
        ),
        (
            "UPDATE turns SET conversation = 9 WHERE turn_id = 3",
            "turn 3: its conversation does not exist",
        ),
        (
            "INSERT INTO bodies VALUES (99, 0, x'', x'')",
            "body 99: 0 records refer to it, and it is not wiped",
        ),
        (
            "UPDATE bodies SET private = x'00' WHERE body = 1",
            "conversation number 1: a record fails its checksum",
        ),
    ],
)
def test_verify_names_each_inconsistency(
    tea_store: ConversationStore, statement: str, problem: str
) -> None:
    change(tea_store, statement)
    assert problem in tea_store.verify()


def test_verify_reports_two_running_turns(tea_store: ConversationStore) -> None:
    change(
        tea_store,
        "DROP INDEX turns_running",
        "UPDATE turns SET state = 'running' WHERE turn_id > 1",
    )
    assert "conversation number 1: 2 turns are running" in tea_store.verify()


def test_verify_can_look_at_one_conversation(tea_store: ConversationStore) -> None:
    change(tea_store, "UPDATE history SET first_token = 0 WHERE conversation = 1 AND position = 4")
    assert len(tea_store.verify("tea")) == 1
    assert tea_store.verify("cup") == []
    with pytest.raises(NotFound):
        tea_store.verify("nobody")


def test_a_flipped_bit_is_not_served(tea_store: ConversationStore) -> None:
    change(tea_store, f"UPDATE bodies SET tokens = x'1400000016000000' WHERE body = {BODY}")
    with pytest.raises(StoreCorrupt, match="'tea', message 2: a record fails its checksum"):
        tea_store.log("tea")
    with pytest.raises(StoreCorrupt, match="'cup', message 2"):
        tea_store.messages("cup")
    with pytest.raises(StoreCorrupt, match="turn 1"):
        tea_store.turn_messages(1)
    assert [m.content for m in tea_store.messages("tea", 3)] == ["more", "yes"]


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM history WHERE conversation = 1 AND position = 1",
        "UPDATE history SET first_token = 5 WHERE conversation = 1 AND position = 2",
    ],
)
def test_a_log_with_a_gap_is_not_served(tea_store: ConversationStore, statement: str) -> None:
    change(tea_store, statement)
    with pytest.raises(
        StoreCorrupt, match="conversation 'tea': its messages do not cover the log exactly"
    ):
        tea_store.log("tea")


@pytest.mark.sqlite  # reads SQLite's files
def test_a_flipped_byte_in_the_file_is_found(
    tea_store: ConversationStore, open_store: Callable[..., ConversationStore]
) -> None:
    path: Path = tea_store.folder.database_path
    tea_store.close()
    damaged = path.read_bytes()
    assert damaged.count(b"hello") == 1
    path.write_bytes(damaged.replace(b"hello", b"jello"))
    store = open_store()
    with pytest.raises(StoreCorrupt):
        store.messages("tea")
    assert len(store.verify()) == 2  # one for tea and one for its fork
    assert store.integrity_check() == []


@pytest.mark.sqlite  # reads SQLite's files
def test_a_damaged_page_is_found_by_both_checks_even_after_a_clean_stop(
    tea_store: ConversationStore, open_store: Callable[..., ConversationStore]
) -> None:
    with writer_of(tea_store).reading() as conn:
        (page,) = conn.execute(
            "SELECT rootpage FROM sqlite_schema WHERE name = 'history'"
        ).fetchone()
    path: Path = tea_store.folder.database_path
    tea_store.close()
    damaged = bytearray(path.read_bytes())
    damaged[(page - 1) * 4096 : page * 4096] = b"\xa5" * 4096
    path.write_bytes(damaged)
    store = open_store()
    assert store.integrity_check() != []
    assert store.integrity_check_due is False  # the last stop was clean
    assert store.verify() != []
    with pytest.raises(StoreCorrupt, match="the database is damaged"):
        store.log("tea")
