"""What only PostgreSQL has: its owner, its sessions that are lost, its schema, its damage, its letters."""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pensieve.config import resolve
from pensieve.config.resolve import print_settings
from pensieve.errors import ConfigError, StoreError, StoreLocked, StoreTooNew, StoreUnavailable
from pensieve.store import ConversationStore, NewConversation, TurnState
from pensieve.store.postgres.dialect import adapted, translated, unescaped
from pensieve.store.postgres.schema import NEWEST, SCHEMA
from tests.scale import SCALE
from tests.store.faulty import history, world, writer_of
from tests.store.postgres_server import PostgresServer
from tests.store.talk import begin, create, reply, say, user
from tests.store.test_faults import ACTS

SECRET = "hunter2"


@pytest.fixture
def url(postgres: PostgresServer) -> Iterator[str]:
    made = postgres.new_database()
    yield made
    postgres.drop(made)


@pytest.fixture
def opened(tmp_path: Path, url: str) -> Iterator[Callable[..., ConversationStore]]:
    """Opens the database, each time in another data folder: as another daemon, perhaps elsewhere."""
    stores = []

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
    """As an operator does, or a server that stops; until they are gone."""
    here = f"FROM pg_stat_activity WHERE datname = '{name_of(url)}'"
    postgres.execute(f"SELECT pg_terminate_backend(pid) {here}")
    while postgres.execute(f"SELECT 1 {here}"):
        pass


# -- one owner --


def test_a_second_daemon_is_refused_and_learns_who_has_the_history(opened: Open) -> None:
    opened("pensieve serve")
    with pytest.raises(StoreLocked, match=rf"in use by pensieve serve, pid {os.getpid()} on "):
        opened("another", busy_timeout_seconds=0.05)


def test_who_has_the_history_next_is_there_as_soon_as_the_one_before_has_gone(opened: Open) -> None:
    with opened("first") as store:
        create(store, "tea", user("hi", 1))
    assert list(opened("second").log("tea")) == [1]


def test_who_has_lost_the_history_to_another_writes_no_more(
    opened: Open, postgres: PostgresServer, url: str
) -> None:
    first = opened("first", busy_timeout_seconds=0.05)
    create(first, "tea")
    turn_id = begin(first, "tea", "r1", "hi", 1)
    end_sessions(postgres, url)
    with opened("second") as second:
        assert [each.turn_id for each in second.interrupted_at_open] == [turn_id]
        with pytest.raises(StoreUnavailable, match="in use by second, pid"):
            first.finish_turn(turn_id, reply("hello", 2), "stop", {})
        say(second, "tea", "r1", user("hi", 1), reply("other", 3))
    for _ in range(2):
        with pytest.raises(StoreLocked, match="was taken over by second, pid"):
            first.finish_turn(turn_id, reply("hello", 2), "stop", {})
    assert list(opened("third").log("tea")) == [1, 3]


# -- sessions that are lost --


def test_a_session_that_ended_while_nothing_was_done_is_no_error(
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


def test_an_old_session_that_the_server_still_believes_in_is_ended_by_the_next(
    opened: Open, postgres: PostgresServer, url: str
) -> None:
    """The network between was lost, and with it our end of the connection."""
    store = opened(busy_timeout_seconds=20.0)
    create(store, "tea")
    descriptor = writer_of(store)._conn.fileno()  # type: ignore[attr-defined]
    kept, nothing = os.dup(descriptor), os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, descriptor)
    os.close(nothing)
    try:
        create(store, "cup")
    finally:
        os.close(kept)
    assert store.num_conversations() == 2


class LostAt:
    """psycopg whose session is lost at the Nth statement from now: before it, or after it was done."""

    def __init__(self, after: bool) -> None:
        import psycopg

        faults = self
        self.countdown = 10**9
        self.fired = False

        class Connection(psycopg.Connection[Any]):
            def execute(self, *args: Any, **options: Any) -> Any:
                faults.countdown -= 1
                if faults.countdown:
                    return super().execute(*args, **options)
                faults.fired = True
                if after:
                    super().execute(*args, **options)
                    with self.pipeline() as pipeline:
                        pipeline.sync()
                self.close()
                raise psycopg.OperationalError("the server closed the connection unexpectedly")

        self.driver = types.SimpleNamespace(
            Connection=Connection,
            Error=psycopg.Error,
            DataError=psycopg.DataError,
            conninfo=psycopg.conninfo,
        )

    def arm(self, countdown: int) -> None:
        self.countdown, self.fired = countdown, False

    def heal(self) -> None:
        self.countdown = 10**9


CASES = [(name, True) for name in ("begin", "finish")] + [("delete", False), ("finish", False)]
if SCALE > 1:
    CASES = [(name, after) for name in ACTS for after in (False, True)]


@pytest.mark.parametrize(("name", "after"), CASES)
def test_an_operation_whose_session_is_lost_happens_or_does_not(
    tmp_path: Path, postgres: PostgresServer, name: str, after: bool
) -> None:
    act, template = ACTS[name], postgres.new_database()
    with ConversationStore.open(tmp_path / "world", "test", url=template) as store:
        world(store)

    def copy(number: int, driver: Any = None) -> tuple[str, ConversationStore]:
        url = postgres.new_database(template=name_of(template))
        folder = tmp_path / f"copy{number}"
        return url, ConversationStore.open(folder, "test", url=url, driver=driver)

    url, store = copy(0)
    with store:
        subject = act.prepare(store)
        before = history(store)
        act.run(store, subject)
        wanted = history(store)
    postgres.drop(url)
    point = 0
    while True:
        point += 1
        faults = LostAt(after)
        url, store = copy(point, faults.driver)
        with store:
            subject = act.prepare(store)
            faults.arm(point)
            raised = False
            try:
                act.run(store, subject)
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


def test_an_end_that_was_committed_in_spite_of_its_error_is_not_doubled(opened: Open) -> None:
    faults = LostAt(after=True)
    store = opened(driver=faults.driver)
    create(store, "tea")
    for number in range(1, 40):
        turn_id = begin(store, "tea", f"r{number}", "hi", 1)
        faults.arm(number)
        try:
            store.finish_turn(turn_id, reply("hello", 2), "stop", {})
        except StoreUnavailable:
            faults.heal()
            create(store, f"new{number}")  # and reads what became of it
            if store.get_turn(turn_id).state is TurnState.COMPLETED:
                break  # it was the COMMIT
            store.interrupt_turn(turn_id)
    else:
        raise AssertionError("no COMMIT was lost")
    assert store.finish_turn(turn_id, reply("hello", 2), "stop", {}) == 1
    assert list(store.log("tea")) == [1, 2]


# -- letters, names and numbers --


def test_every_letter_comes_back(opened: Open) -> None:
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
    from pensieve.store import TurnRequest

    request = TurnRequest("r1", [user("a \0 b", 1)])
    return store.begin_turn("tea", request, tenant=tenant).turn.turn_id


def test_statements_and_texts_in_the_words_of_psycopg() -> None:
    assert translated("SELECT ? WHERE a = :name AND b LIKE '5%' AND x::text = ?") == (
        "SELECT %s WHERE a = %(name)s AND b LIKE '5%%' AND x::text = %s"
    )
    assert adapted({"state": TurnState.RUNNING, "n": 3}) == {"state": "running", "n": 3}
    for text in ("", "plain", "\0", "\x1a", "\x1a0", "\x1a\0\x1a"):
        (written,) = adapted([text])
        assert "\0" not in written
        assert unescaped(written) == text


# -- the schema --


def test_the_tables_and_columns_are_those_of_sqlite(
    opened: Open, tmp_path: Path, postgres: PostgresServer, url: str
) -> None:
    """A step of one schema that is missing in the other is found here."""
    opened().close()
    found = postgres.execute(
        "SELECT table_name, column_name FROM information_schema.columns"
        f" WHERE table_schema = '{SCHEMA}'",
        name_of(url),
    )
    only_here = {"owner", "schema_versions"}
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
    with pytest.raises(StoreTooNew, match=f"has schema version 99 .* up to {NEWEST}; "):
        opened()


def test_a_schema_of_another_program_is_refused(
    opened: Open, postgres: PostgresServer, url: str
) -> None:
    postgres.execute(f"CREATE SCHEMA {SCHEMA}", name_of(url))
    with pytest.raises(StoreError, match="has a schema 'pensieve' of another program"):
        opened()


def test_a_server_that_would_lose_what_it_acknowledged_is_refused(
    opened: Open, postgres: PostgresServer
) -> None:
    def reload(statement: str, value: str) -> None:
        postgres.execute(statement)
        postgres.execute("SELECT pg_reload_conf()")
        while postgres.execute("SHOW full_page_writes") != [(value,)]:
            pass

    reload("ALTER SYSTEM SET full_page_writes = off", "off")
    try:
        with pytest.raises(StoreError, match="runs with full_page_writes = off, and would lose"):
            opened()
    finally:
        reload("ALTER SYSTEM RESET full_page_writes", "on")


def test_a_session_is_durable_whatever_the_server_or_the_role_has_set(
    opened: Open, postgres: PostgresServer, url: str
) -> None:
    postgres.execute(f"ALTER DATABASE {name_of(url)} SET synchronous_commit = off")
    with writer_of(opened()).reading() as conn:
        assert conn.execute("SHOW synchronous_commit").fetchone() == ("on",)
        assert conn.execute("SHOW default_transaction_isolation").fetchone() == ("repeatable read",)


# -- deletion and damage --


def test_the_rows_of_what_was_deleted_go_in_steps(opened: Open, monkeypatch: Any) -> None:
    from pensieve.store.postgres import erasure

    monkeypatch.setattr(erasure, "STEP_ROWS", 4)
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
    world(store)
    scrub = store.scrub()
    num_steps = scrub.num_steps()
    while not scrub.num_passes:
        assert scrub.step() == []
        num_steps -= 1
    assert num_steps >= 0  # by which the pauses are reckoned
    with writer_of(store).reading() as conn:
        conn.execute("UPDATE bodies SET crc = crc + 1 WHERE body = 3")
    problems: list[str] = []
    while not problems:
        problems = scrub.step()
    assert "fails its checksum" in problems[0]
    assert store.integrity_check() != []


# -- backups, and secrets --


def test_a_backup_is_refused_with_a_word_about_those_of_postgresql(opened: Open) -> None:
    from pensieve.store.backup.writing import write_copy

    store = opened()
    with pytest.raises(StoreError, match="PostgreSQL, which has its own backups: pg_dump"):
        write_copy(store.backup_source, store.folder.path / "backup")


def test_a_password_is_in_no_error_and_no_setting_that_is_shown(
    tmp_path: Path, postgres: PostgresServer, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"postgresql://me:{SECRET}@127.0.0.1:1/db"
    with pytest.raises(StoreUnavailable, match=r"postgresql://me@127\.0\.0\.1:1/db: ") as caught:
        ConversationStore.open(tmp_path / "data", "test", url=url)
    assert SECRET not in str(caught.value)
    resolved = resolve({"store": url}, {})
    assert resolved.settings.store == url
    print_settings(resolved)
    assert SECRET not in capsys.readouterr().out
    assert "store" not in resolved.written  # which the engine's process is given


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
def test_an_address_that_might_be_taken_apart_otherwise_is_refused_unseen(given: str) -> None:
    with pytest.raises(ConfigError, match="--store is an address such as") as caught:
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
def test_an_address_is_taken_as_it_is(given: str) -> None:
    assert resolve({"store": given}, {}).settings.store == given
