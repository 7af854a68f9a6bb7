"""Schemas: created once, copied before a migration, and refused if they are newer."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlite_utils import Database

from pensieve.errors import (
    NotFound,
    StoreCorrupt,
    StoreError,
    StoreTooNew,
    StoreUnavailable,
    TurnRunning,
)
from pensieve.store import ConversationStore
from pensieve.store.migrations import STEPS, Steps, migrate
from tests.store.faulty import writer_of
from tests.store.older_schemas import TO_SCHEMA_1
from tests.store.talk import begin, create, reply, say, user

pytestmark = pytest.mark.sqlite  # PostgreSQL's schema is in test_postgres.py

Open = Callable[..., ConversationStore]
NEWEST = len(STEPS)
COLOUR = "ALTER TABLE conversations ADD COLUMN colour TEXT"
NEWER: Steps = {**STEPS, "m999_colour": [COLOUR]}  # the steps of a newer version
FIRST_STEPS = [  # existing databases record these names, so they must not change
    "m001_initial",
    "m002_holders_by_body",
    "m003_bytes_of_tenants",
    "m004_logprobs",
    "m005_prefixes",
    "m006_chains",
    "m007_responses",
    "m008_owners",
    "m009_idempotency_keys",
    "m010_leases",
    "m011_job_owners",
    "m012_salts",
]


def edit(path: Path, driver: Any, *statements: str) -> None:
    conn = driver.connect(str(path), isolation_level=None)
    for statement in statements:
        conn.execute(statement)
    conn.close()


@pytest.fixture
def path(open_store: Open) -> Path:
    """A closed database with one turn."""
    store = open_store()
    create(store, "tea")
    say(store, "tea", "r1", user("hi", 1), reply("hello", 2))
    store.close()
    return store.folder.database_path


def test_the_database_file_records_its_application_schema_and_migrations(
    path: Path, driver: Any
) -> None:
    conn = driver.connect(str(path))
    assert conn.execute("PRAGMA application_id").fetchone() == (0x50656E73,)
    assert conn.execute("PRAGMA user_version").fetchone() == (NEWEST,)
    assert conn.execute("PRAGMA auto_vacuum").fetchone() == (2,)  # incremental, to allow shortening
    assert list(STEPS)[: len(FIRST_STEPS)] == FIRST_STEPS
    assert conn.execute("SELECT migration_set, name FROM _sqlite_migrations").fetchall() == [
        ("pensieve", name) for name in STEPS
    ]
    conn.close()


def test_the_writer_uses_durable_commits_and_secure_delete(store: ConversationStore) -> None:
    with writer_of(store).reading() as conn:
        pragmas = {
            name: conn.execute(f"PRAGMA {name}").fetchone()[0]
            for name in (
                "journal_mode",
                "synchronous",
                "secure_delete",
                "foreign_keys",
                "mmap_size",
            )
        }
    assert pragmas == {
        "journal_mode": "wal",
        "synchronous": 2,
        "secure_delete": 1,
        "foreign_keys": 1,
        "mmap_size": 0,
    }


@pytest.mark.parametrize(
    ("statement", "version"),
    [
        (f"PRAGMA user_version = {NEWEST + 1}", NEWEST + 1),
        (
            "INSERT INTO _sqlite_migrations (migration_set, name, applied_at)"
            " VALUES ('pensieve', 'm004_future', '')",
            NEWEST + 1,
        ),
    ],
)
def test_a_newer_schema_is_refused_and_untouched(
    path: Path, driver: Any, open_store: Open, statement: str, version: int
) -> None:
    edit(path, driver, statement)
    before = path.read_bytes()
    with pytest.raises(StoreTooNew) as refused:
        open_store()
    assert str(refused.value) == (
        f"{path} has schema version {version}, but this Pensieve knows only versions up to {NEWEST}."
        " Open it with the newer Pensieve that wrote it, or restore an older backup"
        " (`pensieve restore`)"
    )
    assert path.read_bytes() == before


def test_the_refusal_of_a_newer_schema_names_the_copy_that_this_version_can_open(
    path: Path, driver: Any, open_store: Open
) -> None:
    """Following the advice of this refusal works."""
    conn = driver.connect(str(path), isolation_level=None)
    migrate(Database(conn), path, NEWER)
    conn.close()
    with pytest.raises(StoreTooNew) as refused:
        open_store()
    assert str(refused.value) == (
        f"{path} has schema version {NEWEST + 1}, but this Pensieve knows only versions up to {NEWEST}."
        " Open it with the newer Pensieve that wrote it, or replace it by"
        f" conversations.db.version{NEWEST}, the history before the upgrade (without later messages)"
    )
    path.with_name(f"conversations.db.version{NEWEST}").replace(path)
    assert list(open_store().log("tea")) == [1, 2]


def test_an_older_schema_is_not_changed_if_it_cannot_be_copied_first(
    path: Path, driver: Any, open_store: Open
) -> None:
    edit(path, driver, *TO_SCHEMA_1)
    path.with_name("conversations.db.version1").mkdir()  # so that the copy cannot be written
    with pytest.raises(
        StoreUnavailable, match=r"conversations.db.version1 before the schema changes"
    ):
        open_store()
    conn = driver.connect(str(path))
    assert conn.execute("PRAGMA user_version").fetchone() == (1,)
    conn.close()
    path.with_name("conversations.db.version1").rmdir()
    assert list(open_store().log("tea")) == [1, 2]


def test_a_refused_open_releases_the_folder(path: Path, driver: Any, open_store: Open) -> None:
    edit(path, driver, f"PRAGMA user_version = {NEWEST + 1}")
    for _ in range(2):
        with pytest.raises(StoreTooNew):
            open_store()
    edit(path, driver, f"PRAGMA user_version = {NEWEST}")
    assert not open_store().integrity_check_due


def test_a_database_of_another_program_is_refused(
    path: Path, driver: Any, open_store: Open
) -> None:
    edit(path, driver, "PRAGMA application_id = 1")
    with pytest.raises(StoreError, match="is a database of another program"):
        open_store()
    path.unlink()
    edit(path, driver, "CREATE TABLE recipes (name TEXT)")
    with pytest.raises(StoreError, match="is a database of another program"):
        open_store()


def test_a_file_that_is_not_a_database_is_refused(path: Path, open_store: Open) -> None:
    path.write_bytes(b"To be, or not to be" * 1000)
    with pytest.raises(StoreCorrupt, match="the file is not a database"):
        open_store()


def test_an_old_sqlite_is_refused(open_store: Open) -> None:
    class Old:
        sqlite_version = "3.36.0"
        sqlite_version_info = (3, 36, 0)

    with pytest.raises(StoreError, match=r"SQLite 3.36.0 is too old; 3.37 is needed"):
        open_store(driver=Old)


def test_a_database_is_copied_before_its_schema_changes(path: Path, driver: Any) -> None:
    conn = driver.connect(str(path), isolation_level=None)
    migrate(Database(conn), path, NEWER)
    assert conn.execute("PRAGMA user_version").fetchone() == (NEWEST + 1,)
    assert conn.execute("SELECT colour FROM conversations").fetchall() == [(None,)]
    conn.close()
    backup = path.with_name(f"conversations.db.version{NEWEST}")
    assert backup.stat().st_mode & 0o777 == 0o600
    conn = driver.connect(str(backup))
    assert conn.execute("PRAGMA user_version").fetchone() == (NEWEST,)
    assert conn.execute("SELECT count(*) FROM messages").fetchone() == (2,)
    conn.close()


def test_a_migration_that_fails_leaves_the_old_schema(path: Path, driver: Any) -> None:
    broken = COLOUR, f"PRAGMA user_version = {NEWEST + 1}", "SELECT 1 FROM nowhere"
    conn = driver.connect(str(path), isolation_level=None)
    with pytest.raises(driver.OperationalError, match="nowhere"):
        migrate(Database(conn), path, {**STEPS, "m999_broken": broken})
    assert conn.execute("PRAGMA user_version").fetchone() == (NEWEST,)
    columns = [row[1] for row in conn.execute("PRAGMA table_info(conversations)")]
    assert "colour" not in columns
    conn.close()


def test_a_record_of_migrations_that_contradicts_the_schema_is_refused(
    path: Path, driver: Any, open_store: Open
) -> None:
    edit(path, driver, f"PRAGMA user_version = {NEWEST - 1}")
    contradiction = f"has schema version {NEWEST - 1}, but records all {NEWEST} migrations"
    with pytest.raises(StoreCorrupt, match=contradiction):
        open_store()


def test_a_deletion_removes_the_copy_that_a_migration_made(
    path: Path, driver: Any, open_store: Open
) -> None:
    """The copy would otherwise keep the deleted text for ever."""
    edit(path, driver, *TO_SCHEMA_1)
    backup = path.with_name("conversations.db.version1")
    store = open_store()
    assert b"hello" in backup.read_bytes()
    assert b"hello" in path.read_bytes()
    running = begin(store, "tea", "r2", "more", 3)
    for refused in (NotFound, TurnRunning):
        with pytest.raises(refused):
            store.delete_conversation("tea" if refused is TurnRunning else "cup")
    assert backup.exists()  # nothing has been deleted yet
    store.interrupt_turn(running)
    store.delete_conversation("tea")
    assert not backup.exists()
    assert not [file for file in path.parent.iterdir() if b"hello" in file.read_bytes()]


def test_a_deletion_is_refused_if_the_copy_of_a_migration_cannot_be_removed(
    path: Path, driver: Any, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(path, driver, *TO_SCHEMA_1)
    store = open_store()

    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        with pytest.raises(
            StoreUnavailable, match=r"conversations.db.version1, .* Permission denied"
        ):
            store.delete_conversation("tea")
    assert list(store.log("tea")) == [1, 2]
    store.delete_conversation("tea")
    assert [file.name for file in path.parent.iterdir() if "version" in file.name] == []


def test_a_migration_counts_the_bytes_that_an_earlier_version_stored(
    path: Path, driver: Any, open_store: Open
) -> None:
    with open_store() as store:
        store.fork_conversation("tea", 1, "fork")
        store.delete_conversation("tea")
        counted = store.stored_bytes()
    assert counted > 0
    edit(path, driver, *TO_SCHEMA_1)
    with open_store() as store:
        assert store.stored_bytes() == counted
        assert store.verify() == []
