"""What may change of a conversation beside its history: metadata, what it begins with, and pending messages.

All of it is in the conversation's body, so a change writes that anew and wipes the old one.

    metadata           at any time
    what it begins     system prompt, tools, template options: as long as it holds no message
    pending messages   come before those of its next turn; no part of the history until that has ended

**Pending messages are taken once.**  The transaction that begins a turn which brings them notes its revision
(`taken_at`).  They are pending as long as the conversation is at that revision, so neither a turn that fails
nor the end of the process loses them, and its end and theirs are one commit.  What changes the revision
otherwise (a turn that does not bring them, a rewind) gives them back first, in its own transaction; and the
next one of these, after a turn that took them has ended, removes them from the body.
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

CHANGED = "the messages that were pending at revision {} have changed meanwhile"


@dataclass(frozen=True, slots=True)
class Pending:
    """Messages, without tokens, that the next turn is to bring; and the revision at which one did."""

    messages: tuple[NewMessage, ...] = ()
    taken_at: int | None = None


class PendingChange(NamedTuple):
    """What is pending after a change; `is_erasure_due`: what went is not erased from the files yet."""

    after: Pending
    is_erasure_due: bool = False


class LastDeleted(NamedTuple):
    """A conversation without the last message that it had."""

    conversation: StoredConversation
    is_rewound: bool  # the message was a reply
    is_erasure_due: bool = False  # as of a PendingChange


class ConversationChanges:
    """Used outside of transactions, in the thread of the store."""

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
            return require_conversation(conn, conversation_id, tenant)[1]

    @repeated
    def begin_with(
        self,
        conversation_id: str,
        system_prompt: str,
        tools: Sequence[Any],
        template_options: Mapping[str, Any],
        *,
        tenant: str = "",
    ) -> StoredConversation:
        """Give a conversation without messages what it begins with; StaleRevision if it has some."""
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
            links = message_rows.insert_messages(conn, tenant, head, None, 0)
            message_rows.append_history(conn, number, links)
            return require_conversation(conn, conversation_id, tenant)[1]

    @repeated
    def change_pending(
        self, conversation_id: str, change: Callable[[Pending], Pending], *, tenant: str = ""
    ) -> PendingChange:
        """What `change` makes of the messages that are pending; no turn may be running.

        A message that goes is deleted: nothing of it stays on the disk.
        """
        with self._transactions.writing() as conn:
            number, conversation = require_conversation(conn, conversation_id, tenant)
            refuse_running(self._transactions.as_read(conn, conversation))
            self._owners.keep(conn, number, conversation)
            held = _held(conn, number, conversation)
            after = change(held.pending)
            is_deletion = any(each not in after.messages for each in held.pending.messages)
            _put_pending(conn, number, tenant, held, after)
            if is_deletion:
                self._erasure.prepare()
        return PendingChange(after, is_deletion and self._is_erasure_due())

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
        """Delete the last message of a conversation that is still as the caller has read it.

        The caller passes what it read: the revision, the time of creation and all pending messages.
        If any of these has changed, nothing is deleted.  A pending message is erased from the disk.  A reply
        is taken back by a rewind, and the messages that it answers become pending in the same transaction.

        Raises:
            StaleRevision: the conversation has changed since the caller read it.
            InvalidArgument: the last message is one that the conversation began with, or there is none.
        """
        with self._transactions.writing(is_serializable=True) as conn:
            number, found = require_conversation(conn, conversation_id, tenant)
            found = self._owners.hold(conn, number, found)
            refuse_running(found)
            refuse_stale(found, revision, created_at)
            held = _held(conn, number, found)
            _refuse_changed(held, found, pending)
            is_rewound = not pending
            if is_rewound:
                left = Pending(self._take_back(conn, number, found))
            else:
                left = replace(held.pending, messages=held.pending.messages[:-1])
                self._erasure.prepare()
            _put_pending(conn, number, tenant, held, left)
            after = require_conversation(conn, conversation_id, tenant)[1]
        return LastDeleted(after, is_rewound, not is_rewound and self._is_erasure_due())

    def _take_back(
        self, conn: Connection, number: int, conversation: StoredConversation
    ) -> tuple[NewMessage, ...]:
        """Rewind the last turn; returns the messages that it answered."""
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

    def _is_erasure_due(self) -> bool:
        """Erase what was deleted from the files; whether that is still to be done."""
        try:
            self._erasure.finish()
        except ErasurePending:
            return True
        return False


def take_pending(
    conn: Connection,
    number: int,
    conversation: StoredConversation,
    messages: Sequence[NewMessage] | None = None,
) -> None:
    """Before a turn that begins here and brings them, or before a revision that comes without them.

    StaleRevision, and nothing is taken, if these are not what is pending; None accepts any, and takes none.
    What a turn that has ended took is removed: it stays no longer than until here.
    """
    held = _held(conn, number, conversation)
    if messages is not None:
        _refuse_changed(held, conversation, messages)
    taken_at = conversation.revision if messages else None
    _put_pending(conn, number, conversation.tenant, held, replace(held.pending, taken_at=taken_at))


class _Held(NamedTuple):
    """A conversation's body, and what is pending by it."""

    body: int
    private: dict[str, Any]
    pending: Pending


def _held(conn: Connection, number: int, conversation: StoredConversation) -> _Held:
    body, private = _private(conn, number)
    stored = private.get("pending")
    if stored is None or _is_over(stored["taken_at"], conversation.revision):
        return _Held(body, private, Pending())
    messages = tuple(NewMessage(**each) for each in stored["messages"])
    return _Held(body, private, Pending(messages, stored["taken_at"]))


def _refuse_changed(
    held: _Held, conversation: StoredConversation, messages: Sequence[NewMessage]
) -> None:
    """Raises StaleRevision unless these are the messages that are pending."""
    if held.pending.messages != tuple(messages):
        revision = conversation.revision
        raise StaleRevision(revision, revision, CHANGED.format(revision))


def _is_over(taken_at: int | None, revision: int) -> bool:
    """Whether the turn that took them has ended."""
    return taken_at is not None and revision > taken_at


def _put_pending(conn: Connection, number: int, tenant: str, held: _Held, after: Pending) -> None:
    check_text(after.messages)
    pending = pending_json(after.messages, after.taken_at)
    if pending != held.private.get("pending"):
        _put_private(conn, number, tenant, held.body, {**held.private, "pending": pending})


def with_pending(
    conn: Connection, conversation_id: str, tenant: str
) -> tuple[StoredConversation, Pending]:
    number, found = require_conversation(conn, conversation_id, tenant)
    return found, _held(conn, number, found).pending


def pending_json(
    messages: Sequence[NewMessage], taken_at: int | None = None
) -> dict[str, Any] | None:
    """The `pending` member of a conversation's body; None where there is none."""
    if not messages:
        return None
    written = [{"role": each.role, **each.private()} for each in messages]
    return {"messages": written, "taken_at": taken_at}


def _private(conn: Connection, number: int) -> tuple[int, dict[str, Any]]:
    """The body's row, and its JSON."""
    row = conn.execute(
        "SELECT c.body, b.crc, b.private, b.tokens FROM conversations c"
        " LEFT JOIN bodies b ON b.body = c.body WHERE c.conversation = ?",
        (number,),
    ).fetchone()
    found: dict[str, Any] = read_private(f"conversation number {number}", *row[1:])
    return row[0], found


def _change_private(conn: Connection, number: int, tenant: str, changes: Mapping[str, Any]) -> None:
    """Members of its JSON."""
    old, private = _private(conn, number)
    _put_private(conn, number, tenant, old, {**private, **changes})


def _put_private(
    conn: Connection, number: int, tenant: str, old: int, private: Mapping[str, Any]
) -> None:
    """In the place of the old body; a member that is None goes."""
    body = insert_body(
        conn, tenant, {name: each for name, each in private.items() if each is not None}
    )
    conn.execute("UPDATE conversations SET body = ? WHERE conversation = ?", (body, number))
    wipe_bodies(conn, tenant, (old,))
