"""Removes deleted content from the store's files, beyond what the deleting transaction does.

Two copies outlast that transaction.  The write-ahead log holds the pages as they were until it is truncated;
if another connection still reads it, the truncation stays due until a later call.  And wiped bodies waste
space in the file until it is rewritten (bodies.py), which is done once they waste enough of it.
"""

from __future__ import annotations

import contextlib

from pensieve.errors import StoreUnavailable
from pensieve.store import bodies
from pensieve.store.connection import Writer


class Erasure:
    """What deletions have left to remove; used outside of transactions."""

    def __init__(self, writer: Writer, compact_bytes_min: int) -> None:
        self._writer = writer
        self._compact_bytes_min = compact_bytes_min
        self._truncate_due = False  # the write-ahead log may still contain deleted content

    def mark_due(self) -> None:
        """A transaction that deletes is about to be committed."""
        self._truncate_due = True

    def resume(self) -> None:
        """Truncate the write-ahead log if an earlier call could not."""
        if self._truncate_due:
            self._truncate()

    def finish(self) -> None:
        """After a deletion: rewrite the file if it is wasteful, and truncate the write-ahead log."""
        self._compact_if_wasteful()
        self._truncate()

    def _compact_if_wasteful(self) -> None:
        with self._writer.reading() as conn:
            if not bodies.wasteful(conn, self._compact_bytes_min):
                return
        # The deletion is committed; if the disk is too full for the rewrite, the next deletion does it.
        with contextlib.suppress(StoreUnavailable), self._writer.reading() as conn:
            bodies.compact(conn)

    def _truncate(self) -> None:
        self._writer.truncate_journal()
        self._truncate_due = False
