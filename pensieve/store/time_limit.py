"""Ends what runs too long in a connection, so that a statement never holds its thread for minutes.

SQLite asks every few thousand of its own instructions whether to go on.  The time counts from the beginning
of a transaction or a read, so it bounds the job and not each of its statements.  What is over fails with
SQLITE_INTERRUPT, which is UNAVAILABLE to a client (connection.py), and is rolled back like any failure.
Waiting for the disk or for a lock has bounds of its own and is not counted here; nor are migrations,
`verify` and `integrity_check`, which take as long as they take.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlite3 import Connection

INSTRUCTIONS = 10_000  # well under a millisecond
STATEMENT_SECONDS = 10.0


class TimeLimit:
    """Of one connection, in the thread that uses it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = math.inf

    def watch(self, conn: Connection) -> None:
        conn.set_progress_handler(self.is_over, INSTRUCTIONS)

    @contextmanager
    def counting(self) -> Iterator[None]:
        self._end = time.monotonic() + self.seconds
        try:
            yield
        finally:
            self._end = math.inf

    def is_over(self) -> bool:
        return time.monotonic() > self._end
