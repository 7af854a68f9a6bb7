"""SQL of the logprobs of a turn's reply: a body of their own, which only a replay reads.

They go when the request is forgotten, when the conversation is deleted, and when the text is tokenized again,
since then they are those of other tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pensieve.store.bodies import checked_body, insert_packed_body, wipe_bodies

if TYPE_CHECKING:
    from sqlite3 import Connection


def insert_logprobs(conn: Connection, tenant: str, turn_id: int, logprobs: bytes) -> None:
    """Of the reply of a turn that has none yet."""
    if logprobs:
        body = insert_packed_body(conn, tenant, b"", logprobs)
        conn.execute("UPDATE turns SET logprobs = ? WHERE turn_id = ?", (body, turn_id))


def read_logprobs(conn: Connection, turn_id: int) -> bytes:
    """As they were inserted; empty where there are none."""
    row = conn.execute(
        "SELECT b.crc, b.private, b.tokens FROM turns t LEFT JOIN bodies b ON b.body = t.logprobs"
        " WHERE t.turn_id = ? AND t.logprobs IS NOT NULL",
        (turn_id,),
    ).fetchone()
    return checked_body(f"turn {turn_id}", *row)[1] if row is not None else b""


def wipe_logprobs(conn: Connection, tenant: str, turn_id: int) -> None:
    found = conn.execute(
        "SELECT logprobs FROM turns WHERE turn_id = ? AND logprobs IS NOT NULL", (turn_id,)
    ).fetchall()
    if found:
        wipe_bodies(conn, tenant, (body for (body,) in found))
        conn.execute("UPDATE turns SET logprobs = NULL WHERE turn_id = ?", (turn_id,))
