"""What deletions leave to do in PostgreSQL: the rows of wiped bodies go, a few in a transaction.

A deletion wipes what it deletes in its own transaction, and no statement reads it again.  That is all that
is promised.  The old versions of the rows stay in the server's files until VACUUM has taken their space and
something else was written there, in its write-ahead log until that is recycled, and in whatever was archived
or copied (docs/postgresql.md, "What a deletion leaves").  So nothing is ever pending here.

Other changes wipe bodies, too.  Who wipes says so to the writer; and the bytes that are counted (`space`),
which are 0 when no wiped row is left, tell the next process that there is something to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pensieve.store.postgres.connection import PostgresWriter

T = TypeVar("T")
STEP_ROWS = 256


class PostgresErasure:
    """Used outside of transactions, but for `prepare`."""

    pending = False  # whether a deletion waits for its end

    def __init__(self, writer: PostgresWriter) -> None:
        self._writer = writer

    @property
    def due(self) -> bool:
        """Whether there is a step to take; any thread may ask."""
        return self._writer.has_wiped

    def prepare(self) -> None:
        """Before a transaction that deletes is committed."""

    def in_reserve(self, delete: Callable[[], T]) -> T:
        """There is no reserve here."""
        return delete()

    def has_room(self) -> bool:
        """A small write finds it out."""
        with self._writer.writing() as conn:
            conn.execute("UPDATE space SET wiped_bytes = wiped_bytes")
        return True

    def finish(self) -> None:
        """After a deletion: its transaction was all."""

    def resume(self) -> None:
        """What an earlier process has left to do is done by the steps."""
        with self._writer.reading() as conn:
            (wiped_bytes,) = conn.execute("SELECT wiped_bytes FROM space").fetchone()
        if wiped_bytes:
            self._writer.note_wiped()

    def step(self) -> bool:
        """One transaction; returns whether there is more."""
        self._writer.has_wiped = False
        try:
            with self._writer.writing() as conn:
                removed = conn.execute(
                    "DELETE FROM bodies WHERE body IN"
                    " (SELECT body FROM bodies WHERE crc IS NULL ORDER BY body LIMIT ?) RETURNING 1",
                    (STEP_ROWS,),
                ).fetchall()
                if len(removed) < STEP_ROWS:
                    conn.execute("UPDATE space SET wiped_bytes = 0")
        except BaseException:
            self._writer.note_wiped()
            raise
        if len(removed) == STEP_ROWS:
            self._writer.note_wiped()
        return self.due
