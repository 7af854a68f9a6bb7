"""A history in PostgreSQL: its connections and what belongs to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from pensieve.errors import StoreError
from pensieve.store.backup.capture import Feed
from pensieve.store.postgres.checking import PostgresScrub, integrity_check
from pensieve.store.postgres.connection import Address, PostgresSnapshots, PostgresWriter
from pensieve.store.postgres.erasure import PostgresErasure
from pensieve.store.verify import verified

CHECK_SECONDS = 3600.0  # of a statement of `verify`, which takes as long as it takes
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

    def give_up(self) -> None:
        """Close the connection."""
        self.writer.close()

    def snapshots(self) -> PostgresSnapshots:
        """For reads beside the writer."""
        return PostgresSnapshots(self._address, self._statement_seconds, f"{self._holder}, reads")

    def scrub(self) -> PostgresScrub:
        return PostgresScrub(self._checking())

    def verify(self, conversation_id: str | None, tenant: str) -> list[str]:
        snapshots = self._checking()
        try:
            return verified(snapshots.snapshot, conversation_id, tenant)
        finally:
            snapshots.close()

    def integrity_check(self) -> list[str]:
        return integrity_check(self._checking())

    def _checking(self) -> PostgresSnapshots:
        return PostgresSnapshots(self._address, CHECK_SECONDS, f"{self._holder}, checks")
