"""The interface between the store and its database: SQLite, in the data folder or shared, or PostgreSQL.

    SqliteBackend     sqlite_backend.py, over connection.py; the default
    PostgresBackend   postgres/backend.py, over postgres/connection.py

The protocols come first, code that both backends share comes below. The store's SQL is the same on both.
`insert_numbered` and postgres/session.py hold the few differences.
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
INSTRUCTIONS = 10_000  # of SQLite, between two checks of the time: well under a millisecond
BUSY_TIMEOUT_SECONDS = 5.0
STATEMENT_SECONDS = 10.0
COMMITS_MAX = 1024  # number of commits whose durations are kept
NUMBER_COLUMNS = {  # by table, for tables with generated row numbers
    "conversations": "conversation",
    "turns": "turn_id",
    "messages": "message",
    "bodies": "body",
    "chains": "chain",
    "responses": "response",
}


class Conflict(StoreUnavailable):
    """Another transaction changed the same rows. Nothing was committed, so the call may be repeated."""


class Transactions(Protocol):
    """Writing connections: one, or one for each thread that writes at the same time."""

    def writing(self, is_serializable: bool = False) -> AbstractContextManager[Connection]:
        """Run one transaction. At the end of the block it is committed and on the disk, or rolled back.

        Conflict if another transaction came first. Pass `is_serializable` if the transaction decides what
        to delete or to share by rows that other transactions may add or remove meanwhile.
        """

    def reading(self, is_snapshot: bool = False) -> AbstractContextManager[Connection]:
        """Run statements outside a transaction. With `is_snapshot`, all of them see the same moment."""

    def settle(self) -> None:
        """Wait until every COMMIT with an unknown outcome has happened or can no longer happen.

        Called outside of transactions.
        """

    def close(self) -> None: ...


class LeaseTransactions(Transactions, Protocol):
    """The connection that renews the lease."""

    def end_stopped(self) -> None:
        """End transactions of other daemons that hang and keep their locks."""


class Reads(Protocol):
    """A connection for reads beside the writer."""

    def snapshot(self) -> AbstractContextManager[Connection]:
        """Read the state that was committed when the block began, and nothing newer."""

    def close(self) -> None: ...


class ErasureSteps:
    """Work that deletions leave behind. The default leaves none; a database may override it.

    Used outside of transactions, except `prepare`.
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

    def in_reserve(self, delete: Callable[[], T]) -> T:
        """Run a deletion. If the disk is full, free the reserve and run it again."""
        return delete()

    def has_room(self) -> bool:
        """Try a small write and refill the reserve. Return whether both worked."""
        return True

    def tidy(self) -> None:
        """Also schedule work that a dead daemon has left. Called by the housekeeper, in any thread."""

    def finish(self) -> None:
        """Called after a deletion. ErasurePending if its content is still in the files."""

    def resume(self) -> None:
        """Continue the work that an earlier process has left."""

    def step(self) -> bool:
        """Work for a few milliseconds. Return whether there is more to do.

        StoreUnavailable if that is impossible now (ErasurePending if deleted text is still in the files).
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
    """Facts about the condition of a history, stored beside it for the next process that opens it."""

    @property
    def is_damaged(self) -> bool: ...
    @property
    def is_check_due(self) -> bool:
        """Whether the history is damaged, or was left in a way that may have damaged it."""

    def mark_damaged(self, is_damaged: bool) -> None:
        """Remember this for the next start. Runs in any thread, and may wait for a server."""


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
        """Whether other daemons may have the history open, too."""

    def share(self) -> None:
        """Let other daemons open the history, now that the work for a single daemon is done."""

    def beside(self) -> LeaseTransactions:
        """Return another writing connection, for another thread. A power loss may undo its commits."""

    def close(self) -> None:
        """Close the writing connection. A second call does nothing."""

    def release(self, *, clean: bool) -> None:
        """After `close`: let other processes open the history. `clean`: nothing of it is in doubt."""

    def give_up(self) -> None:
        """Close everything without cleaning up."""

    def snapshots(self) -> Reads: ...
    def scrub(self) -> ScrubSteps: ...
    def verify(self, conversation_id: str | None, tenant: str) -> list[str]: ...
    def integrity_check(self) -> list[str]: ...


class TimeLimit:
    """Aborts statements that run too long, so that none blocks its thread for minutes.

    The time counts from the beginning of a transaction or a read and limits the whole job. An overdue job
    fails with StoreUnavailable and is rolled back. Waiting for the disk or a lock does not count.
    Migrations, `verify` and `integrity_check` have no limit. Used in the thread of its connection.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = math.inf

    def watch(self, conn: Connection) -> None:
        conn.set_progress_handler(self.is_over, INSTRUCTIONS)

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
        self.on_commit: Callable[[float], None] = lambda seconds: None  # called by a writer
        # Called by a writer when the disk is full.
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
        """Set callbacks for the seconds of each commit and for a full disk. They run in a writer's thread.

        The calls for commits come one at a time.
        """
        self.on_commit, self.on_full = on_commit or self.on_commit, on_full or self.on_full

    def waited(self, seconds: float) -> None:
        """Record how long a transaction waited for its turn among several writing daemons."""
        self._waits.append(seconds)

    @property
    def wait_seconds(self) -> tuple[float, ...]:
        """Waits of the latest transactions; empty if only one daemon has the history."""
        return tuple(self._waits)

    def committed(self, seconds: float) -> None:
        """Record how long a COMMIT took; most of it is the disk's sync."""
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
    """A connection that reserves row numbers and deletes wiped rows.

    Several of them write at the same time, so each counts the bytes of tenants in its own rows.
    """

    def take_number(self, table: str) -> int:
        raise NotImplementedError

    def count_bytes(self, tenant: str, num_bytes: int) -> None:
        raise NotImplementedError

    note_wiped: Callable[[], None]


def insert_numbered(
    conn: Connection, table: str, columns: tuple[str, ...], values: Sequence[Any]
) -> int:
    """Insert a row and return its number. Numbers grow and are never reused; some are skipped.

    SQLite assigns the number during the insertion. A server session takes a number that it reserved
    earlier, so that nobody waits for the insertion. An error of that insertion appears at a later
    statement, at the latest at COMMIT.
    """
    if isinstance(conn, ServerSession):
        number = conn.take_number(table)
        conn.execute(_insertion(table, (NUMBER_COLUMNS[table], *columns)), (number, *values))
        return number
    statement = f"{_insertion(table, columns)} RETURNING {NUMBER_COLUMNS[table]}"
    ((number,),) = conn.execute(statement, values).fetchall()
    return int(number)


def database_clock(conn: Connection) -> str:
    """Return SQL for the seconds since 1970 by the clock of the database's host."""
    if isinstance(conn, ServerSession):
        return "extract(epoch FROM clock_timestamp())::float8"
    return "((julianday('now') - 2440587.5) * 86400.0)"


@lru_cache
def _insertion(table: str, columns: tuple[str, ...]) -> str:
    marks = ", ".join("?" * len(columns))
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})"
