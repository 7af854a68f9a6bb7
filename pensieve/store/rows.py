"""SQL of the history, as functions on a connection; each runs inside its caller's transaction.

`ConversationStore` decides; these read and write rows.  Every lookup goes through a primary key or
an index, so nothing here grows with the number of conversations, but for counting them.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pensieve.errors import NotFound, StoreCorrupt
from pensieve.store.bodies import (
    TOKEN_BYTES,
    checked_body,
    insert_body,
    read_private,
    unpack_tokens,
    wipe_bodies,
)
from pensieve.store.records import (
    Conversation,
    Message,
    NewMessage,
)

if TYPE_CHECKING:
    from sqlite3 import Connection


class Link(NamedTuple):
    """One row of a history: a message in its place."""

    message: int
    revision: int
    num_tokens: int


def digest(*words: str) -> bytes:
    """A fixed-size key for client-chosen names, which are private and may be long."""
    whole = "\0".join(words).encode(errors="surrogatepass")
    return hashlib.blake2b(whole, digest_size=16).digest()


# -- conversations --

CONVERSATION = """
    SELECT c.conversation, c.tenant, c.revision, c.fingerprint, c.created_at, c.updated_at,
        (SELECT turn_id FROM turns t WHERE t.conversation = c.conversation AND t.state = 'running'),
        (SELECT h.position + 1 FROM history h WHERE h.conversation = c.conversation
            ORDER BY h.position DESC LIMIT 1),
        (SELECT h.first_token + m.num_tokens FROM history h JOIN messages m USING (message)
            WHERE h.conversation = c.conversation ORDER BY h.position DESC LIMIT 1),
        b.crc, b.private, b.tokens
    FROM conversations c LEFT JOIN bodies b USING (body)
"""


def _conversation(row: Any) -> tuple[int, Conversation]:
    number, tenant, revision, fingerprint, created_at, updated_at, running = row[:7]
    num_messages, num_tokens = row[7:9]
    private = read_private(f"conversation number {number}", *row[9:])
    return number, Conversation(
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
    )


def conversation_key(conversation_id: str, tenant: str) -> bytes:
    return digest(tenant, conversation_id)


def find_conversation(
    conn: Connection, conversation_id: str, tenant: str
) -> tuple[int, Conversation] | None:
    row = conn.execute(
        CONVERSATION + "WHERE c.key = ?", (conversation_key(conversation_id, tenant),)
    ).fetchone()
    return None if row is None else _conversation(row)


def require_conversation(
    conn: Connection, conversation_id: str, tenant: str
) -> tuple[int, Conversation]:
    found = find_conversation(conn, conversation_id, tenant)
    if found is None:
        raise NotFound(f"there is no conversation {conversation_id!r}")
    return found


def conversation_numbered(conn: Connection, number: int) -> Conversation:
    row = conn.execute(CONVERSATION + "WHERE c.conversation = ?", (number,)).fetchone()
    if row is None:
        raise NotFound(f"there is no conversation number {number}")
    return _conversation(row)[1]


def first_with_prefix(
    conn: Connection, tenant: str, prefix_id: str
) -> tuple[int, Conversation] | None:
    row = conn.execute(
        CONVERSATION + "WHERE c.prefix_key = ? ORDER BY c.conversation LIMIT 1",
        (digest(tenant, prefix_id),),
    ).fetchone()
    return None if row is None else _conversation(row)


def num_conversations(conn: Connection) -> int:
    count: int = conn.execute("SELECT count(*) FROM conversations").fetchone()[0]
    return count


def conversations_before(
    conn: Connection, tenant: str, before: int, limit: int
) -> list[tuple[int, Conversation]]:
    found = conn.execute(
        CONVERSATION
        + "WHERE c.tenant = ? AND c.conversation < ? ORDER BY c.conversation DESC LIMIT ?",
        (tenant, before, limit),
    )
    return [_conversation(row) for row in found]


def insert_conversation(conn: Connection, conversation: Conversation) -> int:
    body = insert_body(
        conn,
        {
            "conversation_id": conversation.conversation_id,
            "tools": list(conversation.tools),
            "template_options": conversation.template_options,
            "metadata": conversation.metadata,
            "prefix_id": conversation.prefix_id,
        },
    )
    prefix_id = conversation.prefix_id
    cursor = conn.execute(
        "INSERT INTO conversations (key, tenant, prefix_key, revision, fingerprint, created_at,"
        " updated_at, body) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
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
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def set_revision(conn: Connection, conversation: int, revision: int, now: float) -> None:
    conn.execute(
        "UPDATE conversations SET revision = ?, updated_at = ? WHERE conversation = ?",
        (revision, now, conversation),
    )


def set_fingerprint(conn: Connection, conversation: int, fingerprint: str) -> None:
    conn.execute(
        "UPDATE conversations SET fingerprint = ? WHERE conversation = ?",
        (fingerprint, conversation),
    )


def delete_conversation(conn: Connection, conversation: int) -> None:
    """Everything but what another conversation's history holds, which stays as that one's."""
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
    name = {"conversation": conversation}
    bodies = conn.execute(
        f"SELECT body FROM messages WHERE {only_here}"
        " UNION ALL SELECT body FROM turns WHERE conversation = :conversation"
        " UNION ALL SELECT body FROM conversations WHERE conversation = :conversation",
        name,
    ).fetchall()
    wipe_bodies(conn, (body for (body,) in bodies))
    conn.execute(f"DELETE FROM messages WHERE {only_here}", name)
    conn.execute(f"UPDATE messages SET turn_id = NULL WHERE turn_id IN {made_here}", name)
    conn.execute("DELETE FROM history WHERE conversation = :conversation", name)
    conn.execute("DELETE FROM turns WHERE conversation = :conversation", name)
    conn.execute("DELETE FROM conversations WHERE conversation = :conversation", name)


# -- messages and histories --


def insert_message(
    conn: Connection, message: NewMessage, turn_id: int | None, finish_reason: str | None = None
) -> int:
    body = insert_body(conn, message.private(), message.token_ids)
    cursor = conn.execute(
        "INSERT INTO messages (turn_id, role, finish_reason, num_tokens, body)"
        " VALUES (?, ?, ?, ?, ?)",
        (
            turn_id,
            str(message.role),
            finish_reason and str(finish_reason),
            len(message.token_ids),
            body,
        ),
    )
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def append_history(conn: Connection, conversation: int, links: Iterable[Link]) -> None:
    """Put messages at the end of a history, where the log ends."""
    row = conn.execute(
        "SELECT h.position + 1, h.first_token + m.num_tokens FROM history h"
        " JOIN messages m USING (message)"
        " WHERE h.conversation = ? ORDER BY h.position DESC LIMIT 1",
        (conversation,),
    ).fetchone()
    position, first_token = row or (0, 0)
    for link in links:
        conn.execute(
            "INSERT INTO history (conversation, position, message, revision, first_token)"
            " VALUES (?, ?, ?, ?, ?)",
            (conversation, position, link.message, link.revision, first_token),
        )
        position += 1
        first_token += link.num_tokens


def links(conn: Connection, conversation: int, until_revision: int) -> list[Link]:
    found = conn.execute(
        "SELECT h.message, h.revision, m.num_tokens FROM history h JOIN messages m USING (message)"
        " WHERE h.conversation = ? AND h.revision <= ? ORDER BY h.position",
        (conversation, until_revision),
    )
    return [Link(*row) for row in found]


def cut_history(conn: Connection, conversation: int, after_revision: int) -> None:
    """Forget the messages that later revisions made, and wipe those that nothing holds."""
    cut = "SELECT message FROM history WHERE conversation = :conversation AND revision > :revision"
    unheld = (
        f"message IN ({cut}) AND turn_id IS NULL AND NOT EXISTS (SELECT 1 FROM history h"
        " WHERE h.message = messages.message AND h.conversation <> :conversation)"
    )
    names = {"conversation": conversation, "revision": after_revision}
    bodies = conn.execute(f"SELECT body FROM messages WHERE {unheld}", names).fetchall()
    wipe_bodies(conn, (body for (body,) in bodies))
    conn.execute(f"DELETE FROM messages WHERE {unheld}", names)
    conn.execute(
        "DELETE FROM history WHERE conversation = :conversation AND revision > :revision", names
    )


def replace_tokens(conn: Connection, conversation: int, token_ids: Sequence[Sequence[int]]) -> None:
    """Give every message of a history new tokens, in rows of its own: a fork keeps the old ones.

    A message made by a turn of this conversation stays that turn's; its old row goes if no fork
    holds it.
    """
    old = conn.execute(
        "SELECT h.revision, m.message, m.role, m.finish_reason, t.turn_id,"
        " b.crc, b.private, b.tokens FROM history h JOIN messages m USING (message)"
        " LEFT JOIN turns t ON t.turn_id = m.turn_id AND t.conversation = h.conversation"
        " LEFT JOIN bodies b ON b.body = m.body"
        " WHERE h.conversation = ? ORDER BY h.position",
        (conversation,),
    ).fetchall()
    new = []
    for (revision, message, role, finish_reason, turn_id, *body), ids in zip(
        old, token_ids, strict=True
    ):
        private = read_private(f"message number {message}", *body)
        again = NewMessage(role=role, token_ids=ids, **private)
        if turn_id is not None:
            conn.execute("UPDATE messages SET turn_id = NULL WHERE message = ?", (message,))
        new.append(Link(insert_message(conn, again, turn_id, finish_reason), revision, len(ids)))
    cut_history(conn, conversation, after_revision=-1)
    append_history(conn, conversation, new)


def _bodies_between(
    conn: Connection, number: int, conversation: Conversation, start: int, stop: int
) -> Iterator[tuple[Any, bytes, bytes]]:
    """(row, private, tokens) of the messages at positions [start, stop), each checked."""
    found = conn.execute(
        "SELECT h.position, h.revision, h.first_token, m.role, m.finish_reason, m.num_tokens,"
        " b.crc, b.private, b.tokens"
        " FROM history h JOIN messages m USING (message) LEFT JOIN bodies b USING (body)"
        " WHERE h.conversation = ? AND h.position >= ? AND h.position < ? ORDER BY h.position",
        (number, start, stop),
    )
    for row in found:
        owner = f"conversation {conversation.conversation_id!r}, message {row[0]}"
        private, tokens = checked_body(owner, *row[6:])
        if len(tokens) != TOKEN_BYTES * row[5]:
            raise StoreCorrupt(f"{owner}: has {len(tokens)} bytes for {row[5]} token ids")
        yield row, private, tokens


def read_log(
    conn: Connection, number: int, conversation: Conversation, num_tokens: int | None = None
) -> array[int]:
    """The log, or its first so many tokens."""
    log = array("I")
    wanted = conversation.num_tokens if num_tokens is None else num_tokens
    num_messages = 0
    for row, _, tokens in _bodies_between(conn, number, conversation, 0, conversation.num_messages):
        if row[0] != num_messages or row[2] != len(log):
            break
        log.extend(unpack_tokens(tokens))
        num_messages += 1
        if num_tokens is not None and len(log) >= wanted:
            return log[:wanted]
    if num_messages != conversation.num_messages:
        raise StoreCorrupt(
            f"conversation {conversation.conversation_id!r}: its messages do not tile the log"
        )
    return log


def read_log_end(
    conn: Connection, number: int, conversation: Conversation, num_tokens: int
) -> array[int]:
    """The last so many tokens of the log, or all there are: reads the last messages only."""
    end, stop = array("I"), conversation.num_messages
    while stop and len(end) < num_tokens:
        start = max(stop - 2, 0)
        part = array("I")
        for _, _, tokens in _bodies_between(conn, number, conversation, start, stop):
            part.extend(unpack_tokens(tokens))
        end, stop = part + end, start
    return end[-num_tokens:]


def read_messages(
    conn: Connection,
    number: int,
    conversation: Conversation,
    start: int,
    stop: int,
    include_token_ids: bool,
) -> list[Message]:
    return [
        Message(
            index=row[0],
            role=row[3],
            revision=row[1],
            first_token=row[2],
            num_tokens=row[5],
            finish_reason=row[4],
            token_ids=unpack_tokens(tokens) if include_token_ids else None,
            **json.loads(private),
        )
        for row, private, tokens in _bodies_between(conn, number, conversation, start, stop)
    ]
