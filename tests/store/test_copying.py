"""A history is unchanged after a copy to PostgreSQL and back. A failed copy leaves nothing behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pensieve.cli.main import main
from pensieve.errors import StoreCorrupt, StoreError, StoreLocked
from pensieve.store import ConversationStore, copying
from pensieve.store.connection import preferred_driver
from pensieve.store.copying import COLUMNS, Copied, copy_history, opened
from pensieve.store.records import ChainState, NewPrefix
from pensieve.store.responses import StoredResponse
from pensieve.store.shared_file import SHARED_SQLITE_MIN
from tests.store.faulty import history, write_history, writer_of
from tests.store.postgres_server import PostgresServer
from tests.store.talk import begin, create, reply, say, user


@pytest.fixture
def url(postgres: PostgresServer) -> Iterator[str]:
    made = postgres.new_database()
    yield made
    postgres.drop(made)


def write_rich_history(store: ConversationStore) -> None:
    """Make a history with rows in each table, a NUL character, a running turn, and unused row numbers."""
    write_history(store)
    turn_id = begin(store, "cup", "r7", "a\0b", 3)
    state = ChainState(b"digest", b"session")
    store.finish_turn(turn_id, reply("yes", 4, logprobs=b"packed"), "stop", {}, state)
    store.responses.save(StoredResponse("resp_1", "tea", {"id": "resp_1"}))
    store.prefixes.declare(NewPrefix("rules", "f", [user("head", 1)]))
    create(store, "gone")
    say(store, "gone", "r1", user("hi", 1), reply("hello", 2))
    begin(store, "tea", "r8", "running", 9)
    store.delete_conversation("gone")
    for tenant in ("", "acme"):
        store.salt_of(tenant)


def rows(store: ConversationStore) -> dict[str, Any]:
    with writer_of(store).reading() as conn:
        return {
            table: sorted(
                (repr(tuple(row)) for row in conn.execute(select(table)).fetchall()),
            )
            for table in COLUMNS
        }


def select(table: str) -> str:
    where = " WHERE crc IS NOT NULL" if table == "bodies" else ""
    return f"SELECT {', '.join(COLUMNS[table].split())} FROM {table}{where}"


def copy(source: tuple[Path, str], target: tuple[Path, str]) -> Copied:
    with opened(*source, "test") as old, opened(*target, "test") as new:
        return copy_history(old, new)


def test_a_history_is_unchanged_after_a_copy_to_postgresql_and_back(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "ROWS_AT_ONCE", 3)
    here, there, again = (tmp_path / "here", ""), (tmp_path, url), (tmp_path / "again", "")
    with ConversationStore.open(here[0], "test") as store:
        write_rich_history(store)
        store.interrupt_turn(running_turn_of(store))
        seen = history(store)
        last_turn_id = begin(store, "pot", "next", "x", 1)
        store.interrupt_turn(last_turn_id)
        held = rows(store)
    assert copy(here, there).conversations == 4
    assert copy(there, again).messages > 8
    for place, address in (there, again):
        with ConversationStore.open(
            place / "data" if address else place, "test", url=address
        ) as store:
            assert rows(store) == held
            assert history(store) == seen
            assert begin(store, "tea", "later", "x", 1) > last_turn_id
            assert store.verify() == store.integrity_check() == []


def running_turn_of(store: ConversationStore) -> int:
    running = store.get_conversation("tea").running_turn_id
    assert running is not None
    return running


def test_every_column_is_copied_except_those_about_sessions_and_owners(tmp_path: Path) -> None:
    with (
        ConversationStore.open(tmp_path, "test") as store,
        writer_of(store).reading() as conn,
    ):
        found = conn.execute(
            "SELECT m.name, c.name FROM sqlite_schema m, pragma_table_info(m.name) c"
            " WHERE m.type = 'table' AND m.name NOT LIKE '%sqlite%' AND m.name <> 'space'"
        ).fetchall()
    left_behind = {
        "sessions",
        "owners",
        "epochs",
        "housekeeping",
        "job_owners",
    }  # not copied, except that new epochs start after the last old epoch
    assert sorted(each for each in found if each[0] not in left_behind) == sorted(
        (name, each) for name in COLUMNS for each in COLUMNS[name].split()
    )
    assert left_behind < {name for name, _ in found}


def test_a_copy_to_a_target_that_has_a_history_is_refused(tmp_path: Path, url: str) -> None:
    here, there = (tmp_path / "here", ""), (tmp_path, url)
    with ConversationStore.open(here[0], "test") as store:
        write_history(store)
    with ConversationStore.open(tmp_path / "data", "test", url=url) as store:
        create(store, "mine")
    with pytest.raises(StoreError, match="already has a history"):
        copy(here, there)
    with ConversationStore.open(tmp_path / "data", "test", url=url) as store:
        assert [each.conversation_id for each in store.list_conversations().conversations] == [
            "mine"
        ]


def test_a_copy_replaces_the_salts_of_a_target_without_conversations(
    tmp_path: Path, url: str
) -> None:
    here, there = (tmp_path / "here", ""), (tmp_path, url)
    with ConversationStore.open(here[0], "test") as store:
        write_history(store)
        salt = store.salt_of("acme")
    with ConversationStore.open(tmp_path / "data", "test", url=url) as store:
        assert store.salt_of("acme") != salt
    copy(here, there)
    with ConversationStore.open(tmp_path / "data", "test", url=url) as store:
        assert store.salt_of("acme") == salt


def test_a_refused_copy_of_a_damaged_history_leaves_the_target_empty(
    tmp_path: Path, url: str
) -> None:
    here, there = (tmp_path / "here", ""), (tmp_path, url)
    with ConversationStore.open(here[0], "test") as store:
        write_history(store)
        with writer_of(store).writing() as conn:
            conn.execute("UPDATE bodies SET crc = crc + 1 WHERE body = 5")
    with pytest.raises(StoreCorrupt, match="body 5: a record fails its checksum"):
        copy(here, there)
    with ConversationStore.open(tmp_path / "data", "test", url=url) as store:
        assert store.num_conversations() == 0


def test_a_history_that_a_daemon_uses_is_not_copied(tmp_path: Path, url: str) -> None:
    with (
        ConversationStore.open(tmp_path / "data", "pensieve serve", url=url),
        pytest.raises(StoreLocked, match="in use by pensieve serve"),
        opened(tmp_path, url, "test") as backend,
        backend.writer.reading(),
    ):
        raise AssertionError("the history was opened")


def test_the_copy_command_reports_how_much_it_copied(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ("--data", str(tmp_path / "data"), "--store", url)
    assert main(["copy", *data]) == 3
    assert "has no history" in capsys.readouterr().err
    with ConversationStore.open(tmp_path / "data", "test") as store:
        write_history(store)
    assert main(["copy", *data]) == 0
    assert "copied 3 conversations with 8 messages to PostgreSQL" in capsys.readouterr().out
    back = ("--data", str(tmp_path / "back"), "--store", url)
    assert main(["copy", "--back", "--json", *back]) == 0
    assert json.loads(capsys.readouterr().out) == {"conversations": 3, "messages": 8}


needs_sqlite = pytest.mark.skipif(
    preferred_driver.sqlite_version_info < SHARED_SQLITE_MIN, reason="needs a newer SQLite"
)


@needs_sqlite
@pytest.mark.parametrize("name", ["history.db", "shared/conversations.db"])
def test_the_copy_command_copies_to_a_shared_file_and_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    data = ("--data", str(tmp_path / "data"), "--store", f"sqlite://{file}")
    back = ("--data", str(tmp_path / "back"), "--store", f"sqlite://{file}")
    assert main(["copy", "--back", *back]) == 3
    assert f"there is no file {file}" in capsys.readouterr().err
    assert not file.exists()
    with ConversationStore.open(tmp_path / "data", "test") as store:
        write_rich_history(store)
        store.interrupt_turn(running_turn_of(store))
        seen, held = history(store), rows(store)
    assert main(["copy", *data]) == 0
    assert f"copied 4 conversations with 12 messages to {file}" in capsys.readouterr().out
    url = f"sqlite://{file}"
    with (
        ConversationStore.open(tmp_path / "one", "test", url=url) as one,
        ConversationStore.open(tmp_path / "two", "test", url=url) as two,
    ):
        assert not one.integrity_check_due
        assert rows(two) == held
        assert history(one) == seen
        assert main(["copy", "--back", *back]) == 3
        assert "in use by daemons that share it" in capsys.readouterr().err
        assert one.verify() == one.integrity_check() == []
    assert main(["copy", "--back", *back]) == 0
    with ConversationStore.open(tmp_path / "back", "test") as store:
        assert rows(store) == held
    assert main(["copy", *data]) == 3
    assert "already has a history" in capsys.readouterr().err


@needs_sqlite
def test_a_shared_file_is_locked_while_it_is_copied(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path / 'history.db'}"
    with opened(tmp_path, url, "pensieve copy"):
        with pytest.raises(StoreLocked, match="in use by pensieve copy, pid"):
            ConversationStore.open(tmp_path / "one", "test", url=url)
        with (
            pytest.raises(StoreLocked, match="in use by pensieve copy, pid"),
            opened(tmp_path, url, "another"),
        ):
            raise AssertionError("the history was opened")
    with pytest.raises(ValueError, match="oops"), opened(tmp_path, url, "pensieve copy"):
        raise ValueError("oops")
    with ConversationStore.open(tmp_path / "one", "test", url=url) as store:
        assert store.integrity_check_due
