"""A history in PostgreSQL: its connections, its cleanup after deletions, and its checks."""

from __future__ import annotations

import logging
import math
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

from pensieve.errors import StoreCorrupt
from pensieve.store.backend import NUMBER_COLUMNS, ErasureSteps, Reads
from pensieve.store.postgres.connection import (
    Address,
    PostgresLanes,
    PostgresSnapshots,
    PostgresWriter,
    short_connection,
)
from pensieve.store.postgres.schema import SCHEMA
from pensieve.store.postgres.session import SqlSession
from pensieve.store.verify import (
    PROBLEMS_MAX,
    ROWS,
    Scrub,
    ScrubScans,
    TableScan,
    highest_keys,
    read_tables,
    scan_bodies,
    scan_conversation,
    verify_with,
)

T = TypeVar("T")
log = logging.getLogger("pensieve")
CHECK_SECONDS = 3600.0  # time limit for one statement of a check
ERASED_AT_ONCE = 256
SMALL_TABLES = (
    "space",
    "tenant_bytes",
    "prefixes",
    "owner",
    "job_owners",
    "salts",
    "schema_versions",
)
NO_INDICES = "the indices of the history are not checked: the database %s amcheck's bt_index_check"


class PostgresBackend:
    def __init__(
        self,
        address: Address,
        holder: str,
        busy_timeout_seconds: float,
        statement_seconds: float,
        num_lanes: int,
        is_exclusive: bool,
        patience_seconds: float,
    ) -> None:
        """`patience_seconds`: see PostgresLanes."""
        self.path = None
        self.is_shared = not is_exclusive
        self._address = address
        self._holder = holder
        self._statement_seconds = statement_seconds
        self.num_lanes = num_lanes
        self.writer = PostgresLanes(
            address,
            holder,
            busy_timeout_seconds,
            statement_seconds,
            num_lanes,
            is_exclusive,
            patience_seconds,
        )
        self.figures = self.writer.figures
        self.erasure = PostgresErasure(self.writer)
        self.marks = PostgresMarks(address, holder, statement_seconds)

    def close(self) -> None:
        self.writer.close()

    def share(self) -> None:
        """Do nothing: unless `is_exclusive`, other daemons can open the history from the start."""

    def lease_connection(self) -> PostgresWriter:
        return self.writer.lease_connection()

    def release(self, *, clean: bool) -> None:
        """Do nothing: closing the connections has released the locks."""

    def give_up(self) -> None:
        """Close the connections."""
        self.writer.close()

    def snapshots(self) -> PostgresSnapshots:
        """Return a read connection, separate from the writers."""
        return PostgresSnapshots(self._address, self._statement_seconds, f"{self._holder}, reads")

    def scrub(self) -> Scrub:
        return Scrub(self._snapshots_for_checks(), POSTGRES_SCANS)

    def verify(self, conversation_id: str | None, tenant: str) -> list[str]:
        snapshots = self._snapshots_for_checks()
        try:
            return verify_with(snapshots.snapshot, conversation_id, tenant)
        finally:
            snapshots.close()

    def integrity_check(self) -> list[str]:
        return integrity_check(self._snapshots_for_checks())

    def _snapshots_for_checks(self) -> PostgresSnapshots:
        name = f"{self._holder}, checks"
        return PostgresSnapshots(self._address, CHECK_SECONDS, name, math.inf)


class PostgresErasure(ErasureSteps):
    """Deletes the rows of wiped bodies, a few per transaction.

    The transaction of a deletion overwrites the content with NULL. After its commit, statements do not see
    the content any more, so an erasure is never pending here. Only the empty rows are left to delete. The
    server itself keeps old row versions in its files until VACUUM has reused their space, in its write-ahead
    log, and in archives and copies (docs/postgresql.md, "What a deletion leaves").

    Every change that wipes bodies calls `note_wiped` of the writer. A starting process looks for wiped rows
    that an earlier process has left.
    """

    def __init__(self, writer: PostgresLanes) -> None:
        self._writer = writer

    @property
    def due(self) -> bool:
        return self._writer.has_wiped

    def has_room(self) -> bool:
        with self._writer.writing() as conn:
            conn.execute("UPDATE space SET wiped_bytes = wiped_bytes")
        return True

    def resume(self) -> None:
        try:
            with self._writer.reading() as conn:
                found = conn.execute("SELECT 1 FROM bodies WHERE crc IS NULL LIMIT 1").fetchall()
        except StoreCorrupt:  # reported when the data is read
            return
        if found:
            self._writer.note_wiped()

    def tidy(self) -> None:
        self._writer.note_wiped()  # the next step looks for wiped rows

    def step(self) -> bool:
        self._writer.has_wiped = False
        try:
            with self._writer.writing() as conn:
                removed = conn.execute(
                    "DELETE FROM bodies WHERE body IN"
                    " (SELECT body FROM bodies WHERE crc IS NULL ORDER BY body LIMIT ?"
                    " FOR UPDATE SKIP LOCKED) RETURNING 1",
                    (ERASED_AT_ONCE,),
                ).fetchall()
        except BaseException:
            self._writer.note_wiped()
            raise
        if len(removed) == ERASED_AT_ONCE:
            self._writer.note_wiped()
        return self.due


class PostgresMarks:
    """Stores the mark of damage in the table `owner`, where every host can read it.

    No check is due after an unclean stop, because the server recovers by itself.
    """

    def __init__(self, address: Address, holder: str, statement_seconds: float) -> None:
        self._address = address
        self._name = f"{holder}, marks"
        self._seconds = statement_seconds

    @property
    def is_damaged(self) -> bool:
        with self._connection() as conn:
            return conn.execute("SELECT is_damaged FROM owner").fetchall() == [(True,)]

    @property
    def is_check_due(self) -> bool:
        return self.is_damaged

    def mark_damaged(self, is_damaged: bool) -> None:
        with self._connection() as conn:
            conn.execute("UPDATE owner SET is_damaged = ?", (is_damaged,))

    def _connection(self) -> AbstractContextManager[SqlSession]:
        """Open a short-lived connection, because the writer belongs to another thread."""
        return short_connection(self._address, self._name, self._seconds)


def _num_steps(conn: Any) -> int:
    highest = highest_keys(conn)
    return highest["conversations"] + sum(highest.values()) // ROWS + 2 * len(SCANS)


def _scan_rows(table: str, conn: Any, after: int, problems: list[str]) -> int | None:
    """Read whole rows. `count(r.*)` needs every column; the key alone could be read from an index."""
    key = NUMBER_COLUMNS[table]
    last: int | None = conn.execute(
        f"SELECT max(r.{key}), count(r.*)"
        f" FROM (SELECT * FROM {table} WHERE {key} > ? ORDER BY {key} LIMIT ?) AS r",
        (after, ROWS),
    ).fetchone()[0]
    return last


SCANS: tuple[TableScan, ...] = (
    scan_conversation,
    scan_bodies,
    *(partial(_scan_rows, table) for table in NUMBER_COLUMNS if table != "bodies"),
    partial(read_tables, SMALL_TABLES),
)
POSTGRES_SCANS = ScrubScans(SCANS, _num_steps)


def integrity_check(reads: Reads) -> list[str]:
    """Read every row, check the indexes, and return the problems.

    Reading every row finds pages that the server cannot read, or whose checksum (`initdb --data-checksums`)
    is wrong. Indexes are checked with the extension `amcheck`, if an operator has installed it.
    """
    problems: list[str] = []
    scrub = Scrub(reads, POSTGRES_SCANS)
    try:
        while not scrub.num_passes and not problems:
            problems += scrub.step()
        problems += _index_problems(reads)
    finally:
        reads.close()
    return problems[:PROBLEMS_MAX]


def _index_problems(reads: Reads) -> list[str]:
    try:
        with reads.snapshot() as conn:
            found = conn.execute(
                "SELECT p.oid::regproc::text, has_function_privilege(p.oid, 'EXECUTE')"
                " AND has_schema_privilege(p.pronamespace, 'USAGE')"
                " FROM pg_extension e JOIN pg_proc p ON p.pronamespace = e.extnamespace"
                " WHERE e.extname = 'amcheck' AND p.proname = 'bt_index_check' AND p.pronargs = 2"
            ).fetchone()
            if found is None or not found[1]:
                log.warning(NO_INDICES, "lacks" if found is None else "does not let this role call")
                return []
            conn.execute(
                f"SELECT {found[0]}(i.indexrelid, true) FROM pg_index i"
                " JOIN pg_class c ON c.oid = i.indexrelid"
                " JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = ?"
                " AND c.relam = (SELECT oid FROM pg_am WHERE amname = 'btree')",
                (SCHEMA,),
            ).fetchall()
    except StoreCorrupt as error:
        return [str(error)]
    return []
