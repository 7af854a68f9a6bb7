"""Removes deleted content from the store's files, beyond what the deleting transaction does.

Three copies outlast that transaction, or might:

    copies              a migration copies the database first; a deletion removes such copies before it
                        commits, so none of them ever holds what is deleted
    the write-ahead     holds pages as they were, until it is truncated; that is *pending* from before the
    log                 commit until it has succeeded, and is tried after the commit, by each step and by
                        the next deletion.  It fails while another connection reads the log, or the disk
                        is full
    the file            wiped bodies contain nothing, but waste space (compaction.py)

A backup (backup/) is kept somewhere else and keeps what is deleted until it is dropped; a slow or broken
one holds up nothing here.

What is pending is remembered by the log itself: a clean close leaves it empty, so a log that is there when
the history is opened may contain anything, and is truncated then or by the first step that can.
"""

from __future__ import annotations

import contextlib

from pensieve.errors import ErasurePending, PensieveError, StoreUnavailable
from pensieve.store.compaction import Compaction
from pensieve.store.connection import Writer
from pensieve.store.migrations import remove_copies

PENDING = "what was deleted is not yet erased from the files of the history, which is tried again"


class Erasure:
    """What deletions have left to do on the disk; used outside of transactions, but for `prepare`."""

    def __init__(self, writer: Writer, compact_bytes_min: int) -> None:
        self.pending = writer.has_journal()
        self._writer = writer
        self._compaction = Compaction(writer, compact_bytes_min)

    @property
    def due(self) -> bool:
        """Whether there is a step to take; any thread may ask."""
        return self.pending or self._compaction.due

    def prepare(self) -> None:
        """Before a transaction that deletes is committed."""
        remove_copies(self._writer.path)
        self.pending = True

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
            self._compaction.look()

    def resume(self) -> None:
        """What an earlier process has left to do; whatever goes wrong is left to the steps."""
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
