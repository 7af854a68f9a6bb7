"""The interface between the store and its database.

The database is SQLite (in the data folder, or shared by several daemons) or PostgreSQL:

    SqliteBackend     sqlite_backend.py, uses connection.py; the default
    PostgresBackend   postgres/backend.py, uses postgres/connection.py

The store sends the same SQL to both databases. `insert_numbered` and postgres/session.py hide the few
differences.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pensieve.errors import StoreUnavailable

if TYPE_CHECKING:
    from sqlite3 import Connection

T = TypeVar("T")
INSTRUCTIONS_PER_CHECK = 10_000  # SQLite instructions between checks of the time; well under 1 ms
BUSY_TIMEOUT_SECONDS = 5.0
STATEMENT_SECONDS = 10.0
COMMITS_MAX = 1024  # number of commits whose durations are kept
NUMBER_COLUMNS = {  # the column of the generated row number, by table
    "conversations": "conversation",
    "turns": "turn_id",
    "messages": "message",
    "bodies": "body",
    "chains": "chain",
    "responses": "response",
}


class Conflict(StoreUnavailable):
    """Another transaction changed the same rows. Nothing was committed, so the caller may retry."""


class Transactions(Protocol):
    """One writing connection, or one for each thread that writes concurrently."""

    def writing(self, is_serializable: bool = False) -> AbstractContextManager[Connection]:
        """Run one transaction. At the end of the block it is committed and on the disk, or rolled back.

        Raises Conflict if a concurrent transaction has changed the same rows. Pass `is_serializable` if this
        transaction reads rows to decide what to delete or share, and other transactions may add or remove
        such rows meanwhile.
        """

    def reading(self, is_snapshot: bool = False) -> AbstractContextManager[Connection]:
        """Run statements outside a write transaction. With `is_snapshot`, all of them see one snapshot."""

    def settle(self) -> None:
        """Wait until every COMMIT with an unknown outcome has either succeeded or failed for good.

        Called outside of transactions.
        """

    def close(self) -> None: ...


class LeaseTransactions(Transactions, Protocol):
    """The connection that renews the lease."""

    def end_hanging_transactions(self) -> None:
        """End hanging transactions of other daemons, which would otherwise keep their locks."""


class Reads(Protocol):
    """A read connection, separate from the writer."""

    def snapshot(self) -> AbstractContextManager[Connection]:
        """Read the state that was committed when the block began."""

    def close(self) -> None: ...


class ErasureSteps:
    """Cleanup after deletions. By default there is nothing to clean up; a backend may override the methods.

    All methods except `prepare` are called outside of transactions.
    """

    @property
    def pending(self) -> bool:
        """Whether deleted content is still in the files."""
        return False

    @property
    def due(self) -> bool:
        """Whether `step` has something to do. Any thread may ask."""
        return self.pending

    def prepare(self) -> None:
        """Called in a deleting transaction, before its commit."""

    def run_deletion(self, delete: Callable[[], T]) -> T:
        """Run a deletion. If the disk is full, free the reserved space and run the deletion again."""
        return delete()

    def has_room(self) -> bool:
        """Try a small write and refill the reserve. Return whether both worked."""
        return True

    def tidy(self) -> None:
        """Schedule the cleanup that a dead daemon left undone. Called by the housekeeper, in any thread."""

    def finish(self) -> None:
        """Called after a deletion. Raises ErasurePending if the deleted content is still in the files."""

    def resume(self) -> None:
        """Continue the cleanup that an earlier process left undone."""

    def step(self) -> bool:
        """Clean up for a few milliseconds. Return whether there is more to do.

        Raises StoreUnavailable if no progress is possible now. The error is ErasurePending if deleted text is
        still in the files.
        """
        return False


class ScrubSteps(Protocol):
    """Reads the whole history in small steps."""

    @property
    def num_passes(self) -> int: ...
    def num_steps(self) -> int: ...
    def step(self) -> list[str]: ...
    def close(self) -> None: ...


class Marks(Protocol):
    """Marks that a history is damaged or was not closed, for the next process that opens the history."""

    @property
    def is_damaged(self) -> bool: ...
    @property
    def is_check_due(self) -> bool:
        """Whether the history is damaged, or may be damaged because it was not closed."""

    def mark_damaged(self, is_damaged: bool) -> None:
        """Record for the next start whether the history is damaged.

        May be called in any thread, and may wait for a server.
        """


class Backend(Protocol):
    @property
    def num_lanes(self) -> int:
        """How many threads may use the backend at the same time."""

    @property
    def writer(self) -> Transactions: ...
    @property
    def figures(self) -> WriteFigures: ...
    @property
    def erasure(self) -> ErasureSteps: ...
    @property
    def marks(self) -> Marks: ...
    @property
    def path(self) -> Path | None:
        """The SQLite file; None for PostgreSQL."""

    @property
    def is_shared(self) -> bool:
        """Whether other daemons may have the history open at the same time."""

    def share(self) -> None:
        """Let other daemons open the history. Called after the startup work that needs exclusive access."""

    def lease_connection(self) -> LeaseTransactions:
        """Return a second writing connection, for another thread. A power loss may undo its commits."""

    def close(self) -> None:
        """Close the writing connection. A second call does nothing."""

    def release(self, *, clean: bool) -> None:
        """Let other processes open the history. Called after `close`.

        `clean`: the history was closed without an error.
        """

    def give_up(self) -> None:
        """Close everything without cleaning up."""

    def snapshots(self) -> Reads: ...
    def scrub(self) -> ScrubSteps: ...
    def verify(self, conversation_id: str | None, tenant: str) -> list[str]: ...
    def integrity_check(self) -> list[str]: ...


class TimeLimit:
    """Limits how long a transaction or a read may run, so that no statement blocks its thread for minutes.

    The time counts from the start of the transaction or read. A transaction that exceeds the limit fails with
    StoreUnavailable and is rolled back. Waiting for the disk or a lock does not count. Migrations, `verify`
    and `integrity_check` have no limit. Used only in the thread of the connection.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = math.inf

    def watch(self, conn: Connection) -> None:
        conn.set_progress_handler(self.is_over, INSTRUCTIONS_PER_CHECK)

    @contextmanager
    def counting(self) -> Iterator[None]:
        self._end = time.monotonic() + self.seconds
        try:
            yield
        finally:
            self._end = math.inf

    def is_over(self) -> bool:
        return time.monotonic() > self._end


class WriteFigures:
    """Statistics of writes. Writers add to them; any thread may read them."""

    def __init__(self, journal: Path | None = None) -> None:
        self.num_commits = 0
        self.on_commit: Callable[[float], None] = lambda seconds: None  # called by a writer thread
        # called by a writer thread when the disk is full
        self.on_full: Callable[[], None] = lambda: None
        self._journal = journal
        self._lock = threading.Lock()
        self._seconds: deque[float] = deque(maxlen=COMMITS_MAX)
        self._waits: deque[float] = deque(maxlen=COMMITS_MAX)

    def watch(
        self,
        on_commit: Callable[[float], None] | None = None,
        on_full: Callable[[], None] | None = None,
    ) -> None:
        """Set the callbacks. They run in a writer thread.

        `on_commit` gets the duration of each commit; its calls never overlap. `on_full` is called when the
        disk is full.
        """
        self.on_commit, self.on_full = on_commit or self.on_commit, on_full or self.on_full

    def record_wait(self, seconds: float) -> None:
        """Record how long a transaction waited for other daemons that write."""
        self._waits.append(seconds)

    @property
    def wait_seconds(self) -> tuple[float, ...]:
        """Waiting times of the latest transactions; empty if only one daemon has the history open."""
        return tuple(self._waits)

    def record_commit(self, seconds: float) -> None:
        """Record how long a COMMIT took."""
        with self._lock:
            self._seconds.append(seconds)
            self.num_commits += 1
            self.on_commit(seconds)

    @property
    def commit_seconds(self) -> tuple[float, ...]:
        """Durations of the latest commits."""
        with self._lock:
            return tuple(self._seconds)

    @property
    def journal_bytes(self) -> int:
        """Length of SQLite's write-ahead log; 0 for PostgreSQL."""
        if self._journal is None:
            return 0
        try:
            return self._journal.stat().st_size
        except FileNotFoundError:
            return 0


class ServerSession:
    """A connection to a database server. Several connections may write at the same time.

    So that connections do not conflict, each one reserves row numbers, and has its own row for each tenant's
    byte counter.
    """

    def take_number(self, table: str) -> int:
        raise NotImplementedError

    def count_bytes(self, tenant: str, num_bytes: int) -> None:
        raise NotImplementedError

    note_wiped: Callable[[], None]


def insert_numbered(
    conn: Connection, table: str, columns: tuple[str, ...], values: Sequence[Any]
) -> int:
    """Insert a row and return its number. Numbers only increase and are never reused; some are skipped.

    SQLite assigns the number during the insertion. A server session takes a number that it reserved
    earlier, so that the caller need not wait for the insertion. If the insertion fails, a later statement
    or COMMIT raises the error.
    """
    if isinstance(conn, ServerSession):
        number = conn.take_number(table)
        conn.execute(_insertion(table, (NUMBER_COLUMNS[table], *columns)), (number, *values))
        return number
    statement = f"{_insertion(table, columns)} RETURNING {NUMBER_COLUMNS[table]}"
    ((number,),) = conn.execute(statement, values).fetchall()
    return int(number)


def database_clock(conn: Connection) -> str:
    """Return an SQL expression for the Unix time by the clock of the database's host."""
    if isinstance(conn, ServerSession):
        return "extract(epoch FROM clock_timestamp())::float8"
    return "((julianday('now') - 2440587.5) * 86400.0)"


@lru_cache
def _insertion(table: str, columns: tuple[str, ...]) -> str:
    placeholders = ", ".join("?" * len(columns))
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({placeholders})"
