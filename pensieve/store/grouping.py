"""Several callers' transactions in one commit: what `Transactions` is while a group runs.

A commit costs a sync of the disk, which is most of what a turn costs the history.  Who has several calls at
hand (the history service, for many daemons) runs them in one group:

    with grouped.group():             BEGIN
        store.begin_turn(...)             SAVEPOINT, its statements, RELEASE
        store.finish_turn(...)            SAVEPOINT, its statements, RELEASE
                                      COMMIT

A call that fails is rolled back to its savepoint and leaves the others as they are; it fails with an error of
ours (NotFound, TurnRunning, …), raised by the code between the statements.  An error of the database itself
(a full disk, a lost connection) says nothing about which of them is to blame, so it ends the group, and all
of it is rolled back.  Nothing of a group is on the disk before `group` returns, so nobody may be told before.

Outside of a group every call is a transaction of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pensieve.errors import PensieveError
from pensieve.store.backend import Transactions

if TYPE_CHECKING:
    from sqlite3 import Connection


class GroupedTransactions:
    """In one thread at a time, like the connection beneath."""

    def __init__(self, writer: Transactions) -> None:
        self._writer = writer
        self._conn: Connection | None = None  # of the group that runs
        self._depth = 0  # savepoints inside of each other

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """One transaction around the calls of the block."""
        with self._writer.writing() as conn:
            self._conn, self._depth = conn, 0
            try:
                yield
            finally:
                self._conn = None

    @contextlib.contextmanager
    def writing(self) -> Iterator[Connection]:
        conn = self._conn
        if conn is None:
            with self._writer.writing() as alone:
                yield alone
            return
        self._depth += 1
        name = f"call_{self._depth}"
        conn.execute(f"SAVEPOINT {name}")
        try:
            yield conn
        except PensieveError:
            conn.execute(f"ROLLBACK TO SAVEPOINT {name}")
            conn.execute(f"RELEASE SAVEPOINT {name}")
            raise
        else:
            conn.execute(f"RELEASE SAVEPOINT {name}")
        finally:
            self._depth -= 1

    @contextlib.contextmanager
    def reading(self) -> Iterator[Connection]:
        conn = self._conn
        if conn is not None:
            yield conn
            return
        with self._writer.reading() as alone:
            yield alone

    def close(self) -> None:
        self._writer.close()
