"""Responses that clients may fetch, continue from and delete.

Each response belongs to a turn of a conversation. A response is a row of `responses` and a body, which is the
JSON that its client got. It is deleted with its conversation, or earlier.

    revision         the conversation's revision after the response's turn; a client continues from there.
                     It is set in the commit that adds the turn to the history, and NULL before.
    is_ours          the conversation was created only to hold responses; no client asked for it
    last_revision    the highest revision of this response and the deleted responses of the conversation. The
                     revision of a response is the one after its turn, or the one before its turn if the turn
                     is not in the history.

If `is_ours` is set and the only remaining response of the conversation is deleted, the conversation must be
deleted, too. The conversation is kept if it was continued in another way: a turn is running, or its revision
is above `last_revision`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pensieve.errors import AlreadyExists, NotFound
from pensieve.store import conversation_rows
from pensieve.store.backend import ErasureSteps
from pensieve.store.bodies import insert_body, read_private, wipe_bodies
from pensieve.store.conversation_rows import digest
from pensieve.store.transactions import StoreTransactions, repeated

if TYPE_CHECKING:
    from sqlite3 import Connection

RESPONSE_KEYS = "response"  # separates the keys of responses from those of conversations
RAISE_LAST_REVISION = "last_revision = CASE WHEN last_revision < ? THEN ? ELSE last_revision END"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A stored response."""

    response_id: str
    conversation_id: str
    body: Mapping[str, Any]  # JSON
    request: str = ""  # a digest of the request
    revision: int | None = None
    is_ours: bool = False
    began_at_revision: int = 0  # the conversation's revision before the response's turn
    tenant: str = ""


class Removed(NamedTuple):
    """The result of deleting a response: the conversation that is no longer needed, if any."""

    conversation_id: str = ""  # empty: the conversation stays
    revision: int = 0  # the revision of this conversation


class ResponseStore:
    """The methods run their own transactions. Call them in a store thread, outside of transactions."""

    def __init__(self, transactions: StoreTransactions, erasure: ErasureSteps) -> None:
        self._transactions = transactions
        self._erasure = erasure

    @repeated
    def save(self, response: StoredResponse) -> None:
        """Insert or replace a response. Raises NotFound if its conversation does not exist."""
        with self._transactions.writing() as conn:
            number, _ = conversation_rows.require_conversation(
                conn, response.conversation_id, response.tenant
            )
            put_response(conn, number, response)

    def is_only_for_responses(self, conversation_id: str, *, tenant: str = "") -> bool:
        """Return whether a conversation exists only to hold responses, and has at least one response.

        Raises NotFound if the conversation does not exist.
        """
        with self._transactions.reading(is_snapshot=True) as conn:
            number, _ = conversation_rows.require_conversation(conn, conversation_id, tenant)
            row = conn.execute(
                "SELECT 1 FROM responses WHERE conversation = ? AND is_ours = 1 LIMIT 1", (number,)
            ).fetchone()
        return row is not None

    def conversation_unneeded_without(self, response_id: str, *, tenant: str = "") -> Removed:
        """Return what `delete` would return, without deleting the response."""
        with self._transactions.reading(is_snapshot=True) as conn:
            return _conversation_unneeded_without(conn, _require(conn, response_id, tenant))

    @repeated
    def delete(self, response_id: str, *, tenant: str = "") -> Removed:
        """Delete a response and erase it from the disk. Return the conversation that is no longer needed.

        Raises:
            NotFound: the response does not exist.
            ErasurePending: the response is deleted, but not yet erased from the files.
        """

        def delete() -> Removed:
            with self._transactions.writing(is_serializable=True) as conn:
                removed = _delete(conn, response_id, tenant)
                self._erasure.prepare()
            return removed

        try:
            removed = self._erasure.run_deletion(delete)
        except NotFound:
            self._erasure.finish()
            raise
        # If the conversation is no longer needed, the caller deletes it, which erases the response, too.
        if not removed.conversation_id:
            self._erasure.finish()
        return removed


def put_response(conn: Connection, number: int, response: StoredResponse) -> None:
    """Insert or replace a response of the conversation with this row number.

    If the turn is already in the history, a response without a revision is ignored. Such a response was
    written while the turn was running, and arrives late.
    """
    tenant = response.tenant
    last_revision = response.revision or response.began_at_revision
    private = {
        "response_id": response.response_id,
        "response": dict(response.body),
        "request": response.request,
    }
    key = _key(response.response_id, tenant)
    row = conn.execute(
        "SELECT response, conversation, body, revision FROM responses WHERE key = ?", (key,)
    ).fetchone()
    if row is not None and row[1] != number:
        raise AlreadyExists(f"response {response.response_id!r} already exists")
    if row is not None and row[3] is not None and response.revision is None:
        return
    body = insert_body(conn, tenant, private)
    if row is None:
        conn.execute(
            "INSERT INTO responses (key, conversation, revision, last_revision, is_ours, body)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (key, number, response.revision, last_revision, int(response.is_ours), body),
        )
        return
    wipe_bodies(conn, tenant, (row[2],))
    conn.execute(
        f"UPDATE responses SET revision = ?, {RAISE_LAST_REVISION}, body = ? WHERE response = ?",
        (response.revision, last_revision, last_revision, body, row[0]),
    )


class _Row(NamedTuple):
    response: int
    conversation: int
    last_revision: int
    is_ours: int
    body: int


def _require(conn: Connection, response_id: str, tenant: str) -> _Row:
    row = conn.execute(
        "SELECT response, conversation, last_revision, is_ours, body FROM responses WHERE key = ?",
        (_key(response_id, tenant),),
    ).fetchone()
    if row is None:
        raise NotFound(f"there is no response {response_id!r}")
    return _Row(*row)


def _delete(conn: Connection, response_id: str, tenant: str) -> Removed:
    row = _require(conn, response_id, tenant)
    unneeded = _conversation_unneeded_without(conn, row)
    wipe_bodies(conn, tenant, (row.body,))
    conn.execute("DELETE FROM responses WHERE response = ?", (row.response,))
    conn.execute(
        f"UPDATE responses SET {RAISE_LAST_REVISION} WHERE conversation = ?",
        (row.last_revision, row.last_revision, row.conversation),
    )
    return unneeded


def _conversation_unneeded_without(conn: Connection, row: _Row) -> Removed:
    """Return the response's conversation if nothing else needs it, otherwise an empty `Removed`."""
    has_others = conn.execute(
        "SELECT 1 FROM responses WHERE conversation = ? AND response <> ? LIMIT 1",
        (row.conversation, row.response),
    ).fetchone()
    conversation = conversation_rows.conversation_numbered(conn, row.conversation)
    is_unused = (
        row.is_ours
        and not has_others
        and conversation.revision <= row.last_revision
        and conversation.running_turn_id is None
    )
    return Removed(conversation.conversation_id, conversation.revision) if is_unused else Removed()


def find(conn: Connection, response_id: str, tenant: str) -> StoredResponse | None:
    row = conn.execute(
        "SELECT r.response, r.conversation, r.revision, r.is_ours, b.crc, b.private, b.tokens"
        " FROM responses r LEFT JOIN bodies b USING (body) WHERE r.key = ?",
        (_key(response_id, tenant),),
    ).fetchone()
    if row is None:
        return None
    private = read_private(f"response number {row[0]}", *row[4:])
    conversation = conversation_rows.conversation_numbered(conn, row[1])
    return StoredResponse(
        private["response_id"],
        conversation.conversation_id,
        private["response"],
        private["request"],
        row[2],
        bool(row[3]),
        tenant=tenant,
    )


def _key(response_id: str, tenant: str) -> bytes:
    return digest(tenant, RESPONSE_KEYS, response_id)
