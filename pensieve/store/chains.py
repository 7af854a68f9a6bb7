"""Find the stored conversation that matches a client's history.

A client without a conversation id sends the full history each time. conversations/binding/chain.py computes
digests that are equal for equal histories. With each reply, the store keeps the digest of the history up to
and including that reply. This digest is called a *state*:

    chains     key        a digest of tenant and state
               message    the reply that ends this history
               session    a digest of the client's own name for the conversation; empty: none

A state belongs to a reply, not to a conversation. Every conversation that holds the reply has the same
history up to that reply. So a fork needs no new rows here, and forks are found after the original is deleted.
A rewind deletes no rows, because the shortened history no longer holds the reply. When no history and no turn
holds the reply any more, the reply is deleted with its states (ON DELETE CASCADE).

A row holds only digests and numbers. Old rows are deleted, a few per transaction. A history whose rows were
deleted is no longer found: the client's next request begins a new conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from pensieve.store import conversation_rows
from pensieve.store.conversation_rows import tenant_key
from pensieve.store.housekeeper import Housekeeper
from pensieve.store.records import ChainMatch, ChainState
from pensieve.store.transactions import StoreTransactions, repeated

if TYPE_CHECKING:
    from sqlite3 import Connection

STATES_MAX = 16  # limit for the states that are read for one key
HOLDERS_MAX = 64
FORGOTTEN_AT_ONCE = 256


class Holder(NamedTuple):
    """A conversation whose history contains a message."""

    conversation: int
    revision: int  # the revision that added the message
    is_last: bool  # the message is the last of this history
    running_turn_id: int | None


class Chains:
    """The methods run their own transactions. Call them in a store thread, outside of transactions."""

    def __init__(self, transactions: StoreTransactions, housekeeper: Housekeeper) -> None:
        self._transactions = transactions
        self._housekeeper = housekeeper

    def longest(
        self, digests: Sequence[bytes], session: bytes, *, tenant: str = ""
    ) -> ChainMatch | None:
        """Return the conversation to continue, or None if no history matches.

        `digests` has one digest for each prefix of the client's history, longest first. Among the
        matching conversations, a conversation to which the turn may be appended is preferred.
        """
        with self._transactions.reading(is_snapshot=True) as conn:
            for digest in digests:
                messages, is_of_session = _messages_with_key(
                    conn, tenant_key(tenant, digest), session
                )
                if messages:
                    break
            else:
                return None
            holder, may_append = self._best(conn, messages, is_of_session)
            found = conversation_rows.conversation_numbered(conn, holder.conversation)
        return ChainMatch(
            digest, found.conversation_id, holder.revision, found.revision, may_append
        )

    @repeated
    def forget(self, before: float) -> bool:
        """Delete some states that are older than `before`. Return whether there may be more.

        Does nothing if another daemon is the housekeeper.
        """
        if not self._housekeeper.is_ours:
            return False
        with self._transactions.reading() as conn:
            rows = conn.execute(
                "SELECT chain, at FROM chains WHERE chain > 0 ORDER BY chain LIMIT ?",
                (FORGOTTEN_AT_ONCE,),
            ).fetchall()
        old = tuple(chain for chain, at in rows if at < before)
        if old:
            placeholders = ",".join("?" * len(old))
            with self._transactions.writing() as conn:
                conn.execute(f"DELETE FROM chains WHERE chain IN ({placeholders})", old)
        return len(old) == FORGOTTEN_AT_ONCE

    def _best(
        self, conn: Connection, messages: Sequence[int], is_of_session: bool
    ) -> tuple[Holder, bool]:
        """Return a conversation with one of these messages, and whether the turn may be appended to it."""
        others = []
        for message in messages:
            for holder in _holders(conn, message):
                turn_id = holder.running_turn_id
                is_idle = turn_id is None or self._transactions.is_dead(conn, turn_id)
                if is_of_session and holder.is_last and is_idle:
                    return holder, True
                others.append(holder)
        return others[0], False  # `others` is not empty: some history holds each of the messages


def insert_state(
    conn: Connection, tenant: str, state: ChainState, message: int, now: float
) -> None:
    """Store the state of a history that ends with this reply."""
    conn.execute(
        "INSERT INTO chains (key, message, session, at) VALUES (?, ?, ?, ?)",
        (tenant_key(tenant, state.digest), message, state.client_session, now),
    )


def copy_states(conn: Connection, old: int, new: int) -> None:
    """Copy the states of message `old` to message `new`, which replaces `old` and has other tokens."""
    conn.execute(
        "INSERT INTO chains (key, message, session, at)"
        " SELECT key, ?, session, at FROM chains WHERE message = ?",
        (new, old),
    )


def _messages_with_key(conn: Connection, key: bytes, session: bytes) -> tuple[list[int], bool]:
    """Return messages that end a history with this key, and whether they are from this session.

    If the session has such messages, returns them, newest first. Otherwise returns one message of another
    session.
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


def _holders(conn: Connection, message: int) -> list[Holder]:
    """Return the oldest conversations that hold the message."""
    rows = conn.execute(
        "SELECT h.conversation, h.revision, NOT EXISTS (SELECT 1 FROM history l"
        " WHERE l.conversation = h.conversation AND l.position > h.position),"
        " (SELECT turn_id FROM turns t WHERE t.conversation = h.conversation"
        " AND t.state = 'running' LIMIT 1)"
        " FROM history h WHERE h.message = ? ORDER BY h.conversation LIMIT ?",
        (message, HOLDERS_MAX),
    )
    return [Holder(row[0], row[1], bool(row[2]), row[3]) for row in rows]
