"""Check that the records of a history agree: all at once (`verify`) or in steps (`Scrub`).

For each conversation:

* positions count from 0, and messages cover the log without gaps
* every record passes its checksum and has the stated number of token ids
* revisions never decrease and do not exceed the conversation's revision
* a finished turn is in the history completely or not at all

For the whole store:

* at most one turn of a conversation is running
* every message and body is referenced, and no reference points to a missing row
* the byte counters of tenants are correct, and their salts have the right length
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pensieve.errors import NotFound, StoreCorrupt
from pensieve.store import conversation_rows
from pensieve.store.backend import NUMBER_COLUMNS, Reads
from pensieve.store.bodies import STORED_BYTES_QUERY, TOKEN_BYTES, checked_body, last_within
from pensieve.store.connection import read_only
from pensieve.store.salts import SALT_BYTES

if TYPE_CHECKING:
    from sqlite3 import Connection

PROBLEMS_MAX = 100
# tables that a scrub reads, with their key columns
KEYS = {**NUMBER_COLUMNS, "owners": "conversation"}
ROWS = 256
BODIES_BYTES = 256 * 2**10
# Checks some rows after a key, and appends the problems. Returns the last read key, or None at the end.
TableScan = Callable[["Connection", int, list[str]], "int | None"]


def verify(
    path: Path, driver: Any, conversation_id: str | None, tenant: str, *, immutable: bool = False
) -> list[str]:
    """Return at most PROBLEMS_MAX problems; an empty list if none were found."""
    connect = partial(read_only, path, driver, immutable=immutable)
    return verify_with(connect, conversation_id, tenant)


def verify_with(
    connect: Callable[[], AbstractContextManager[Connection]],
    conversation_id: str | None,
    tenant: str,
) -> list[str]:
    """Like `verify`, but with the read connection that `connect` opens."""
    problems: list[str] = []
    try:
        with connect() as conn:
            if conversation_id is not None:
                number, _ = conversation_rows.require_conversation(conn, conversation_id, tenant)
                verify_conversation(conn, number, problems)
            else:
                _verify_all(conn, problems)
    except StoreCorrupt as error:
        problems.append(str(error))
    return problems[:PROBLEMS_MAX]


def integrity_check(path: Path, driver: Any, *, immutable: bool = False) -> list[str]:
    """Return the problems that SQLite finds in pages, indexes and foreign keys."""
    try:
        with read_only(path, driver, immutable=immutable) as conn:
            found = conn.execute(f"PRAGMA integrity_check({PROBLEMS_MAX})").fetchall()
            strays = conn.execute("PRAGMA foreign_key_check").fetchall()
    except StoreCorrupt as error:
        return [str(error)]
    problems = [line for (line,) in found if line != "ok"]
    problems += [f"a row of {stray[0]} refers to a missing row of {stray[2]}" for stray in strays]
    return problems[:PROBLEMS_MAX]


def _verify_all(conn: Connection, problems: list[str]) -> None:
    numbers = conn.execute("SELECT conversation FROM conversations").fetchall()
    for (number,) in numbers:
        if len(problems) >= PROBLEMS_MAX:
            return
        verify_conversation(conn, number, problems)
    for sentence, query in STORE_QUERIES:
        problems += [sentence.format(*row) for row in conn.execute(query)]


def verify_conversation(conn: Connection, number: int, problems: list[str]) -> None:
    try:
        name = f"conversation {conversation_rows.conversation_numbered(conn, number).conversation_id!r}"
    except NotFound:
        return  # deleted meanwhile
    except StoreCorrupt as error:
        problems.append(str(error))
        return
    next_position = next_token = last_revision = 0
    for row in conn.execute(HISTORY_QUERY, (number,)):
        position, revision, first_token, turn_revision, newest, num_tokens, *body = row
        place = f"{name}, message {position}"
        if position != next_position:
            problems.append(f"{place}: the message before it is missing")
        if num_tokens is None:
            problems.append(f"{place}: does not exist")
            return
        if first_token != next_token:
            problems.append(f"{place}: begins at token {first_token} instead of {next_token}")
        if not last_revision <= revision <= newest:
            problems.append(f"{place}: revision {revision} is not in {last_revision}..{newest}")
        if turn_revision is not None and turn_revision != revision:
            problems.append(
                f"{place}: its turn made revision {turn_revision}, the history says {revision}"
            )
        try:
            _, tokens = checked_body(place, *body)
        except StoreCorrupt as error:
            problems.append(str(error))
        else:
            if len(tokens) != TOKEN_BYTES * num_tokens:
                problems.append(f"{place}: has {len(tokens)} bytes for {num_tokens} token ids")
        next_position, next_token = position + 1, first_token + num_tokens
        last_revision = revision
    problems += [f"{name}, turn {row[0]}: {row[1]}" for row in conn.execute(TURN_QUERY, (number,))]


class ScrubScans(NamedTuple):
    """The scans of a scrub for one kind of database, and an estimate of the number of steps."""

    scans: tuple[TableScan, ...]
    num_steps: Callable[[Connection], int]  # an estimate, usually too high


class Scrub:
    """Reads the whole history in small steps, to find damage in data that is rarely read.

    A step is one short read transaction (a snapshot of `reads`), so that it does not delay deletions. It
    takes a few milliseconds, because a conversation is not longer than the model's context. Unreadable data
    (StoreCorrupt) is reported as a problem. The position is not stored, so a new process starts from the
    beginning. For one thread at a time.
    """

    def __init__(self, reads: Reads, scans: ScrubScans) -> None:
        self.num_passes = 0
        self._reads = reads
        self._scans, self._num_steps = scans
        self._scan = 0
        self._after = 0

    def num_steps(self) -> int:
        """Return the approximate number of steps of a pass."""
        try:
            with self._reads.snapshot() as conn:
                return self._num_steps(conn)
        except StoreCorrupt:
            return len(self._scans)

    def step(self) -> list[str]:
        """Take one step. Return the problems found."""
        problems: list[str] = []
        try:
            with self._reads.snapshot() as conn:
                last = self._scans[self._scan](conn, self._after, problems)
            self._after = last or 0
            self._scan += last is None
        except StoreCorrupt as error:
            problems.append(str(error))
        if self._scan == len(self._scans) or problems:
            self._scan = self._after = 0
            self.num_passes += not problems
            self.close()
        return problems

    def close(self) -> None:
        self._reads.close()


def scan_conversation(conn: Connection, after: int, problems: list[str]) -> int | None:
    number: int | None = conn.execute(
        "SELECT min(conversation) FROM conversations WHERE conversation > ?", (after,)
    ).fetchone()[0]
    if number is not None:
        verify_conversation(conn, number, problems)
    return number


def scan_bodies(conn: Connection, after: int, problems: list[str]) -> int | None:
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


def read_tables(
    tables: Sequence[str], conn: Connection, after: int, problems: list[str]
) -> int | None:
    """Read all rows of small tables."""
    for table in tables:
        conn.execute(f"SELECT * FROM {table}").fetchall()
    return None


def highest_keys(conn: Connection) -> dict[str, int]:
    return {
        table: conn.execute(f"SELECT coalesce(max({key}), 0) FROM {table}").fetchone()[0]
        for table, key in KEYS.items()
    }


HISTORY_QUERY = """
    SELECT h.position, h.revision, h.first_token, t.revision, c.revision,
        m.num_tokens, b.crc, b.private, b.tokens
    FROM history h JOIN conversations c USING (conversation)
        LEFT JOIN messages m ON m.message = h.message LEFT JOIN bodies b ON b.body = m.body
        LEFT JOIN turns t ON t.turn_id = m.turn_id AND t.conversation = h.conversation
    WHERE h.conversation = ? ORDER BY h.position
"""

# (turn, sentence) for each turn that contradicts its messages.
TURN_QUERY = """
    WITH made AS (
        SELECT t.turn_id, t.state, t.revision, c.revision AS present, c.conversation,
            (SELECT count(*) FROM messages m WHERE m.turn_id = t.turn_id) AS num_messages,
            (SELECT count(*) FROM messages m WHERE m.turn_id = t.turn_id
                AND m.finish_reason IS NOT NULL) AS num_replies,
            (SELECT count(*) FROM messages m JOIN history h ON h.message = m.message
                AND h.conversation = c.conversation WHERE m.turn_id = t.turn_id) AS num_held
        FROM turns t JOIN conversations c USING (conversation) WHERE t.conversation = ?
    )
    SELECT turn_id, sentence FROM (SELECT turn_id, CASE
        WHEN state IN ('completed', 'cancelled') AND (revision IS NULL OR revision > present)
            THEN 'has ended, but its revision is missing or too high'
        WHEN state IN ('completed', 'cancelled') AND num_replies <> 1 THEN 'ended without one reply'
        WHEN state IN ('completed', 'cancelled') AND num_held NOT IN (0, num_messages)
            THEN 'is in the history in part'
        WHEN state NOT IN ('completed', 'cancelled') AND (num_held <> 0 OR num_replies <> 0)
            THEN 'was not completed, but has a reply, or messages in the history'
        WHEN state NOT IN ('running', 'completed', 'cancelled', 'interrupted', 'failed')
            THEN 'has an unknown state'
        END AS sentence FROM made) judged
    WHERE sentence IS NOT NULL
"""

STORE_QUERIES = (
    (
        "message {}: nothing holds it",
        "SELECT message FROM messages m WHERE turn_id IS NULL"
        " AND NOT EXISTS (SELECT 1 FROM history h WHERE h.message = m.message)",
    ),
    (
        "message {}: its turn {} does not exist",
        "SELECT message, turn_id FROM messages m WHERE turn_id IS NOT NULL"
        " AND NOT EXISTS (SELECT 1 FROM turns t WHERE t.turn_id = m.turn_id)",
    ),
    (
        "history of conversation number {}: there is no such conversation",
        "SELECT DISTINCT conversation FROM history h"
        " WHERE NOT EXISTS (SELECT 1 FROM conversations c WHERE c.conversation = h.conversation)",
    ),
    (
        "turn {}: its conversation does not exist",
        "SELECT turn_id FROM turns t"
        " WHERE NOT EXISTS (SELECT 1 FROM conversations c WHERE c.conversation = t.conversation)",
    ),
    (
        "response number {}: its conversation does not exist",
        "SELECT response FROM responses r"
        " WHERE NOT EXISTS (SELECT 1 FROM conversations c WHERE c.conversation = r.conversation)",
    ),
    (
        "conversation number {}: {} turns are running",
        "SELECT conversation, count(*) FROM turns WHERE state = 'running'"
        " GROUP BY conversation HAVING count(*) > 1",
    ),
    (
        "body {}: {} records refer to it, and it is {}",
        """
        WITH holders AS (
            SELECT body FROM conversations UNION ALL SELECT body FROM turns
            UNION ALL SELECT body FROM messages
            UNION ALL SELECT logprobs FROM turns WHERE logprobs IS NOT NULL
            UNION ALL SELECT body FROM responses
        ), held AS (SELECT body, count(*) AS num FROM holders GROUP BY body)
        SELECT b.body, coalesce(held.num, 0),
            CASE WHEN b.crc IS NULL THEN 'wiped' ELSE 'not wiped' END
        FROM bodies b LEFT JOIN held USING (body)
        WHERE coalesce(held.num, 0) <> CASE WHEN b.crc IS NULL THEN 0 ELSE 1 END
        UNION ALL
        SELECT held.body, held.num, 'missing'
        FROM held WHERE NOT EXISTS (SELECT 1 FROM bodies b WHERE b.body = held.body)
        """,
    ),
    (
        "prefix number {}: its conversation does not exist or belongs to another tenant",
        "SELECT conversation FROM prefixes p WHERE NOT EXISTS (SELECT 1 FROM conversations c"
        " WHERE c.conversation = p.conversation AND c.tenant = p.tenant)",
    ),
    (
        "chain {}: its message is not a reply",
        "SELECT chain FROM chains c WHERE NOT EXISTS"
        " (SELECT 1 FROM messages m WHERE m.message = c.message AND m.finish_reason IS NOT NULL)",
    ),
    (
        "tenant {!r}: its conversations take {} bytes, and {} are counted",
        f"""
        WITH added (tenant, num_bytes) AS ({STORED_BYTES_QUERY}),
            known AS (SELECT tenant FROM added UNION SELECT tenant FROM tenants)
        SELECT k.tenant, coalesce(a.num_bytes, 0), coalesce(t.stored_bytes, 0)
        FROM known k LEFT JOIN added a USING (tenant) LEFT JOIN tenants t USING (tenant)
        WHERE coalesce(a.num_bytes, 0) <> coalesce(t.stored_bytes, 0)
        """,
    ),
    (
        "tenant {!r}: its salt has {} bytes",
        f"SELECT tenant, length(salt) FROM salts WHERE length(salt) <> {SALT_BYTES}",
    ),
)
