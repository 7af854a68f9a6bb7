"""What a database gives to the history: SQLite in the data folder, or PostgreSQL.

    SqliteBackend     sqlite_backend.py, over connection.py; the default
    PostgresBackend   postgres/backend.py

The SQL of the store is the same on both (postgres/dialect.py has the little that is not), and so are the
invariants of conversation_store.py.  What only one of them has (a write-ahead log to truncate, compaction,
backups) is in its own modules.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, TypeVar

from pensieve.store.backup.capture import Feed
from pensieve.store.write_figures import WriteFigures

if TYPE_CHECKING:
    from sqlite3 import Connection

T = TypeVar("T")


class Transactions(Protocol):
    """The connection that writes; in one thread at a time."""

    def writing(self) -> AbstractContextManager[Connection]:
        """One transaction: at the end of the block it is committed and on the disk, or rolled back."""

    def reading(self) -> AbstractContextManager[Connection]:
        """Statements outside a transaction."""

    def close(self) -> None: ...


class Reads(Protocol):
    """A connection that reads beside it."""

    def snapshot(self) -> AbstractContextManager[Connection]:
        """What was committed when it began, all of it and nothing newer."""

    def close(self) -> None: ...


class ErasureSteps(Protocol):
    """What deletions have left to do; used outside of transactions, but for `prepare`."""

    @property
    def pending(self) -> bool: ...
    @property
    def due(self) -> bool: ...
    def prepare(self) -> None: ...
    def in_reserve(self, delete: Callable[[], T]) -> T: ...
    def has_room(self) -> bool: ...
    def finish(self) -> None: ...
    def resume(self) -> None: ...
    def step(self) -> bool: ...


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


class Source(Protocol):
    """What a backup needs; StoreError where the database has backups of its own."""

    now: Callable[[], float]

    @property
    def identity(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...
    def read(self, num_bytes: int, offset: int) -> bytes: ...
    def begin(self) -> Feed: ...
    def collect(self) -> None: ...
    def end(self, feed: Feed) -> None: ...


class Backend(Protocol):
    @property
    def writer(self) -> Transactions: ...
    @property
    def figures(self) -> WriteFigures: ...
    @property
    def erasure(self) -> ErasureSteps: ...
    @property
    def backup_source(self) -> Source: ...
    @property
    def marks(self) -> Marks: ...
    def close(self) -> None:
        """Close the connection that writes; a second call does nothing."""

    def give_up(self) -> None:
        """Leave it as it is; what was opened is closed."""

    def snapshots(self) -> Reads: ...
    def scrub(self) -> ScrubSteps: ...
    def verify(self, conversation_id: str | None, tenant: str) -> list[str]: ...
    def integrity_check(self) -> list[str]: ...
