"""What a backup needs of an open history."""

from __future__ import annotations

from collections.abc import Callable

from pensieve.store.backup.capture import Feed
from pensieve.store.connection import Writer
from pensieve.store.folder import DataFolder


class BackupSource:
    """`begin`, `collect` and `end` belong to the thread of the store, the rest to any."""

    def __init__(self, folder: DataFolder, writer: Writer, now: Callable[[], float]) -> None:
        self.now = now
        self._folder = folder
        self._writer = writer

    @property
    def identity(self) -> str:
        return self._folder.identity()

    @property
    def num_bytes(self) -> int:
        return self._folder.database_bytes

    def read(self, num_bytes: int, offset: int) -> bytes:
        return self._folder.read_database(num_bytes, offset)

    def begin(self) -> Feed:
        """What is committed from now on, and what the write-ahead log holds already."""
        return self._writer.begin_feed()

    def collect(self) -> None:
        """Put into the feeds what was committed up to now."""
        self._writer.collect()

    def end(self, feed: Feed) -> None:
        self._writer.end_feed(feed)
