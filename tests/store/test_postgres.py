"""PostgreSQL only: exclusive use, lost sessions, schema, damage and characters."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pensieve.config import resolve
from pensieve.config.resolve import print_settings
from pensieve.errors import (
    ConfigError,
    DiskFull,
    StoreCorrupt,
    StoreError,
    StoreLocked,
    StoreTooNew,
    StoreUnavailable,
)
from pensieve.store import ConversationStore, NewConversation, StoredTurnState
from pensieve.store.backend import NUMBER_COLUMNS, Conflict
from pensieve.store.postgres import connection
from pensieve.store.postgres.backend import SCANS
from pensieve.store.postgres.connection import Address, PostgresLanes
from pensieve.store.postgres.schema import NEWEST, SCHEMA
from pensieve.store.postgres.session import translated
from pensieve.store.postgres.wire import Wire, escaped, unescaped
from pensieve.store.records import ChainState
from tests.scale import SCALE
from tests.store import postgres_server
from tests.store.faulty import NEVER, history, write_history, writer_of
from tests.store.postgres_server import USER, PostgresServer
from tests.store.talk import begin, create, reply, say, user
from tests.store.test_faults import OPERATIONS

SECRET = "hunter2"


@pytest.fixture
def url(postgres: PostgresServer) -> Iterator[str]:
    made = postgres.new_database()
    yield made
    postgres.drop(made)


@pytest.fixture
def opened(tmp_path: Path, url: str) -> Iterator[Callable[..., ConversationStore]]:
    """Open the database. Each call uses another data folder, like another daemon."""
    stores: list[ConversationStore] = []

    def open_one(holder: str = "pensieve test", **options: Any) -> ConversationStore:
        folder = tmp_path / f"data{len(stores)}"
        store = ConversationStore.open(folder, holder, **{"url": url, **options})
        stores.append(store)
        return store

    yield open_one
    for store in stores:
        store.close()


Open = Callable[..., ConversationStore]


def name_of(url: str) -> str:
    return url.split("/")[3].split("?")[0]


def end_sessions(postgres: PostgresServer, url: str) -> None:
    """End all sessions, like an operator or a stopping server, and wait until they are gone."""
    here = f"FROM pg_stat_activity WHERE datname = '{name_of(url)}'"
    postgres.execute(f"SELECT pg_terminate_backend(pid) {here}")
    while postgres.execute(f"SELECT 1 {here}"):
        pass


# -- one owner --


def open_exclusively(url: str) -> PostgresLanes:
    """Open the database exclusively, as a copy of the history does."""
    return PostgresLanes(Address(url), "alone", 0.05, 10.0, 1, True, 5.0)


def wait_until_disconnected(postgres: PostgresServer, url: str) -> None:
    """Wait until all sessions have ended, because a session keeps its locks until then."""
    sessions = (
        f"SELECT 1 FROM pg_stat_activity WHERE datname = '{name_of(url)}'"
        " AND backend_type = 'client backend'"
    )
    while postgres.execute(sessions):
        time.sleep(0.01)


def test_exclusive_access_is_refused_while_others_are_connected_and_names_them(
    opened: Open, postgres: PostgresServer, url: str
) -> None:
    with opened("pensieve serve"), opened("another"):
        holders = (
            rf"in use by another, pid {os.getpid()} on .*, pensieve serve, pid {os.getpid()} on "
        )
        with pytest.raises(StoreLocked, match=holders), open_exclusively(url).reading():
            pass
    wait_until_disconnected(postgres, url)
    with contextlib.closing(open_exclusively(url)) as first:
        with first.reading():
            pass
        with pytest.raises(StoreLocked, match=rf"is in use by alone, pid {os.getpid()} on "):
            opened("another", busy_timeout_seconds=0.05)
        with (
            pytest.raises(StoreLocked, match=rf"is in use by alone, pid {os.getpid()} on "),
            open_exclusively(url).reading(),
        ):
            pass
    opened("another")


def test_a_schema_migration_needs_exclusive_access(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened("pensieve serve"):
        with monkeypatch.context() as patch:
            patch.setattr("pensieve.store.postgres.connection.needs_step", lambda conn: True)
            with pytest.raises(
                StoreLocked, match="which requires exclusive access, but is in use by pensieve"
            ):
                opened("newer", busy_timeout_seconds=0.05)
        opened("another")


def test_a_history_can_be_opened_as_soon_as_the_previous_process_has_closed_it(
    opened: Open,
) -> None:
    with opened("first") as store:
        create(store, "tea", user("hi", 1))
    assert list(opened("second").log("tea")) == [1]


def test_a_process_that_lost_its_exclusive_access_stops_writing(
    opened: Open, postgres: PostgresServer, url: str
) -> None:
    """With shared access, a process would lose only the conversations that other processes claim."""
    first = open_exclusively(url)
    with first.writing():
        pass
    end_sessions(postgres, url)
    with opened("second") as second:
        with pytest.raises(StoreUnavailable, match="in use by second, pid"), first.writing():
            pass
        create(second, "tea")
        say(second, "tea", "r1", user("hi", 1), reply("other", 3))
    wait_until_disconnected(postgres, url)
    for _ in range(2):
        with pytest.raises(StoreLocked, match="was taken over by second, pid"), first.writing():
            pass
    assert list(opened("third").log("tea")) == [1, 3]


# -- sessions that are lost --


def test_a_session_that_ended_while_idle_is_replaced_without_an_error(
    opened: Open, postgres: PostgresServer, url: str
) -> None:
    store = opened()
    create(store, "tea")
    reader = store.reader()
    assert reader.num_conversations() == 1
    turn_id = begin(store, "tea", "r1", "hi", 1)
    end_sessions(postgres, url)
    assert store.finish_turn(turn_id, reply("hello", 2), "stop", {}) == 1
    assert reader.num_conversations() == 1
    reader.close()


def test_a_new_session_ends_the_old_session_of_a_broken_connection(
    opened: Open, postgres: PostgresServer, url: str
) -> None:
    """The network has failed. The client's end of the connection is closed, but not the server's."""
    store = opened(busy_timeout_seconds=20.0)
    create(store, "tea")
    descriptor = writer_of(store).writers[0]._wire.conn.fileno()  # type: ignore[attr-defined]
    kept, nothing = os.dup(descriptor), os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, descriptor)
    os.close(nothing)
    try:
        create(store, "cup")
    finally:
        os.close(kept)
    assert store.num_conversations() == 2


def test_reads_wait_for_commits_that_the_standby_does_not_have_yet(
    opened: Open, postgres: PostgresServer, url: str
) -> None:
    """An interrupted wait for a standby makes the commit visible, so the next session must wait again."""
    store = opened()
    create(store, "tea")
    turn_id = begin(store, "tea", "r1", "hi", 1)
    here = f"FROM pg_stat_activity WHERE datname = '{name_of(url)}' AND wait_event = 'SyncRep'"

    def wait_until_blocked(job: Future[Any]) -> None:
        while not postgres.execute(f"SELECT 1 {here}"):
            assert not job.done()

    def set_standbys(names: str) -> None:
        postgres.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'")
        postgres.execute("SELECT pg_reload_conf()")
        while postgres.execute("SHOW synchronous_standby_names") != [(names,)]:
            pass
        time.sleep(0.5)  # until the server's checkpointer has the new setting, too

    with ThreadPoolExecutor(1) as pool:
        set_standbys("nobody")
        try:
            for end in ("pg_terminate_backend", "pg_cancel_backend"):
                if end == "pg_cancel_backend":
                    job: Future[Any] = pool.submit(create, store, "cup")
                else:
                    job = pool.submit(store.finish_turn, turn_id, reply("hello", 2), "stop", {})
                wait_until_blocked(job)
                postgres.execute(f"SELECT {end}(pid) {here}")
                if end == "pg_terminate_backend":
                    with pytest.raises(StoreUnavailable):
                        job.result()
                    read = pool.submit(store.get_turn, turn_id)
                    wait_until_blocked(read)
                    set_standbys("")
                    assert read.result().state is StoredTurnState.COMPLETED
                    set_standbys("nobody")
                else:  # the session continues, and the server reports success
                    with pytest.raises(StoreUnavailable, match="synchronous replication"):
                        job.result()
                    found = pool.submit(store.get_conversation, "cup")
                    wait_until_blocked(found)
        finally:
            set_standbys("")
        assert found.result().conversation_id == "cup"


class SessionLoss:
    """Loses the session at the Nth statement from now, before or after the statement is executed."""

    def __init__(self, after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.countdown = NEVER
        self.fired = False
        send = Wire.send

        def lossy(wire: Wire, *arguments: Any) -> Any:
            self.countdown -= 1
            if self.countdown:
                return send(wire, *arguments)
            self.fired = True
            if after:
                send(wire, *arguments)
                wire.sync()
            wire.close()
            raise wire._driver.OperationalError("the server closed the connection unexpectedly")

        monkeypatch.setattr(Wire, "send", lossy)

    def arm(self, countdown: int) -> None:
        self.countdown, self.fired = countdown, False

    def heal(self) -> None:
        self.countdown = NEVER


CASES = [(name, True) for name in ("begin", "finish")] + [("delete", False), ("finish", False)]
if SCALE > 1:
    CASES = [(name, after) for name in OPERATIONS for after in (False, True)]


@pytest.mark.parametrize(("name", "after"), CASES)
def test_an_operation_that_loses_its_session_happens_completely_or_not_at_all(
    tmp_path: Path,
    postgres: PostgresServer,
    name: str,
    after: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operation, template = OPERATIONS[name], postgres.new_database()
    with ConversationStore.open(tmp_path / "world", "test", url=template) as store:
        write_history(store)

    faults = SessionLoss(after, monkeypatch)

    def copy(number: int) -> tuple[str, ConversationStore]:
        url = postgres.new_database(template=name_of(template))
        folder = tmp_path / f"copy{number}"
        return url, ConversationStore.open(folder, "test", url=url)

    url, store = copy(0)
    with store:
        subject = operation.prepare(store)
        before = history(store)
        operation.run(store, subject)
        wanted = history(store)
    postgres.drop(url)
    point = 0
    while True:
        point += 1
        url, store = copy(point)
        with store:
            subject = operation.prepare(store)
            faults.arm(point)
            raised = False
            try:
                operation.run(store, subject)
            except StoreUnavailable:
                raised = True
            faults.heal()
            if not faults.fired:
                break
            seen = history(store)
            assert seen in ((before, wanted) if raised else (wanted,)), point
            if raised or not name.startswith("begin"):
                for conversation_id in {"tea", "pot"} & {entry[0] for entry in seen}:
                    say(store, conversation_id, "r9", user("x", 8), reply("y", 9))
            assert store.verify() == [], point
        postgres.drop(url)
    assert point > 4


def test_a_turn_end_that_committed_despite_an_error_is_not_stored_twice(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(lease_seconds=3600.0)  # a renewal of the lease would use up a fault
    faults = SessionLoss(True, monkeypatch)
    create(store, "tea")
    for number in range(1, 40):
        turn_id = begin(store, "tea", f"r{number}", "hi", 1)
        faults.arm(number)
        try:
            store.finish_turn(turn_id, reply("hello", 2), "stop", {})
        except StoreUnavailable:
            faults.heal()
            create(store, f"new{number}")  # this transaction first reads whether the turn ended
            if store.get_turn(turn_id).state is StoredTurnState.COMPLETED:
                break  # the lost statement was the COMMIT
            store.interrupt_turn(turn_id)
    else:
        raise AssertionError("no COMMIT was lost")
    assert store.finish_turn(turn_id, reply("hello", 2), "stop", {}) == 1
    assert list(store.log("tea")) == [1, 2]


# -- characters, names and numbers --


def test_every_character_is_stored_exactly(opened: Open) -> None:
    store = opened()
    names = ["a\0", "a\x1a0", "a\x1a", "a\x1a1", "ä\U0001f600\x1a\0", "%s ? :conversation"]
    for name in names:
        store.create_conversation(NewConversation("tea", f"f {name}", [], tenant=name))
        begun = store.get_conversation("tea", tenant=name)
        assert (begun.tenant, begun.fingerprint) == (name, f"f {name}")
    turn_id = begin_of(store, names[0])
    assert store.fail_turn(turn_id, "NUL \0 in it").failure == "NUL \0 in it"
    reader = store.reader()
    assert reader.tenants_of("tea") == sorted(names)
    reader.close()
    assert store.verify() == store.integrity_check() == []


def begin_of(store: ConversationStore, tenant: str) -> int:
    from pensieve.store import NewTurn

    request = NewTurn("r1", [user("a \0 b", 1)])
    return store.begin_turn("tea", request, tenant=tenant).turn.turn_id


def test_statements_and_texts_are_translated_for_postgresql() -> None:
    by_place = translated("SELECT ? WHERE b LIKE '5%' AND x::text = ?")
    assert tuple(by_place) == ("SELECT $1 WHERE b LIKE '5%' AND x::text = $2", ())
    assert by_place.in_order((1, "a")) == (1, "a")
    by_name = translated("SELECT :one WHERE a > :two OR a = :one")
    assert tuple(by_name) == ("SELECT $1 WHERE a > $2 OR a = $1", ("one", "two"))
    assert by_name.in_order({"two": 2, "one": 1}) == [1, 2]
    for text in ("", "plain", "\0", "\x1a", "\x1a0", "\x1a\0\x1a"):
        assert "\0" not in escaped(text)
        assert unescaped(escaped(text)) == text


def test_values_of_all_types_are_read_as_they_were_written(opened: Open) -> None:
    values = (None, True, 2**63 - 1, -(2**63), 0, 1.5, -0.1, 1e300, b"\0\xff", b"", "ä", "")
    types = ("text", "bool", *["int8"] * 3, *["float8"] * 3, *["bytea"] * 2, *["text"] * 2)
    marks = ", ".join(f"?::{each}" for each in types)
    with writer_of(opened()).reading() as conn:
        for _ in range(3):  # the second call prepares the statement
            assert conn.execute(f"SELECT {marks}", values).fetchall() == [values]
        for number in (0, 1, -1, 9999, 10_000, 10**8, 12_345_678_901_234_567_890, -(10**20)):
            found = conn.execute("SELECT sum(n) FROM (SELECT ?::numeric AS n) AS s", (str(number),))
            assert found.fetchone() == (number,)
        assert conn.execute("SELECT 3::int4, -3::int2, 'x'::name").fetchone() == (3, -3, "x")
        assert conn.execute("SELECT ?::text", (StoredTurnState.RUNNING,)).fetchone() == ("running",)


# -- the schema --


def test_postgresql_and_sqlite_have_the_same_tables_and_columns(
    opened: Open, tmp_path: Path, postgres: PostgresServer, url: str
) -> None:
    """Finds a migration step that is missing in one of the schemas."""
    opened().close()
    found = postgres.execute(
        "SELECT table_name, column_name FROM information_schema.columns"
        f" WHERE table_schema = '{SCHEMA}'",
        name_of(url),
    )
    only_here = {"owner", "schema_versions", "tenant_bytes"}
    there = {(table, column) for table, column in found if table not in only_here}
    with (
        ConversationStore.open(tmp_path / "sqlite", "test") as store,
        writer_of(store).reading() as conn,
    ):
        (version,) = conn.execute("PRAGMA user_version").fetchone()
        here = set(
            conn.execute(
                "SELECT m.name, c.name FROM sqlite_schema m, pragma_table_info(m.name) c"
                " WHERE m.type = 'table' AND m.name NOT LIKE '%sqlite%'"
            )
        )
    assert (NEWEST, there) == (version, here)


def test_a_newer_schema_is_refused_and_untouched(
    opened: Open, postgres: PostgresServer, url: str
) -> None:
    opened().close()
    newer = f"INSERT INTO {SCHEMA}.schema_versions (version) VALUES (99)"
    postgres.execute(newer, name_of(url))
    with pytest.raises(StoreTooNew, match=f"has schema version 99, .* up to {NEWEST}\\."):
        opened()


def test_a_schema_of_another_program_is_refused(
    opened: Open, postgres: PostgresServer, url: str
) -> None:
    postgres.execute(f"CREATE SCHEMA {SCHEMA}", name_of(url))
    with pytest.raises(StoreError, match="has a schema 'pensieve' of another program"):
        opened()


def test_a_server_that_would_lose_acknowledged_data_is_refused(
    opened: Open, postgres: PostgresServer
) -> None:
    def reload(statement: str, value: str) -> None:
        postgres.execute(statement)
        postgres.execute("SELECT pg_reload_conf()")
        while postgres.execute("SHOW full_page_writes") != [(value,)]:
            pass

    reload("ALTER SYSTEM SET full_page_writes = off", "off")
    try:
        with pytest.raises(StoreError, match="runs with full_page_writes = off, and could lose"):
            opened()
    finally:
        reload("ALTER SYSTEM RESET full_page_writes", "on")


def test_sessions_are_durable_despite_settings_of_the_server_or_role(
    opened: Open, postgres: PostgresServer, url: str
) -> None:
    postgres.execute(f"ALTER DATABASE {name_of(url)} SET synchronous_commit = off")
    with writer_of(opened()).reading() as conn:
        assert conn.execute("SHOW synchronous_commit").fetchone() == ("on",)
        assert conn.execute("SHOW default_transaction_isolation").fetchone() == ("repeatable read",)


# -- deletion and damage --


def test_rows_of_deleted_conversations_are_erased_in_steps(opened: Open, monkeypatch: Any) -> None:
    monkeypatch.setattr("pensieve.store.postgres.backend.ERASED_AT_ONCE", 4)
    store = opened()
    for name in ("tea", "cup"):
        create(store, name)
        for number in range(3):
            say(store, name, f"r{number}", user("a secret", 1), reply("yes", 2))
    store.delete_conversation("tea")
    assert store.erasure.due
    assert not store.erasure.pending
    steps = 1
    while store.erasure.step():
        steps += 1
    assert steps == 3
    with writer_of(store).reading() as conn:
        assert conn.execute("SELECT count(*) FROM bodies WHERE crc IS NULL").fetchone() == (0,)
        assert conn.execute("SELECT count(*) FROM bodies").fetchone() == (1 + 3 * 3,)
    assert store.verify() == store.integrity_check() == []


def test_a_scrub_finds_a_record_that_fails_its_checksum(opened: Open) -> None:
    store = opened()
    write_history(store)
    scrub = store.scrub()
    num_steps = scrub.num_steps()
    while not scrub.num_passes:
        assert scrub.step() == []
        num_steps -= 1
    assert num_steps >= 0  # the pauses between steps are computed from this estimate
    with writer_of(store).reading() as conn:
        conn.execute("UPDATE bodies SET crc = crc + 1 WHERE body = 3")
    problems: list[str] = []
    while not problems:
        problems = scrub.step()
    assert "fails its checksum" in problems[0]
    assert store.integrity_check() != []


def test_the_next_process_erases_the_rows_that_an_earlier_process_wiped(opened: Open) -> None:
    with opened() as store:
        create(store, "tea")
        assert not store.erasure.due
        store.changes.set_metadata("tea", {"topic": "milk"})  # no deletion, but it wipes a body
        assert store.erasure.due
    with opened() as store:
        assert store.erasure.due
        assert not store.erasure.step()
    assert not opened().erasure.due


@pytest.mark.parametrize("table", ["turns", "chains"])
def test_a_scrub_finds_a_damaged_page_even_where_an_index_could_answer(
    tmp_path: Path, table: str
) -> None:
    if problem := postgres_server.missing():
        pytest.skip(problem)
    server = PostgresServer()
    try:
        server.initialise()
        server.start()
        url = server.new_database()
        with ConversationStore.open(tmp_path / "data", "test", url=url) as store:
            create(store, "tea")
            for number in range(300):
                turn_id = begin(store, "tea", f"r{number}", "hi", 1)
                state = ChainState(b"digest", b"session")
                store.finish_turn(turn_id, reply("hello", 2), "stop", {}, state)
        database = name_of(url)
        server.execute("VACUUM", database)  # from now on, an index alone can list the rows
        ((path,),) = server.execute(f"SELECT pg_relation_filepath('pensieve.{table}')", database)
        server.stop()
        with (server.data / path).open("r+b") as file:
            file.seek(8000)
            file.write(b"damage")
        server.start()
        with ConversationStore.open(tmp_path / "data", "test", url=url) as store:
            walk = dict(
                zip([key for key in NUMBER_COLUMNS if key != "bodies"], SCANS[2:-1], strict=True)
            )
            reads = store._backend._snapshots_for_checks()  # type: ignore[attr-defined]
            with pytest.raises(StoreCorrupt, match="a page"), reads.snapshot() as conn:
                walk[table](conn, 0, [])
            reads.close()
            assert "a page of the database is damaged" in store.integrity_check()[0]
    finally:
        server.close()


def test_a_damage_mark_belongs_to_the_history_and_not_to_the_data_folder(
    opened: Open, tmp_path: Path
) -> None:
    folder = tmp_path / "data0"
    with ConversationStore.open(folder, "test") as sqlite_store:
        sqlite_store.marks.mark_damaged(True)
    with opened() as store:
        assert store.folder.path == folder
        assert not store.integrity_check_due
        store.marks.mark_damaged(True)
    with opened("another host") as store:
        assert store.marks.is_damaged
        assert store.integrity_check_due
        assert store.integrity_check() == []
        assert not store.integrity_check_due
    assert not opened("a third").marks.is_damaged
    with ConversationStore.open(folder, "test") as sqlite_store:
        assert sqlite_store.integrity_check_due


@pytest.fixture
def with_amcheck(postgres: PostgresServer) -> Iterator[PostgresServer]:
    """A server with the extension amcheck. If the package's server lacks it, use the system's server."""
    available = "SELECT 1 FROM pg_available_extensions WHERE name = 'amcheck'"
    if postgres.execute(available):
        yield postgres
        return
    if (place := postgres_server.system_programs()) is None:
        pytest.skip("amcheck comes with Debian's postgresql")
    server = PostgresServer(place=place)
    try:
        server.initialise()
        server.start()
        if not server.execute(available):
            pytest.skip("amcheck comes with Debian's postgresql-contrib")
        yield server
    finally:
        server.close()


def test_indexes_are_checked_if_the_role_is_allowed_to(
    tmp_path: Path, with_amcheck: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    postgres, url = with_amcheck, with_amcheck.new_database()
    name = name_of(url)
    postgres.execute("DROP ROLE IF EXISTS modest")
    postgres.execute("CREATE ROLE modest LOGIN")
    postgres.execute("CREATE EXTENSION amcheck", name)
    try:
        postgres.execute(f"GRANT CREATE ON DATABASE {name} TO modest")
        modest = url.replace(f"{USER}@", "modest@")
        with ConversationStore.open(tmp_path / "data", "test", url=modest) as store:
            write_history(store)
            assert store.integrity_check() == []
            assert "does not let this role call amcheck's bt_index_check" in caplog.text
            caplog.clear()
            called = "bt_index_check(regclass, boolean)"
            postgres.execute(f"GRANT EXECUTE ON FUNCTION {called} TO modest", name)
            assert store.integrity_check() == []
            assert caplog.text == ""
            damage_an_index(postgres, name)
            assert "an index of the database is damaged" in store.integrity_check()[0]
    finally:
        postgres.execute("DROP OWNED BY modest", name)
        postgres.execute("DROP OWNED BY modest")
        postgres.execute("DROP ROLE modest")
        postgres.drop(url)


def damage_an_index(postgres: PostgresServer, name: str) -> None:
    """Make an index miss rows: change its sort order without rebuilding it."""
    postgres.execute(
        "UPDATE pg_index SET indoption = '0 1'"
        " WHERE indexrelid = 'pensieve.conversations_prefix'::regclass",
        name,
    )


def test_verify_and_integrity_check_have_no_total_time_limit(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    write_history(store)
    hours = itertools.count()
    clock = types.SimpleNamespace(monotonic=lambda: 3600.0 * next(hours))
    monkeypatch.setattr("pensieve.store.backend.time", clock)
    assert store.verify() == store.integrity_check() == []
    with pytest.raises(StoreUnavailable, match="took too long"):
        store.num_conversations()


# -- round trips --


class RoundTrips:
    """A proxy for the server's socket that counts the client's round trips."""

    def __init__(self, server: Path, place: Path) -> None:
        self.num_round_trips = 0
        self._server_has_answered = True
        self._server = str(server / ".s.PGSQL.5432")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(place / ".s.PGSQL.5432"))
        self._socket.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._socket.accept()
                threading.Thread(target=self._carry, args=[client], daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, socket.socket(socket.AF_UNIX) as server:
            server.connect(self._server)
            while True:
                for here in select.select([client, server], [], [])[0]:
                    if not (data := here.recv(1 << 16)):
                        return
                    self.num_round_trips += here is client and self._server_has_answered
                    self._server_has_answered = here is server
                    (server if here is client else client).sendall(data)


def test_beginning_and_ending_a_turn_take_two_round_trips_each(
    opened: Open, postgres: PostgresServer, url: str, tmp_path: Path
) -> None:
    round_trips = RoundTrips(postgres.path, tmp_path)
    store = opened(url=url.replace(str(postgres.path), str(tmp_path)), lease_seconds=3600.0)
    create(store, "tea")
    counts = []
    for number in range(5):
        before = round_trips.num_round_trips
        turn_id = begin(store, "tea", f"r{number}", "hi", 1)
        begun = round_trips.num_round_trips
        store.finish_turn(turn_id, reply("hello", 2), "stop", {})
        counts.append((begun - before, round_trips.num_round_trips - begun))
    assert counts[1:] == [(2, 2)] * 4  # the first turn also reserves numbers
    store.close()
    round_trips.close()


def test_an_error_inside_a_savepoint_is_raised_at_its_release_and_the_rollback_undoes_its_writes(
    opened: Open,
) -> None:
    store = opened()
    insert = "INSERT INTO prefixes (tenant, conversation, keep_warm) VALUES (?, ?, 0)"
    with writer_of(store).writing() as conn:
        conn.execute("SAVEPOINT one")
        conn.execute(insert, ("a", 1))
        conn.execute("RELEASE SAVEPOINT one")
        conn.execute("SAVEPOINT two")
        conn.execute(insert, ("b", 2))
        conn.execute(insert, ("a", 1))  # a duplicate; its error is not read yet
        with pytest.raises(psycopg_error(), match="prefixes_pkey"):
            conn.execute("RELEASE SAVEPOINT two")
        conn.execute("ROLLBACK TO SAVEPOINT two")
        conn.execute(insert, ("c", 3))
    with writer_of(store).reading() as conn:
        rows = conn.execute("SELECT tenant FROM prefixes ORDER BY tenant").fetchall()
    assert rows == [("a",), ("c",)]


def test_no_session_stays_in_a_transaction_even_after_an_error(
    opened: Open, postgres: PostgresServer, url: str
) -> None:
    store = opened(lease_seconds=3600.0)
    create(store, "tea")
    reads = store._backend.snapshots()
    there = (
        f"SELECT DISTINCT state FROM pg_stat_activity WHERE datname = '{name_of(url)}'"
        " AND backend_type = 'client backend'"
    )

    def read(*statements: str) -> None:
        with reads.snapshot() as conn:
            results = [conn.execute(each) for each in statements]
            for each in results:
                each.fetchall()

    fine, wrong = "SELECT revision FROM conversations", "SELECT 1 / (revision - revision)"
    broken = f"{wrong} FROM conversations"
    for statements in ((), (fine,), (fine, fine), (broken,), (fine, broken, fine), (broken, fine)):
        for _ in range(2):
            with contextlib.suppress(psycopg_error("DataError")):
                read(*statements)
            assert postgres.execute(there) == [("idle",)], statements
        create(store, f"c{len(statements)}{statements.count(broken)}{statements[:1] == (fine,)}")
        with reads.snapshot() as conn:
            ((count,),) = conn.execute("SELECT count(*) FROM conversations").fetchall()
        assert count == store.num_conversations()
    reads.close()


def test_an_unread_error_rolls_back_the_transaction(opened: Open) -> None:
    store = opened()
    insert = "INSERT INTO prefixes (tenant, conversation, keep_warm) VALUES ('a', 1, 0)"

    def insert_twice() -> None:
        with writer_of(store).writing() as conn:
            conn.execute(insert)
            conn.execute(insert)

    with pytest.raises(Conflict, match="prefixes_pkey"):
        insert_twice()
    with writer_of(store).reading() as conn:
        assert conn.execute("SELECT * FROM prefixes").fetchall() == []


def psycopg_error(name: str = "IntegrityError") -> Any:
    import psycopg

    return getattr(psycopg, name)


# -- secrets --


def test_a_password_appears_in_no_error_log_line_or_shown_setting(
    tmp_path: Path,
    postgres: PostgresServer,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "START_SECONDS", 0.1)
    url = f"postgresql://me:{SECRET}@127.0.0.1:1/db"
    with pytest.raises(StoreUnavailable, match=r"postgresql://me@127\.0\.0\.1:1/db: ") as caught:
        ConversationStore.open(tmp_path / "data", "test", url=url)
    assert SECRET not in str(caught.value)
    assert "cannot reach the database" in caplog.text
    assert SECRET not in caplog.text
    resolved = resolve({"store": url}, {})
    assert resolved.settings.store == url
    print_settings(resolved)
    assert SECRET not in capsys.readouterr().out
    assert "store" not in resolved.written  # these settings are passed to the engine process


@pytest.mark.parametrize(
    "given",
    [
        f"postgresql://me:{SECRET}/more@host/db",
        f"postgresql://me:{SECRET}@more@host/db",
        f"postgresql://me:{SECRET}#@host/db",
        f"postgresql://me:{SECRET}?@host/db",
        f"postgresql://me:{SECRET}",
        f"postgresql://me:{SECRET}:more@host/db",
        f"postgresql://host/{SECRET}/db",
        f"host=somewhere password={SECRET}",
        f"mysql://me:{SECRET}@host/db",
    ],
)
def test_an_address_that_another_parser_could_split_differently_is_refused_and_not_shown(
    given: str,
) -> None:
    with pytest.raises(ConfigError, match="--store must be an address such as") as caught:
        resolve({"store": given}, {})
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        "postgresql:///history",
        "postgres://host/history",
        "postgresql://me@[::1]:5433/history?sslmode=verify-full",
        f"postgresql://me:{SECRET}%40@one:5432,two:5432/history",
        "postgresql://me@/history?host=/run/postgresql",
        "postgresql://me@%2Frun%2Fpostgresql/history",
    ],
)
def test_a_valid_store_address_is_accepted_unchanged(given: str) -> None:
    assert resolve({"store": given}, {}).settings.store == given


def test_a_full_disk_is_reported_at_once(opened: Open) -> None:
    store = opened()
    writer, told = writer_of(store), []
    store.figures.on_full = lambda: told.append(1)
    for code, kind, num_told in (("53100", DiskFull, 1), ("53200", StoreUnavailable, 0)):
        told.clear()
        with pytest.raises(kind), writer.writing() as conn:
            conn.execute(f"DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '{code}'; END $$")
        assert len(told) == num_told


def test_has_room_tests_the_disk_with_a_write(opened: Open) -> None:
    store = opened()
    assert store.erasure.has_room()
    with writer_of(store).reading() as conn:
        conn.execute("SET default_transaction_read_only = on")
    with pytest.raises(StoreUnavailable):
        store.erasure.has_room()
