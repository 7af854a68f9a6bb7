"""Several daemons on one PostgreSQL database: stores in processes that are killed, stopped and cut off."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pensieve.errors import OwnedElsewhere, PensieveError
from pensieve.store import ConversationStore, NewMessage
from pensieve.store.conversation_changes import Pending
from pensieve.store.owners import EPOCHS_LOCK_KEY, Session
from pensieve.store.postgres import connection
from pensieve.store.postgres.connection import LOCK_KEY
from pensieve.store.shared_file import is_stopped
from tests.scale import SCALE
from tests.store.faulty import writer_of
from tests.store.postgres_server import USER, PostgresServer
from tests.store.sharing_process import KEEP_OWNERS, LEASE_SECONDS, Process
from tests.store.talk import begin, create
from tests.store.test_postgres import name_of
from tests.store.test_shared_file import (  # noqa: F401  the same tests run on both databases
    NUM_CONVERSATIONS,
    check_epochs,
    test_a_conversation_of_a_killed_daemon_can_be_claimed_after_its_lease,
    test_a_conversation_recreated_after_another_daemon_deleted_it_is_reported_as_stale,
    test_a_daemon_with_an_expired_lease_keeps_turns_that_no_daemon_claimed,
    test_a_late_turn_end_is_refused_after_another_daemon_took_over,
    test_a_restarted_daemon_interrupts_its_earlier_turns,
    test_idle_conversations_of_a_draining_daemon_are_claimed_with_the_address_of_their_kv,
    test_one_daemon_is_the_housekeeper_and_another_daemon_takes_over,
    test_the_creator_owns_a_conversation_and_other_daemons_learn_its_address,
    test_two_owners_never_share_an_epoch,
    try_claim,
    wait_until,
)

Start = Callable[..., Process]
SOCKET = ".s.PGSQL.5432"
PIECE = 1 << 16


class Proxy:
    """A proxy for the server's socket. While `cut`, it forwards nothing, but closes nothing."""

    def __init__(self, server: Path) -> None:
        self._server = str(server / SOCKET)
        self._folder = tempfile.TemporaryDirectory(prefix="pensieve-proxy-")
        self.path = Path(self._folder.name)
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(self.path / SOCKET))
        self._listening.listen()
        self._forwards = threading.Event()
        self._forwards.set()
        self._open: set[socket.socket] = set()
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def cut(self) -> None:
        self._forwards.clear()

    def heal(self, *, closes: bool) -> None:
        """Forward again. With `closes`, connections from before are lost on both sides."""
        if closes:
            for each in list(self._open):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        self._forwards.set()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._accepting.join()
        self.heal(closes=True)
        self._folder.cleanup()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._pass_on, args=(client,), daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        self._forwards.wait()
        with client, socket.socket(socket.AF_UNIX) as server, contextlib.suppress(OSError):
            server.connect(self._server)
            self._open |= {client, server}
            other = {client: server, server: client}
            while True:
                for each in select.select(list(other), [], [])[0]:
                    piece = each.recv(PIECE)
                    self._forwards.wait()
                    if not piece:
                        return
                    other[each].sendall(piece)
        self._open -= {client, server}


@pytest.fixture
def url(postgres: PostgresServer) -> Iterator[str]:
    made = postgres.new_database()
    yield made
    postgres.drop(made)


@pytest.fixture
def path(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The parent folder of the daemons' data folders."""

    def problems_in(path: Path) -> list[str]:
        with ConversationStore.open(path.parent / "last", "test", url=url) as store:
            return [*store.verify(), *store.integrity_check()]

    monkeypatch.setattr("tests.store.test_shared_file.problems_in", problems_in)
    return tmp_path / "shared"


@pytest.fixture
def start(path: Path, url: str) -> Iterator[Start]:
    """Start processes, and end them after the test."""
    started: list[Process] = []

    def start_one(name: str, **options: Any) -> Process:
        started.append(Process(path, name, **{"url": url, **options}))
        return started[-1].ready()

    yield start_one
    for each in started:
        each.end()


@pytest.fixture
def proxy(postgres: PostgresServer) -> Iterator[Proxy]:
    made = Proxy(postgres.path)
    yield made
    made.close()


def url_through(proxy: Proxy, url: str) -> str:
    return f"{url.partition('?')[0]}?host={proxy.path}"


@pytest.mark.parametrize("closes", [False, True])
def test_a_disconnected_daemon_cannot_end_a_turn_that_another_daemon_claimed(
    start: Start, proxy: Proxy, url: str, closes: bool
) -> None:
    a = start("a", url=url_through(proxy, url), lease_seconds=LEASE_SECONDS)
    b = start("b", lease_seconds=LEASE_SECONDS)
    a("create", "tea")
    a("create", "cup")
    turn_id, attempt, *_ = a("begin", "tea", "r1", 2)
    kept, *_ = a("begin", "cup", "r1", 3)
    proxy.cut()
    a.put("finish", turn_id, attempt, 99)
    wait_until(lambda: try_claim(b, "begin", "tea", "r1", 2))
    assert b("finish", turn_id, attempt + 1, 7) == 1
    proxy.heal(closes=closes)
    assert a.answer()[1] in ("Unavailable", "StoreUnavailable")
    wait_until(lambda: a("finish", turn_id, attempt, 99)[1] == "Unavailable")
    assert a("finish", kept, 1, 8) == 1  # no other daemon has claimed this conversation
    assert b("log", "tea") == [1, 2, 7]
    assert b("log", "cup") == [1, 3, 8]


def test_a_daemon_that_is_stopped_during_a_transaction_loses_its_locks(start: Start) -> None:
    a, b = (start(name, lease_seconds=LEASE_SECONDS) for name in "ab")
    a("create", "tea")
    b("create", "cup")
    a.put("hold_write_lock")
    wait_until(lambda: is_stopped(a.child.pid))
    assert b("say", "cup", "r1", 2) == 1
    wait_until(lambda: try_claim(b, "begin", "tea", "r1", 2))
    a.resume()
    assert a.answer()[:2] == ["error", "StoreUnavailable"]
    assert a("say", "tea", "r2", 3)[1] == "OwnedElsewhere"


def test_a_daemon_starts_even_if_a_stopped_daemon_holds_the_epoch_lock(
    start: Start,
) -> None:
    a = start("a", lease_seconds=LEASE_SECONDS)
    a("create", "tea")
    a.put(
        "hold_write_lock", f"SELECT pg_advisory_xact_lock({EPOCHS_LOCK_KEY}) FROM owners FOR UPDATE"
    )
    wait_until(lambda: is_stopped(a.child.pid))
    time.sleep(LEASE_SECONDS)
    b = start("b", lease_seconds=LEASE_SECONDS)
    assert b("say", "tea", "r1", 2) == 1


def test_a_daemon_does_not_end_its_own_transactions(tmp_path: Path, url: str) -> None:
    """This holds however long its thread computes between two statements."""
    with ConversationStore.open(
        tmp_path / "a", "test", url=url, replica="a", lease_seconds=LEASE_SECONDS, num_lanes=2
    ) as store:
        create(store, "tea")
        with writer_of(store).writing() as conn:
            conn.execute(KEEP_OWNERS).fetchall()
            time.sleep(1.5 * LEASE_SECONDS)
            conn.execute(KEEP_OWNERS).fetchall()


def sessions(store: ConversationStore) -> list[Session]:
    reader = store.reader()
    try:
        return reader.sessions()
    finally:
        reader.close()


@pytest.fixture
def modest_url(postgres: PostgresServer, url: str) -> Iterator[str]:
    """The same database for a role that sees all sessions, but may not end sessions of a superuser."""
    postgres.execute("CREATE ROLE modest LOGIN IN ROLE pg_monitor")
    postgres.execute(f"GRANT CREATE ON DATABASE {name_of(url)} TO modest")
    yield url.replace(f"{USER}@", "modest@")
    for database in (name_of(url), "postgres"):
        postgres.execute("DROP OWNED BY modest", database)
    postgres.execute("DROP ROLE modest")


def test_a_hanging_transaction_of_another_role_delays_no_daemon(
    tmp_path: Path, url: str, modest_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    import psycopg

    options: dict[str, Any] = {"url": modest_url, "lease_seconds": LEASE_SECONDS}
    with (
        psycopg.connect(url, autocommit=True) as other,
        ConversationStore.open(tmp_path / "a", "test", replica="a", **options) as a,
    ):
        other.execute("SELECT pg_advisory_lock_shared(%s)", [LOCK_KEY])
        other.execute("BEGIN")
        other.execute("SELECT txid_current()")
        time.sleep(1.5 * LEASE_SECONDS)
        with ConversationStore.open(tmp_path / "b", "test", replica="b", **options):
            assert [each.is_alive for each in sessions(a)] == [True, True]
        other.execute("COMMIT")
    assert caplog.text == ""


def test_a_daemon_starts_even_if_it_cannot_end_hanging_transactions(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "END_HANGING_SESSIONS", "SELECT 1 / 0")
    options: dict[str, Any] = {"url": url, "lease_seconds": LEASE_SECONDS}
    with ConversationStore.open(tmp_path / "a", "test", replica="a", **options) as store:
        create(store, "tea")
    assert "cannot end hanging transactions of other daemons: division by zero" in caplog.text


def test_no_turn_begins_while_pending_messages_of_an_unowned_conversation_change(
    tmp_path: Path, url: str, postgres: PostgresServer
) -> None:
    """The conversation has no owner, as in a history of an older version."""
    with (
        ConversationStore.open(tmp_path / "a", "test", url=url) as a,
        ConversationStore.open(tmp_path / "b", "test", url=url) as b,
    ):
        create(a, "tea")
        postgres.execute("DELETE FROM pensieve.owners", name_of(url))
        refused: list[PensieveError] = []

        def begin_at_b() -> None:
            try:
                begin(b, "tea", "r1", "hi", 1)
            except PensieveError as error:
                refused.append(error)

        thread = threading.Thread(target=begin_at_b)

        def change(pending: Pending) -> Pending:
            thread.start()
            thread.join(0.5)
            return Pending((*pending.messages, NewMessage("user", "more")))

        changed = a.changes.change_pending("tea", change)
        thread.join()
        assert len(changed.after.messages) == 1
        assert [type(each) for each in refused] == [OwnedElsewhere]


def test_random_faults_neither_lose_nor_duplicate_turns(
    start: Start, path: Path, url: str, postgres: PostgresServer
) -> None:
    """Three daemons run turns in the same conversations. Each in turn is killed, stopped and cut off.

    Every acknowledged turn is in the log exactly once, at its revision. All turns of an epoch come from one
    daemon.
    """
    said: list[list[Any]] = []
    proxies = {name: Proxy(postgres.path) for name in "abc"}
    processes: dict[str, Process] = {}
    unread: dict[str, bytes] = {}
    seeds = itertools.count(1)
    first = start("first")
    for number in range(NUM_CONVERSATIONS):
        first("create", f"w{number}")
    first("close")

    def start_daemon(name: str) -> None:
        place = {"url": url_through(proxies[name], url), "lease_seconds": LEASE_SECONDS}
        processes[name], unread[name] = start(name, **place), b""
        os.set_blocking(processes[name].child.stdout.fileno(), False)  # type: ignore[union-attr]
        processes[name].put("run_random_turns", next(seeds), NUM_CONVERSATIONS)

    def read_output() -> None:
        for name, process in processes.items():
            with contextlib.suppress(BlockingIOError):
                while piece := os.read(process.child.stdout.fileno(), PIECE):  # type: ignore[union-attr]
                    unread[name] += piece
            *lines, unread[name] = unread[name].split(b"\n")
            said.extend(entry for line in lines if (entry := json.loads(line))[0] == "said")

    for name in "abc":
        start_daemon(name)
    for step in range(9 * SCALE):
        time.sleep(0.4)
        read_output()
        victim, fault = "abc"[step % 3], step // 3 % 3
        if fault == 0:
            processes[victim].kill()
            read_output()
            start_daemon(victim)
        elif fault == 1:
            processes[victim].stop()
            time.sleep(LEASE_SECONDS + 0.3)
            processes[victim].resume()
        else:
            proxies[victim].cut()
            time.sleep(LEASE_SECONDS + 0.3)
            proxies[victim].heal(closes=bool(step % 2))
    time.sleep(0.4)
    for each in processes.values():
        each.kill()
    read_output()
    for proxy in proxies.values():
        proxy.close()

    assert len(said) > 100
    sessions = {entry[5] for entry in said}
    assert len(sessions) > 3, "no restarted daemon finished a turn"
    check_epochs(said)
    with ConversationStore.open(path.parent / "last", "test", url=url) as store:
        for number in range(NUM_CONVERSATIONS):
            name = f"w{number}"
            log, messages = list(store.log(name)), store.messages(name, include_token_ids=True)
            entries = [entry for entry in said if entry[1] == name]
            assert len({entry[3] for entry in entries}) == len(entries)
            for _, _, token, revision, *_ in entries:
                assert log.count(token) == 2  # once in the message, once in its reply
                found = [m.revision for m in messages if list(m.token_ids or ()) == [token]]
                assert found == [revision, revision]
        assert store.verify() == []
        assert store.integrity_check() == []
