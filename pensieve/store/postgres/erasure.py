"""What deletions leave to do in PostgreSQL: the rows of wiped bodies go, a few in a transaction.

A deletion wipes what it deletes in its own transaction, and no statement reads it again.  That is all that
is promised.  The old versions of the rows stay in the server's files until VACUUM has taken their space and
something else was written there, in its write-ahead log until that is recycled, and in whatever was archived
or copied (docs/postgresql.md, "What a deletion leaves").  So nothing is ever pending here.
"""

from __future__ import annotations

from pensieve.store.postgres.connection import PostgresWriter

STEP_ROWS = 256


class PostgresErasure:
    """Used outside of transactions, but for `prepare`."""

    pending = False  # whether a deletion waits for its end

    def __init__(self, writer: PostgresWriter) -> None:
        self.due = True  # whether there is a step to take: those before us may have left rows
        self._writer = writer

    def prepare(self) -> None:
        """Before a transaction that deletes is committed."""
        self.due = True

    def finish(self) -> None:
        """After a deletion: its transaction was all."""

    def resume(self) -> None:
        """What an earlier process has left to do is done by the steps."""

    def step(self) -> bool:
        """One transaction; returns whether there is more."""
        with self._writer.writing() as conn:
            removed = conn.execute(
                "DELETE FROM bodies WHERE body IN"
                " (SELECT body FROM bodies WHERE crc IS NULL ORDER BY body LIMIT ?)",
                (STEP_ROWS,),
            ).rowcount
        self.due = removed == STEP_ROWS
        return self.due
