"""SQL of messages and histories, as functions on a connection. See conversation_rows.py.

A history is a list of links to messages. Forks share messages.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pensieve.errors import NotFound, StoreCorrupt
from pensieve.store.backend import insert_numbered
from pensieve.store.bodies import (
    TOKEN_BYTES,
    checked_body,
    insert_body,
    last_within,
    read_private,
    unpack_tokens,
    wipe_bodies,
)
from pensieve.store.chains import copy_states
from pensieve.store.records import (
    PAGE_BYTES_MAX,
    MessagePage,
    NewMessage,
    StoredConversation,
    StoredMessage,
)
from pensieve.store.turn_rows import wipe_logprobs

if TYPE_CHECKING:
    from sqlite3 import Connection


INSERTED_COLUMNS = ("turn_id", "role", "finish_reason", "num_tokens", "body")
LINKS_AT_ONCE = 8  # rows per statement
NO_END = 2**62
LENGTHS = (  # length of a message, without and with its token ids; 0 if it is missing
    "coalesce(length(b.private), 0)",
    "coalesce(length(b.private) + length(b.tokens), 0)",
)


class HistoryRow(NamedTuple):
    """A row of a history: a message, the revision that added it, and its number of tokens."""

    message: int
    revision: int
    num_tokens: int


def insert_message(
    conn: Connection,
    tenant: str,
    message: NewMessage,
    turn_id: int | None,
    finish_reason: str | None = None,
) -> int:
    """Insert a message that no history holds yet. Return its row number."""
    body = insert_body(conn, tenant, message.private(), message.token_ids)
    reason = finish_reason and str(finish_reason)
    values = turn_id, str(message.role), reason, len(message.token_ids), body
    return insert_numbered(conn, "messages", INSERTED_COLUMNS, values)


def insert_messages(
    conn: Connection,
    tenant: str,
    messages: Sequence[NewMessage],
    turn_id: int | None,
    revision: int,
) -> list[HistoryRow]:
    """Insert messages that no history holds yet. Return rows for `append_history`."""
    return [
        HistoryRow(insert_message(conn, tenant, message, turn_id), revision, len(message.token_ids))
        for message in messages
    ]


def append_history(
    conn: Connection, conversation: int, links: Iterable[HistoryRow], end: tuple[int, int] = (0, 0)
) -> None:
    """Append messages to a history. `end` is its current number of messages and of tokens."""
    position, first_token = end
    rows = []
    for link in links:
        rows.append((conversation, position, link.message, link.revision, first_token))
        position += 1
        first_token += link.num_tokens
    for first in range(0, len(rows), LINKS_AT_ONCE):
        batch = rows[first : first + LINKS_AT_ONCE]
        conn.execute(
            "INSERT INTO history (conversation, position, message, revision, first_token)"
            f" VALUES {', '.join(['(?, ?, ?, ?, ?)'] * len(batch))}",
            tuple(value for row in batch for value in row),
        )


def links(conn: Connection, conversation: int, until_revision: int) -> list[HistoryRow]:
    """Return the messages of a history up to a revision, in order."""
    found = conn.execute(
        "SELECT h.message, h.revision, m.num_tokens FROM history h JOIN messages m USING (message)"
        " WHERE h.conversation = ? AND h.revision <= ? ORDER BY h.position",
        (conversation, until_revision),
    )
    return [HistoryRow(*row) for row in found]


def require_links(
    conn: Connection, number: int, conversation: StoredConversation, revision: int
) -> list[HistoryRow]:
    """Return the history up to a revision.

    Raises NotFound unless the revision is 0, the current revision, or the revision of a message.
    """
    found = links(conn, number, revision)
    if revision not in (0, conversation.revision) and (not found or found[-1].revision != revision):
        raise NotFound(
            f"conversation {conversation.conversation_id!r} has no message of revision {revision}"
        )
    return found


def cut_history(conn: Connection, conversation: int, tenant: str, after_revision: int) -> None:
    """Remove the messages of later revisions from a history. Wipe messages that nothing else holds."""
    cut = "SELECT message FROM history WHERE conversation = :conversation AND revision > :revision"
    unheld = (
        f"message IN ({cut}) AND turn_id IS NULL AND NOT EXISTS (SELECT 1 FROM history h"
        " WHERE h.message = messages.message AND h.conversation <> :conversation)"
    )
    parameters = {"conversation": conversation, "revision": after_revision}
    bodies = conn.execute(f"SELECT body FROM messages WHERE {unheld}", parameters).fetchall()
    wipe_bodies(conn, tenant, (body for (body,) in bodies))
    conn.execute(f"DELETE FROM messages WHERE {unheld}", parameters)
    conn.execute(
        "DELETE FROM history WHERE conversation = :conversation AND revision > :revision",
        parameters,
    )


def replace_tokens(
    conn: Connection, conversation: int, tenant: str, token_ids: Sequence[Sequence[int]]
) -> None:
    """Replace every message of a history by a new row with new tokens. Forks keep the old rows.

    If a turn of this conversation made a message, the new row belongs to that turn. The old row is deleted
    unless a fork holds it. The turn's logprobs are deleted, because they belong to the old tokens.
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
        retokenized = NewMessage(role=role, token_ids=ids, **private)
        if turn_id is not None:
            conn.execute("UPDATE messages SET turn_id = NULL WHERE message = ?", (message,))
            wipe_logprobs(conn, tenant, turn_id)
        inserted = insert_message(conn, tenant, retokenized, turn_id, finish_reason)
        copy_states(conn, message, inserted)
        new.append(HistoryRow(inserted, revision, len(ids)))
    cut_history(conn, conversation, tenant, after_revision=-1)
    append_history(conn, conversation, new)


def _bodies_between(
    conn: Connection,
    number: int,
    conversation: StoredConversation,
    start: int,
    stop: int,
    tokens_end: int = NO_END,
) -> Iterator[tuple[Any, bytes, bytes]]:
    """Check and yield (row, private JSON, token bytes) of the messages at positions [start, stop).

    Leaves out messages that begin at or after position `tokens_end` of the log.
    """
    found = conn.execute(
        "SELECT h.position, h.revision, h.first_token, m.role, m.finish_reason, m.num_tokens,"
        " b.crc, b.private, b.tokens"
        " FROM history h JOIN messages m USING (message) LEFT JOIN bodies b USING (body)"
        " WHERE h.conversation = ? AND h.position >= ? AND h.position < ? AND h.first_token < ?"
        " ORDER BY h.position",
        (number, start, stop, tokens_end),
    )
    for row in found:
        owner = f"conversation {conversation.conversation_id!r}, message {row[0]}"
        private, tokens = checked_body(owner, *row[6:])
        if len(tokens) != TOKEN_BYTES * row[5]:
            raise StoreCorrupt(f"{owner}: has {len(tokens)} bytes for {row[5]} token ids")
        yield row, private, tokens


def read_log(
    conn: Connection, number: int, conversation: StoredConversation, num_tokens: int | None = None
) -> array[int]:
    """Return the token ids of a conversation, or only the first `num_tokens`.

    Raises StoreCorrupt if the messages do not cover the log exactly.
    """
    log = array("I")
    num_messages = 0
    end = NO_END if num_tokens is None else max(num_tokens, 1)
    stop = conversation.num_messages
    for row, _, tokens in _bodies_between(conn, number, conversation, 0, stop, end):
        if row[0] != num_messages or row[2] != len(log):
            break
        log.extend(unpack_tokens(tokens))
        num_messages += 1
        if num_tokens is not None and len(log) >= num_tokens:
            return log[:num_tokens]
    if num_messages != conversation.num_messages:
        raise StoreCorrupt(
            f"conversation {conversation.conversation_id!r}: its messages do not cover the log exactly"
        )
    return log


def read_log_end(
    conn: Connection, number: int, conversation: StoredConversation, num_tokens: int
) -> array[int]:
    """Return the last `num_tokens` token ids of a conversation. Reads only its last messages."""
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
    conversation: StoredConversation,
    start: int,
    stop: int,
    include_token_ids: bool,
) -> list[StoredMessage]:
    """Return the messages at positions [start, stop)."""
    return [
        _message(row, private, tokens, include_token_ids)
        for row, private, tokens in _bodies_between(conn, number, conversation, start, stop)
    ]


def read_page(
    conn: Connection,
    number: int,
    conversation: StoredConversation,
    start: int,
    stop: int,
    include_token_ids: bool,
) -> MessagePage:
    """Like `read_messages`, but stops before PAGE_BYTES_MAX is exceeded."""
    lengths = conn.execute(
        f"SELECT h.position, {LENGTHS[include_token_ids]} FROM history h"
        " JOIN messages m USING (message) LEFT JOIN bodies b USING (body)"
        " WHERE h.conversation = ? AND h.position >= ? AND h.position < ? ORDER BY h.position",
        (number, start, stop),
    ).fetchall()
    last = last_within(lengths, PAGE_BYTES_MAX)
    stop = start if last is None else last + 1
    page = read_messages(conn, number, conversation, start, stop, include_token_ids)
    return MessagePage(tuple(page), start + len(page) < conversation.num_messages)


def _message(row: Any, private: bytes, tokens: bytes, include_token_ids: bool) -> StoredMessage:
    return StoredMessage(
        index=row[0],
        role=row[3],
        revision=row[1],
        first_token_index=row[2],
        num_tokens=row[5],
        finish_reason=row[4],
        token_ids=unpack_tokens(tokens) if include_token_ids else None,
        **json.loads(private),
    )
