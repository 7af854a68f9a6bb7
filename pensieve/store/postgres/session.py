"""Run the store's SQL on PostgreSQL.

The same SQL runs on both databases; only the placeholders are translated. So the store's SQL follows these
rules: RETURNING instead of `lastrowid` and `rowcount`; no `max` or `min` of two values; qualified columns in
upserts; numbers are compared only with numbers, and booleans with booleans.

Within a transaction, the session sends a statement without waiting. It waits when a result is read (wire.py),
and at the end of a savepoint, so that errors of earlier statements are raised there. Outside of a
transaction, it waits for each statement.

Numbers of new rows are reserved (`insert_numbered` of backend.py). One query to the sequence reserves a
hundred numbers. They are dropped when the connection is lost: if the server crashed before a commit, it may
return the same numbers again.

A transaction adds up the bytes per tenant and writes the sums once, before its end or the next savepoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from pensieve.errors import StoreUnavailable
from pensieve.store.backend import NUMBER_COLUMNS, ServerSession, TimeLimit
from pensieve.store.postgres.wire import PendingResult, Wire

# limit for cached translations; statements with lists differ each time
STATEMENTS_MAX = 1024
PLACEHOLDER = re.compile(r"\?|(?<!:):([a-z_]+)")
RESERVED_AT_ONCE = 100
NEXT_NUMBERS = "SELECT nextval(pg_get_serial_sequence(?, ?)) FROM generate_series(1, ?)"
COUNT_BYTES = (
    "INSERT INTO tenant_bytes (tenant, slot, stored_bytes) VALUES (?, ?, ?) ON CONFLICT (tenant, slot)"
    " DO UPDATE SET stored_bytes = tenant_bytes.stored_bytes + excluded.stored_bytes"
)


class ReservedNumbers:
    """Row numbers reserved for one connection, by table."""

    def __init__(self) -> None:
        self._numbers: dict[str, list[int]] = {table: [] for table in NUMBER_COLUMNS}

    def take(self, session: SqlSession, table: str) -> int:
        numbers = self._numbers[table]
        if not numbers:
            found = session.execute(NEXT_NUMBERS, (table, NUMBER_COLUMNS[table], RESERVED_AT_ONCE))
            numbers += sorted((number for (number,) in found), reverse=True)
        return numbers.pop()


class SqlSession(ServerSession):
    def __init__(
        self,
        wire: Wire,
        limit: TimeLimit | None = None,
        reserve: ReservedNumbers | None = None,
        on_wiped: Callable[[], None] = lambda: None,
        slot: int = 0,
    ) -> None:
        """`slot` selects this connection's rows of `tenant_bytes`."""
        self._is_transaction = False
        self._slot = slot
        self._counted: dict[str, int] = {}  # bytes by tenant, in the current transaction
        self.note_wiped = on_wiped
        self._wire = wire
        self._limit = limit
        self._reserve = ReservedNumbers() if reserve is None else reserve

    def execute(self, sql: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> PendingResult:
        if self._limit is not None and self._limit.is_over():
            raise StoreUnavailable("the history: a statement took too long and was ended")
        if self._counted and sql.startswith(("SAVEPOINT", "RELEASE")):
            self._write_counted()
        statement = translated(sql)
        if sql.startswith("ROLLBACK"):
            self._counted.clear()
            self._wire.clear()  # ignore errors of statements that the rollback undoes
        result = self._wire.send(statement.sql, statement.in_order(values))
        if not self._is_transaction or sql.startswith(("RELEASE", "ROLLBACK")):
            self._wire.sync()
        return result

    def begin(self, mode: str = "") -> None:
        self._is_transaction = True
        self.execute(f"BEGIN {mode}")

    def commit(self) -> str:
        """Commit, and return the server's answer: COMMIT or ROLLBACK."""
        self._write_counted()
        result = self._wire.send("COMMIT")
        self._wire.sync()
        return result.status

    def take_number(self, table: str) -> int:
        return self._reserve.take(self, table)

    def count_bytes(self, tenant: str, num_bytes: int) -> None:
        self._counted[tenant] = self._counted.get(tenant, 0) + num_bytes

    def _write_counted(self) -> None:
        counted, self._counted = self._counted, {}
        for tenant, num_bytes in counted.items():
            self.execute(COUNT_BYTES, (tenant, self._slot, num_bytes))


class Statement(NamedTuple):
    sql: str
    names: tuple[str, ...]  # names of $1, $2 and so on; empty if the values have no names

    def in_order(self, values: Sequence[Any] | Mapping[str, Any]) -> Sequence[Any]:
        if isinstance(values, Mapping):
            return [values[name] for name in self.names]
        return values


@lru_cache(maxsize=STATEMENTS_MAX)
def translated(sql: str) -> Statement:
    """Translate a statement of the store for PostgreSQL: `?` and `:name` become `$1` and so on."""
    names: list[str] = []
    num_marks = 0

    def placeholder(match: re.Match[str]) -> str:
        nonlocal num_marks
        name = match[1]
        if name is None:
            num_marks += 1
            return f"${num_marks}"
        if name not in names:
            names.append(name)
        return f"${names.index(name) + 1}"

    return Statement(PLACEHOLDER.sub(placeholder, sql), tuple(names))
