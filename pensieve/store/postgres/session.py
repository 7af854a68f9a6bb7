"""What the store's SQL runs on: a connection to PostgreSQL, through a pipeline within a transaction.

In a pipeline `execute` sends a statement and does not wait.  Who looks at a result waits for that one and all
before it.  So the order of statements is that of the calls, and a statement that fails makes all behind it
fail, COMMIT as well: nothing of the transaction happens.  Its error is raised where somebody waits next, at
the latest at the end of the block.  Savepoints keep that within them: what ends one is waited for.

Numbers of new rows are reserved (numbered.py): the sequence gives a hundred with one question.  A reserve
belongs to a connection, since a server that crashed before a commit may give the same numbers again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pensieve.errors import StoreUnavailable
from pensieve.store.numbered import KEYS, ServerSession
from pensieve.store.postgres import dialect
from pensieve.store.time_limit import TimeLimit

RESERVED_AT_ONCE = 100
NUMBERS = "SELECT nextval(pg_get_serial_sequence(%s, %s)) FROM generate_series(1, %s)"
WAITED_FOR = ("RELEASE", "ROLLBACK")


class Reserve:
    """Numbers of one connection, by table."""

    def __init__(self) -> None:
        self._numbers: dict[str, list[int]] = {table: [] for table in KEYS}

    def take(self, conn: Any, table: str) -> int:
        numbers = self._numbers[table]
        if not numbers:
            found = conn.execute(NUMBERS, [table, KEYS[table], RESERVED_AT_ONCE]).fetchall()
            numbers += sorted((number for (number,) in found), reverse=True)
        return numbers.pop()


class Session(ServerSession):
    def __init__(
        self,
        conn: Any,
        limit: TimeLimit | None = None,
        reserve: Reserve | None = None,
        on_wiped: Callable[[], None] = lambda: None,
    ) -> None:
        self.conn = conn
        self.pipeline: Any = None  # psycopg's, in a transaction
        self._limit = limit
        self._reserve = reserve
        self.note_wiped = on_wiped

    def execute(self, sql: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> Any:
        if self._limit is not None and self._limit.is_over():
            raise StoreUnavailable("the history: a statement took too long and was ended")
        if self.pipeline is not None and sql.startswith("ROLLBACK"):
            with contextlib.suppress(Exception):  # what failed is what it undoes
                self.pipeline.sync()
        cursor = self.conn.execute(dialect.translated(sql), dialect.adapted(values))
        if self.pipeline is not None and sql.startswith(WAITED_FOR):
            self.pipeline.sync()
        return cursor

    def take_number(self, table: str) -> int:
        assert self._reserve is not None, "this connection only reads"
        return self._reserve.take(self.conn, table)


@contextlib.contextmanager
def pipelined(session: Session) -> Iterator[None]:
    """Statements of the block are sent without waiting; at its end all have happened, or it raises."""
    with session.conn.pipeline() as session.pipeline:
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # of those behind what failed
                session.pipeline.sync()
            raise
