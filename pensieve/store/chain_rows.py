"""SQL of chains (chains.py), as functions on a connection; see conversation_rows.py."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from pensieve.store.records import ChainState

if TYPE_CHECKING:
    from sqlite3 import Connection

KEY_BYTES = 16
OF_A_REQUEST = b"request"  # in place of a session; the digests of sessions are longer
STATES_MAX = 16  # that are looked at, of those with the same key, and of each
HOLDERS_MAX = 64


def chain_key(tenant: str, digest: bytes) -> bytes:
    """The `key` column: tenants never meet."""
    whole = tenant.encode(errors="surrogatepass") + b"\0" + digest
    return hashlib.blake2b(whole, digest_size=KEY_BYTES).digest()


def insert_state(
    conn: Connection, tenant: str, state: ChainState, message: int, now: float
) -> None:
    """A history that ends with this message, the reply of a turn."""
    conn.execute(
        "INSERT INTO chains (key, message, session, at) VALUES (?, ?, ?, ?)",
        (chain_key(tenant, state.digest), message, state.session, now),
    )


def insert_request(
    conn: Connection, tenant: str, request_id: str, message: int, now: float
) -> None:
    """Record which turn a request began; `message` is one of the turn's messages."""
    state = ChainState(_request_digest(request_id), OF_A_REQUEST)
    insert_state(conn, tenant, state, message, now)


def _request_digest(request_id: str) -> bytes:
    whole = b"request\0" + request_id.encode()
    return hashlib.blake2b(whole, digest_size=KEY_BYTES).digest()


def copy_states(conn: Connection, old: int, new: int) -> None:
    """The same message with other tokens is found as the old one is."""
    conn.execute(
        "INSERT INTO chains (key, message, session, at)"
        " SELECT key, ?, session, at FROM chains WHERE message = ?",
        (new, old),
    )


def states(conn: Connection, key: bytes, session: bytes) -> tuple[list[int], bool]:
    """The messages that end a history with this key, of those that some history has.

    The newest that were made in this session, and true; or else any one, and false.
    """
    held = " AND EXISTS (SELECT 1 FROM history h WHERE h.message = chains.message)"
    rows = conn.execute(
        f"SELECT message FROM chains WHERE key = ? AND session = ?{held} ORDER BY chain DESC LIMIT ?",
        (key, session, STATES_MAX),
    ).fetchall()
    if rows:
        return [message for (message,) in rows], True
    row = conn.execute(f"SELECT message FROM chains WHERE key = ?{held} LIMIT 1", (key,)).fetchone()
    return ([] if row is None else [row[0]]), False


class Holder(NamedTuple):
    """A conversation whose history has a message."""

    conversation: int
    revision: int  # that the message came with
    is_head: bool  # it is the last one
    running_turn_id: int | None


def holders(conn: Connection, message: int) -> list[Holder]:
    """The oldest of them."""
    rows = conn.execute(
        "SELECT h.conversation, h.revision, NOT EXISTS (SELECT 1 FROM history l"
        " WHERE l.conversation = h.conversation AND l.position > h.position),"
        " (SELECT turn_id FROM turns t WHERE t.conversation = h.conversation"
        " AND t.state = 'running' LIMIT 1)"
        " FROM history h WHERE h.message = ? ORDER BY h.conversation LIMIT ?",
        (message, HOLDERS_MAX),
    )
    return [Holder(row[0], row[1], bool(row[2]), row[3]) for row in rows]


class Begun(NamedTuple):
    """A turn that runs or has its reply."""

    conversation: int
    num_messages: int  # of its prompt


def turn_of_request(conn: Connection, tenant: str, request_id: str) -> Begun | None:
    """Return the turn that a request began, in whichever conversation of the tenant it is."""
    row = conn.execute(
        "SELECT t.conversation, (SELECT count(*) FROM messages m"
        " WHERE m.turn_id = t.turn_id AND m.finish_reason IS NULL)"
        " FROM chains c JOIN messages first ON first.message = c.message"
        " JOIN turns t ON t.turn_id = first.turn_id"
        " WHERE c.key = ? AND c.session = ? AND t.state IN ('running', 'completed', 'cancelled')"
        " LIMIT 1",
        (chain_key(tenant, _request_digest(request_id)), OF_A_REQUEST),
    ).fetchone()
    return None if row is None else Begun(*row)


def oldest_states(conn: Connection, before: float, limit: int) -> tuple[list[int], bool]:
    """Those of the oldest rows that are from before that time, and whether there may be more."""
    rows = conn.execute(
        "SELECT chain, at FROM chains WHERE chain > 0 ORDER BY chain LIMIT ?", (limit,)
    ).fetchall()
    old = [chain for chain, at in rows if at < before]
    return old, len(old) == limit


def delete_states(conn: Connection, chains: Sequence[int]) -> None:
    marks = ",".join("?" * len(chains))
    conn.execute(f"DELETE FROM chains WHERE chain IN ({marks})", tuple(chains))
