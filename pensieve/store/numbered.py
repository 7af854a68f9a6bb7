"""Rows that have numbers of their own, and who gives them.

SQLite gives a row its number as it is inserted, and a statement costs next to nothing.  To a server each
question is a message there and back.  So a session with one takes numbers that were reserved before, many at
once, and nobody waits for an insertion: its error is that of a later statement, at the latest of COMMIT.

Numbers grow, and one that was given out is not given out again; some are never used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sqlite3 import Connection

KEYS = {  # the column of the number, by table
    "conversations": "conversation",
    "turns": "turn_id",
    "messages": "message",
    "bodies": "body",
    "chains": "chain",
    "responses": "response",
}


class ServerSession:
    """A connection that reserves numbers, and does not keep rows that were wiped."""

    def take_number(self, table: str) -> int:
        raise NotImplementedError

    note_wiped: Callable[[], None]


def insert_numbered(
    conn: Connection, table: str, columns: tuple[str, ...], values: Sequence[Any]
) -> int:
    """Insert a row; returns its number."""
    if isinstance(conn, ServerSession):
        number = conn.take_number(table)
        conn.execute(_insertion(table, (KEYS[table], *columns)), (number, *values))
        return number
    statement = f"{_insertion(table, columns)} RETURNING {KEYS[table]}"
    ((number,),) = conn.execute(statement, values).fetchall()
    return int(number)


@lru_cache
def _insertion(table: str, columns: tuple[str, ...]) -> str:
    marks = ", ".join("?" * len(columns))
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})"
