"""SQL of turns, as functions on a connection. See conversation_rows.py.

A turn's body holds what a replay needs (request_id, sampling). forgetting.py overwrites the body after 7
days, so a value that must be kept longer needs a column.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from pensieve.errors import NotFound
from pensieve.store.backend import database_clock, insert_numbered
from pensieve.store.bodies import (
    checked_body,
    insert_body,
    insert_packed_body,
    read_private,
    unpack_tokens,
    wipe_bodies,
)
from pensieve.store.conversation_rows import conversation_numbered, digest, tenant_key
from pensieve.store.records import (
    KeyedTurn,
    NewMessage,
    NewTurn,
    StoredConversation,
    StoredTurn,
    StoredTurnState,
    TurnMessages,
)

if TYPE_CHECKING:
    from sqlite3 import Connection


INSERTED_COLUMNS = (  # columns of a new turn
    "conversation",
    "request_key",
    "state",
    "attempts",
    "seed",
    "usage",
    "created_at",
    "body",
    "idempotency_key",
)


class TurnRow(NamedTuple):
    """A stored turn, its conversation's row number, and the hash of its request's content."""

    conversation: int
    content_hash: str
    turn: StoredTurn


TURN = """
    SELECT t.turn_id, t.conversation, t.state, t.attempts, t.seed, t.finish_reason, t.failure,
        t.usage, t.revision, t.created_at, t.finished_at, c.tenant,
        b.crc, b.private, b.tokens, d.crc, d.private, d.tokens
    FROM turns t JOIN conversations c USING (conversation)
        LEFT JOIN bodies b ON b.body = t.body LEFT JOIN bodies d ON d.body = c.body
"""


def _turn(row: Any) -> TurnRow:
    """Make a record from a row of the query TURN."""
    turn_id, conversation, state, attempts, seed, finish_reason, failure, *more = row
    usage, revision, created_at, finished_at, tenant, *bodies = more
    private = read_private(f"turn {turn_id}", *bodies[:3])
    conversation_private = read_private(f"conversation number {conversation}", *bodies[3:])
    turn = StoredTurn(
        turn_id=turn_id,
        conversation_id=conversation_private["conversation_id"],
        tenant=tenant,
        request_id=private["request_id"],
        state=StoredTurnState(state),
        attempts=attempts,
        sampling=private["sampling"],
        seed=int(seed),
        finish_reason=finish_reason,
        failure=failure,
        usage=json.loads(usage),
        revision=revision,
        created_at=created_at,
        finished_at=finished_at,
    )
    return TurnRow(conversation, private["content_hash"], turn)


class TurnProgress(NamedTuple):
    """The data that `ConversationStore.finish_turn` needs."""

    conversation: int
    state: StoredTurnState
    revision: int | None  # the revision that the turn created, if it has ended
    conversation_revision: int
    tenant: str
    end: tuple[int, int]  # messages and tokens of the history before the turn
    attempt: int
    owner: int | None  # the session that has the conversation
    messages: tuple[tuple[int, int], ...]  # the turn's messages: (message, tokens)


class TurnFence(NamedTuple):
    """The data that decides who may end a turn."""

    state: StoredTurnState
    attempt: int
    owner: int | None  # the session that has the conversation


def find_turn_of_request(
    conn: Connection, conversation_key: bytes, request_id: str
) -> TurnRow | None:
    row = conn.execute(
        TURN + "WHERE c.key = ? AND t.request_key = ?", (conversation_key, digest(request_id))
    ).fetchone()
    return None if row is None else _turn(row)


def find_turn_by_key(conn: Connection, tenant: str, request_id: str) -> KeyedTurn | None:
    row = conn.execute(
        "SELECT t.conversation, (SELECT count(*) FROM messages m"
        " WHERE m.turn_id = t.turn_id AND m.finish_reason IS NULL) FROM turns t"
        " WHERE t.idempotency_key = ? AND t.state IN ('running', 'completed', 'cancelled') LIMIT 1",
        (idempotency_key(tenant, request_id),),
    ).fetchone()
    if row is None:
        return None
    return KeyedTurn(conversation_numbered(conn, row[0]).conversation_id, row[1])


def idempotency_key(tenant: str, request_id: str) -> bytes:
    """Return the value of the column `idempotency_key`. It is unique for a request within its tenant."""
    return tenant_key(tenant, digest("request", request_id))


def find_turn_numbered(conn: Connection, turn_id: int) -> TurnRow | None:
    row = conn.execute(TURN + "WHERE t.turn_id = ?", (turn_id,)).fetchone()
    return None if row is None else _turn(row)


def require_turn(conn: Connection, turn_id: int) -> TurnRow:
    found = find_turn_numbered(conn, turn_id)
    if found is None:
        raise NotFound(f"there is no turn {turn_id}")
    return found


def require_progress(conn: Connection, turn_id: int) -> TurnProgress:
    found = conn.execute(PROGRESS, (turn_id,))
    messages = conn.execute(
        "SELECT message, num_tokens FROM messages WHERE turn_id = ? ORDER BY message", (turn_id,)
    )
    row = found.fetchone()
    if row is None:
        raise NotFound(f"there is no turn {turn_id}")
    end = row[5] or 0, row[6] or 0
    number, state, turn_revision, revision, tenant = row[:5]
    return TurnProgress(
        *(number, StoredTurnState(state), turn_revision, revision, tenant, end),
        *(row[7], row[8], tuple(messages)),
    )


PROGRESS = """
    SELECT t.conversation, t.state, t.revision, c.revision, c.tenant,
        (SELECT h.position + 1 FROM history h WHERE h.conversation = t.conversation
            ORDER BY h.position DESC LIMIT 1),
        (SELECT h.first_token + m.num_tokens FROM history h JOIN messages m USING (message)
            WHERE h.conversation = t.conversation ORDER BY h.position DESC LIMIT 1),
        t.attempts, (SELECT session FROM owners o WHERE o.conversation = t.conversation)
    FROM turns t JOIN conversations c USING (conversation) WHERE t.turn_id = ?
"""


def insert_turn(
    conn: Connection,
    number: int,
    conversation: StoredConversation,
    request: NewTurn,
    content_hash: str,
    now: float,
) -> StoredTurn:
    body = insert_body(
        conn,
        conversation.tenant,
        {
            "request_id": request.request_id,
            "sampling": dict(request.sampling),
            "content_hash": content_hash,
        },
    )
    request_key, seed = digest(request.request_id), str(request.seed)
    retry_key = _idempotency_key(conversation.tenant, request)
    values = number, request_key, "running", 1, seed, "{}", now, body, retry_key
    turn_id = insert_numbered(conn, "turns", INSERTED_COLUMNS, values)
    return StoredTurn(
        turn_id=turn_id,
        conversation_id=conversation.conversation_id,
        tenant=conversation.tenant,
        request_id=request.request_id,
        state=StoredTurnState.RUNNING,
        attempts=1,
        sampling=dict(request.sampling),
        seed=request.seed,
        finish_reason=None,
        failure=None,
        usage={},
        revision=None,
        created_at=now,
        finished_at=None,
    )


def _idempotency_key(tenant: str, request: NewTurn) -> bytes | None:
    """Return the key, or None for a request without an Idempotency-Key or without its full history."""
    return idempotency_key(tenant, request.request_id) if request.has_idempotency_key else None


def restart_turn(conn: Connection, turn_id: int, tenant: str, request: NewTurn) -> None:
    """Begin an interrupted or failed turn again with its first seed. Its old messages are wiped."""
    bodies = conn.execute("SELECT body FROM messages WHERE turn_id = ?", (turn_id,)).fetchall()
    wipe_bodies(conn, tenant, (body for (body,) in bodies))
    conn.execute("DELETE FROM messages WHERE turn_id = ?", (turn_id,))
    conn.execute(
        "UPDATE turns SET state = 'running', attempts = attempts + 1, failure = NULL,"
        " finished_at = NULL, idempotency_key = ? WHERE turn_id = ?",
        (_idempotency_key(tenant, request), turn_id),
    )


def require_fence(conn: Connection, turn_id: int) -> TurnFence:
    row = conn.execute(
        "SELECT t.state, t.attempts, o.session FROM turns t LEFT JOIN owners o USING (conversation)"
        " WHERE t.turn_id = ?",
        (turn_id,),
    ).fetchone()
    if row is None:
        raise NotFound(f"there is no turn {turn_id}")
    return TurnFence(StoredTurnState(row[0]), row[1], row[2])


def read_turn_messages(conn: Connection, turn_id: int) -> TurnMessages:
    prompt: list[NewMessage] = []
    reply = None
    for role, finish_reason, *body in conn.execute(
        "SELECT m.role, m.finish_reason, b.crc, b.private, b.tokens FROM messages m"
        " LEFT JOIN bodies b USING (body) WHERE m.turn_id = ? ORDER BY m.message",
        (turn_id,),
    ):
        private, tokens = checked_body(f"turn {turn_id}", *body)
        message = NewMessage(role=role, token_ids=unpack_tokens(tokens), **json.loads(private))
        if finish_reason is None:
            prompt.append(message)
        else:
            reply = replace(message, logprobs=read_logprobs(conn, turn_id))
    return TurnMessages(tuple(prompt), reply)


def finish_turn(
    conn: Connection,
    turn_id: int,
    state: StoredTurnState,
    finish_reason: str,
    usage: Mapping[str, Any],
    revision: int,
    now: float,
) -> None:
    conn.execute(
        "UPDATE turns SET state = ?, finish_reason = ?, usage = ?, revision = ?, finished_at = ?"
        " WHERE turn_id = ?",
        (state.value, str(finish_reason), json.dumps(dict(usage)), revision, now, turn_id),
    )


def fail_turn(conn: Connection, turn_id: int, failure: str, now: float) -> None:
    conn.execute(
        "UPDATE turns SET state = 'failed', failure = ?, finished_at = ? WHERE turn_id = ?",
        (failure, now, turn_id),
    )


def interrupt_turn(conn: Connection, turn_id: int, now: float) -> None:
    conn.execute(
        "UPDATE turns SET state = 'interrupted', finished_at = ? WHERE turn_id = ?", (now, turn_id)
    )


def running_turns(conn: Connection, session: int) -> list[int]:
    """Return the running turns of the conversations that a session owns."""
    found = conn.execute(
        "SELECT t.turn_id FROM turns t JOIN owners o USING (conversation)"
        " WHERE t.state = 'running' AND o.session = ?",
        (session,),
    )
    return sorted(turn_id for (turn_id,) in found)


def runs_elsewhere(conn: Connection, turn_id: int, session: int) -> bool:
    """Return whether another live session owns the turn's conversation."""
    row = conn.execute(
        "SELECT 1 FROM turns t JOIN owners o USING (conversation) JOIN sessions s USING (session)"
        " WHERE t.turn_id = ? AND o.session <> ?"
        f" AND (s.lease_until IS NULL OR s.lease_until > {database_clock(conn)})",
        (turn_id, session),
    ).fetchone()
    return row is not None


def insert_logprobs(conn: Connection, tenant: str, turn_id: int, logprobs: bytes) -> None:
    """Store the logprobs of a turn's reply in a separate body, because only a replay reads them."""
    if logprobs:
        body = insert_packed_body(conn, tenant, b"", logprobs)
        conn.execute("UPDATE turns SET logprobs = ? WHERE turn_id = ?", (body, turn_id))


def read_logprobs(conn: Connection, turn_id: int) -> bytes:
    row = conn.execute(
        "SELECT b.crc, b.private, b.tokens FROM turns t LEFT JOIN bodies b ON b.body = t.logprobs"
        " WHERE t.turn_id = ? AND t.logprobs IS NOT NULL",
        (turn_id,),
    ).fetchone()
    return checked_body(f"turn {turn_id}", *row)[1] if row is not None else b""


def wipe_logprobs(conn: Connection, tenant: str, turn_id: int) -> None:
    """Wipe the logprobs. Used if the request is forgotten, or if the reply was tokenized again."""
    found = conn.execute(
        "SELECT logprobs FROM turns WHERE turn_id = ? AND logprobs IS NOT NULL", (turn_id,)
    ).fetchall()
    if found:
        wipe_bodies(conn, tenant, (body for (body,) in found))
        conn.execute("UPDATE turns SET logprobs = NULL WHERE turn_id = ?", (turn_id,))
