"""Removes deleted content from the store's files, beyond what the deleting transaction does.

Three copies outlast that transaction, or might:

    copies              a migration copies the database first; a deletion removes such copies before it
                        commits, so none of them ever holds what is deleted
    the write-ahead     holds pages as they were, until it is truncated; that is *pending* from before the
    log                 commit until it has succeeded, and is tried after the commit, by each step and by
                        the next deletion.  It fails while another connection reads the log, or the disk
                        is full
    the file            wiped bodies contain nothing, but waste space (compaction.py)

On a full disk a deletion takes the space of the reserve (reserve.py), and the file is shortened at once.

A backup (backup/) is kept somewhere else and keeps what is deleted until it is dropped; a slow or broken
one holds up nothing here.

What is pending is remembered by the log itself: a clean close leaves it empty, so a log that is there when
the history is opened may contain anything, and is truncated then or by the first step that can.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

from pensieve.errors import DiskFull, ErasurePending, PensieveError, StoreUnavailable
from pensieve.store.compaction import Compaction
from pensieve.store.connection import Writer
from pensieve.store.migrations import remove_copies
from pensieve.store.reserve import Reserve

T = TypeVar("T")

PENDING = "what was deleted is not yet erased from the files of the history, which is tried again"


class Erasure:
    """What deletions have left to do on the disk; used outside of transactions, but for `prepare`."""

    def __init__(self, writer: Writer, compact_bytes_min: int, reserve: Reserve) -> None:
        self.pending = writer.has_journal()
        self._writer = writer
        self._reserve = reserve
        self._compaction = Compaction(writer, compact_bytes_min)

    @property
    def due(self) -> bool:
        """Whether there is a step to take; any thread may ask."""
        return self.pending or self._compaction.due

    def prepare(self) -> None:
        """Before a transaction that deletes is committed."""
        remove_copies(self._writer.path)
        self.pending = True

    def in_reserve(self, delete: Callable[[], T]) -> T:
        """Carry out what deletes; if the disk is full, again with the space of the reserve."""
        try:
            return delete()
        except DiskFull:
            if not self._reserve.release():
                raise
        with contextlib.suppress(StoreUnavailable):
            self._writer.truncate_journal()  # it may take as much again
        return delete()

    def has_room(self) -> bool:
        """Keep the reserve again, and try a small write; returns whether both worked."""
        if not self._reserve.refill():
            return False
        with self._writer.writing() as conn:
            conn.execute("UPDATE space SET wiped_bytes = wiped_bytes")
        return True

    def finish(self) -> None:
        """After a deletion: ErasurePending if its content is still in the write-ahead log."""
        if not self.pending:
            return
        try:
            is_empty = self._writer.truncate_journal()
        except StoreUnavailable as error:
            raise ErasurePending(f"{PENDING}: {error}") from error
        if not is_empty:
            raise ErasurePending(f"{PENDING}: another program reads them")
        self.pending = False
        with contextlib.suppress(StoreUnavailable):  # the next deletion looks again
            self._compaction.look(is_urgent=not self._reserve.is_kept)

    def resume(self) -> None:
        """What an earlier process has left to do; whatever goes wrong is left to the steps."""
        self._reserve.refill()
        with contextlib.suppress(PensieveError):
            self.finish()
            self._compaction.look()

    def step(self) -> bool:
        """A few milliseconds of what is due; returns whether there is more.

        Raises StoreUnavailable if that is not possible now (ErasurePending, if text is still there).
        """
        if self.pending:
            self.finish()
        elif self._compaction.due:
            self._compaction.step()
            if not self._compaction.due:
                self._writer.truncate_journal()  # only then the file becomes shorter
        return self.due
