"""Return the space of wiped bodies to the disk, in steps of a few milliseconds of the store thread.

    rest ──wasteful──> fence ──> move ──> remove ──> trim ──> rest
       └────────────mostly free pages────────────────^

Each step is one transaction. Between steps, the history is fully usable and verifiable.

    fence    append a few rows (the fence), each of which fills a whole leaf of the B-tree
    move     copy each live row that lies before the fence to the end of the table, change the references to
             the copy, and wipe the original. Appending moves no existing cell. At the end, all rows before
             the fence are wiped.
    remove   delete the rows before the fence, from the first on. SQLite then balances the first leaf with the
             next two. That copies cells between pages, but only cells of wiped rows or of the fence.
    trim     move the last pages of the file into free pages, and shorten the file

The database does not store the phase. After a crash, a new pass begins if enough space is still wasted. A
failed step is repeated. A pass copies fewer bytes than it frees. The next pass removes the fence.

Trimming needs a database that was created with auto_vacuum=INCREMENTAL. An older database reuses free pages,
but its file never gets shorter.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from pensieve.store.bodies import LOCAL_BYTES_MAX
from pensieve.store.connection import WriterConnection

if TYPE_CHECKING:
    from sqlite3 import Connection

COMPACT_BYTES_MIN = 16 * 2**20
FENCE_ROWS = 4  # more than the two leaves that balancing involves
FENCE_BYTES = LOCAL_BYTES_MAX - 100  # so large that no two rows fit into one leaf
STEP_ROWS = 128
STEP_BYTES = 256 * 2**10
STEP_PAGES = 256
AUTO_VACUUM_INCREMENTAL = 2
BODY_REFERENCES = (  # all columns that refer to bodies
    ("messages", "body"),
    ("turns", "body"),
    ("turns", "logprobs"),
    ("conversations", "body"),
    ("responses", "body"),
)


class CompactionPhase(Enum):
    """What the next step does."""

    REST = auto()
    FENCE = auto()
    MOVE = auto()
    REMOVE = auto()
    TRIM = auto()


class CompactionState(NamedTuple):
    """The position of a pass. Each step returns the next state, to be used after the step is committed."""

    phase: CompactionPhase
    fence: int = 0  # first row of the fence
    moved: int = 0  # last row that `move` has handled
    wiped_bytes: int = 0  # bytes that the pass will free


class Compaction:
    """A pass over one database. Call `step` outside of transactions."""

    def __init__(
        self,
        writer: WriterConnection,
        first: CompactionPhase,
        may_go_on: Callable[[Connection], bool] = lambda conn: True,
    ) -> None:
        """`may_go_on` is called in each step's transaction. The pass stops when it returns False."""
        self._writer = writer
        self._may_go_on = may_go_on
        self._state = CompactionState(first)

    def step(self) -> bool:
        """Take one step in one transaction. Return whether there is another step."""
        with self._writer.writing(is_serializable=True) as conn:
            if not self._may_go_on(conn):
                return False
            state = STEPS[self._state.phase](conn, self._state)
        self._state = state
        return state.phase is not CompactionPhase.REST


def first_phase(
    writer: WriterConnection, bytes_min: int, *, is_urgent: bool = False
) -> CompactionPhase:
    """Return the first phase of a pass: REST unless enough space is wasted.

    Enough means that the wiped bytes, or the free pages, are at least `bytes_min` and at least half of the
    file. `is_urgent`: the disk is full, so any free page is enough.
    """
    with writer.reading() as conn:
        page_bytes = _number(conn, "PRAGMA page_size")
        file_bytes = page_bytes * _number(conn, "PRAGMA page_count")
        free_bytes = page_bytes * _number(conn, "PRAGMA freelist_count")
        wiped_bytes = _number(conn, "SELECT wiped_bytes FROM space")
        can_trim = _number(conn, "PRAGMA auto_vacuum") == AUTO_VACUUM_INCREMENTAL
    if wiped_bytes >= bytes_min and 2 * wiped_bytes > file_bytes - free_bytes:
        return CompactionPhase.FENCE
    is_mostly_free = free_bytes >= bytes_min and 2 * free_bytes > file_bytes
    if can_trim and ((is_urgent and free_bytes) or is_mostly_free):
        return CompactionPhase.TRIM
    return CompactionPhase.REST


def _place_fence(conn: Connection, state: CompactionState) -> CompactionState:
    fence = 1 + _number(conn, "SELECT coalesce(max(body), 0) FROM bodies")
    for row in range(fence, fence + FENCE_ROWS):
        conn.execute(
            "INSERT INTO bodies (body, tokens) VALUES (?, zeroblob(?))", (row, FENCE_BYTES)
        )
    wiped_bytes = _number(conn, "SELECT wiped_bytes FROM space")
    return CompactionState(CompactionPhase.MOVE, fence, 0, wiped_bytes)


def _move(conn: Connection, state: CompactionState) -> CompactionState:
    rows = conn.execute(
        "SELECT body, crc IS NULL, length(private) + length(tokens) FROM bodies"
        " WHERE body > ? AND body < ? ORDER BY body LIMIT ?",
        (state.moved, state.fence, STEP_ROWS),
    ).fetchall()
    if not rows:
        return state._replace(phase=CompactionPhase.REMOVE)
    step_bytes = 0
    for body, is_wiped, num_bytes in rows:
        if not is_wiped:
            _move_body(conn, body)
            step_bytes += num_bytes
        state = state._replace(moved=body)
        if step_bytes >= STEP_BYTES:
            break
    return state


def _move_body(conn: Connection, body: int) -> None:
    """Copy a body to the end of the table and wipe the original."""
    copy = conn.execute(
        "INSERT INTO bodies (crc, private, tokens)"
        " SELECT crc, private, tokens FROM bodies WHERE body = ?",
        (body,),
    ).lastrowid
    for table, column in BODY_REFERENCES:
        conn.execute(f"UPDATE {table} SET {column} = ? WHERE {column} = ?", (copy, body))
    conn.execute(
        "UPDATE bodies SET crc = NULL, private = NULL, tokens = NULL WHERE body = ?", (body,)
    )


def _remove(conn: Connection, state: CompactionState) -> CompactionState:
    rows = conn.execute(
        "SELECT body FROM bodies WHERE body < ? ORDER BY body LIMIT ?", (state.fence, STEP_ROWS)
    ).fetchall()
    if rows:
        conn.execute("DELETE FROM bodies WHERE body <= ?", rows[-1])
        return state
    conn.execute("UPDATE space SET wiped_bytes = max(0, wiped_bytes - ?)", (state.wiped_bytes,))
    return CompactionState(CompactionPhase.TRIM)


def _trim(conn: Connection, state: CompactionState) -> CompactionState:
    before = _number(conn, "PRAGMA freelist_count")
    conn.execute(f"PRAGMA incremental_vacuum({STEP_PAGES})").fetchall()
    is_shorter = _number(conn, "PRAGMA freelist_count") < before
    return state if is_shorter else CompactionState(CompactionPhase.REST)


STEPS = {
    CompactionPhase.FENCE: _place_fence,
    CompactionPhase.MOVE: _move,
    CompactionPhase.REMOVE: _remove,
    CompactionPhase.TRIM: _trim,
}


def _number(conn: Connection, query: str) -> int:
    number: int = conn.execute(query).fetchone()[0]
    return number
