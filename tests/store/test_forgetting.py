"""Old requests are forgotten: the history stays, and data that is only needed to replay them is deleted."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pensieve.store import ConversationStore, NewTurn, StoredTurnState, forgetting
from pensieve.store.compaction import Compaction, CompactionPhase
from pensieve.store.records import ChainState, KeyedTurn
from pensieve.store.sqlite_backend import Erasure
from pensieve.store.turn_rows import idempotency_key
from tests.store.faulty import history, write_history, writer_of
from tests.store.older_schemas import POSTGRES_TO_SCHEMA_8, TO_SCHEMA_8
from tests.store.talk import begin, create, reply, say, user

Open = Callable[..., ConversationStore]


def forget(store: ConversationStore, before: float) -> int:
    """Run a whole pass. Return the number of its steps."""
    steps = 1
    while store.forgetting.step(before):
        steps += 1
    assert store.verify() == store.integrity_check() == []
    return steps


def num_request_ids(store: ConversationStore, driver: Any) -> int:
    """Return the number of turns that can be found by their request id."""
    with writer_of(store).reading() as conn:
        found = conn.execute("SELECT count(*) FROM turns WHERE length(request_key) = 16")
        count: int = found.fetchone()[0]
        return count


def test_a_forgotten_request_runs_as_new_and_the_history_stays(store: ConversationStore) -> None:
    write_history(store)
    before = history(store)
    turn = store.find_turn("tea", "r1")
    assert turn is not None
    forget(store, turn.finished_at or 0.0)
    assert store.find_turn("tea", "r1") is not None  # not older than the limit
    forget(store, 1e9)
    assert history(store) == before
    assert store.find_turn("tea", "r1") is None
    assert store.get_turn(turn.turn_id).request_id == ""
    assert say(store, "tea", "r1", user("hi", 10), reply("hello", 20, 21)) == 3
    assert store.begin_turn("tea", NewTurn("r1", [user("hi", 10)])).must_run is False


@pytest.mark.sqlite  # reads SQLite's files
def test_logprobs_are_deleted_with_the_request_of_their_turn(
    store: ConversationStore, driver: Any
) -> None:
    """Logprobs are counted, moved by compaction, and wiped with the turn even if the history stays."""
    create(store, "tea")
    create(store, "cup")
    secret = b"SECRET-logprobs" * 1000
    before = store.stored_bytes()
    say(store, "tea", "r1", user("hi", 1), reply("hello", 2, logprobs=secret))
    say(store, "cup", "r1", user("hi", 1), reply("hello", 2, logprobs=secret))
    assert store.stored_bytes() > before + 2 * len(secret)
    assert [each.extra for each in store.messages("tea")] == [{}, {}]
    turn = store.find_turn("tea", "r1")
    assert turn is not None
    answer = store.turn_messages(turn.turn_id).reply
    assert answer is not None
    assert answer.logprobs == secret
    store.delete_conversation("cup")
    assert store.stored_bytes() < before + 2 * len(secret)
    assert store.verify() == []
    assert isinstance(store.erasure, Erasure)
    store.erasure._compaction = Compaction(store.erasure._writer, CompactionPhase.FENCE)
    while store.erasure.step():
        pass
    assert store.verify() == []
    answer = store.turn_messages(turn.turn_id).reply
    assert answer is not None
    assert answer.logprobs == secret
    forget(store, 1e9)
    assert store.stored_bytes() < before + len(secret)
    assert history(store)
    path = store.folder.database_path
    store.close()
    assert not [file for file in path.parent.iterdir() if b"SECRET" in file.read_bytes()]


def test_replacing_the_log_deletes_its_logprobs(store: ConversationStore) -> None:
    create(store, "tea")
    say(store, "tea", "r1", user("hi", 1), reply("hello", 2, logprobs=b"packed"))
    turn = store.find_turn("tea", "r1")
    assert turn is not None
    store.replace_log("tea", "fingerprint 2", [[3], [4]])
    answer = store.turn_messages(turn.turn_id).reply
    assert answer is not None
    assert (list(answer.token_ids), answer.logprobs) == ([4], b"")
    assert store.verify() == []


def test_a_forgetting_step_wipes_a_bounded_number_of_logprob_bytes(
    store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forgetting, "FORGOTTEN_BYTES", 1000)
    create(store, "tea")
    for number in range(6):
        answer = reply("yes", 2, logprobs=bytes(600 if number < 5 else 5000))
        say(store, "tea", f"r{number}", user("hi", 1), answer)
    assert forget(store, 1e9) == 6
    assert store.find_turn("tea", "r5") is None


@pytest.mark.sqlite  # reads SQLite's files
def test_text_that_no_history_holds_is_deleted_with_its_request(store: ConversationStore) -> None:
    """Interrupted, failed and rewound turns are forgotten, but not turns that a fork still has."""
    create(store, "tea")
    say(store, "tea", "r1", user("kept by a fork", 1), reply("yes", 2))
    store.fork_conversation("tea", 1, "cup")
    say(store, "tea", "r2", user("cut by a rewind", 3), reply("no", 4))
    store.rewind_conversation("tea", 0)
    store.interrupt_turn(begin(store, "tea", "r3", "was interrupted", 5))
    store.fail_turn(begin(store, "tea", "r4", "has failed", 6), "NAN_LOGITS")
    forget(store, 1e9)
    store.close()
    content = store.folder.database_path.read_bytes()
    assert b"kept by a fork" in content
    for gone in (b"cut by a rewind", b"was interrupted", b"has failed"):
        assert gone not in content


def test_a_running_or_recently_ended_turn_keeps_its_request(
    store: ConversationStore, driver: Any
) -> None:
    create(store, "tea")
    create(store, "cup")
    running = begin(store, "tea", "r1", "text", 1)
    say(store, "cup", "r1", user("hi", 1), reply("hello", 2))
    now = store.get_conversation("cup").updated_at
    say(store, "cup", "r2", user("hi", 1), reply("hello", 2))
    forget(store, now + 0.5)
    assert num_request_ids(store, driver) == 2
    assert store.find_turn("tea", "r1") is not None
    store.finish_turn(running, reply("late", 3), "stop", {})
    forget(store, now + 0.5)
    assert num_request_ids(store, driver) == 2  # the turn ended after the limit
    forget(store, 1e9)  # a later pass finds it
    assert num_request_ids(store, driver) == 0
    assert len(store.messages("tea")) == 2
    assert store.get_turn(running).state is StoredTurnState.COMPLETED


def test_a_forgetting_pass_takes_small_steps_and_the_next_pass_continues_after_it(
    open_store: Open, driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forgetting, "TURNS_PER_STEP", 10)
    monkeypatch.setattr(forgetting, "FORGOTTEN_AT_ONCE", 4)
    store = open_store()
    create(store, "tea")
    for number in range(50):
        say(store, "tea", f"r{number}", user("hi", number), reply("hello", number))
    assert forget(store, 1e9) >= 50 // 4
    assert num_request_ids(store, driver) == 0
    assert forget(store, 1e9) == 1
    say(store, "tea", "r1", user("hi", 1), reply("hello", 2))
    assert forget(store, 1e9) == 1
    store.close()
    store = open_store()  # a new process looks at all turns once
    assert forget(store, 1e9) >= 50 // 10
    assert num_request_ids(store, driver) == 0


@pytest.mark.sqlite  # reads SQLite's files
def test_conversations_with_forgotten_requests_are_deleted_and_compacted_like_others(
    open_store: Open, tmp_path: Path
) -> None:
    store = open_store(compact_bytes_min=1)
    choose = random.Random(1)
    for number in range(30):
        create(store, f"c{number}")
        for turn in range(4):
            say(store, f"c{number}", f"r{turn}", user("a secret " * 30, 1), reply("hello", 2))
        if choose.random() < 0.5:
            store.rewind_conversation(f"c{number}", 2)
    forget(store, 1e9)
    for number in range(29):
        store.delete_conversation(f"c{number}")
    while store.erasure.step():
        pass
    assert store.verify() == store.integrity_check() == []
    assert len(store.list_conversations().conversations) == 1
    store.delete_conversation("c29")
    assert b"a secret" not in store.folder.database_path.read_bytes()


def test_an_idempotency_key_of_schema_8_is_migrated_and_forgotten_with_its_turn(
    open_store: Open, driver: Any
) -> None:
    """In schema 8, the key was stored as a chain of the request's first message."""
    store = open_store()
    create(store, "tea")
    forgotten = NewTurn("forgotten", [user("hi", 1)], history_digest=b"digest")
    forgotten_id = store.begin_turn("tea", forgotten).turn.turn_id
    store.finish_turn(forgotten_id, reply("hello", 2), "stop", {})
    forget(store, 1e9)
    keyed = NewTurn("again", [user("one", 3), user("two", 4)], history_digest=b"digest")
    turn_id = store.begin_turn("tea", keyed).turn.turn_id
    state = ChainState(b"state", b"session 16 bytes")
    store.finish_turn(turn_id, reply("yes", 5), "stop", {}, state)
    say(store, "tea", "r1", user("hi", 1), reply("hello", 2))
    with writer_of(store).writing() as conn:
        again = bytes.fromhex("8834cf5cd9be8a009a391b4de97c7054")
        for key, number in ((idempotency_key("", "forgotten"), forgotten_id), (again, turn_id)):
            conn.execute(
                "INSERT INTO chains (key, message, session, at) VALUES"
                " (?, (SELECT min(message) FROM messages WHERE turn_id = ?), ?, 1.0)",
                (key, number, b"request"),
            )
        for statement in POSTGRES_TO_SCHEMA_8 if driver is None else TO_SCHEMA_8:
            conn.execute(statement)
    store.close()
    with open_store() as store:
        assert store.find_turn_by_key("again") == KeyedTurn("tea", 2)
        assert store.find_turn_by_key("r1") is None
        assert store.find_turn_by_key("forgotten") is None
        assert not store.begin_turn("tea", keyed).must_run
        with writer_of(store).reading() as conn:
            assert conn.execute("SELECT count(*) FROM chains").fetchone()[0] == 1
        assert store.chains.longest([b"state"], b"session 16 bytes") is not None
        forget(store, 1e9)
        assert store.find_turn_by_key("again") is None
