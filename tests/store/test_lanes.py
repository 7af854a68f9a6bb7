"""Several threads write to PostgreSQL at the same time, each in its own transactions."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pensieve.errors import AlreadyExists, StoreUnavailable, TurnRunning
from pensieve.store import (
    ConversationStore,
    NewTurn,
    StoredTurnState,
    conversation_changes,
    conversation_rows,
    turn_rows,
)
from pensieve.store.backend import Conflict
from pensieve.store.conversation_changes import Pending
from pensieve.store.postgres.connection import PostgresLanes, pensieve_error
from pensieve.store.transactions import CALLS_MAX
from tests.scale import SCALE
from tests.store.faulty import writer_of
from tests.store.postgres_server import PostgresServer
from tests.store.talk import begin, create, reply, say, user

LANES = 8


@pytest.fixture
def url(postgres: PostgresServer) -> Iterator[str]:
    created = postgres.new_database()
    yield created
    postgres.drop(created)


@pytest.fixture
def store(tmp_path: Path, url: str) -> Iterator[ConversationStore]:
    with ConversationStore.open(tmp_path / "data", "test", url=url, num_lanes=LANES) as opened:
        yield opened


@pytest.fixture
def execute_separately(url: str) -> Iterator[Callable[[str], object]]:
    """Return a function that executes a statement on a separate connection."""
    import psycopg

    with psycopg.connect(url, autocommit=True, options="-c search_path=pensieve") as conn:
        yield conn.execute


def lanes_of(store: ConversationStore) -> PostgresLanes:
    lanes = writer_of(store)
    assert isinstance(lanes, PostgresLanes)
    return lanes


def call_concurrently(*calls: Callable[[], Any]) -> list[Any]:
    """Make the calls in separate threads. Return the results or errors."""
    ready = threading.Barrier(len(calls))

    def run_after_barrier(call: Callable[[], Any]) -> Any:
        ready.wait()
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run_after_barrier, calls))


def call_before_first(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, before: Callable[[], object]
) -> None:
    """Call `before` before the first call of a patched function."""
    original, pending = getattr(module, name), [before]

    def called(*arguments: Any, **named: Any) -> Any:
        if pending:
            pending.pop()()
        return original(*arguments, **named)

    monkeypatch.setattr(module, name, called)


def test_concurrent_turns_of_many_threads_are_neither_lost_nor_miscounted(
    store: ConversationStore,
) -> None:
    num_turns = 10 * SCALE

    def talk(name: str) -> None:
        create(store, name, user("head", 1))
        for number in range(num_turns):
            say(store, name, f"r{number}", user("hi", number), reply("hello", number))

    names = [f"c{number}" for number in range(LANES)]
    assert call_concurrently(*(lambda name=name: talk(name) for name in names)) == [None] * LANES
    for name in names:
        twice = (number for each in range(num_turns) for number in (each, each))
        assert list(store.log(name)) == [1, *twice]
    assert store.verify() == []
    assert 1 < len(lanes_of(store).writers) <= LANES
    assert store.figures.num_commits >= 2 * num_turns * LANES


def test_one_of_many_concurrent_creations_of_a_conversation_succeeds(
    store: ConversationStore,
) -> None:
    found = call_concurrently(*[lambda: create(store, "tea", user("head", 1))] * LANES)
    refused = [each for each in found if isinstance(each, AlreadyExists)]
    assert len(refused) == LANES - 1
    assert store.verify() == []


def test_a_call_that_loses_a_race_is_retried(
    store: ConversationStore, execute_separately: Callable[[str], object]
) -> None:
    create(store, "tea")
    seen: list[Pending] = []

    def change(pending: Pending) -> Pending:
        seen.append(pending)
        if len(seen) == 1:
            execute_separately("UPDATE bodies SET crc = crc")
        return Pending((user("later"),))

    changed = store.changes.change_pending("tea", change)
    assert len(seen) == 2
    assert [each.content for each in changed.after.messages] == ["later"]
    assert store.verify() == []


def test_a_call_that_loses_every_race_fails_after_a_few_retries(
    store: ConversationStore, execute_separately: Callable[[str], object]
) -> None:
    create(store, "tea")
    calls: list[Pending] = []

    def change(pending: Pending) -> Pending:
        calls.append(pending)
        execute_separately("UPDATE bodies SET crc = crc")
        return Pending((user("later"),))

    with pytest.raises(StoreUnavailable, match="another transaction changed the same rows"):
        store.changes.change_pending("tea", change)
    assert len(calls) == CALLS_MAX
    assert store.verify() == []


def test_a_turn_whose_end_loses_a_race_stays_live_until_the_retry_ends_it(
    store: ConversationStore,
    execute_separately: Callable[[str], object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    create(store, "tea")
    create(store, "cup")
    turn_id = begin(store, "tea", "r1", "hi", 1)

    def race() -> None:
        execute_separately("UPDATE turns SET usage = usage")
        vars(store)[
            "_transactions"
        ]._note_failure()  # so that the next transaction looks for dead turns

    call_before_first(monkeypatch, turn_rows, "finish_turn", race)
    assert store.finish_turn(turn_id, reply("hello", 2), "stop", {}) == 1
    assert list(store.log("tea")) == [1, 2]


def test_a_turn_whose_end_loses_every_race_is_interrupted_by_the_next_transaction(
    store: ConversationStore,
    execute_separately: Callable[[str], object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    create(store, "tea")
    turn_id = begin(store, "tea", "r1", "hi", 1)
    original = turn_rows.finish_turn

    def finish_after_race(*arguments: Any) -> None:
        execute_separately("UPDATE turns SET usage = usage")
        original(*arguments)

    monkeypatch.setattr(turn_rows, "finish_turn", finish_after_race)
    with pytest.raises(Conflict):
        store.finish_turn(turn_id, reply("hello", 2), "stop", {})
    assert store.get_turn(turn_id).state is StoredTurnState.INTERRUPTED
    monkeypatch.undo()
    say(store, "tea", "r1", user("hi", 1), reply("hello", 2))
    assert list(store.log("tea")) == [1, 2]


def test_no_thread_interrupts_a_turn_that_another_thread_begins(store: ConversationStore) -> None:
    """Threads look for dead turns while others begin and end turns."""
    transactions = vars(store)["_transactions"]
    done = threading.Event()

    def look_for_dead_turns() -> None:
        number = 0
        while not done.is_set():
            transactions._note_failure()
            store.changes.set_metadata("seen", {"number": number})
            number += 1

    def talk(name: str) -> None:
        for number in range(20 * SCALE):
            say(store, name, f"r{number}", user("hi", 1), reply("hello", 2))

    def all_talk() -> None:
        try:
            names = [f"c{number}" for number in range(LANES - 1)]
            assert call_concurrently(*(lambda n=n: talk(n) for n in names)) == [None] * len(names)
        finally:
            done.set()

    for name in ("seen", *(f"c{number}" for number in range(LANES - 1))):
        create(store, name)
    assert call_concurrently(look_for_dead_turns, all_talk) == [None, None]
    assert store.verify() == []


def test_concurrent_deletions_of_a_conversation_and_its_fork_wipe_the_shared_text(
    store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither deletion sees the other. Each leaves the shared text to the other, so one must be retried."""
    create(store, "tea", user("a secret", 1))
    store.fork_conversation("tea", 0, "cup")
    both, original = threading.Barrier(2), vars(conversation_rows)["wipe_bodies"]
    waits = [True, True]

    def together(*arguments: Any) -> None:
        if waits:
            waits.pop()
            both.wait()
        original(*arguments)

    monkeypatch.setattr(conversation_rows, "wipe_bodies", together)
    deleted = call_concurrently(*(lambda n=n: store.delete_conversation(n) for n in ("tea", "cup")))
    assert deleted == [None, None]
    with lanes_of(store).reading() as conn:
        assert conn.execute("SELECT count(*) FROM messages").fetchone()[0] == 0
        found = conn.execute("SELECT count(*) FROM bodies WHERE crc IS NOT NULL")
        assert found.fetchone()[0] == 0
    assert store.stored_bytes() == 0
    assert store.verify() == []


def test_a_concurrent_fork_and_deletion_leave_a_consistent_history(
    store: ConversationStore,
) -> None:
    for number in range(5 * SCALE):
        name, copy = f"tea{number}", f"cup{number}"
        create(store, name, user("head", 1))
        say(store, name, "r1", user("hi", 2), reply("hello", 3))
        forked, deleted = call_concurrently(
            partial(store.fork_conversation, name, 1, copy),
            partial(store.delete_conversation, name),
        )
        assert deleted is None
        if not isinstance(forked, Exception):
            assert list(store.log(copy)) == [1, 2, 3]
    assert store.verify() == []


def test_a_lost_connection_affects_only_its_own_thread(
    store: ConversationStore, postgres: PostgresServer
) -> None:
    for name in ("tea", "cup"):
        create(store, name)
    turn_id = begin(store, "cup", "r1", "hi", 1)

    def lose() -> None:
        with lanes_of(store).writing() as conn:
            (pid,) = conn.execute("SELECT pg_backend_pid()").fetchone()
            (begun,) = call_concurrently(lambda: begin(store, "tea", "r1", "hi", 1))
            postgres.execute(f"SELECT pg_terminate_backend({pid})")
            assert call_concurrently(
                lambda: store.finish_turn(turn_id, reply("hello", 2), "stop", {})
            ) == [1]
            assert begun > turn_id
            conn.execute("SELECT 1").fetchall()

    with pytest.raises(StoreUnavailable, match="the server was stopped"):
        lose()
    assert list(store.log("cup")) == [1, 2]


SLOW_COMMIT = (
    "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql"
    " AS 'BEGIN PERFORM pg_advisory_xact_lock_shared(77); RETURN NULL; END'",
    "CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON turns DEFERRABLE INITIALLY DEFERRED"
    " FOR EACH ROW EXECUTE FUNCTION slow()",
)


def test_a_commit_after_its_connection_was_lost_leaves_no_running_turn(
    store: ConversationStore, execute_separately: Callable[[str], Any]
) -> None:
    """The next write uses another connection, while the server still runs the COMMIT."""
    create(store, "tea")
    create(store, "cup")
    for statement in SLOW_COMMIT:
        execute_separately(statement)
    execute_separately("SELECT pg_advisory_lock(77)")  # the COMMIT waits for this lock
    committing = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'advisory'"

    def lose() -> None:
        while not execute_separately(committing).fetchall():
            time.sleep(0.01)
        connection = lanes_of(store).writers[1]._wire.conn  # type: ignore[union-attr]
        with socket.socket(fileno=os.dup(connection.fileno())) as cut:
            cut.shutdown(socket.SHUT_RDWR)

    with lanes_of(store).reading():  # holds the first connection, so `begin` uses the second
        begun, _ = call_concurrently(partial(begin, store, "tea", "r1", "hi", 1), lose)
        assert isinstance(begun, StoreUnavailable)
    store.changes.set_metadata("cup", {"a": 1})
    execute_separately("SELECT pg_advisory_unlock(77)")
    while execute_separately(committing).fetchall():
        time.sleep(0.01)
    execute_separately("DROP TRIGGER slow ON turns")
    say(store, "tea", "r2", user("hi", 1), reply("hello", 2))


def test_pending_messages_cannot_change_while_the_turn_that_took_them_begins_again(
    store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(store, "tea")
    message = user("first")
    store.changes.change_pending("tea", lambda _: Pending((message,)))
    turn = NewTurn("r1", [message, user("hi", 1)], pending=(message,))
    store.interrupt_turn(store.begin_turn("tea", turn).turn.turn_id)

    def begin_again() -> None:
        (begun,) = call_concurrently(lambda: store.begin_turn("tea", turn))
        assert begun.must_run

    call_before_first(monkeypatch, conversation_changes, "refuse_running", begin_again)
    with pytest.raises(TurnRunning):
        store.changes.change_pending("tea", lambda _: Pending())
    assert store.verify() == []


def test_losing_the_race_to_create_a_conversation_does_not_report_its_kv_as_stale(
    store: ConversationStore, execute_separately: Callable[[str], Any]
) -> None:
    create(store, "tea")
    say(store, "tea", "r1", user("hi", 1), reply("hello", 2))
    stale: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        jobs: list[Future[None]] = []

        def on_stale(tenant: str, conversation_id: str) -> None:
            stale.append(conversation_id)
            if not jobs:
                jobs.append(pool.submit(create, store, "cup"))
                while not execute_separately(
                    "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
                ).fetchall():
                    assert not jobs[0].done()

        store.watch(on_stale)
        store.fork_conversation("tea", 1, "cup")
        with pytest.raises(AlreadyExists):
            jobs[0].result()
    assert stale == ["cup"]


def test_several_daemons_can_open_a_new_database_at_once(tmp_path: Path, url: str) -> None:
    def open_daemon(number: int) -> ConversationStore:
        options = {"url": url, "replica": f"r{number}", "num_lanes": 2}
        return ConversationStore.open(tmp_path / f"data{number}", "test", **options)

    found = call_concurrently(*[partial(open_daemon, number) for number in range(4)])
    for number, each in enumerate(found):
        assert isinstance(each, ConversationStore), each
        create(each, f"tea{number}")
    last = found[0].owners.session
    for each in found:
        each.close()
    with open_daemon(0) as again:
        assert again.owners.session > last


@pytest.mark.parametrize("code", ["40001", "40P01", "23505", "23503"])
def test_an_error_caused_by_a_concurrent_transaction_is_a_conflict(code: str) -> None:
    class Failed(Exception):
        sqlstate = code

    assert isinstance(pensieve_error(Failed("lost\nDETAIL: a value"), "postgresql:///h"), Conflict)
    assert "a value" not in str(pensieve_error(Failed("lost\nDETAIL: a value"), "postgresql:///h"))


def test_each_connection_counts_the_bytes_of_a_tenant_in_its_own_row(
    store: ConversationStore,
) -> None:
    create(store, "tea")
    with lanes_of(store).writing():  # holds this thread's connection, so `cup` uses another
        call_concurrently(lambda: create(store, "cup"))
    with lanes_of(store).reading() as conn:
        rows = conn.execute("SELECT slot, stored_bytes FROM tenant_bytes").fetchall()
    assert sum(num_bytes > 0 for _, num_bytes in rows) == 2
    assert store.stored_bytes() == sum(num_bytes for _, num_bytes in rows) > 0
    assert store.begin_turn("tea", NewTurn("r1", [user("hi", 1)])).must_run
    assert store.verify() == []
