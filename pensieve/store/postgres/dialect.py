"""What differs where the store's SQL, which both databases understand, runs on PostgreSQL.

    placeholders   `?` and `:name` become `%s` and `%(name)s`
    numbers        an int is a bigint, however small, so that a statement is prepared once; sums come back
                   as int
    texts          PostgreSQL refuses the letter NUL.  It is stored as two letters that begin with ESCAPE,
                   and ESCAPE itself as two others, so every text comes back and equal ones stay equal

The rest is left out of the store's SQL: it knows neither `lastrowid` (RETURNING is in both) nor `max` and
`min` of two values, names a column with its table where an upsert has two of them, and compares numbers
with numbers and truth with truth.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

STATEMENTS_MAX = 1024  # that are remembered; those with a list in them differ
PLACEHOLDER = re.compile(r"\?|(?<!:):([a-z_]+)")
ESCAPE = "\x1a"
ESCAPED = {"\0": ESCAPE + "0", ESCAPE: ESCAPE + "1"}
UNESCAPED = {written: letter for letter, written in ESCAPED.items()}
TO_ESCAPE = re.compile(f"[\0{ESCAPE}]")
TO_UNESCAPE = re.compile(f"{ESCAPE}[01]")


@lru_cache(maxsize=STATEMENTS_MAX)
def translated(sql: str) -> str:
    """A statement of the store's as psycopg wants it."""

    def placeholder(match: re.Match[str]) -> str:
        return f"%({match[1]})s" if match[1] else "%s"

    return PLACEHOLDER.sub(placeholder, sql.replace("%", "%%"))


def adapted(values: Sequence[Any] | Mapping[str, Any]) -> Any:
    """The values of a statement as psycopg wants them."""
    if isinstance(values, Mapping):
        return {name: _adapted(value) for name, value in values.items()}
    return [_adapted(value) for value in values]


def _adapted(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = str(value)  # an enum's text, too
    return TO_ESCAPE.sub(lambda match: ESCAPED[match[0]], text) if _has_escape(text) else text


def _has_escape(text: str) -> bool:
    return "\0" in text or ESCAPE in text


def unescaped(text: str) -> str:
    """The inverse of what `adapted` does to a text."""
    if ESCAPE not in text:
        return text
    return TO_UNESCAPE.sub(lambda match: UNESCAPED[match[0]], text)


def teach(conn: Any) -> None:
    """Make a psycopg connection read and write values as this module says."""
    from psycopg.types.numeric import Int8Dumper, NumericLoader
    from psycopg.types.string import TextLoader

    class SumLoader(NumericLoader):
        def load(self, data: Any) -> Any:
            return int(bytes(data))

    class EscapedLoader(TextLoader):
        def load(self, data: Any) -> Any:
            return unescaped(bytes(data).decode())

    conn.adapters.register_dumper(int, Int8Dumper)
    conn.adapters.register_loader("numeric", SumLoader)
    conn.adapters.register_loader("text", EscapedLoader)
