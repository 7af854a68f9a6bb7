"""Reads the whole history bit by bit, so that damage is found where nobody has looked for months.

    conversations   one after the other: what `verify` says of it, and that the index from messages to
                    histories has its messages
    bodies          each against its checksum: those of turns and of what a rewind has cut, too
    rows            each table in its order, and that every index finds each row
    the rest        a few rows

A step is one short read transaction of its own, so that it keeps no deletion waiting, and takes a few
milliseconds: a conversation is no longer than the model's context.  What the database cannot read
(StoreCorrupt) is a problem like others.  The position is not remembered: a new process begins anew.  One
thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from pensieve.errors import StoreCorrupt
from pensieve.store.backend import NUMBER_COLUMNS, Reads
from pensieve.store.bodies import checked_body, last_within
from pensieve.store.verify import verify_conversation

if TYPE_CHECKING:
    from sqlite3 import Connection

KEYS = {**NUMBER_COLUMNS, "owners": "conversation"}
ROWS = 256
BODIES_BYTES = 256 * 2**10
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
Walk = Callable[["Connection", int, list[str]], "int | None"]  # from a key on; returns the last one


class Walks(NamedTuple):
    """What a database has to look at, one after the other, and how many steps that takes."""

    walks: tuple[Walk, ...]
    num_steps: Callable[[Connection], int]  # about so many, rather more than fewer


class Scrub:
    """Of any database: `reads` gives the snapshots, one for each step."""

    def __init__(self, reads: Reads, walks: Walks) -> None:
        self.num_passes = 0
        self._reads = reads
        self._walks, self._num_steps = walks
        self._walk = 0
        self._after = 0

    def num_steps(self) -> int:
        """About so many a pass has now."""
        try:
            with self._reads.snapshot() as conn:
                return self._num_steps(conn)
        except StoreCorrupt:
            return len(self._walks)

    def step(self) -> list[str]:
        """Look at a little; returns the problems found there."""
        problems: list[str] = []
        try:
            with self._reads.snapshot() as conn:
                last = self._walks[self._walk](conn, self._after, problems)
            self._after = last or 0
            self._walk += last is None
        except StoreCorrupt as error:
            problems.append(str(error))
        if self._walk == len(self._walks) or problems:
            self._walk = self._after = 0
            self.num_passes += not problems
            self.close()
        return problems

    def close(self) -> None:
        self._reads.close()


def highest_keys(conn: Connection) -> dict[str, int]:
    """By table."""
    return {
        table: conn.execute(f"SELECT coalesce(max({key}), 0) FROM {table}").fetchone()[0]
        for table, key in KEYS.items()
    }


def _num_steps(conn: Connection) -> int:
    numbers = highest_keys(conn)
    num_bytes = 1
    for pragma in ("page_count", "page_size"):
        num_bytes *= conn.execute(f"PRAGMA {pragma}").fetchone()[0]
    walked = numbers["bodies"] + sum(numbers[each.table] for each in INDEXES)
    conversations = numbers["conversations"]
    return conversations + walked // ROWS + num_bytes // BODIES_BYTES + 2 * len(WALKS)


def look_at_conversation(conn: Connection, after: int, problems: list[str]) -> int | None:
    """The next one."""
    number: int | None = conn.execute(
        "SELECT min(conversation) FROM conversations WHERE conversation > ?", (after,)
    ).fetchone()[0]
    if number is not None:
        verify_conversation(conn, number, problems)
    return number


def _conversations(conn: Connection, after: int, problems: list[str]) -> int | None:
    number = look_at_conversation(conn, after, problems)
    if number is not None:
        problems += [
            f"conversation number {number}: an index does not find message {position}"
            for (position,) in conn.execute(LINKS_NOT_FOUND, (number,))
        ]
    return number


def look_at_bodies(conn: Connection, after: int, problems: list[str]) -> int | None:
    """A few of the next ones."""
    lengths = conn.execute(
        "SELECT body, coalesce(length(private) + length(tokens), 0) FROM bodies WHERE body > ?"
        " ORDER BY body LIMIT ?",
        (after, ROWS),
    ).fetchall()
    last = last_within(lengths, BODIES_BYTES)
    if last is None:
        return None
    for body, crc, private, tokens in conn.execute(
        "SELECT body, crc, private, tokens FROM bodies WHERE body > ? AND body <= ? ORDER BY body",
        (after, last),
    ):
        if crc is None:
            continue  # wiped
        try:
            checked_body(f"body {body}", crc, private, tokens)
        except StoreCorrupt as error:
            problems.append(str(error))
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
OF_SQLITE = Walks(WALKS, _num_steps)
