"""Reads the whole history bit by bit, so that damage is found where nobody has looked for months.

    conversations   one after the other: what `verify` says of it, and that the index from messages to
                    histories has its messages
    bodies          each against its checksum: those of turns and of what a rewind has cut, too
    rows            each table in its order, and that every index finds each row
    the rest        a few rows

A step is one short read transaction of its own, so that it keeps no deletion waiting, and takes a few
milliseconds: a conversation is no longer than the model's context.  What SQLite cannot read
(StoreCorrupt) is a problem like others.  The position is not remembered: a new process begins anew.  One
thread at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pensieve.errors import StoreCorrupt
from pensieve.store.bodies import checked_body
from pensieve.store.connection import explained, open_read_only, preferred_driver
from pensieve.store.verify import verify_conversation

if TYPE_CHECKING:
    from sqlite3 import Connection

ROWS = 256
BODIES_BYTES = 256 * 2**10
CACHE_PAGES = 16  # what is read twice comes from the system's cache, if from any


KEYS = {
    "conversations": "conversation",
    "turns": "turn_id",
    "messages": "message",
    "bodies": "body",
    "chains": "chain",
    "responses": "response",
    "owners": "conversation",
}


EVERY_ROW = "body > 0"
EVERY_CHAIN = "message > 0"


class Index(NamedTuple):
    table: str
    name: str
    columns: tuple[str, ...]
    where: str = EVERY_ROW  # what is true of each row that is in it


INDEXES = (
    Index("conversations", "sqlite_autoindex_conversations_1", ("key",)),
    Index("conversations", "conversations_tenant", ("tenant",)),
    Index("conversations", "conversations_prefix", ("prefix_key",), "prefix_key IS NOT NULL"),
    Index("conversations", "conversations_body", ("body",)),
    Index("turns", "sqlite_autoindex_turns_1", ("conversation", "request_key")),
    Index("turns", "turns_running", ("conversation",), "state = 'running'"),
    Index("turns", "turns_body", ("body",)),
    Index("turns", "turns_logprobs", ("logprobs",), "logprobs IS NOT NULL"),
    Index("messages", "messages_turn", ("turn_id",)),
    Index("messages", "messages_body", ("body",)),
    Index("chains", "chains_key", ("key", "session"), EVERY_CHAIN),
    Index("chains", "chains_message", ("message",), EVERY_CHAIN),
    Index("responses", "sqlite_autoindex_responses_1", ("key",), "key > x''"),
    Index("responses", "responses_conversation", ("conversation",), "conversation > 0"),
    Index("responses", "responses_body", ("body",), "body IS NOT 0"),
    Index("owners", "owners_session", ("session",), "session IS NOT 0"),
)
LINKS_NOT_FOUND = """
    SELECT position FROM history r WHERE conversation = ? AND NOT EXISTS (
        SELECT 1 FROM history i INDEXED BY history_message
        WHERE i.message = r.message AND i.conversation = r.conversation)
"""
SMALL_TABLES = (
    "space",
    "tenants",
    "prefixes",
    "sessions",
    "epochs",
    "sqlite_sequence",
    "sqlite_schema",
    "_sqlite_migrations",
)
Walk = Callable[["Connection", int, list[str]], int | None]  # from a key on; returns the last one


class Scrub:
    def __init__(self, path: Path, driver: Any = preferred_driver) -> None:
        self.num_passes = 0
        self._path = path
        self._driver = driver
        self._conn: Connection | None = None
        self._walk = 0
        self._after = 0

    def num_steps(self) -> int:
        """About so many a pass has now, rather more than fewer."""
        numbers: dict[str, int] = {}

        def count(conn: Connection) -> None:
            for table, key in KEYS.items():
                numbers[table] = conn.execute(f"SELECT max({key}) FROM {table}").fetchone()[0] or 0
            for pragma in ("page_count", "page_size"):
                numbers[pragma] = conn.execute(f"PRAGMA {pragma}").fetchone()[0]

        self._read(count, [])
        num_bytes = numbers.get("page_count", 0) * numbers.get("page_size", 0)
        walked = numbers.get("bodies", 0) + sum(numbers.get(each.table, 0) for each in INDEXES)
        conversations = numbers.get("conversations", 0)
        return conversations + walked // ROWS + num_bytes // BODIES_BYTES + 2 * len(WALKS)

    def step(self) -> list[str]:
        """Look at a little; returns the problems found there."""
        problems: list[str] = []

        def look(conn: Connection) -> None:
            last = WALKS[self._walk](conn, self._after, problems)
            self._after = last or 0
            self._walk += last is None

        self._read(look, problems)
        if self._walk == len(WALKS) or problems:
            self._walk = self._after = 0
            self.num_passes += not problems
            self.close()
        return problems

    def close(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            with contextlib.suppress(self._driver.Error):
                conn.close()

    def _read(self, look: Callable[[Connection], None], problems: list[str]) -> None:
        """In a transaction of its own; StoreUnavailable if that is not possible now."""
        try:
            if self._conn is None:
                self._conn = open_read_only(self._path, self._driver)
                self._conn.execute(f"PRAGMA cache_size = {CACHE_PAGES}")
            self._conn.execute("BEGIN")
            look(self._conn)
            self._conn.execute("ROLLBACK")
        except self._driver.Error as error:
            self.close()
            failure = explained(error, self._path)
            if not isinstance(failure, StoreCorrupt):
                raise failure from error
            problems.append(str(failure))


def _conversations(conn: Connection, after: int, problems: list[str]) -> int | None:
    number: int | None = conn.execute(
        "SELECT min(conversation) FROM conversations WHERE conversation > ?", (after,)
    ).fetchone()[0]
    if number is not None:
        verify_conversation(conn, number, problems)
        problems += [
            f"conversation number {number}: an index does not find message {position}"
            for (position,) in conn.execute(LINKS_NOT_FOUND, (number,))
        ]
    return number


def look_at_bodies(conn: Connection, after: int, problems: list[str]) -> int | None:
    last, num_bytes = None, 0
    for body, crc, private, tokens in conn.execute(
        "SELECT body, crc, private, tokens FROM bodies WHERE body > ? ORDER BY body LIMIT ?",
        (after, ROWS),
    ):
        last = body
        if crc is None:
            continue  # wiped
        try:
            checked_body(f"body {body}", crc, private, tokens)
        except StoreCorrupt as error:
            problems.append(str(error))
            continue
        num_bytes += len(private) + len(tokens)
        if num_bytes > BODIES_BYTES:
            break
    return last


def _indexed(index: Index, conn: Connection, after: int, problems: list[str]) -> int | None:
    table, name, columns, where = index
    key = KEYS[table]
    if where != EVERY_ROW:  # it may be empty, so that no row leads to it
        conn.execute(
            f"SELECT {key} FROM {table} INDEXED BY {name} WHERE {where} LIMIT 1"
        ).fetchall()
    last: int | None = conn.execute(
        f"SELECT max(k) FROM (SELECT {key} AS k FROM {table} NOT INDEXED WHERE {key} > ?"
        f" ORDER BY {key} LIMIT ?)",
        (after, ROWS),
    ).fetchone()[0]
    same = " AND ".join(f"i.{column} IS r.{column}" for column in (*columns, key))
    not_found = conn.execute(
        f"SELECT {key} FROM {table} r NOT INDEXED WHERE {key} > ? AND {key} <= ? AND r.{where}"
        f" AND NOT EXISTS (SELECT 1 FROM {table} i INDEXED BY {name} WHERE {same} AND i.{where})",
        (after, after if last is None else last),
    )
    problems += [f"row {row} of {table}: the index {name} does not find it" for (row,) in not_found]
    return last


def _small_tables(conn: Connection, after: int, problems: list[str]) -> int | None:
    for table in SMALL_TABLES:
        conn.execute(f"SELECT * FROM {table}").fetchall()
    conn.execute("SELECT name FROM _sqlite_migrations WHERE migration_set = 'pensieve'").fetchall()
    return None


WALKS: tuple[Walk, ...] = (
    _conversations,
    look_at_bodies,
    *(partial(_indexed, index) for index in INDEXES),
    _small_tables,
)
