"""What a database gives to the history: SQLite in the data folder, or PostgreSQL.

    SqliteBackend     sqlite_backend.py, over connection.py; the default
    PostgresBackend   postgres/backend.py, over postgres/connection.py

The protocols say what both have, and the code that both share is below them.  The store's SQL is the same on
both; `insert_numbered` and postgres/session.py have the little that is not.
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
INSTRUCTIONS = 10_000  # of SQLite, between two looks at the time: well under a millisecond
BUSY_TIMEOUT_SECONDS = 5.0
STATEMENT_SECONDS = 10.0
COMMITS_MAX = 1024  # whose times are kept
NUMBER_COLUMNS = {  # of tables whose rows have numbers of their own
    "conversations": "conversation",
    "turns": "turn_id",
    "messages": "message",
    "bodies": "body",
    "chains": "chain",
    "responses": "response",
}


class Conflict(StoreUnavailable):
    """Another transaction changed the same rows.  Nothing was committed, so the call may be repeated."""


class Transactions(Protocol):
    """What writes: one connection, or one for each thread that writes at the same time."""

    def writing(self, is_serializable: bool = False) -> AbstractContextManager[Connection]:
        """One transaction: at the end of the block it is committed and on the disk, or rolled back.

        Conflict if another transaction came first.  A transaction must be `is_serializable` if it decides
        what to delete or to share by rows that others may add or remove meanwhile.
        """

    def reading(self, is_snapshot: bool = False) -> AbstractContextManager[Connection]:
        """Statements outside a transaction; `is_snapshot`: all of them see the same moment."""

    def settle(self) -> None:
        """Wait until every COMMIT whose outcome is unknown has happened, or cannot happen any more.

        Called outside of transactions.
        """

    def close(self) -> None: ...


class LeaseTransactions(Transactions, Protocol):
    """The connection that renews the lease."""

    def end_stopped(self) -> None:
        """End the transactions of other daemons that stand still and keep their locks."""


class Reads(Protocol):
    """A connection that reads beside it."""

    def snapshot(self) -> AbstractContextManager[Connection]:
        """What was committed when it began, all of it and nothing newer."""

    def close(self) -> None: ...


class ErasureSteps:
    """What deletions leave to do: nothing, unless a database says otherwise.

    Used outside of transactions, but for `prepare`.
    """

    @property
    def pending(self) -> bool:
        """Whether a deletion waits for its end."""
        return False

    @property
    def due(self) -> bool:
        """Whether there is a step to take; any thread may ask."""
        return self.pending

    def prepare(self) -> None:
        """Before a transaction that deletes is committed."""

    def in_reserve(self, delete: Callable[[], T]) -> T:
        """Carry out what deletes; if the disk is full, again with the space of a reserve."""
        return delete()

    def has_room(self) -> bool:
        """Try a small write, and keep the reserve again; whether both worked."""
        return True

    def tidy(self) -> None:
        """Now and then, by who cleans up: what a daemon that died has left is due, too.  In any thread."""

    def finish(self) -> None:
        """After a deletion: ErasurePending if its content is still in the files."""

    def resume(self) -> None:
        """Go on with what an earlier process has left to do."""

    def step(self) -> bool:
        """Do a few milliseconds of what is due; returns whether there is more.

        Raises StoreUnavailable if that is not possible now (ErasurePending, if text is still there).
        """
        return False


class ScrubSteps(Protocol):
    """Reads everything, a little at a time."""

    @property
    def num_passes(self) -> int: ...
    def num_steps(self) -> int: ...
    def step(self) -> list[str]: ...
    def close(self) -> None: ...


class Marks(Protocol):
    """What is known of a history before it is looked at; kept where the history is, for whoever opens it."""

    @property
    def is_damaged(self) -> bool: ...
    @property
    def is_check_due(self) -> bool:
        """It is damaged, or was left in a way that may have damaged it."""

    def mark_damaged(self, is_damaged: bool) -> None:
        """Remember it for the next start; in any thread, and it may wait for a server."""


class Backend(Protocol):
    @property
    def num_lanes(self) -> int:
        """How many threads may use it at the same time."""

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
        """The file of SQLite's database; None of another one."""

    @property
    def is_shared(self) -> bool:
        """Whether other daemons may have the history open, too."""

    def share(self) -> None:
        """From now on they may: what only one of them may do is done."""

    def beside(self) -> LeaseTransactions:
        """Another connection that writes, for another thread; what it commits may be lost with the power."""

    def close(self) -> None:
        """Close the connection that writes; a second call does nothing."""

    def release(self, *, clean: bool) -> None:
        """Behind `close`: let others have it; `clean` if nothing of it is in doubt."""

    def give_up(self) -> None:
        """Leave it as it is; what was opened is closed."""

    def snapshots(self) -> Reads: ...
    def scrub(self) -> ScrubSteps: ...
    def verify(self, conversation_id: str | None, tenant: str) -> list[str]: ...
    def integrity_check(self) -> list[str]: ...


class TimeLimit:
    """Ends what runs too long in a connection, so that a statement never holds its thread for minutes.

    The time counts from the beginning of a transaction or a read, so it bounds the whole job.  A job that is
    over time fails with StoreUnavailable and is rolled back.  Waiting for the disk or a lock is not counted.
    Migrations, `verify` and `integrity_check` have no limit.  Used in the thread of its connection.
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
    """How writing the history goes, in figures: writers add to them, and any thread may look."""

    def __init__(self, journal: Path | None = None) -> None:
        self.num_commits = 0
        self.on_commit: Callable[[float], None] = lambda seconds: None  # in the writer's thread
        self.on_full: Callable[[], None] = lambda: None  # the disk is; in the writer's thread
        self._journal = journal
        self._lock = threading.Lock()
        self._seconds: deque[float] = deque(maxlen=COMMITS_MAX)
        self._waits: deque[float] = deque(maxlen=COMMITS_MAX)

    def watch(
        self,
        on_commit: Callable[[float], None] | None = None,
        on_full: Callable[[], None] | None = None,
    ) -> None:
        """Call these in a writer's thread: with the seconds of each commit; when the disk is full.

        The calls for commits come one at a time.
        """
        self.on_commit, self.on_full = on_commit or self.on_commit, on_full or self.on_full

    def waited(self, seconds: float) -> None:
        """A transaction has waited so long for its turn among daemons that write."""
        self._waits.append(seconds)

    @property
    def wait_seconds(self) -> tuple[float, ...]:
        """Of the latest transactions; none where one daemon has the history."""
        return tuple(self._waits)

    def committed(self, seconds: float) -> None:
        """A transaction is on the disk, which took so long, most of it for the disk's sync."""
        with self._lock:
            self._seconds.append(seconds)
            self.num_commits += 1
            self.on_commit(seconds)

    @property
    def commit_seconds(self) -> tuple[float, ...]:
        """Of the latest transactions."""
        with self._lock:
            return tuple(self._seconds)

    @property
    def journal_bytes(self) -> int:
        """The length of the write-ahead log; 0 where it is another program's (PostgreSQL's)."""
        if self._journal is None:
            return 0
        try:
            return self._journal.stat().st_size
        except FileNotFoundError:
            return 0


class ServerSession:
    """A connection that reserves numbers, and does not keep rows that were wiped.

    Several of them write at the same time, so each counts the bytes of tenants in rows of its own.
    """

    def take_number(self, table: str) -> int:
        raise NotImplementedError

    def count_bytes(self, tenant: str, num_bytes: int) -> None:
        raise NotImplementedError

    note_wiped: Callable[[], None]


def insert_numbered(
    conn: Connection, table: str, columns: tuple[str, ...], values: Sequence[Any]
) -> int:
    """Insert a row; returns its number.  Numbers grow, and none is given out twice; some are never used.

    SQLite gives the number with the insertion.  A server would have to be asked, so its session takes numbers
    that were reserved before, and nobody waits for the insertion: its error is that of a later statement, at
    the latest of COMMIT.
    """
    if isinstance(conn, ServerSession):
        number = conn.take_number(table)
        conn.execute(_insertion(table, (NUMBER_COLUMNS[table], *columns)), (number, *values))
        return number
    statement = f"{_insertion(table, columns)} RETURNING {NUMBER_COLUMNS[table]}"
    ((number,),) = conn.execute(statement, values).fetchall()
    return int(number)


def database_clock(conn: Connection) -> str:
    """SQL of the seconds since 1970 by the clock of the database's host."""
    if isinstance(conn, ServerSession):
        return "extract(epoch FROM clock_timestamp())::float8"
    return "((julianday('now') - 2440587.5) * 86400.0)"


@lru_cache
def _insertion(table: str, columns: tuple[str, ...]) -> str:
    marks = ", ".join("?" * len(columns))
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})"
