"""Declared prefixes: common beginnings of conversations, each stored as a conversation.

A declared prefix is a row of `prefixes` and the conversation that the row refers to. Clients cannot access
that conversation by id, because the id contains a character that is not allowed in client ids. The
conversation's messages are the system prompt and the few-shot turns, with the tokens that the template
renders for them. This conversation never runs a turn. So a prefix is stored, verified, backed up and erased
like any conversation. A conversation under a prefix begins as a fork of the prefix's conversation:

* The fork holds the messages of the prefix at revision 0. No rewind removes these messages, and they survive
  the deletion of the prefix.
* After a change of the tokenizer, the fork and the prefix are tokenized again separately (`replace_log`).

Lists and counts of conversations leave out prefixes. The service limits the number of prefixes per tenant.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from pensieve.errors import AlreadyExists, NotFound, StoreCorrupt
from pensieve.store import conversation_rows, message_rows
from pensieve.store.conversation_changes import pending_json
from pensieve.store.owners import Owners
from pensieve.store.records import (
    PAGE_BYTES_MAX,
    PREFIX_MARK,
    NewConversation,
    NewPrefix,
    StoredConversation,
    StoredPrefix,
    check_id,
    check_text,
)
from pensieve.store.transactions import StoreTransactions, repeated

if TYPE_CHECKING:
    from sqlite3 import Connection

log = logging.getLogger("pensieve")


def stored_id(prefix_id: str) -> str:
    """Return the id of the conversation that stores a prefix."""
    return PREFIX_MARK + prefix_id


class PrefixStore:
    """The methods run their own transactions. Call them in a store thread, outside of transactions."""

    def __init__(
        self, transactions: StoreTransactions, owners: Owners, now: Callable[[], float]
    ) -> None:
        self._transactions = transactions
        self._owners = owners
        self._now = now

    @repeated
    def declare(self, new: NewPrefix) -> StoredPrefix:
        """Store a prefix. Raises AlreadyExists if the tenant has a prefix with this id."""
        check_id("prefix_id", new.prefix_id)
        check_text(new.messages)
        with self._transactions.writing() as conn:
            if find(conn, new.prefix_id, new.tenant) is not None:
                raise AlreadyExists(f"prefix {new.prefix_id!r} already exists")
            declared = NewConversation(
                stored_id(new.prefix_id),
                new.fingerprint,
                tools=new.tools,
                template_options=new.template_options,
                tenant=new.tenant,
                began_at=new.began_at,
            )
            number = conversation_rows.insert_conversation(
                conn, declared.without_messages(self._now())
            )
            head = message_rows.insert_messages(conn, new.tenant, new.messages, None, 0)
            message_rows.append_history(conn, number, head)
            conn.execute(
                "INSERT INTO prefixes (tenant, conversation, keep_warm) VALUES (?, ?, ?)",
                (new.tenant, number, int(new.keep_warm)),
            )
            found = require(conn, new.prefix_id, new.tenant)
            self._owners.drop_stale_prefix(found.conversation)
            return found

    @repeated
    def begin(self, new: NewConversation) -> StoredConversation:
        """Create a conversation that begins with the messages, tools and options of its declared prefix."""
        check_id("conversation_id", new.conversation_id)
        check_text(new.pending)
        now = self._now()
        with self._transactions.writing(is_serializable=True) as conn:
            source_id = stored_id(new.prefix_id)
            number, source = conversation_rows.require_conversation(conn, source_id, new.tenant)
            conversation_rows.refuse_existing(conn, new.conversation_id, new.tenant)
            created = conversation_rows.insert_conversation(
                conn,
                replace(
                    source,
                    conversation_id=new.conversation_id,
                    metadata=dict(new.metadata),
                    prefix_id=new.prefix_id,
                    created_at=now,
                    updated_at=now,
                ),
                pending_json(new.pending),
            )
            message_rows.append_history(conn, created, message_rows.links(conn, number, 0))
            begun = conversation_rows.conversation_numbered(conn, created)
            self._owners.own_new(conn, created, begun)
            return begun

    def find(self, prefix_id: str, *, tenant: str = "") -> StoredPrefix | None:
        """Return a prefix; None if the tenant has not declared it."""
        with self._transactions.reading() as conn:
            return find(conn, prefix_id, tenant)

    def num_of(self, tenant: str) -> int:
        with self._transactions.reading() as conn:
            count = conn.execute("SELECT count(*) FROM prefixes WHERE tenant = ?", (tenant,))
            return int(count.fetchone()[0])

    def to_keep_warm(self) -> list[tuple[str, str]]:
        """Return (tenant, id) of the prefixes whose KV should stay cached, in the order of declaration."""
        with self._transactions.reading() as conn:
            rows = conn.execute(
                "SELECT conversation FROM prefixes WHERE keep_warm <> 0 ORDER BY conversation"
            ).fetchall()
            found = []
            for (number,) in rows:
                try:
                    found.append(conversation_rows.conversation_numbered(conn, number))
                except StoreCorrupt as error:  # one damaged prefix must not affect the others
                    log.error("a prefix cannot be kept warm: %s", error)
        return [(each.tenant, each.conversation_id.removeprefix(PREFIX_MARK)) for each in found]

    def has_turns(self, conversation: StoredConversation) -> bool:
        """Return whether the conversation has messages beyond those of its prefix."""
        with self._transactions.reading(is_snapshot=True) as conn:
            row = conn.execute(
                "SELECT h.revision FROM history h JOIN conversations c USING (conversation)"
                " WHERE c.key = ? ORDER BY h.position DESC LIMIT 1",
                (
                    conversation_rows.conversation_key(
                        conversation.conversation_id, conversation.tenant
                    ),
                ),
            ).fetchone()
        return row is not None and row[0] > 0


def find(conn: Connection, prefix_id: str, tenant: str) -> StoredPrefix | None:
    key = conversation_rows.conversation_key(stored_id(prefix_id), tenant)
    row = conn.execute(PREFIX + "WHERE c.key = ?", (key,)).fetchone()
    return None if row is None else _prefix(conn, row)


def require(conn: Connection, prefix_id: str, tenant: str) -> StoredPrefix:
    """Return a prefix. Raises NotFound."""
    if (found := find(conn, prefix_id, tenant)) is None:
        raise NotFound(f"there is no prefix {prefix_id!r}")
    return found


def page_of_tenant(
    conn: Connection, tenant: str, after: int, limit: int
) -> tuple[list[tuple[int, StoredPrefix]], bool]:
    """Return prefixes with row numbers above `after`, oldest first, and whether there are more.

    Returns at most `limit` prefixes, and fewer if they would exceed PAGE_BYTES_MAX.
    """
    found = conn.execute(
        PREFIX + "WHERE p.tenant = ? AND p.conversation > ? ORDER BY p.conversation LIMIT ?",
        (tenant, after, limit + 1),
    ).fetchall()
    page: list[tuple[int, StoredPrefix]] = []
    num_bytes = 0
    for row in found:
        num_bytes += row[3]
        if page and (len(page) == limit or num_bytes > PAGE_BYTES_MAX):
            return page, True
        page.append((row[0], _prefix(conn, row)))
    return page, False


def num_by_tenant(conn: Connection) -> dict[str, int]:
    """Return the number of prefixes of each tenant that has any."""
    return dict(conn.execute("SELECT tenant, count(*) FROM prefixes GROUP BY tenant"))


def all_prefixes(conn: Connection) -> list[StoredPrefix]:
    """Return the prefixes of all tenants, oldest first."""
    rows = conn.execute(PREFIX + "ORDER BY p.conversation").fetchall()
    return [_prefix(conn, row) for row in rows]


# A conversation that holds the prefix's last message holds the whole prefix. So the number of conversations
# under the prefix is the number of histories with this message, without the prefix's own history.
PREFIX = """
    SELECT p.conversation, p.keep_warm,
        (SELECT count(*) - 1 FROM history held WHERE held.message =
            (SELECT h.message FROM history h WHERE h.conversation = p.conversation
                ORDER BY h.position DESC LIMIT 1)),
        (SELECT length(private) FROM bodies b WHERE b.body = c.body)
    FROM prefixes p JOIN conversations c ON c.tenant = p.tenant AND c.conversation = p.conversation
"""


def _prefix(conn: Connection, row: tuple[int, int, int, int]) -> StoredPrefix:
    number, keep_warm, num_conversations, _ = row
    conversation = conversation_rows.conversation_numbered(conn, number)
    return StoredPrefix(
        conversation.conversation_id.removeprefix(PREFIX_MARK),
        conversation,
        bool(keep_warm),
        num_conversations,
    )
