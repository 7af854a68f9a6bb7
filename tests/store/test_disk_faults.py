"""Errors of SQLite and the disk are one line each, and the store recovers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pensieve.errors import PensieveError, StoreCorrupt, StoreUnavailable
from pensieve.store import (
    ConversationStore,
)
from tests.store.faulty import (
    FaultyDriver,
    begin_third_turn,
    database_of,
    history,
    open_copy,
    write_history,
    writer_of,
)
from tests.store.talk import create, reply

pytestmark = pytest.mark.sqlite  # faults of SQLite's files are the subject

FULL, IO_ERROR = 13, 10


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        (5, StoreUnavailable, "another program holds the database"),
        (8, StoreUnavailable, "the database is read-only"),
        (10 | (4 << 8), StoreUnavailable, "disk I/O error"),  # a failed sync
        (11, StoreCorrupt, "the database is damaged"),
        (14, StoreUnavailable, "the database file cannot be opened"),
        (26, StoreCorrupt, "the file is not a database"),
    ],
)
def test_each_sqlite_error_is_reported_in_one_line(
    folder: Path, driver: Any, code: int, error: type[PensieveError], words: str
) -> None:
    faults = FaultyDriver(driver, code, False, False)
    with open_copy(folder, "copy", faults) as store:
        faults.arm(2)
        with pytest.raises(error) as raised:
            create(store, "new")
        assert str(raised.value) == f"the history {store.folder.database_path}: {words}"
        create(store, "new")


@pytest.mark.parametrize("code", [8, 10, 14])
def test_after_an_io_error_a_new_connection_is_used(folder: Path, driver: Any, code: int) -> None:
    faults = FaultyDriver(driver, code, False, False)
    with open_copy(folder, "copy", faults) as store:
        used = database_of(store)
        faults.arm(3)
        with pytest.raises(StoreUnavailable):
            create(store, "new")
        assert database_of(store) is None
        with pytest.raises(driver.ProgrammingError):
            used.conn.execute("SELECT 1")
        create(store, "new")


def test_an_sql_error_of_the_program_is_raised_unchanged(folder: Path, driver: Any) -> None:
    faults = FaultyDriver(driver, 1, False, False)
    with open_copy(folder, "copy", faults) as store:
        faults.arm(2)
        with pytest.raises(driver.OperationalError, match="planted"):
            create(store, "new")
        create(store, "new")


def test_a_full_disk_refuses_the_turn_and_keeps_the_history(store: ConversationStore) -> None:
    write_history(store)
    before = history(store)
    with writer_of(store).reading() as conn:
        (num_pages,) = conn.execute("PRAGMA page_count").fetchone()
        conn.execute(f"PRAGMA max_page_count = {num_pages + 4}").fetchall()
    turn_id = begin_third_turn(store)
    with pytest.raises(StoreUnavailable, match="the disk is full"):
        store.finish_turn(turn_id, reply("long" * 9000, *range(9000)), "stop", {})
    assert history(store) == before
    with writer_of(store).reading() as conn:
        conn.execute(f"PRAGMA max_page_count = {num_pages + 400}").fetchall()
    assert store.finish_turn(turn_id, reply("long" * 9000, *range(9000)), "stop", {}) == 3
    assert store.verify() == []


FILE_LIMIT_CHILD = """
import resource, signal, sys
from pathlib import Path
from pensieve.errors import StoreUnavailable
from pensieve.store import ConversationStore
from tests.store.talk import create, reply, say, user
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = ConversationStore.open(Path(sys.argv[1]), "test")
create(store, "tea")
resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, resource.RLIM_INFINITY))
number = 0
try:
    while True:
        say(store, "tea", f"r{number}", user("hi", number), reply("x" * 20_000, number))
        number += 1
except StoreUnavailable as error:
    print(number, error)
print(len(store.log("tea")), store.verify())
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(say(store, "tea", f"r{number}", user("hi", number), reply("ok", number)) == number + 1)
store.close()
"""


def test_a_turn_is_refused_if_the_file_cannot_grow_and_nothing_is_lost(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FILE_LIMIT_CHILD, str(tmp_path)], capture_output=True, text=True
    )
    assert done.stderr == ""
    refused, after, went_on = done.stdout.splitlines()
    number, _, words = refused.partition(" ")
    assert int(number) > 0
    assert words in {
        f"the history {tmp_path}/conversations.db: {reason}"
        for reason in ("the disk is full", "disk I/O error")
    }
    assert after == f"{2 * int(number)} []"
    assert went_on == "True"
