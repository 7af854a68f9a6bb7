"""What the store's SQL runs on.

In a transaction nobody waits for a statement but who looks at its result (wire.py).  Savepoints keep what is
inside them apart: what ends one is waited for, so an error that nobody has waited for is raised before it.
Outside of a transaction each statement is one by itself, and is waited for.

Numbers of new rows are reserved (numbered.py): the sequence gives a hundred with one question.  A reserve
belongs to a connection, since a server that crashed before a commit may give the same numbers again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pensieve.errors import StoreUnavailable
from pensieve.store.numbered import KEYS, ServerSession
from pensieve.store.postgres import dialect
from pensieve.store.postgres.wire import Result, Wire
from pensieve.store.time_limit import TimeLimit

RESERVED_AT_ONCE = 100
NUMBERS = "SELECT nextval(pg_get_serial_sequence(?, ?)) FROM generate_series(1, ?)"


class Reserve:
    """Numbers of one connection, by table."""

    def __init__(self) -> None:
        self._numbers: dict[str, list[int]] = {table: [] for table in KEYS}

    def take(self, session: Session, table: str) -> int:
        numbers = self._numbers[table]
        if not numbers:
            found = session.execute(NUMBERS, (table, KEYS[table], RESERVED_AT_ONCE))
            numbers += sorted((number for (number,) in found), reverse=True)
        return numbers.pop()


class Session(ServerSession):
    def __init__(
        self,
        wire: Wire,
        limit: TimeLimit | None = None,
        reserve: Reserve | None = None,
        on_wiped: Callable[[], None] = lambda: None,
    ) -> None:
        self._is_transaction = False
        self.note_wiped = on_wiped
        self._wire = wire
        self._limit = limit
        self._reserve = Reserve() if reserve is None else reserve

    def execute(self, sql: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> Result:
        if self._limit is not None and self._limit.is_over():
            raise StoreUnavailable("the history: a statement took too long and was ended")
        statement = dialect.translated(sql)
        if sql.startswith("ROLLBACK"):
            self._wire.clear()  # what failed is what it undoes
        result = self._wire.send(statement.sql, statement.in_order(values))
        if not self._is_transaction or sql.startswith(("RELEASE", "ROLLBACK")):
            self._wire.sync()
        return result

    def begin(self, how: str = "") -> None:
        self._is_transaction = True
        self.execute(f"BEGIN {how}")

    def commit(self) -> str:
        """What the server has made of it."""
        result = self._wire.send("COMMIT")
        self._wire.sync()
        return result.status

    def take_number(self, table: str) -> int:
        return self._reserve.take(self, table)
