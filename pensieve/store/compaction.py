"""Gives the space of wiped bodies back, in steps that each take the store thread a few milliseconds.

    rest ──wasteful──> fence ──> move ──> remove ──> trim ──> rest
       └────────────mostly free pages────────────────^

A step is one transaction, and between two of them the history is as usable and as verifiable as ever.

    fence    append rows that each fill a leaf of their own; a pass cleans what lies before them
    move     copy what is not wiped to the end of the table, where no existing cell moves, let its holder
             refer to the copy, and wipe it where it was; at the end all rows before the fence are wiped
    remove   delete these rows from the front on.  SQLite then balances the first leaf with the two next to
             it, and so copies cells between pages, but they are cells of wiped rows, or of the fence
    trim     move the last pages of the file into free ones, and shorten it

Nothing of this is remembered by the database: after a crash a pass begins anew if the file is still wasteful,
and a statement that failed is tried again by the next step.  A pass copies what is alive, which is less than
what it frees.  The fence of a pass is removed by the next one.

Trimming needs a database made with auto_vacuum=INCREMENTAL.  In an older one free pages are used again, but
the file keeps its length.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from pensieve.store.bodies import LOCAL_BYTES_MAX
from pensieve.store.connection import WriterConnection

if TYPE_CHECKING:
    from sqlite3 import Connection

COMPACT_BYTES_MIN = 16 * 2**20
FENCE_ROWS = 4  # balancing reaches two leaves to the right
FENCE_BYTES = LOCAL_BYTES_MAX - 100  # no two fit into a leaf
STEP_ROWS = 128
STEP_BYTES = 256 * 2**10
STEP_PAGES = 256
AUTO_VACUUM_INCREMENTAL = 2
HOLDERS = (  # the columns that refer to bodies
    ("messages", "body"),
    ("turns", "body"),
    ("turns", "logprobs"),
    ("conversations", "body"),
    ("responses", "body"),
)


class Phase(Enum):
    """What the next step does."""

    REST = auto()
    FENCE = auto()
    MOVE = auto()
    REMOVE = auto()
    TRIM = auto()


class State(NamedTuple):
    """Where a pass is; a step makes the next state, which counts once its transaction is committed."""

    phase: Phase = Phase.REST
    fence: int = 0  # the first row of it
    moved: int = 0  # the last row that `move` has looked at
    wiped_bytes: int = 0  # what the pass gives back


class Compaction:
    """The compaction of one database; used outside of transactions."""

    def __init__(self, writer: WriterConnection, bytes_min: int) -> None:
        self._writer = writer
        self._bytes_min = bytes_min
        self._state = State()

    @property
    def due(self) -> bool:
        """Whether there is a step to take."""
        return self._state.phase is not Phase.REST

    def look(self, *, is_urgent: bool = False) -> None:
        """Begin if at least `bytes_min` and more than half of the file are wiped, or free.

        `is_urgent`: the disk is full, so give back any free page.
        """
        if self.due:
            return
        with self._writer.reading() as conn:
            page_bytes = _number(conn, "PRAGMA page_size")
            file_bytes = page_bytes * _number(conn, "PRAGMA page_count")
            free_bytes = page_bytes * _number(conn, "PRAGMA freelist_count")
            wiped_bytes = _number(conn, "SELECT wiped_bytes FROM space")
            can_trim = _number(conn, "PRAGMA auto_vacuum") == AUTO_VACUUM_INCREMENTAL
        if wiped_bytes >= self._bytes_min and 2 * wiped_bytes > file_bytes - free_bytes:
            self._state = State(Phase.FENCE)
        elif can_trim and (
            (is_urgent and free_bytes)
            or (free_bytes >= self._bytes_min and 2 * free_bytes > file_bytes)
        ):
            self._state = State(Phase.TRIM)

    def step(self) -> None:
        """One transaction."""
        if self.due:
            with self._writer.writing() as conn:
                state = STEPS[self._state.phase](conn, self._state)
            self._state = state


def _place_fence(conn: Connection, state: State) -> State:
    fence = 1 + _number(conn, "SELECT coalesce(max(body), 0) FROM bodies")
    for row in range(fence, fence + FENCE_ROWS):
        conn.execute(
            "INSERT INTO bodies (body, tokens) VALUES (?, zeroblob(?))", (row, FENCE_BYTES)
        )
    wiped_bytes = _number(conn, "SELECT wiped_bytes FROM space")
    return State(Phase.MOVE, fence, 0, wiped_bytes)


def _move(conn: Connection, state: State) -> State:
    rows = conn.execute(
        "SELECT body, crc IS NULL, length(private) + length(tokens) FROM bodies"
        " WHERE body > ? AND body < ? ORDER BY body LIMIT ?",
        (state.moved, state.fence, STEP_ROWS),
    ).fetchall()
    if not rows:
        return state._replace(phase=Phase.REMOVE)
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
    """Copy a body to the end of the table, and wipe it where it was."""
    copy = conn.execute(
        "INSERT INTO bodies (crc, private, tokens)"
        " SELECT crc, private, tokens FROM bodies WHERE body = ?",
        (body,),
    ).lastrowid
    for table, column in HOLDERS:
        conn.execute(f"UPDATE {table} SET {column} = ? WHERE {column} = ?", (copy, body))
    conn.execute(
        "UPDATE bodies SET crc = NULL, private = NULL, tokens = NULL WHERE body = ?", (body,)
    )


def _remove(conn: Connection, state: State) -> State:
    rows = conn.execute(
        "SELECT body FROM bodies WHERE body < ? ORDER BY body LIMIT ?", (state.fence, STEP_ROWS)
    ).fetchall()
    if rows:
        conn.execute("DELETE FROM bodies WHERE body <= ?", rows[-1])
        return state
    conn.execute("UPDATE space SET wiped_bytes = max(0, wiped_bytes - ?)", (state.wiped_bytes,))
    return State(Phase.TRIM)


def _trim(conn: Connection, state: State) -> State:
    before = _number(conn, "PRAGMA freelist_count")
    conn.execute(f"PRAGMA incremental_vacuum({STEP_PAGES})").fetchall()
    is_shorter = _number(conn, "PRAGMA freelist_count") < before
    return state if is_shorter else State()


STEPS = {
    Phase.FENCE: _place_fence,
    Phase.MOVE: _move,
    Phase.REMOVE: _remove,
    Phase.TRIM: _trim,
}


def _number(conn: Connection, query: str) -> int:
    number: int = conn.execute(query).fetchone()[0]
    return number
