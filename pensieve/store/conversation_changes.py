"""Change the parts of a conversation that are outside its history.

These parts are in the conversation's body, so each change writes a new body and wipes the old body.

    metadata           may change at any time
    beginning          system prompt, tools and template options; may change only while there is no message
    pending messages   messages that the next turn inserts before its own messages; they join the history
                       when that turn ends

**Pending messages are used exactly once.** The transaction that begins a turn with the pending messages
records the current revision as `taken_at`. The messages stay pending while the conversation is at that
revision. So neither a failed turn nor a crash loses them. The commit that ends the turn increases the
revision, and the messages are no longer pending. Other changes of the revision are a rewind and a turn
without the pending messages. Such a change resets `taken_at`, so unused messages stay pending. If a turn has
already used the messages, the change removes them from the body.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from pensieve.errors import ErasurePending, InvalidArgument, StaleRevision
from pensieve.store import conversation_rows, message_rows
from pensieve.store.backend import ErasureSteps
from pensieve.store.bodies import insert_body, read_private, wipe_bodies
from pensieve.store.conversation_rows import refuse_running, refuse_stale, require_conversation
from pensieve.store.owners import Owners
from pensieve.store.records import NewMessage, StoredConversation, check_text
from pensieve.store.transactions import StoreTransactions, repeated

if TYPE_CHECKING:
    from sqlite3 import Connection

PENDING_CHANGED = "the messages pending at revision {} have changed since they were read"


@dataclass(frozen=True, slots=True)
class Pending:
    """The pending messages, and the revision at which a turn took them. They have no tokens yet."""

    messages: tuple[NewMessage, ...] = ()
    taken_at: int | None = None


class PendingChange(NamedTuple):
    """The pending messages after a change.

    `is_erasure_due`: text that the change removed is still in the files.
    """

    after: Pending
    is_erasure_due: bool = False


class LastDeleted(NamedTuple):
    """A conversation after its last message was deleted."""

    conversation: StoredConversation
    is_rewound: bool  # the message was a reply
    is_erasure_due: bool = False  # as in PendingChange


class ConversationChanges:
    """The methods run their own transactions. Call them in a store thread, outside of transactions."""

    def __init__(
        self,
        transactions: StoreTransactions,
        owners: Owners,
        erasure: ErasureSteps,
        now: Callable[[], float],
    ) -> None:
        self._transactions = transactions
        self._owners = owners
        self._erasure = erasure
        self._now = now

    @repeated
    def set_metadata(
        self, conversation_id: str, metadata: Mapping[str, Any], *, tenant: str = ""
    ) -> StoredConversation:
        with self._transactions.writing() as conn:
            number, _ = require_conversation(conn, conversation_id, tenant)
            _change_private(conn, number, tenant, {"metadata": dict(metadata)})
            conversation_rows.set_updated(conn, number, self._now())
            return require_conversation(conn, conversation_id, tenant)[1]

    @repeated
    def set_beginning(
        self,
        conversation_id: str,
        system_prompt: str,
        tools: Sequence[Any],
        template_options: Mapping[str, Any],
        *,
        tenant: str = "",
    ) -> StoredConversation:
        """Set the beginning of a conversation. Raises StaleRevision if the conversation has messages."""
        head = [NewMessage("system", system_prompt)] if system_prompt else []
        check_text(head)
        with self._transactions.writing() as conn:
            number, found = require_conversation(conn, conversation_id, tenant)
            found = self._owners.hold(conn, number, found)
            refuse_running(found)
            if found.num_messages or found.revision:
                raise StaleRevision(0, found.revision)
            settings = {"tools": list(tools), "template_options": dict(template_options)}
            _change_private(conn, number, tenant, settings)
            conversation_rows.set_updated(conn, number, self._now())
            links = message_rows.insert_messages(conn, tenant, head, None, 0)
            message_rows.append_history(conn, number, links)
            return require_conversation(conn, conversation_id, tenant)[1]

    @repeated
    def change_pending(
        self, conversation_id: str, change: Callable[[Pending], Pending], *, tenant: str = ""
    ) -> PendingChange:
        """Replace the pending messages by the result of `change`. No turn may be running.

        Removed messages are erased from the disk.
        """
        with self._transactions.writing() as conn:
            number, conversation = require_conversation(conn, conversation_id, tenant)
            refuse_running(self._transactions.as_read(conn, conversation))
            self._owners.block_turns(conn, number, conversation)
            stored = _stored_pending(conn, number, conversation)
            after = change(stored.pending)
            is_deletion = any(each not in after.messages for each in stored.pending.messages)
            _put_pending(conn, number, tenant, stored, after)
            conversation_rows.set_updated(conn, number, self._now())
            if is_deletion:
                self._erasure.prepare()
        return PendingChange(after, is_deletion and not self._try_erasure())

    @repeated
    def delete_last(
        self,
        conversation_id: str,
        revision: int,
        created_at: float,
        pending: Sequence[NewMessage],
        *,
        tenant: str = "",
    ) -> LastDeleted:
        """Delete the last message of a conversation, if the conversation is as the caller read it.

        The caller passes the revision, the time of creation and all pending messages that it read. A pending
        message is erased from the disk. A reply is removed by a rewind, and the messages that the reply
        answers become pending in the same transaction.

        Raises:
            StaleRevision: the conversation has changed since then; nothing was deleted.
            InvalidArgument: there is no message, or the last message belongs to the beginning.
        """
        with self._transactions.writing(is_serializable=True) as conn:
            number, found = require_conversation(conn, conversation_id, tenant)
            found = self._owners.hold(conn, number, found)
            refuse_running(found)
            refuse_stale(found, revision, created_at)
            stored = _stored_pending(conn, number, found)
            _refuse_changed_pending(stored, found, pending)
            is_rewound = not pending
            if is_rewound:
                still_pending = Pending(self._take_back(conn, number, found))
            else:
                still_pending = replace(stored.pending, messages=stored.pending.messages[:-1])
                self._erasure.prepare()
            _put_pending(conn, number, tenant, stored, still_pending)
            after = require_conversation(conn, conversation_id, tenant)[1]
        return LastDeleted(after, is_rewound, not is_rewound and not self._try_erasure())

    def _take_back(
        self, conn: Connection, number: int, conversation: StoredConversation
    ) -> tuple[NewMessage, ...]:
        """Rewind the last turn and return the messages that it answered."""
        links = message_rows.links(conn, number, conversation.revision)
        kept = [each for each in links if each.revision < links[-1].revision]
        cut = message_rows.read_messages(
            conn, number, conversation, len(kept), len(links), include_token_ids=False
        )
        if not cut or cut[-1].finish_reason is None:
            raise InvalidArgument("conversation_id", "does not end with a reply")
        message_rows.cut_history(
            conn, number, conversation.tenant, kept[-1].revision if kept else 0
        )
        conversation_rows.set_revision(conn, number, conversation.revision + 1, self._now())
        return tuple(
            NewMessage(each.role, each.content, (), each.tool_call_id, each.extra)
            for each in cut[:-1]
        )

    def _try_erasure(self) -> bool:
        """Erase deleted content from the files. Return False if some deleted content is left."""
        try:
            self._erasure.finish()
        except ErasurePending:
            return False
        return True


def take_pending(
    conn: Connection,
    number: int,
    conversation: StoredConversation,
    messages: Sequence[NewMessage] | None = None,
) -> None:
    """Record that a turn takes the pending messages. Remove messages that an ended turn has taken.

    `messages` are the pending messages that the turn includes. If other messages are pending, raise
    StaleRevision and change nothing. None: the turn or rewind takes no messages, and `taken_at` is reset.
    """
    stored = _stored_pending(conn, number, conversation)
    if messages is not None:
        _refuse_changed_pending(stored, conversation, messages)
    taken_at = conversation.revision if messages else None
    _put_pending(
        conn, number, conversation.tenant, stored, replace(stored.pending, taken_at=taken_at)
    )


class _StoredPending(NamedTuple):
    """A conversation's body and its pending messages."""

    body: int
    private: dict[str, Any]
    pending: Pending


def _stored_pending(
    conn: Connection, number: int, conversation: StoredConversation
) -> _StoredPending:
    body, private = _private(conn, number)
    stored = private.get("pending")
    if stored is None or _has_taker_ended(stored["taken_at"], conversation.revision):
        return _StoredPending(body, private, Pending())
    messages = tuple(NewMessage(**each) for each in stored["messages"])
    return _StoredPending(body, private, Pending(messages, stored["taken_at"]))


def _refuse_changed_pending(
    stored: _StoredPending, conversation: StoredConversation, messages: Sequence[NewMessage]
) -> None:
    """Raise StaleRevision if the pending messages are not equal to `messages`."""
    if stored.pending.messages != tuple(messages):
        revision = conversation.revision
        raise StaleRevision(revision, revision, PENDING_CHANGED.format(revision))


def _has_taker_ended(taken_at: int | None, revision: int) -> bool:
    """Return whether a turn has taken the messages and has ended."""
    return taken_at is not None and revision > taken_at


def _put_pending(
    conn: Connection, number: int, tenant: str, stored: _StoredPending, after: Pending
) -> None:
    """Replace the pending messages by `after`. Writes nothing if they are equal."""
    check_text(after.messages)
    pending = pending_json(after.messages, after.taken_at)
    if pending != stored.private.get("pending"):
        _put_private(conn, number, tenant, stored.body, {**stored.private, "pending": pending})


def with_pending(
    conn: Connection, conversation_id: str, tenant: str
) -> tuple[StoredConversation, Pending]:
    number, found = require_conversation(conn, conversation_id, tenant)
    return found, _stored_pending(conn, number, found).pending


def pending_json(
    messages: Sequence[NewMessage], taken_at: int | None = None
) -> dict[str, Any] | None:
    """Return the `pending` member of a conversation's body, or None if there are no messages."""
    if not messages:
        return None
    written = [{"role": each.role, **each.private()} for each in messages]
    return {"messages": written, "taken_at": taken_at}


def _private(conn: Connection, number: int) -> tuple[int, dict[str, Any]]:
    row = conn.execute(
        "SELECT c.body, b.crc, b.private, b.tokens FROM conversations c"
        " LEFT JOIN bodies b ON b.body = c.body WHERE c.conversation = ?",
        (number,),
    ).fetchone()
    found: dict[str, Any] = read_private(f"conversation number {number}", *row[1:])
    return row[0], found


def _change_private(conn: Connection, number: int, tenant: str, changes: Mapping[str, Any]) -> None:
    """Replace members of the body's JSON."""
    old, private = _private(conn, number)
    _put_private(conn, number, tenant, old, {**private, **changes})


def _put_private(
    conn: Connection, number: int, tenant: str, old: int, private: Mapping[str, Any]
) -> None:
    """Write a new body and wipe the old body. Members that are None are left out."""
    body = insert_body(
        conn, tenant, {name: each for name, each in private.items() if each is not None}
    )
    conn.execute("UPDATE conversations SET body = ? WHERE conversation = ?", (body, number))
    wipe_bodies(conn, tenant, (old,))
