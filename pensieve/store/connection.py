"""The read-write connection to a SQLite database of a history or a job, and read-only connections.

**One daemon** has one writer. No other process writes or checkpoints the database: the data folder is
locked, checkpoints happen on this connection, readers use mode=ro, and there is no mmap. This also avoids the
WAL-reset bug of SQLite 3.7.0 to 3.51.2, which needs two connections that write or checkpoint. The package
pysqlite3 contains a fixed SQLite and is used if installed.

**Several daemons** (shared_file.py) have one writer each, in processes of one host. They require a SQLite
without that bug. Only one daemon writes at a time: transactions are IMMEDIATE, and a writer begins one only
while it holds the writers' lock. Other operations are safe, too:

    recovery     The first daemon that opens the file recovers the log. No other process has the file open at
                 that time. The daemon recovers on a separate connection (`_recover`) and closes it, which
                 removes the -shm file. This is necessary because a recovery copies uninitialized memory,
                 which may contain private text, into that file. A recovery while other daemons run is rare:
                 only if a process died while it wrote the header of the -shm file. Then the -shm file stays
                 until the last daemon closes the history.
    truncating   needs the writers' lock, so no other daemon writes or checkpoints meanwhile. SQLite truncates
                 the log only if every frame is in the database and no process reads the log. Otherwise SQLite
                 reports that it did not truncate, and we try again.
    wiping       `secure_delete` wipes the pages that the transaction changes, whichever process wrote them
                 before. After a commit by another process, SQLite reads cached pages again.
    migrations   run while only one daemon has the file open. They copy the old database to a file beside it.
                 The next deletion removes these copies.
    closing      The last connection moves the log into the database and removes the log.

**Threads.** The connection may move between threads, but two threads must not use it at once. If they do,
the second one gets a RuntimeError.

**Durability.** With WAL and synchronous=FULL, `writing` syncs the log before it returns.

**Errors.** After an error, the transaction is rolled back. After an I/O error (especially a failed sync) the
content of the kernel's cache is unknown. So the connection is closed, and the next use opens a new
connection, which reads from the disk. Nothing is retried on the old connection. A failed rollback is treated
like an I/O error.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from sqlite_utils import Database
from sqlite_utils.utils import sqlite3

from pensieve.errors import DiskFull, StoreCorrupt, StoreError, StoreUnavailable
from pensieve.store.backend import BUSY_TIMEOUT_SECONDS, STATEMENT_SECONDS, TimeLimit, WriteFigures
from pensieve.store.shared_file import SharedFile, WriterLock

if TYPE_CHECKING:
    from sqlite3 import Connection

preferred_driver: Any = sqlite3  # pysqlite3 if it is installed

SQLITE_VERSION_MIN = (3, 37, 0)  # STRICT tables
JOURNAL_BYTES_MAX = 64 * 2**20

# Explanations of primary result codes (sqlite.org/rescode.html) for error messages.
UNAVAILABLE = {
    3: "permission denied",
    5: "another program holds the database",
    6: "another program holds the database",
    7: "out of memory",
    8: "the database is read-only",
    9: "a statement took too long and was ended",
    10: "disk I/O error",
    13: "the disk is full",
    14: "the database file cannot be opened",
    15: "another program holds the database",
}
CORRUPT = {11: "the database is damaged", 26: "the file is not a database"}
UNDECODABLE = "Could not decode to UTF-8"  # the driver's message; SQLite has no code for it
REOPEN_AFTER = {8, 10, 14}
# how long a truncation waits for other daemons' readers; no daemon can write during this time
READERS_MILLISECONDS = 100
FULL, IO_ERROR, CONSTRAINT = 13, 10, 19


class WriterConnection:
    """A read-write connection for one thread at a time. It is reopened after an error.

    `driver` is pysqlite3 or sqlite3. `on_open` is called with each new sqlite_utils Database and returns
    whether it has changed the schema. `noun` names the database in error messages.
    """

    def __init__(
        self,
        path: Path,
        on_open: Callable[[Any], object],
        driver: Any = preferred_driver,
        busy_timeout_seconds: float = BUSY_TIMEOUT_SECONDS,
        statement_seconds: float = STATEMENT_SECONDS,
        noun: str = "the history",
        shared: SharedFile | None = None,
        patience_seconds: float = math.inf,
        synchronous: str = "FULL",
    ) -> None:
        """`shared` is set if other daemons may have the file open, too.

        After waiting `patience_seconds`, a writer checks whether the process that writes is stopped
        (SIGSTOP).
        """
        if driver.sqlite_version_info < SQLITE_VERSION_MIN:
            raise StoreError(f"SQLite {driver.sqlite_version} is too old; 3.37 is needed")
        self.path = path
        self.driver = driver
        self._noun = noun
        self._on_open = on_open
        self._busy_timeout_seconds = busy_timeout_seconds
        self.figures = WriteFigures(self.journal_path)
        self._in_use = threading.Lock()
        self._db: Any = None
        self.limit = TimeLimit(statement_seconds)
        self._shared = shared
        self._synchronous = synchronous
        self._writer_lock = (
            WriterLock(path, patience_seconds + busy_timeout_seconds, patience_seconds)
            if shared is not None
            else None
        )
        if self._writer_lock is not None:
            self._writer_lock.on_wait = self.figures.record_wait

    @contextlib.contextmanager
    def writing(self, is_serializable: bool = False) -> Iterator[Connection]:
        """Run one transaction. At the end of the block it is committed and on the disk, or rolled back.

        All transactions are serializable, because one connection writes at a time.
        """
        with self._holding_writer_lock(), self._operation() as db:
            db.conn.execute("BEGIN IMMEDIATE")
            try:
                yield db.conn
                began = time.perf_counter()
                db.conn.execute("COMMIT")
            except BaseException:
                db.rollback()
                raise
            self.figures.record_commit(time.perf_counter() - began)

    def settle(self) -> None:
        """Do nothing: the outcome of a COMMIT is known when it returns."""

    def end_hanging_transactions(self) -> None:
        """Do nothing: a waiting writer kills a suspended writer by itself (shared_file.py)."""

    @contextlib.contextmanager
    def reading(self, is_snapshot: bool = False) -> Iterator[Connection]:
        """Run statements outside a write transaction. With `is_snapshot`, all of them see one snapshot."""
        with self._operation() as db:
            if not is_snapshot:
                yield db.conn
                return
            db.conn.execute("BEGIN")
            try:
                yield db.conn
            finally:
                db.rollback()

    @property
    def journal_path(self) -> Path:
        return self.path.with_name(f"{self.path.name}-wal")

    def has_journal(self) -> bool:
        """Return whether the write-ahead log has content. A process that died may have left it."""
        return self.figures.journal_bytes > 0

    def truncate_journal(self) -> bool:
        """Move the write-ahead log into the database and empty the log. Return whether that was possible.

        It is impossible while another connection reads the log. If several daemons share the file, the call
        waits up to READERS_MILLISECONDS for such readers; otherwise it does not wait.
        """
        reader_milliseconds = 0 if self._shared is None else READERS_MILLISECONDS
        with self._holding_writer_lock(), self.reading() as conn:
            try:
                conn.execute(f"PRAGMA busy_timeout = {reader_milliseconds}").fetchall()
                busy, _, _ = conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                milliseconds = round(1000 * self._busy_timeout_seconds)
                conn.execute(f"PRAGMA busy_timeout = {milliseconds}").fetchall()
            except BaseException:
                self._discard()  # the next connection has the normal busy_timeout
                raise
        return not busy

    def close(self) -> None:
        """Checkpoint and close. The connection is closed even if this raises an error.

        If another connection reads the write-ahead log, the log stays for the next opening.
        """
        try:
            if self._db is not None:
                self.truncate_journal()
        finally:
            self._discard()
            if self._writer_lock is not None:
                self._writer_lock.close()

    def _holding_writer_lock(self) -> AbstractContextManager[None]:
        """Hold the writers' lock during the block, if several daemons share the file."""
        return contextlib.nullcontext() if self._writer_lock is None else self._writer_lock.taken()

    def _pensieve_error(self, error: Any) -> Exception:
        failure = pensieve_error(error, self.path, self._noun)
        if isinstance(failure, DiskFull):
            self.figures.on_full()
        return failure

    @contextlib.contextmanager
    def _operation(self) -> Iterator[Any]:
        if not self._in_use.acquire(blocking=False):
            raise RuntimeError(f"{self._noun} is being used by another thread")
        try:
            if self._db is None:
                self._db = self._open()
            with self.limit.counting():
                yield self._db
        except self.driver.Error as error:
            if primary_code(error) in REOPEN_AFTER:
                self._discard()
            # not stored in a variable, which would make a reference cycle with the traceback
            raise self._pensieve_error(error) from error
        finally:
            if self._db is not None and self._db.conn.in_transaction:
                self._discard()  # the rollback failed; closing rolls back
            self._in_use.release()

    def _open(self) -> Any:
        if self.has_journal() and (self._shared is None or self._shared.is_alone):
            with contextlib.suppress(self.driver.Error):
                self._recover()
        return self._connect()

    def _recover(self) -> None:
        """Move the log of an earlier connection into the database, on a connection that is then closed.

        Recovering a log copies uninitialized memory, which may contain private text, into the -shm file.
        Closing the connection removes that file, and the next connection finds no log to recover.
        """
        with contextlib.closing(self.driver.connect(str(self.path), timeout=0.0)) as conn:
            conn.execute("PRAGMA schema_version").fetchall()

    def _connect(self) -> Any:
        conn = self.driver.connect(
            str(self.path),
            timeout=self._busy_timeout_seconds,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            db = Database(conn, recursive_triggers=False, execute_plugins=False)
            if conn.execute("PRAGMA page_count").fetchone() == (0,):
                # The database is being created. Only this setting lets it shrink later (compaction.py).
                conn.execute("PRAGMA auto_vacuum = INCREMENTAL").fetchall()
            (mode,) = conn.execute("PRAGMA journal_mode = WAL").fetchone()
            if mode != "wal":
                raise StoreError(
                    f"SQLite cannot use a write-ahead log at {self.path}: move it to a local file system"
                )
            for pragma in (
                f"synchronous = {self._synchronous}",
                "fullfsync = ON",  # only macOS has it
                "secure_delete = ON",
                "foreign_keys = ON",
                "mmap_size = 0",
                f"journal_size_limit = {JOURNAL_BYTES_MAX}",
            ):
                conn.execute(f"PRAGMA {pragma}").fetchall()
            has_changed = self._on_open(db)
            # To undo savepoints and statements, SQLite copies pages. The copies must not be written to
            # temporary files outside of the folder.
            conn.execute("PRAGMA temp_store = MEMORY").fetchall()
            self.limit.watch(conn)
        except BaseException:
            with contextlib.suppress(self.driver.Error):
                conn.close()
            raise
        # after a schema change, each statement on the connection is slower (measured)
        if has_changed:
            conn.close()
            return self._connect()
        return db

    def _discard(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            with contextlib.suppress(self.driver.Error):
                db.conn.close()


def pensieve_error(error: Any, path: Path, noun: str = "the history") -> Exception:
    """Return the PensieveError for a driver's error. Unexpected errors are returned unchanged."""
    primary = primary_code(error)
    if primary == FULL or (primary == IO_ERROR and _has_no_space(path)):
        return DiskFull(f"{noun} {path}: {UNAVAILABLE[FULL]}")
    if primary in UNAVAILABLE:
        return StoreUnavailable(f"{noun} {path}: {UNAVAILABLE[primary]}")
    if not primary and UNDECODABLE in str(error):
        return StoreCorrupt(f"{noun} {path}: a text is damaged")
    if primary in CORRUPT:
        return StoreCorrupt(f"{noun} {path}: {CORRUPT[primary]}")
    assert isinstance(error, Exception)
    return error


def _has_no_space(path: Path) -> bool:
    """Return whether the disk is full. SQLite reports a -shm file that could not grow as an I/O error."""
    try:
        return os.statvfs(path.parent).f_bavail == 0
    except OSError:
        return False


def primary_code(error: Any) -> int:
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF


def open_read_only(
    path: Path, driver: Any = preferred_driver, *, immutable: bool = False
) -> Connection:
    """Open a connection that cannot write or checkpoint. Any thread may open one.

    With `immutable`, no process may have the database open, and SQLite creates no side files.
    """
    conn: Connection = driver.connect(
        f"file:{quote(str(path))}?mode=ro{'&immutable=1' * immutable}",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
    )
    return conn


@contextlib.contextmanager
def read_only(
    path: Path, driver: Any = preferred_driver, *, immutable: bool = False
) -> Iterator[Connection]:
    """Open a read-only connection during the block."""
    try:
        with contextlib.closing(open_read_only(path, driver, immutable=immutable)) as conn:
            yield conn
    except driver.Error as error:
        raise pensieve_error(error, path) from error
