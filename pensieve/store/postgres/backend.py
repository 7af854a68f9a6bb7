"""A history in PostgreSQL: its connections and what belongs to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NoReturn

from pensieve.errors import StoreError
from pensieve.store.backup.capture import Feed
from pensieve.store.postgres.checking import OF_POSTGRES, integrity_check
from pensieve.store.postgres.connection import Address, PostgresSnapshots, PostgresWriter, opened
from pensieve.store.postgres.erasure import PostgresErasure
from pensieve.store.postgres.session import Session
from pensieve.store.scrub import Scrub
from pensieve.store.verify import verified

CHECK_SECONDS = 3600.0  # of one statement of a check, which takes as long as it takes
ITS_OWN_BACKUPS = (
    "the history is in PostgreSQL, which has its own backups: pg_dump, pg_basebackup and an archive of its"
    " write-ahead log (docs/postgresql.md)"
)


class NoBackups:
    """In the place of a BackupSource: whoever asks for a backup is told where there are some."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now

    @property
    def identity(self) -> str:
        self._refuse()

    @property
    def num_bytes(self) -> int:
        self._refuse()

    def read(self, num_bytes: int, offset: int) -> bytes:
        self._refuse()

    def begin(self) -> Feed:
        self._refuse()

    def collect(self) -> None:
        self._refuse()

    def end(self, feed: Feed) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise StoreError(ITS_OWN_BACKUPS)


class PostgresMarks:
    """In the row of `owner`, so that another host knows it, too.  A server mends what a crash has left."""

    def __init__(self, address: Address, holder: str, statement_seconds: float) -> None:
        self._address = address
        self._name = f"{holder}, marks"
        self._seconds = statement_seconds

    @property
    def is_damaged(self) -> bool:
        with self._opened() as conn:
            return conn.execute("SELECT is_damaged FROM owner").fetchall() == [(True,)]

    @property
    def is_check_due(self) -> bool:
        return self.is_damaged

    def mark_damaged(self, is_damaged: bool) -> None:
        with self._opened() as conn:
            conn.execute("UPDATE owner SET is_damaged = ?", (is_damaged,))

    def _opened(self) -> AbstractContextManager[Session]:
        """Of its own, for a moment: the writer is another thread's."""
        return opened(self._address, self._name, self._seconds)


class PostgresBackend:
    def __init__(
        self,
        address: Address,
        holder: str,
        now: Callable[[], float],
        busy_timeout_seconds: float,
        statement_seconds: float,
    ) -> None:
        self._address = address
        self._holder = holder
        self._statement_seconds = statement_seconds
        self.writer = PostgresWriter(address, holder, busy_timeout_seconds, statement_seconds)
        self.figures = self.writer.figures
        self.erasure = PostgresErasure(self.writer)
        self.backup_source = NoBackups(now)
        self.marks = PostgresMarks(address, holder, statement_seconds)

    def close(self) -> None:
        self.writer.close()

    def give_up(self) -> None:
        """Close the connection."""
        self.writer.close()

    def snapshots(self) -> PostgresSnapshots:
        """For reads beside the writer."""
        return PostgresSnapshots(self._address, self._statement_seconds, f"{self._holder}, reads")

    def scrub(self) -> Scrub:
        return Scrub(self._checking(), OF_POSTGRES)

    def verify(self, conversation_id: str | None, tenant: str) -> list[str]:
        snapshots = self._checking()
        try:
            return verified(snapshots.snapshot, conversation_id, tenant)
        finally:
            snapshots.close()

    def integrity_check(self) -> list[str]:
        return integrity_check(self._checking())

    def _checking(self) -> PostgresSnapshots:
        name = f"{self._holder}, checks"
        return PostgresSnapshots(self._address, CHECK_SECONDS, name, math.inf)
