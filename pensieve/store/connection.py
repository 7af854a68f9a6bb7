"""The read-write connection to the database of a history or of a job, and read-only ones.

One writer.  Nothing else in any process writes or checkpoints this database: the data folder is locked,
checkpoints happen on this connection, readers open with mode=ro, and there is no mmap.  This also avoids
the WAL-reset bug of SQLite 3.7.0 to 3.51.2, which needs two connections that write or checkpoint;
pysqlite3, where installed, brings a version without it.

Several daemons (shared_file.py) have several writers, in processes of one host and a SQLite without that bug.
One of them writes at a time: a transaction is IMMEDIATE, and begins when it is this writer's turn.  What is
done beside transactions stays right:

    recovery     is needed where no process has the file open, so it is done by a daemon that is alone, in a
                 connection that is then closed, as ever (`_recover`).  Where a process dies and others go on,
                 SQLite has to recover only if it died while it wrote the header of the file -shm; then some
                 of a survivor's memory stays in -shm until the last daemon has closed the history
    truncating   takes the turn of a writer, so no other daemon writes or checkpoints meanwhile.  SQLite does
                 it only when every frame is in the database and no connection of any process reads the log;
                 it tells, and is tried again.  So what a deletion waits for is the same as with one writer
    wiping       `secure_delete` wipes in the pages of the transaction, whoever wrote them before.  Pages that
                 another process has in memory are read again after a commit of others
    migrations   happen while a daemon is alone, and the copies that they make are removed by any deletion
    closing      the last connection of all moves the log into the database and removes it

One thread at a time.  The connection may be opened in one thread and used in another, but never in two at
once; a second user at the same time is a bug of the caller and raises RuntimeError.

Durable on return.  With WAL and synchronous=FULL, `writing` syncs the log before it returns.

After an error the transaction is rolled back.  After an I/O error, above all a failed sync, it is unknown
what the kernel's cache still holds.  So the connection is closed, and the next use opens a new one that
reads from the disk; nothing is retried on the old one.  The same happens if the rollback fails.
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
from pensieve.store.shared_file import SharedFile, WriteTurn

if TYPE_CHECKING:
    from sqlite3 import Connection

preferred_driver: Any = sqlite3  # pysqlite3 where it is installed

SQLITE_VERSION_MIN = (3, 37, 0)  # STRICT tables
JOURNAL_BYTES_MAX = 64 * 2**20

# Primary result codes (sqlite.org/rescode.html), in words for error messages.
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
UNDECODABLE = "Could not decode to UTF-8"  # which the driver says, and SQLite has no code for
REOPEN_AFTER = {8, 10, 14}
READERS_MILLISECONDS = 100  # that readers of other daemons are waited for, while nobody writes
FULL, IO_ERROR, CONSTRAINT = 13, 10, 19


class WriterConnection:
    """The connection for one thread at a time; it opens again after an error.

    `driver` is pysqlite3 or sqlite3; `on_open` is called with each new sqlite_utils Database, and says
    whether it has changed the schema; `noun` is what errors call it.
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
        """`shared`: other daemons have the file open, too.

        A writer that has waited for `patience_seconds` looks why.
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
        self._turn = (
            WriteTurn(path, patience_seconds + busy_timeout_seconds, patience_seconds)
            if shared is not None
            else None
        )
        if self._turn is not None:
            self._turn.waited = self.figures.waited

    @contextlib.contextmanager
    def writing(self, is_serializable: bool = False) -> Iterator[Connection]:
        """One transaction: at the end of the block it is committed and on the disk, or rolled back.

        All are serializable, because one connection writes at a time.
        """
        with self._to_write(), self._operation() as db:
            db.conn.execute("BEGIN IMMEDIATE")
            try:
                yield db.conn
                began = time.perf_counter()
                db.conn.execute("COMMIT")
            except BaseException:
                db.rollback()
                raise
            self.figures.committed(time.perf_counter() - began)

    def settle(self) -> None:
        """Nothing: the outcome of a COMMIT is on the disk when it returns."""

    def end_stopped(self) -> None:
        """Nothing: who waits for its turn to write does it (shared_file.py)."""

    @contextlib.contextmanager
    def reading(self, is_snapshot: bool = False) -> Iterator[Connection]:
        """Statements outside a transaction; `is_snapshot`: all of them see the same moment."""
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
        """Where SQLite keeps the write-ahead log."""
        return self.path.with_name(f"{self.path.name}-wal")

    def has_journal(self) -> bool:
        """Whether there is something in the write-ahead log, or was when a process died."""
        return self.figures.journal_bytes > 0

    def truncate_journal(self) -> bool:
        """Move the write-ahead log into the database and leave the log empty; whether that was possible.

        It is not while another connection reads the log.  This does not wait for that one to end, or a moment
        only where other daemons read.
        """
        moment = 0 if self._shared is None else READERS_MILLISECONDS
        with self._to_write(), self.reading() as conn:
            try:
                conn.execute(f"PRAGMA busy_timeout = {moment}").fetchall()
                busy, _, _ = conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                milliseconds = round(1000 * self._busy_timeout_seconds)
                conn.execute(f"PRAGMA busy_timeout = {milliseconds}").fetchall()
            except BaseException:
                self._discard()  # the next connection waits again
                raise
        return not busy

    def close(self) -> None:
        """Checkpoint and close; the connection is closed even if this raises an error.

        If another connection reads the write-ahead log, that stays for the next opening.
        """
        try:
            if self._db is not None:
                self.truncate_journal()
        finally:
            self._discard()
            if self._turn is not None:
                self._turn.close()

    def _to_write(self) -> AbstractContextManager[None]:
        """The turn among daemons that write."""
        return contextlib.nullcontext() if self._turn is None else self._turn.taken()

    def _explained(self, error: Any) -> Exception:
        failure = explained(error, self.path, self._noun)
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
            raise self._explained(error) from error  # a local name would make it a cycle
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
        """Move a log that an earlier connection left into the database, and close again.

        A connection that recovers a log copies unused memory into the file -shm, which may be anybody's
        text (measured).  The file goes with the last connection; the next one then finds no log.
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
                # It is made now; then it can be shortened (compaction.py).
                conn.execute("PRAGMA auto_vacuum = INCREMENTAL").fetchall()
            (mode,) = conn.execute("PRAGMA journal_mode = WAL").fetchone()
            if mode != "wal":
                raise StoreError(f"{self.path} lies where SQLite cannot use a write-ahead log")
            for pragma in (
                f"synchronous = {self._synchronous}",
                "fullfsync = ON",  # for macOS; no effect elsewhere
                "secure_delete = ON",
                "foreign_keys = ON",
                "mmap_size = 0",
                f"journal_size_limit = {JOURNAL_BYTES_MAX}",
            ):
                conn.execute(f"PRAGMA {pragma}").fetchall()
            has_changed = self._on_open(db)
            # What a savepoint or a statement keeps of pages, to undo it, is in no file outside of the folder.
            conn.execute("PRAGMA temp_store = MEMORY").fetchall()
            self.limit.watch(conn)
        except BaseException:
            with contextlib.suppress(self.driver.Error):
                conn.close()
            raise
        if has_changed:  # after a change of the schema each statement is slower (measured)
            conn.close()
            return self._connect()
        return db

    def _discard(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            with contextlib.suppress(self.driver.Error):
                db.conn.close()


def explained(error: Any, path: Path, noun: str = "the history") -> Exception:
    """The PensieveError for a driver's error; an error that should not happen is returned as it is."""
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
    """SQLite reports a file -shm that could not grow as an I/O error."""
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
    """A connection that cannot write or checkpoint; any thread may open one.

    An `immutable` database is one that nobody has open; no file is made beside it.
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
    """The same, for a while."""
    try:
        with contextlib.closing(open_read_only(path, driver, immutable=immutable)) as conn:
            yield conn
    except driver.Error as error:
        raise explained(error, path) from error
