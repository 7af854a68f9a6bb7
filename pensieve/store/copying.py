"""Copy a whole history from one database to another, row by row.

One transaction of the target copies all tables with all row numbers. The target must be empty, and an
interrupted copy leaves it empty. Each body's checksum is verified. Wiped rows are not copied, because they
are empty. Turns that were running are interrupted when the copy is opened, as after a crash. The target
continues the turn numbers of the source, so it never reuses the number of a deleted turn.

Source and target are locked during the copy, so no daemon can serve them. The marks of damage, and the
records of which process has the source open, are not copied. The copy itself is checked for damage.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pensieve.errors import PensieveError, StoreCorrupt, StoreError
from pensieve.store.backend import (
    BUSY_TIMEOUT_SECONDS,
    NUMBER_COLUMNS,
    Backend,
    ServerSession,
)
from pensieve.store.bodies import checked_body, last_within
from pensieve.store.compaction import COMPACT_BYTES_MIN
from pensieve.store.conversation_store import open_backend
from pensieve.store.folder import DataFolder

if TYPE_CHECKING:
    from sqlite3 import Connection

ROWS_AT_ONCE = 512
BYTES_AT_ONCE = 4 * 2**20
STATEMENT_SECONDS = 24 * 3600.0
COLUMNS = {  # by table; a table comes after the tables that it refers to
    "bodies": "body crc private tokens",
    "conversations": "conversation key tenant prefix_key revision fingerprint created_at updated_at body",
    "turns": "turn_id conversation request_key state attempts seed finish_reason failure usage revision"
    " created_at finished_at body logprobs idempotency_key",
    "messages": "message turn_id role finish_reason num_tokens body",
    "history": "conversation position message revision first_token",
    "tenants": "tenant stored_bytes",
    "prefixes": "tenant conversation keep_warm",
    "chains": "chain key message session at",
    "responses": "response key conversation revision last_revision is_ours body",
    "salts": "tenant salt",
}
HIGHEST_TURN = (  # query for the highest turn number, in SQLite and in PostgreSQL
    "SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'turns'",
    "SELECT last_value FROM turns_turn_id_seq",
)


class Copied(NamedTuple):
    conversations: int
    messages: int


@contextlib.contextmanager
def opened(data: Path, url: str, holder: str) -> Iterator[Backend]:
    """Open the history at `url`, or in `data` if `url` is empty, to copy it. Lock it exclusively."""
    with contextlib.ExitStack() as stack:
        if url:
            data = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = DataFolder.open(data, holder, has_database=not url)
        was_unclean = folder.stopped_unclean
        try:
            times = BUSY_TIMEOUT_SECONDS, COMPACT_BYTES_MIN, STATEMENT_SECONDS
            backend = open_backend(folder, url, None, *times)
            try:
                yield backend
                backend.writer.close()
            except BaseException:
                with contextlib.suppress(PensieveError):
                    backend.writer.close()
                backend.give_up()
                raise
            backend.release(clean=not backend.marks.is_check_due)
        except BaseException:
            folder.close(clean=False)
            raise
        folder.close(clean=not was_unclean)


def copy_history(source: Backend, target: Backend) -> Copied:
    """Copy the history.

    Raises:
        StoreError: the target is not empty.
        StoreCorrupt: the source is damaged.
    """
    with source.writer.reading():
        pass  # opening the source locks it and migrates it to the newest schema
    reads = source.snapshots()
    try:
        with reads.snapshot() as old, target.writer.writing() as new:
            if any(_count(new, table) for table in ("bodies", "conversations")):
                raise StoreError("the target already has a history; a copy needs an empty target")
            # An empty target may have salts, because requests that store no conversation make salts, too. The
            # salts of the source replace them.
            new.execute("DELETE FROM salts")
            for table in COLUMNS:
                _copy_table(old, new, table)
            _continue_numbering(new, _highest(old))
            (epoch,) = old.execute("SELECT last FROM epochs").fetchone()
            new.execute("UPDATE epochs SET last = ?", (epoch,))
            copied = Copied(_count(old, "conversations"), _count(old, "messages"))
    finally:
        reads.close()
    if problems := target.verify(None, ""):
        raise StoreCorrupt(f"the copy is damaged: {problems[0]}")
    return copied


def _copy_table(old: Connection, new: Connection, table: str) -> None:
    columns = COLUMNS[table].split()
    placeholders = ", ".join("?" * len(columns))
    insert = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({placeholders})"
    for rows in _batches(old, table, columns):
        for row in rows:
            if table == "bodies":
                checked_body(f"body {row[0]}", *row[1:])
            if table == "tenants" and isinstance(new, ServerSession):
                new.count_bytes(*row)
            else:
                new.execute(insert, tuple(row))
        new.execute("SELECT 1").fetchall()  # wait for the server, to limit the statements in flight


def _batches(old: Connection, table: str, columns: list[str]) -> Iterator[list[Any]]:
    listed = ", ".join(columns)
    if table not in NUMBER_COLUMNS and table != "history":  # a small table, in one batch
        yield old.execute(f"SELECT {listed} FROM {table}").fetchall()
        return
    key, where = NUMBER_COLUMNS.get(table, "conversation"), "true"
    length = "0"
    if table == "bodies":
        where, length = "crc IS NOT NULL", "length(private) + length(tokens)"
    after = 0
    while True:
        lengths = old.execute(
            f"SELECT DISTINCT {key}, {length} FROM {table} WHERE {key} > ? AND {where}"
            f" ORDER BY {key} LIMIT ?",
            (after, ROWS_AT_ONCE),
        ).fetchall()
        last = last_within(lengths, BYTES_AT_ONCE)
        if last is None:
            return
        yield old.execute(
            f"SELECT {listed} FROM {table} WHERE {key} > ? AND {key} <= ? AND {where}"
            f" ORDER BY {key}",
            (after, last),
        ).fetchall()
        after = last


def _highest(conn: Connection) -> int:
    (highest,) = conn.execute(HIGHEST_TURN[isinstance(conn, ServerSession)]).fetchone()
    return int(highest)


def _continue_numbering(conn: Connection, highest_turn: int) -> None:
    """Number new rows after all copied rows, and new turns after all turns that ever existed."""
    if isinstance(conn, ServerSession):
        for table, key in NUMBER_COLUMNS.items():
            found = conn.execute(f"SELECT coalesce(max({key}), 0) FROM {table}").fetchone()
            highest = max(found[0], highest_turn if table == "turns" else 0)
            if highest:
                name = f"pg_get_serial_sequence('{table}', '{key}')"
                conn.execute(f"SELECT setval({name}, ?)", (highest,))
    else:
        conn.execute("DELETE FROM sqlite_sequence WHERE name = 'turns'")
        conn.execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('turns', ?)", (highest_turn,))


def _count(conn: Connection, table: str) -> int:
    number: int = conn.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
    return number
