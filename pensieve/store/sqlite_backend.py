"""A history in SQLite: its connections, erasure and checks."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pensieve.errors import DiskFull, ErasurePending, PensieveError, StoreUnavailable
from pensieve.store import verify
from pensieve.store.backend import ErasureSteps, Marks, TimeLimit
from pensieve.store.compaction import Compaction, CompactionPhase, first_phase
from pensieve.store.connection import WriterConnection, open_read_only, pensieve_error
from pensieve.store.folder import RESERVE_NAME, DataFolder
from pensieve.store.housekeeper import Housekeeper
from pensieve.store.migrations import migrate, remove_copies
from pensieve.store.shared_commits import SharedCommits
from pensieve.store.shared_file import SharedFile
from pensieve.store.verify import (
    BODIES_BYTES,
    KEYS,
    ROWS,
    Scrub,
    ScrubScans,
    TableScan,
    highest_keys,
    read_tables,
    scan_bodies,
    scan_conversation,
)

if TYPE_CHECKING:
    from sqlite3 import Connection

T = TypeVar("T")
SCRUB_CACHE_PAGES = 16
EVERY_ROW = "body > 0"
EVERY_CHAIN = "message > 0"
RESERVE_BYTES = 8 * 2**20
PENDING = (
    "the deleted content is not yet erased from the files of the history; this will be retried"
)


class SqliteBackend:
    def __init__(
        self,
        folder: DataFolder,
        driver: Any,
        busy_timeout_seconds: float,
        compact_bytes_min: int,
        statement_seconds: float,
        housekeeper: Housekeeper,
        shared: SharedFile | None = None,
        lease_seconds: float = math.inf,
        num_lanes: int = 1,
    ) -> None:
        """`shared`: the file, if the database is shared with other daemons."""
        self.num_lanes = num_lanes
        # SQLite resolves links, too, and keeps its log beside the real file.
        self.path = folder.database_path if shared is None else shared.path
        self.path = self.path.resolve() if self.path.is_symlink() else self.path
        self._shared = shared
        # After `patience_seconds`, a waiting writer kills a writing process that is stopped. Half of the
        # lease is short enough that the leases of waiting daemons do not expire meanwhile.
        self._sharing_options: dict[str, Any] = {
            "shared": shared,
            "patience_seconds": lease_seconds / 2,
        }
        self._busy_timeout_seconds = busy_timeout_seconds
        kind = WriterConnection if num_lanes == 1 else SharedCommits
        self.writer = kind(
            self.path,
            lambda db: migrate(
                db, self.path, is_alone=shared.is_alone if shared is not None else True
            ),
            driver,
            busy_timeout_seconds,
            statement_seconds,
            **self._sharing_options,
        )
        self.figures = self.writer.figures
        reserve_path = folder.path / RESERVE_NAME if shared is None else shared.reserve_path
        self._reserve = Reserve(reserve_path)
        self.erasure = Erasure(self.writer, compact_bytes_min, self._reserve, housekeeper)
        self.marks: Marks = folder if shared is None else shared

    @property
    def is_shared(self) -> bool:
        return self._shared is not None

    def share(self) -> None:
        if self._shared is not None:
            self._shared.share()

    def lease_connection(self) -> WriterConnection:
        """Return a second writing connection, for leases."""
        return WriterConnection(
            self.path,
            lambda db: None,
            self.writer.driver,
            self._busy_timeout_seconds,
            self.writer.limit.seconds,
            synchronous="NORMAL",
            **self._sharing_options,
        )

    def close(self) -> None:
        self._reserve.release()  # the final checkpoint may need the space
        self.writer.close()

    def release(self, *, clean: bool) -> None:
        if self._shared is not None:
            self._shared.close(clean=clean)

    def give_up(self) -> None:
        """Close a shared file.

        An exclusive file stays open, because closing it runs a checkpoint, which may be what failed. Python
        closes it when the connection is garbage-collected.
        """
        if self._shared is not None:
            with contextlib.suppress(PensieveError):
                self.writer.close()
            self._shared.close(clean=False)

    def snapshots(self) -> Snapshots:
        """Return a read connection, separate from the writer."""
        return Snapshots(self.path, self.writer.driver, self.writer.limit.seconds)

    def scrub(self) -> Scrub:
        return scrub_of_files(self.path, self.writer.driver)

    def verify(self, conversation_id: str | None, tenant: str) -> list[str]:
        return verify.verify(self.path, self.writer.driver, conversation_id, tenant)

    def integrity_check(self) -> list[str]:
        """Run SQLite's check of every page and index."""
        return verify.integrity_check(self.path, self.writer.driver)


class Snapshots:
    """A read connection, separate from the writer. For one thread at a time.

    Each read sees the state that was committed when the read began. The connection stays open between reads,
    so that reads still work if the process has run out of file descriptors. It is reopened after an error.
    """

    def __init__(
        self, path: Path, driver: Any, seconds: float = math.inf, cache_pages: int | None = None
    ) -> None:
        """`seconds`: time limit of a read."""
        self._limit = TimeLimit(seconds)
        self._path = path
        self._driver = driver
        self._cache_pages = cache_pages
        self._conn: Connection | None = None

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[Connection]:
        try:
            if self._conn is None:
                self._conn = open_read_only(self._path, self._driver)
                if self._cache_pages is not None:
                    self._conn.execute(f"PRAGMA cache_size = {self._cache_pages}")
                self._limit.watch(self._conn)
            with self._limit.counting():
                self._conn.execute("BEGIN")
                yield self._conn
        except self._driver.Error as error:
            self.close()
            raise pensieve_error(error, self._path) from error
        finally:
            if self._conn is not None and self._conn.in_transaction:
                try:
                    self._conn.execute("ROLLBACK")
                # The data that was read is correct. The next read reopens the connection.
                except self._driver.Error:
                    self.close()

    def close(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            with contextlib.suppress(self._driver.Error):
                conn.close()


def scrub_of_files(path: Path, driver: Any) -> Scrub:
    """Return a scrub with a small page cache, so that it reads from the disk and not from the cache."""
    return Scrub(Snapshots(path, driver, cache_pages=SCRUB_CACHE_PAGES), SQLITE_SCANS)


class Erasure(ErasureSteps):
    """Removes deleted content that would remain in the files after the deleting transaction.

        migration copies    A migration first copies the database. A deletion removes these copies before its
                            commit, so they never hold deleted content.
        write-ahead log     The log holds old versions of pages until it is truncated. The erasure is
                            *pending* from before the commit until a truncation has succeeded. After the
                            commit, each step and the next deletion try to truncate the log. This fails while
                            another connection reads the log, or while the disk is full.
        database file       Wiped bodies contain nothing, but waste space (compaction.py).

    On a full disk, a deletion frees the reserve to get space, and the file is shortened immediately.

    A backup (backup.py) is stored elsewhere and keeps deleted content until the backup is dropped. While a
    backup copies the database, the log cannot be truncated. A slow or broken backup folder does not delay the
    truncation.

    A clean close leaves the log empty. So if the history is opened and the log has content, the log may
    contain deleted content. It is then truncated when the history is opened, or by a later step.

    If several daemons share the file and one of them dies, the others continue to use the log. So the
    housekeeper truncates the log every TIDY_SECONDS, in case a dead daemon left deleted content in it
    (`tidy`). Only the housekeeper compacts. All daemons share the reserve.
    """

    def __init__(
        self,
        writer: WriterConnection,
        compact_bytes_min: int,
        reserve: Reserve,
        housekeeper: Housekeeper,
    ) -> None:
        # The number of deletions, and how many of them are erased. A deletion is counted in its transaction,
        # before the commit. So a truncation erases all deletions that were counted before it.
        self._num_deletions, self._num_erased = int(writer.has_journal()), 0
        self._counting = threading.Lock()
        self._deleting = threading.Lock()  # one deletion at a time uses the reserve
        self._writer = writer
        self._housekeeper = housekeeper
        self._reserve = reserve
        self._compact_bytes_min = compact_bytes_min
        self._compaction: Compaction | None = None  # during a pass

    @property
    def pending(self) -> bool:
        return self._num_erased < self._num_deletions

    @property
    def due(self) -> bool:
        return self.pending or self._compaction is not None

    def prepare(self) -> None:
        remove_copies(self._writer.path)
        self._count()

    def _count(self) -> None:
        with self._counting:
            self._num_deletions += 1

    def run_deletion(self, delete: Callable[[], T]) -> T:
        with self._deleting:
            try:
                return delete()
            except DiskFull:
                if not self._reserve.release():
                    raise
            with contextlib.suppress(StoreUnavailable):
                # empty the log, because the second try may need as much space
                self._writer.truncate_journal()
            return delete()

    def has_room(self) -> bool:
        if not self._reserve.refill():
            return False
        with self._writer.writing() as conn:
            conn.execute("UPDATE space SET wiped_bytes = wiped_bytes")
        return True

    def tidy(self) -> None:
        if self._writer.has_journal():
            self._count()

    def finish(self) -> None:
        if not self.pending:
            return
        num_deletions = self._num_deletions
        try:
            is_empty = self._writer.truncate_journal()
        except StoreUnavailable as error:
            raise ErasurePending(f"{PENDING}: {error}") from error
        if not is_empty:
            raise ErasurePending(f"{PENDING}: another program reads the files")
        with self._counting:
            self._num_erased = max(self._num_erased, num_deletions)
        with contextlib.suppress(StoreUnavailable):  # the next deletion checks again
            self._begin_compaction_if_due(is_urgent=not self._reserve.is_kept)

    def resume(self) -> None:
        self._reserve.refill()
        with contextlib.suppress(PensieveError):  # later steps retry
            self.finish()
            self._begin_compaction_if_due()

    def step(self) -> bool:
        if self.pending:
            self.finish()
        elif self._compaction is not None and not self._compaction.step():
            self._compaction = None
            self._writer.truncate_journal()  # the file gets shorter only at a checkpoint
        return self.due

    def _begin_compaction_if_due(self, *, is_urgent: bool = False) -> None:
        """Begin a compaction pass if the file wastes enough space."""
        if self._compaction is None and self._housekeeper.is_ours:
            phase = first_phase(self._writer, self._compact_bytes_min, is_urgent=is_urgent)
            if phase is not CompactionPhase.REST:
                self._compaction = Compaction(self._writer, phase, self._housekeeper.fence())


class Reserve:
    """A file that reserves a few MiB of disk space.

    On a full disk, this space is freed for a deletion, which writes to the write-ahead log before it frees
    anything.
    """

    def __init__(self, path: Path, num_bytes: int = RESERVE_BYTES) -> None:
        self._path = path
        self._num_bytes = num_bytes

    @property
    def is_kept(self) -> bool:
        return self._path.exists()

    def release(self) -> bool:
        """Free the space. Return whether any was reserved."""
        try:
            self._path.unlink()
        except OSError:
            return False
        return True

    def refill(self) -> bool:
        """Reserve the space. Return False if too little space would stay free on the disk."""
        try:
            disk = os.statvfs(self._path.parent)
            free = disk.f_bavail * disk.f_frsize
            needed = self._num_bytes // 4 + (0 if self.is_kept else self._num_bytes)
            if free < needed:
                return False
            if not self.is_kept:
                self._allocate()
        except OSError:
            return False
        return True

    def _allocate(self) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, self._num_bytes)
            else:  # macOS
                os.write(descriptor, bytes(self._num_bytes))
        except OSError:
            with contextlib.suppress(OSError):
                self._path.unlink()
            raise
        finally:
            os.close(descriptor)


# -- the steps of a scrub: conversations and their index, bodies, each row of each index, other tables --


class Index(NamedTuple):
    table: str
    name: str
    columns: tuple[str, ...]
    where: str = EVERY_ROW  # condition of the rows in the index


INDEXES = (
    Index("conversations", "sqlite_autoindex_conversations_1", ("key",)),
    Index("conversations", "conversations_tenant", ("tenant",)),
    Index("conversations", "conversations_prefix", ("prefix_key",), "prefix_key IS NOT NULL"),
    Index("conversations", "conversations_body", ("body",)),
    Index("turns", "sqlite_autoindex_turns_1", ("conversation", "request_key")),
    Index("turns", "turns_running", ("conversation",), "state = 'running'"),
    Index("turns", "turns_body", ("body",)),
    Index("turns", "turns_logprobs", ("logprobs",), "logprobs IS NOT NULL"),
    Index("turns", "turns_idempotency_key", ("idempotency_key",), "idempotency_key IS NOT NULL"),
    Index("messages", "messages_turn", ("turn_id",)),
    Index("messages", "messages_body", ("body",)),
    Index("chains", "chains_key", ("key", "session"), EVERY_CHAIN),
    Index("chains", "chains_message", ("message",), EVERY_CHAIN),
    Index("responses", "sqlite_autoindex_responses_1", ("key",), "key > x''"),
    Index("responses", "responses_conversation", ("conversation",), "conversation > 0"),
    Index("responses", "responses_body", ("body",), "body IS NOT 0"),
)
LINKS_NOT_FOUND = """
    SELECT position FROM history r WHERE conversation = ? AND NOT EXISTS (
        SELECT 1 FROM history i INDEXED BY history_message
        WHERE i.message = r.message AND i.conversation = r.conversation)
"""
SMALL_TABLES = (
    "space",
    "tenants",
    "prefixes",
    "sessions",
    "epochs",
    "housekeeping",
    "job_owners",
    "salts",
    "sqlite_sequence",
    "sqlite_schema",
    "_sqlite_migrations",
    "_sqlite_migrations WHERE migration_set = 'pensieve'",  # reads its index
)


def _num_steps(conn: Connection) -> int:
    numbers = highest_keys(conn)
    num_bytes = 1
    for pragma in ("page_count", "page_size"):
        num_bytes *= conn.execute(f"PRAGMA {pragma}").fetchone()[0]
    num_rows = numbers["bodies"] + sum(numbers[each.table] for each in INDEXES)
    conversations = numbers["conversations"]
    return conversations + num_rows // ROWS + num_bytes // BODIES_BYTES + 2 * len(SCANS)


def _scan_conversations(conn: Connection, after: int, problems: list[str]) -> int | None:
    number = scan_conversation(conn, after, problems)
    if number is not None:
        problems += [
            f"conversation number {number}: an index does not find message {position}"
            for (position,) in conn.execute(LINKS_NOT_FOUND, (number,))
        ]
    return number


def _scan_index(index: Index, conn: Connection, after: int, problems: list[str]) -> int | None:
    table, name, columns, where = index
    key = KEYS[table]
    # Read the index even if no row belongs in it. The query below would then not read it.
    if where != EVERY_ROW:
        conn.execute(
            f"SELECT {key} FROM {table} INDEXED BY {name} WHERE {where} LIMIT 1"
        ).fetchall()
    last: int | None = conn.execute(
        f"SELECT max(k) FROM (SELECT {key} AS k FROM {table} NOT INDEXED WHERE {key} > ?"
        f" ORDER BY {key} LIMIT ?)",
        (after, ROWS),
    ).fetchone()[0]
    same = " AND ".join(f"i.{column} IS r.{column}" for column in (*columns, key))
    not_found = conn.execute(
        f"SELECT {key} FROM {table} r NOT INDEXED WHERE {key} > ? AND {key} <= ? AND r.{where}"
        f" AND NOT EXISTS (SELECT 1 FROM {table} i INDEXED BY {name} WHERE {same} AND i.{where})",
        (after, after if last is None else last),
    )
    problems += [f"row {row} of {table}: the index {name} does not find it" for (row,) in not_found]
    return last


def _scan_owners(conn: Connection, after: int, problems: list[str]) -> int | None:
    """Read the rows of `owners`, which has no index."""
    last: int | None = conn.execute(
        "SELECT max(conversation), sum(session), sum(epoch) FROM (SELECT * FROM owners"
        " WHERE conversation > ? ORDER BY conversation LIMIT ?)",
        (after, ROWS),
    ).fetchone()[0]
    return last


SCANS: tuple[TableScan, ...] = (
    _scan_conversations,
    scan_bodies,
    _scan_owners,
    *(partial(_scan_index, index) for index in INDEXES),
    partial(read_tables, SMALL_TABLES),
)
SQLITE_SCANS = ScrubScans(SCANS, _num_steps)
