"""SQL of conversations, as functions on a connection. Each runs inside its caller's transaction.

`ConversationStore` makes the decisions. This module, message_rows.py and turn_rows.py read and write rows.
Every lookup uses a primary key or an index. Only `num_conversations` takes longer if there are more
conversations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pensieve.errors import AlreadyExists, NotFound, StaleRevision, TurnRunning
from pensieve.store.backend import insert_numbered
from pensieve.store.bodies import insert_body, last_within, read_private, wipe_bodies
from pensieve.store.records import PAGE_BYTES_MAX, StoredConversation

if TYPE_CHECKING:
    from sqlite3 import Connection


KEY_BYTES = 16


def digest(*words: str) -> bytes:
    """Return a fixed-size key for names that clients choose. Such names are private and may be long."""
    whole = "\0".join(words).encode(errors="surrogatepass")
    return hashlib.blake2b(whole, digest_size=KEY_BYTES).digest()


def tenant_key(tenant: str, digest: bytes) -> bytes:
    """Return a key for a lookup among all conversations of a tenant. No other tenant has the same key."""
    whole = tenant.encode(errors="surrogatepass") + b"\0" + digest
    return hashlib.blake2b(whole, digest_size=KEY_BYTES).digest()


SCANNED_ROWS = 4096  # rows that one call of `idle_conversations` reads
IDLE_AT_ONCE = 32
INSERTED_COLUMNS = (
    "key",
    "tenant",
    "prefix_key",
    "revision",
    "fingerprint",
    "created_at",
    "updated_at",
    "body",
)
CONVERSATION = """
    SELECT c.conversation, c.tenant, c.revision, c.fingerprint, c.created_at, c.updated_at,
        (SELECT turn_id FROM turns t WHERE t.conversation = c.conversation AND t.state = 'running'
            LIMIT 1),
        (SELECT h.position + 1 FROM history h WHERE h.conversation = c.conversation
            ORDER BY h.position DESC LIMIT 1),
        (SELECT h.first_token + m.num_tokens FROM history h JOIN messages m USING (message)
            WHERE h.conversation = c.conversation ORDER BY h.position DESC LIMIT 1),
        b.crc, b.private, b.tokens
    FROM conversations c LEFT JOIN bodies b USING (body)
"""
WITH_REQUEST = CONVERSATION.replace(  # plus the turn that a request began, and the owner's session
    "SELECT c.conversation,",
    "SELECT (SELECT turn_id FROM turns t WHERE t.conversation = c.conversation"
    " AND t.request_key = ?),"
    " (SELECT session FROM owners o WHERE o.conversation = c.conversation), c.conversation,",
    1,
)
LISTED_CONDITION = (
    "c.tenant = ? AND c.conversation < ? AND NOT EXISTS"
    " (SELECT 1 FROM prefixes p WHERE p.tenant = c.tenant AND p.conversation = c.conversation)"
)


def _conversation(row: Any) -> tuple[int, StoredConversation]:
    number, tenant, revision, fingerprint, created_at, updated_at, running = row[:7]
    num_messages, num_tokens = row[7:9]
    private = read_private(f"conversation number {number}", *row[9:])
    return number, StoredConversation(
        conversation_id=private["conversation_id"],
        tenant=tenant,
        revision=revision,
        num_messages=num_messages or 0,
        num_tokens=num_tokens or 0,
        fingerprint=fingerprint,
        tools=tuple(private["tools"]),
        template_options=private["template_options"],
        metadata=private["metadata"],
        prefix_id=private["prefix_id"],
        running_turn_id=running,
        created_at=created_at,
        updated_at=updated_at,
        began_at=private.get("began_at"),
        has_pending="pending" in private,
    )


def conversation_key(conversation_id: str, tenant: str) -> bytes:
    """Return the `key` column of a conversation."""
    return digest(tenant, conversation_id)


def find_conversation(
    conn: Connection, conversation_id: str, tenant: str
) -> tuple[int, StoredConversation] | None:
    """Return a conversation with its row number, or None if the conversation does not exist."""
    row = conn.execute(
        CONVERSATION + "WHERE c.key = ?", (conversation_key(conversation_id, tenant),)
    ).fetchone()
    return None if row is None else _conversation(row)


def require_conversation(
    conn: Connection, conversation_id: str, tenant: str
) -> tuple[int, StoredConversation]:
    """Return a conversation with its row number. Raises NotFound."""
    found = find_conversation(conn, conversation_id, tenant)
    if found is None:
        raise _no_conversation(conversation_id)
    return found


def require_with_request(
    conn: Connection, conversation_id: str, tenant: str, request_id: str
) -> tuple[int, StoredConversation, int | None, int | None]:
    """Like `require_conversation`, plus the turn that this request began and the owner's session, or None."""
    row = conn.execute(
        WITH_REQUEST + "WHERE c.key = ?",
        (digest(request_id), conversation_key(conversation_id, tenant)),
    ).fetchone()
    if row is None:
        raise _no_conversation(conversation_id)
    return *_conversation(row[2:]), row[0], row[1]


def _no_conversation(conversation_id: str) -> NotFound:
    return NotFound(f"there is no conversation {conversation_id!r}")


def refuse_running(conversation: StoredConversation) -> None:
    """Raise TurnRunning if a turn of the conversation is running."""
    if conversation.running_turn_id is not None:
        raise TurnRunning(conversation.conversation_id, str(conversation.running_turn_id))


def refuse_stale(
    conversation: StoredConversation, expected: int | None, created_at: float | None = None
) -> None:
    """Raise StaleRevision unless the conversation has this revision and this time of creation.

    A different time of creation means that the conversation was deleted and created again with the same id.
    """
    if expected is not None and (
        expected != conversation.revision or created_at not in (None, conversation.created_at)
    ):
        raise StaleRevision(expected, conversation.revision)


def refuse_existing(conn: Connection, conversation_id: str, tenant: str) -> None:
    """Raise AlreadyExists if there is a conversation with this id."""
    if find_conversation(conn, conversation_id, tenant) is not None:
        raise AlreadyExists(f"conversation {conversation_id!r} already exists")


def tenants_of(conn: Connection, conversation_id: str, tenants: Iterable[str]) -> list[str]:
    """Return the tenants, among `tenants`, that have a conversation with this id."""
    query = "SELECT 1 FROM conversations WHERE key = ?"
    keys = ((tenant, conversation_key(conversation_id, tenant)) for tenant in tenants)
    return [tenant for tenant, key in keys if conn.execute(query, (key,)).fetchone()]


def conversation_numbered(conn: Connection, number: int) -> StoredConversation:
    """Return the conversation with this row number. Raises NotFound."""
    row = conn.execute(CONVERSATION + "WHERE c.conversation = ?", (number,)).fetchone()
    if row is None:
        raise NotFound(f"there is no conversation number {number}")
    return _conversation(row)[1]


def first_with_prefix(
    conn: Connection, tenant: str, prefix_id: str
) -> tuple[int, StoredConversation] | None:
    """Return the oldest conversation with this prefix_id, and its row number."""
    row = conn.execute(
        CONVERSATION + "WHERE c.prefix_key = ? ORDER BY c.conversation LIMIT 1",
        (digest(tenant, prefix_id),),
    ).fetchone()
    return None if row is None else _conversation(row)


def num_conversations(conn: Connection) -> int:
    """Return the number of conversations of all tenants. Declared prefixes do not count."""
    count: int = conn.execute(
        "SELECT (SELECT count(*) FROM conversations) - (SELECT count(*) FROM prefixes)"
    ).fetchone()[0]
    return count


def conversations_before(
    conn: Connection, tenant: str, before: int, limit: int
) -> tuple[list[tuple[int, StoredConversation]], bool]:
    """Return conversations with row numbers below `before`, newest first, and whether there are more.

    Declared prefixes are left out. Returns at most `limit` conversations, and fewer if they would exceed
    PAGE_BYTES_MAX.
    """
    lengths = conn.execute(
        "SELECT c.conversation, coalesce(length(b.private), 0) FROM conversations c"
        f" LEFT JOIN bodies b USING (body) WHERE {LISTED_CONDITION} ORDER BY c.conversation DESC LIMIT ?",
        (tenant, before, limit + 1),
    ).fetchall()
    last = last_within(lengths[:limit], PAGE_BYTES_MAX)
    if last is None:
        return [], False
    rows = conn.execute(
        f"{CONVERSATION}WHERE {LISTED_CONDITION} AND c.conversation >= ? ORDER BY c.conversation DESC",
        (tenant, before, last),
    ).fetchall()
    return [_conversation(row) for row in rows], last != lengths[-1][0]


def idle_conversations(
    conn: Connection, before: float, after: int
) -> tuple[list[StoredConversation], int | None]:
    """Return some conversations that last changed before the time `before`, of all tenants.

    Reads up to SCANNED_ROWS rows with numbers above `after`. Declared prefixes are left out. Also returns the
    `after` of the next call, or None if there are no more rows.
    """
    rows = conn.execute(
        "SELECT conversation, updated_at FROM conversations WHERE conversation > ?"
        " ORDER BY conversation LIMIT ?",
        (after, SCANNED_ROWS),
    ).fetchall()
    old = [number for number, updated_at in rows if updated_at < before]
    found = []
    for number in old[:IDLE_AT_ONCE]:
        row = conn.execute(
            CONVERSATION + "WHERE c.conversation = ? AND NOT EXISTS (SELECT 1 FROM prefixes p"
            " WHERE p.tenant = c.tenant AND p.conversation = c.conversation)",
            (number,),
        ).fetchone()
        if row is not None:
            found.append(_conversation(row)[1])
    if len(old) > IDLE_AT_ONCE:
        return found, old[IDLE_AT_ONCE - 1]
    return found, rows[-1][0] if len(rows) == SCANNED_ROWS else None


def insert_conversation(
    conn: Connection, conversation: StoredConversation, pending: Mapping[str, Any] | None = None
) -> int:
    """Insert a row for a conversation without history. Return the row number.

    `pending` is the JSON of messages that wait for the conversation's first turn.
    """
    private: dict[str, Any] = {
        "conversation_id": conversation.conversation_id,
        "tools": list(conversation.tools),
        "template_options": conversation.template_options,
        "metadata": conversation.metadata,
        "prefix_id": conversation.prefix_id,
    }
    is_declared = conversation.began_at is not None
    if is_declared:
        private["began_at"] = conversation.began_at
    if pending is not None:
        private["pending"] = dict(pending)
    body = insert_body(conn, conversation.tenant, private)
    # A conversation under a declared prefix gets no prefix_key. Otherwise a conversation under an undeclared
    # prefix with the same id would copy the beginning of this conversation.
    prefix_id = "" if is_declared else conversation.prefix_id
    return insert_numbered(
        conn,
        "conversations",
        INSERTED_COLUMNS,
        (
            conversation_key(conversation.conversation_id, conversation.tenant),
            conversation.tenant,
            digest(conversation.tenant, prefix_id) if prefix_id else None,
            conversation.revision,
            conversation.fingerprint,
            conversation.created_at,
            conversation.updated_at,
            body,
        ),
    )


def set_revision(conn: Connection, conversation: int, revision: int, now: float) -> None:
    conn.execute(
        "UPDATE conversations SET revision = ?, updated_at = ? WHERE conversation = ?",
        (revision, now, conversation),
    )


def set_updated(conn: Connection, conversation: int, now: float) -> None:
    """Record the time of a change that does not change the revision."""
    conn.execute(
        "UPDATE conversations SET updated_at = ? WHERE conversation = ?", (now, conversation)
    )


def refuse_changed(current: StoredConversation, before: StoredConversation) -> None:
    """Raise StaleRevision if a conversation has changed, or was deleted and created again."""
    if (current.revision, current.updated_at, current.created_at) != (
        *(before.revision, before.updated_at, before.created_at),
    ):
        raise StaleRevision(before.revision, current.revision)


def set_fingerprint(conn: Connection, conversation: int, fingerprint: str) -> None:
    conn.execute(
        "UPDATE conversations SET fingerprint = ? WHERE conversation = ?",
        (fingerprint, conversation),
    )


def delete_conversation(conn: Connection, conversation: int, tenant: str) -> None:
    """Delete a conversation with its turns, responses and messages. Messages that a fork holds stay."""
    made_here = "(SELECT turn_id FROM turns WHERE conversation = :conversation)"
    held_here = (
        "(SELECT message FROM history WHERE conversation = :conversation UNION"
        f" SELECT message FROM messages WHERE turn_id IN {made_here})"
    )
    only_here = (
        f"message IN {held_here} AND (turn_id IS NULL OR turn_id IN {made_here}) AND NOT EXISTS"
        " (SELECT 1 FROM history h"
        " WHERE h.message = messages.message AND h.conversation <> :conversation)"
    )
    parameters = {"conversation": conversation}
    bodies = conn.execute(
        f"SELECT body FROM messages WHERE {only_here}"
        " UNION ALL SELECT body FROM turns WHERE conversation = :conversation"
        " UNION ALL SELECT logprobs FROM turns WHERE conversation = :conversation"
        " AND logprobs IS NOT NULL"
        " UNION ALL SELECT body FROM responses WHERE conversation = :conversation"
        " UNION ALL SELECT body FROM conversations WHERE conversation = :conversation",
        parameters,
    ).fetchall()
    wipe_bodies(conn, tenant, (body for (body,) in bodies))
    conn.execute(f"DELETE FROM messages WHERE {only_here}", parameters)
    conn.execute(f"UPDATE messages SET turn_id = NULL WHERE turn_id IN {made_here}", parameters)
    conn.execute("DELETE FROM history WHERE conversation = :conversation", parameters)
    conn.execute("DELETE FROM turns WHERE conversation = :conversation", parameters)
    conn.execute("DELETE FROM responses WHERE conversation = :conversation", parameters)
    conn.execute(
        "DELETE FROM prefixes WHERE tenant = ? AND conversation = ?", (tenant, conversation)
    )
    conn.execute("DELETE FROM conversations WHERE conversation = :conversation", parameters)
