"""The head that all conversations with one prefix_id share: their system prompt and tools.

The first conversation with a prefix_id fixes both.  Later ones hold its messages themselves, so that their
KV can be shared too, unless their tokens differ because the model or tokenizer has changed since.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pensieve.errors import PrefixTaken
from pensieve.store import conversation_rows, message_rows
from pensieve.store.message_rows import Link
from pensieve.store.records import Message, NewConversation, NewMessage

if TYPE_CHECKING:
    from sqlite3 import Connection


def shared_head(conn: Connection, new: NewConversation) -> list[Link]:
    """The messages that the new conversation shares; empty if it needs its own.

    Raises PrefixTaken if its system prompt or tools differ from those of the same prefix_id.
    """
    if not new.prefix_id:
        return []
    first = conversation_rows.first_with_prefix(conn, new.tenant, new.prefix_id)
    if first is None:
        return []
    number, holder = first
    head = message_rows.links(conn, number, until_revision=0)
    messages = message_rows.read_messages(conn, number, holder, 0, len(head), True)
    if _texts(messages) != _texts(new.messages) or list(holder.tools) != list(new.tools):
        raise PrefixTaken(f"prefix {new.prefix_id!r} has another system prompt or other tools")
    same_tokens = all(
        list(each.token_ids or ()) == list(other.token_ids)
        for each, other in zip(messages, new.messages, strict=True)
    )
    return head if same_tokens and holder.fingerprint == new.fingerprint else []


def _texts(messages: Iterable[Message | NewMessage]) -> list[tuple[Any, ...]]:
    return [(each.role, each.content, each.tool_call_id, each.extra) for each in messages]
