"""A history in SQLite, in the data folder: its connections and what belongs to them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pensieve.store import verify
from pensieve.store.backup.source import BackupSource
from pensieve.store.connection import Writer, explained, open_read_only
from pensieve.store.erasure import Erasure
from pensieve.store.folder import RESERVE_NAME, DataFolder
from pensieve.store.migrations import migrate
from pensieve.store.reserve import Reserve
from pensieve.store.scrub import OF_SQLITE, Scrub
from pensieve.store.time_limit import TimeLimit

if TYPE_CHECKING:
    from sqlite3 import Connection

SCRUB_CACHE_PAGES = 16


class Snapshots:
    """Reads beside the writer, each of what was committed when it began; in one thread at a time.

    The connection stays open, since there may be no file descriptor for another one; after an error it is
    opened anew.
    """

    def __init__(
        self, path: Path, driver: Any, seconds: float = math.inf, cache_pages: int | None = None
    ) -> None:
        """`seconds`: that a read may take."""
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
            raise explained(error, self._path) from error
        finally:
            if self._conn is not None and self._conn.in_transaction:
                try:
                    self._conn.execute("ROLLBACK")
                except self._driver.Error:  # what was read is right; the next read opens it anew
                    self.close()

    def close(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            with contextlib.suppress(self._driver.Error):
                conn.close()


def scrub_of_files(path: Path, driver: Any) -> Scrub:
    """What is read twice comes from the system's cache, if from any."""
    return Scrub(Snapshots(path, driver, cache_pages=SCRUB_CACHE_PAGES), OF_SQLITE)


class SqliteBackend:
    def __init__(
        self,
        folder: DataFolder,
        now: Callable[[], float],
        driver: Any,
        busy_timeout_seconds: float,
        compact_bytes_min: int,
        statement_seconds: float,
    ) -> None:
        self._path = folder.database_path
        self.writer = Writer(
            self._path,
            lambda db: migrate(db, self._path),
            now,
            driver,
            busy_timeout_seconds,
            statement_seconds,
        )
        self.figures = self.writer.figures
        self._reserve = Reserve(folder.path / RESERVE_NAME)
        self.erasure = Erasure(self.writer, compact_bytes_min, self._reserve)
        self.backup_source = BackupSource(folder, self.writer, now)
        self.marks = folder

    def close(self) -> None:
        self._reserve.release()  # the last checkpoint may need the space
        self.writer.close()

    def give_up(self) -> None:
        """What is open is closed with the last reference to it; a checkpoint may be what failed."""

    def snapshots(self) -> Snapshots:
        """For reads beside the writer."""
        return Snapshots(self._path, self.writer.driver, self.writer.limit.seconds)

    def scrub(self) -> Scrub:
        return scrub_of_files(self._path, self.writer.driver)

    def verify(self, conversation_id: str | None, tenant: str) -> list[str]:
        return verify.verify(self._path, self.writer.driver, conversation_id, tenant)

    def integrity_check(self) -> list[str]:
        """SQLite's own check of every page and index."""
        return verify.integrity_check(self._path, self.writer.driver)
