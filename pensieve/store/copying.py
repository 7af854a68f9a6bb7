"""Copy a whole history from one database to another, row for row.

All tables with all numbers, in one transaction of the target, which has to be empty: an interruption leaves
it so.  Each body is checked against its checksum on its way.  Wiped rows stay behind, as nothing is in them.
A turn that was running is interrupted where the copy is opened, as after a crash.  The number of a turn that
is gone is given to no other one there either.

Both ends are locked while it runs, like by a daemon, so none can serve either of them.  What is known of a
history beside its rows (that it is damaged, who has it) is not copied: the copy is checked instead.
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
COLUMNS = {  # by table, in an order in which what a row refers to comes before it
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
}
GIVEN_OUT = (  # the highest number of a turn: of SQLite, of PostgreSQL
    "SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'turns'",
    "SELECT last_value FROM turns_turn_id_seq",
)


class Copied(NamedTuple):
    conversations: int
    messages: int


@contextlib.contextmanager
def opened(data: Path, url: str, holder: str) -> Iterator[Backend]:
    """A history for copying, held alone until the end of the block: that of `data`, or of `url`."""
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
    """StoreError if the target has something already; StoreCorrupt if the source is damaged."""
    with source.writer.reading():
        pass  # it is locked, and has the newest schema
    reads = source.snapshots()
    try:
        with reads.snapshot() as old, target.writer.writing() as new:
            if any(_count(new, table) for table in ("bodies", "conversations")):
                raise StoreError("there is a history already; a copy needs an empty place")
            for table in COLUMNS:
                _copy_table(old, new, table)
            _go_on_from(new, _highest(old))
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
    marks = ", ".join("?" * len(columns))
    insert = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})"
    for rows in _batches(old, table, columns):
        for row in rows:
            if table == "bodies":
                checked_body(f"body {row[0]}", *row[1:])
            if table == "tenants" and isinstance(new, ServerSession):
                new.count_bytes(*row)
            else:
                new.execute(insert, tuple(row))
        new.execute("SELECT 1").fetchall()  # no more than this is under way


def _batches(old: Connection, table: str, columns: list[str]) -> Iterator[list[Any]]:
    listed = ", ".join(columns)
    if table not in NUMBER_COLUMNS and table != "history":  # few rows
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
    (highest,) = conn.execute(GIVEN_OUT[isinstance(conn, ServerSession)]).fetchone()
    return int(highest)


def _go_on_from(conn: Connection, highest_turn: int) -> None:
    """New rows get numbers above all that were given out."""
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
