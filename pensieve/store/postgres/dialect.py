"""What differs where the store's SQL, which both databases understand, runs on PostgreSQL.

    placeholders   `?` and `:name` become `$1` and so on
    texts          PostgreSQL refuses the letter NUL.  It is stored as two letters that begin with ESCAPE,
                   and ESCAPE itself as two others, so every text comes back and equal ones stay equal

The rest is left out of the store's SQL: it knows no `lastrowid` and no `rowcount` (RETURNING is in both), no
`max` and `min` of two values, names a column with its table where an upsert has two of them, and compares
numbers with numbers and truth with truth.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

REMEMBERED_MAX = 1024  # statements; those with a list in them differ
PLACEHOLDER = re.compile(r"\?|(?<!:):([a-z_]+)")
ESCAPE = "\x1a"
ESCAPED = {"\0": ESCAPE + "0", ESCAPE: ESCAPE + "1"}
UNESCAPED = {written: letter for letter, written in ESCAPED.items()}
TO_ESCAPE = re.compile(f"[\0{ESCAPE}]")
TO_UNESCAPE = re.compile(f"{ESCAPE}[01]")


class Statement(NamedTuple):
    sql: str
    names: tuple[str, ...]  # of $1, $2; empty where they have none

    def in_order(self, values: Sequence[Any] | Mapping[str, Any]) -> Sequence[Any]:
        if isinstance(values, Mapping):
            return [values[name] for name in self.names]
        return values


@lru_cache(maxsize=REMEMBERED_MAX)
def translated(sql: str) -> Statement:
    """A statement of the store's as PostgreSQL wants it."""
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


def escaped(text: str) -> str:
    """A text that PostgreSQL takes."""
    if "\0" in text or ESCAPE in text:
        return TO_ESCAPE.sub(lambda match: ESCAPED[match[0]], text)
    return text


def unescaped(text: str) -> str:
    """The inverse of `escaped`."""
    if ESCAPE not in text:
        return text
    return TO_UNESCAPE.sub(lambda match: UNESCAPED[match[0]], text)
