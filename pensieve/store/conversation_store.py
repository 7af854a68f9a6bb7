"""The history of all conversations: what was said, token for token, and who may go on from where.

    begin_turn ──> running ──finish_turn──> completed | cancelled     user and reply join the log
                      │ ^
                      │ └─begin_turn, same request_id──┐
                      ├──interrupt_turn──> interrupted ┤              the log is as before
                      └──fail_turn──────-> failed ─────┘

What holds, whatever happens to the process or the disk:

* Every public method is one transaction: its effect is all there or not at all.  What `finish_turn`
  returned is on the disk.
* A turn's messages lie beside the history until `finish_turn` links them into it, so a turn that
  did not end leaves no trace in the log.  At most one turn of a conversation is `running`.
* A `running` row belongs to a live turn of this process.  At the start there is none, so all such
  rows become `interrupted`; the same happens, before the next write, to a turn whose end could not
  be written (a full disk).  Whether that end got through is then read from the disk, never guessed.
* Revisions only grow.  A rewind takes the next one, and what is cut stays readable as the replay of
  the turn that made it until the conversation is deleted.
* A message is shared by reference, never changed, and gone when nothing holds it any more; after
  `delete_conversation` no byte of it is left in the files.

The caller uses the store from one thread at a time; `verify` and `integrity_check` open their own
read-only connection and may run in another.
"""

from __future__ import annotations

import contextlib
import re
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pensieve.errors import (
    AlreadyExists,
    InvalidArgument,
    NotFound,
    PrefixTaken,
    StaleRevision,
    StoreUnavailable,
    TurnRunning,
)
from pensieve.store import bodies, rows, turn_rows, verify
from pensieve.store.connection import BUSY_TIMEOUT_SECONDS, Writer, preferred_driver
from pensieve.store.folder import DataFolder
from pensieve.store.live_turns import LiveTurns
from pensieve.store.migrations import migrate
from pensieve.store.records import (
    LEGAL_TRANSITIONS,
    PAGE_SIZE_MAX,
    Begun,
    Conversation,
    Message,
    NewConversation,
    NewMessage,
    Page,
    Rewound,
    StoredTurn,
    TurnMessages,
    TurnRequest,
    TurnState,
    check_id,
    check_text,
)
from pensieve.store.rows import Link

if TYPE_CHECKING:
    from sqlite3 import Connection

PAGE_TOKEN_PATTERN = re.compile("[0-9]{1,18}")
CANCELLED = "cancelled"  # the finish_reason that makes a turn's state `cancelled`


class ConversationStore:
    """Open it with `ConversationStore.open`; it owns the data folder until `close`."""

    def __init__(
        self,
        folder: DataFolder,
        now: Callable[[], float] = time.time,
        driver: Any = preferred_driver,
        busy_timeout_seconds: float = BUSY_TIMEOUT_SECONDS,
        compact_bytes_min: int = bodies.COMPACT_BYTES_MIN,
    ) -> None:
        self.folder = folder
        self.integrity_check_due = folder.stopped_unclean
        self._now = now
        self._compact_bytes_min = compact_bytes_min
        self._writer = Writer(
            folder.database_path,
            lambda db: migrate(db, folder.database_path),
            driver,
            busy_timeout_seconds,
        )
        self._truncate_due = False  # the write-ahead log still holds what was deleted
        self._turns = LiveTurns(self._writer, now)
        interrupted = self._turns.settle()
        self.interrupted_at_open = tuple(self.get_turn(turn_id) for turn_id in interrupted)

    @classmethod
    def open(cls, path: Path, holder: str, **options: Any) -> ConversationStore:
        """Lock the folder `path` in the name of `holder` ("pensieve chat") and open its history.

        Reads the write-ahead log and the `running` rows, nothing that grows with the history.  After
        an unclean stop `integrity_check_due` says so until an `integrity_check` has passed, also
        after later starts.
        """
        folder = DataFolder.open(path, holder)
        try:
            return cls(folder, **options)
        except BaseException:
            folder.close(clean=not folder.stopped_unclean)
            raise

    def close(self) -> None:
        """Checkpoint, close and let go of the folder; harmless the second time."""
        clean = False
        try:
            self._writer.close()
            clean = not self.integrity_check_due
        finally:
            self.folder.close(clean)

    def __enter__(self) -> ConversationStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- conversations --

    def create_conversation(self, new: NewConversation) -> Conversation:
        """A conversation at revision 0 whose log is its head.

        The first conversation with a prefix_id fixes system prompt and tools for all others with
        it, which share its messages; another text under it is PrefixTaken.
        """
        check_id("conversation_id", new.conversation_id)
        if new.prefix_id:
            check_id("prefix_id", new.prefix_id)
        check_text(new.messages)
        now = self._now()
        with self._turns.writing() as conn:
            self._refuse_taken(conn, new.conversation_id, new.tenant)
            shared = self._shared_head(conn, new)
            number = rows.insert_conversation(
                conn,
                Conversation(
                    conversation_id=new.conversation_id,
                    tenant=new.tenant,
                    revision=0,
                    num_messages=0,
                    num_tokens=0,
                    fingerprint=new.fingerprint,
                    tools=tuple(new.tools),
                    template_options=dict(new.template_options),
                    metadata=dict(new.metadata),
                    prefix_id=new.prefix_id,
                    running_turn_id=None,
                    created_at=now,
                    updated_at=now,
                ),
            )
            rows.append_history(conn, number, shared or _inserted(conn, new.messages, None, 0))
            return rows.require_conversation(conn, new.conversation_id, new.tenant)[1]

    def get_conversation(self, conversation_id: str, *, tenant: str = "") -> Conversation:
        with self._writer.reading() as conn:
            return self._settled(rows.require_conversation(conn, conversation_id, tenant)[1])

    def num_conversations(self) -> int:
        """Of all tenants."""
        with self._writer.reading() as conn:
            return rows.num_conversations(conn)

    def list_conversations(
        self, page_size: int = 100, page_token: str = "", *, tenant: str = ""
    ) -> Page:
        """The newest first; what is created while paging does not move the later pages."""
        if not 1 <= page_size <= PAGE_SIZE_MAX:
            raise InvalidArgument("page_size", f"must lie in 1..{PAGE_SIZE_MAX}")
        if page_token and not PAGE_TOKEN_PATTERN.fullmatch(page_token):
            raise InvalidArgument("page_token", "is not one that was given out")
        before = int(page_token) if page_token else 2**63 - 1
        with self._writer.reading() as conn:
            found = rows.conversations_before(conn, tenant, before, page_size + 1)
        page = found[:page_size]
        more = len(found) > page_size
        conversations = tuple(self._settled(each) for _, each in page)
        return Page(conversations, str(page[-1][0]) if more else "")

    def fork_conversation(
        self,
        source_id: str,
        at_revision: int,
        new_id: str,
        *,
        metadata: Mapping[str, Any] | None = None,
        tenant: str = "",
    ) -> Conversation:
        """A conversation that begins with the source's messages up to `at_revision`, shared.

        Allowed while a turn of the source runs: only what is committed is taken.
        """
        check_id("conversation_id", new_id)
        now = self._now()
        with self._turns.writing() as conn:
            number, source = rows.require_conversation(conn, source_id, tenant)
            self._refuse_taken(conn, new_id, tenant)
            links = _links_until(conn, number, source, at_revision)
            fork = rows.insert_conversation(
                conn,
                replace(
                    source,
                    conversation_id=new_id,
                    revision=at_revision,
                    metadata=dict(metadata or {}),
                    created_at=now,
                    updated_at=now,
                ),
            )
            rows.append_history(conn, fork, links)
            return rows.require_conversation(conn, new_id, tenant)[1]

    def rewind_conversation(
        self, conversation_id: str, to_revision: int, *, tenant: str = ""
    ) -> Rewound:
        """Cut the messages that later revisions made; returns the new revision and log length."""
        with self._turns.writing() as conn:
            number, conversation = rows.require_conversation(conn, conversation_id, tenant)
            _refuse_running(conversation)
            links = _links_until(conn, number, conversation, to_revision)
            rows.cut_history(conn, number, to_revision)
            rows.set_revision(conn, number, conversation.revision + 1, self._now())
            return Rewound(conversation.revision + 1, sum(link.num_tokens for link in links))

    def replace_log(
        self,
        conversation_id: str,
        fingerprint: str,
        token_ids: Sequence[Sequence[int]],
        *,
        tenant: str = "",
    ) -> Conversation:
        """The same messages and revisions under another model, tokenizer or template.

        `token_ids` has one sequence per message of the history, in order.
        """
        with self._turns.writing() as conn:
            number, conversation = rows.require_conversation(conn, conversation_id, tenant)
            _refuse_running(conversation)
            if len(token_ids) != conversation.num_messages:
                raise InvalidArgument(
                    "token_ids",
                    f"{len(token_ids)} sequences for {conversation.num_messages} messages",
                )
            rows.replace_tokens(conn, number, token_ids)
            rows.set_fingerprint(conn, number, fingerprint)
            return rows.require_conversation(conn, conversation_id, tenant)[1]

    def delete_conversation(self, conversation_id: str, *, tenant: str = "") -> None:
        """Leave nothing of it on the disk; messages that a fork holds stay as the fork's.

        Its running turn must have ended.  StoreUnavailable can mean that it is deleted and the
        write-ahead log could not be emptied yet (somebody reads it); then close, the next deletion
        or the same one again empties it.
        """
        if self._truncate_due:
            self._truncate()
        with self._turns.writing() as conn:
            number, conversation = rows.require_conversation(conn, conversation_id, tenant)
            _refuse_running(conversation)
            rows.delete_conversation(conn, number)
            self._truncate_due = True
        self._compact_if_wasteful()
        self._truncate()

    # -- turns --

    def begin_turn(self, conversation_id: str, request: TurnRequest, *, tenant: str = "") -> Begun:
        """Commit the turn as `running`, or find what the same request_id stands for already.

        A turn that runs or has ended comes back as it is.  One that was interrupted or failed
        begins again, with the messages of this request and the seed it had.
        """
        check_id("request_id", request.request_id)
        check_text(request.messages)
        content_hash = request.content_hash()
        with self._turns.writing() as conn:
            number, conversation = rows.require_conversation(conn, conversation_id, tenant)
            key = rows.conversation_key(conversation_id, tenant)
            stored = turn_rows.find_request(conn, key, request.request_id)
            if stored is not None and stored.content_hash != content_hash:
                raise InvalidArgument("request_id", "was used before with other content")
            if stored and TurnState.RUNNING not in LEGAL_TRANSITIONS[stored.turn.state]:
                return Begun(stored.turn, must_run=False)
            _refuse_running(conversation)
            expected = request.expected_revision
            if expected is not None and expected != conversation.revision:
                raise StaleRevision(expected, conversation.revision)
            if stored is None:
                turn = turn_rows.insert_turn(
                    conn, number, conversation, request, content_hash, self._now()
                )
            else:
                turn_rows.restart_turn(conn, stored.turn.turn_id)
                turn = turn_rows.require_turn(conn, stored.turn.turn_id).turn
            _inserted(conn, request.messages, turn.turn_id, 0)
        self._turns.add(turn.turn_id)
        return Begun(turn, must_run=True)

    def finish_turn(
        self,
        turn_id: int,
        reply: NewMessage,
        finish_reason: str,
        usage: Mapping[str, Any],
    ) -> int:
        """Append the turn's messages and its reply to the log; returns the revision it made.

        Asked again after an error, it returns what got through: the outcome is never doubled.
        """
        state = TurnState.CANCELLED if finish_reason == CANCELLED else TurnState.COMPLETED
        with self._turns.ending(turn_id) as conn:
            check_text([reply])
            number, found, made, revision = turn_rows.require_progress(conn, turn_id)
            if found is state and made is not None:
                return made
            if found is not TurnState.RUNNING:
                raise NotFound(f"turn {turn_id} no longer runs, it is {found}")
            revision += 1
            links = turn_rows.turn_links(conn, turn_id, revision)
            message = rows.insert_message(conn, reply, turn_id, finish_reason)
            links.append(Link(message, revision, len(reply.token_ids)))
            rows.append_history(conn, number, links)
            now = self._now()
            rows.set_revision(conn, number, revision, now)
            turn_rows.finish_turn(conn, turn_id, state, finish_reason, usage, revision, now)
        return revision

    def fail_turn(self, turn_id: int, failure: str) -> StoredTurn:
        """The engine could not finish it: its messages stay out of the history."""
        with self._turns.ending(turn_id) as conn:
            if turn_rows.require_turn(conn, turn_id).turn.state is TurnState.RUNNING:
                turn_rows.fail_turn(conn, turn_id, failure, self._now())
            return turn_rows.require_turn(conn, turn_id).turn

    def interrupt_turn(self, turn_id: int) -> StoredTurn:
        """Nobody waits for it any more: its messages stay out of the history."""
        with self._turns.ending(turn_id) as conn:
            if turn_rows.require_turn(conn, turn_id).turn.state is TurnState.RUNNING:
                turn_rows.interrupt_turn(conn, turn_id, self._now())
            return turn_rows.require_turn(conn, turn_id).turn

    def get_turn(self, turn_id: int) -> StoredTurn:
        with self._writer.reading() as conn:
            return self._settled_turn(turn_rows.require_turn(conn, turn_id).turn)

    def find_turn(
        self, conversation_id: str, request_id: str, *, tenant: str = ""
    ) -> StoredTurn | None:
        """What a request_id stands for; None also where there is no such conversation."""
        with self._writer.reading() as conn:
            key = rows.conversation_key(conversation_id, tenant)
            found = turn_rows.find_request(conn, key, request_id)
        return None if found is None else self._settled_turn(found.turn)

    def turn_messages(self, turn_id: int) -> TurnMessages:
        """What a turn was asked and what it replied, also when a rewind has cut it."""
        with self._writer.reading() as conn:
            turn_rows.require_turn(conn, turn_id)
            return turn_rows.read_turn_messages(conn, turn_id)

    # -- reading --

    def log(
        self, conversation_id: str, num_tokens: int | None = None, *, tenant: str = ""
    ) -> array[int]:
        """The exact token ids of the conversation, or the first so many of them, checked ('I')."""
        with self._writer.reading() as conn:
            number, conversation = rows.require_conversation(conn, conversation_id, tenant)
            return rows.read_log(conn, number, conversation, num_tokens)

    def log_end(self, conversation_id: str, num_tokens: int, *, tenant: str = "") -> array[int]:
        """The last token ids of the conversation; what it takes does not grow with the conversation."""
        with self._writer.reading() as conn:
            number, conversation = rows.require_conversation(conn, conversation_id, tenant)
            return rows.read_log_end(conn, number, conversation, num_tokens)

    def messages(
        self,
        conversation_id: str,
        start: int = 0,
        limit: int | None = None,
        *,
        include_token_ids: bool = False,
        tenant: str = "",
    ) -> list[Message]:
        """The messages at positions [start, start + limit), or all from start on."""
        if start < 0 or (limit is not None and limit < 0):
            raise InvalidArgument("start" if start < 0 else "limit", "must not be negative")
        with self._writer.reading() as conn:
            number, conversation = rows.require_conversation(conn, conversation_id, tenant)
            end = conversation.num_messages
            stop = end if limit is None else min(start + limit, end)
            return rows.read_messages(conn, number, conversation, start, stop, include_token_ids)

    # -- checking --

    def verify(self, conversation_id: str | None = None, *, tenant: str = "") -> list[str]:
        """Derive again what the records say of each other; returns what is wrong, or nothing."""
        path = self.folder.database_path
        return verify.verify(path, self._writer.driver, conversation_id, tenant)

    def integrity_check(self) -> list[str]:
        """SQLite's own check of every page and index; returns what is wrong, or nothing."""
        problems = verify.integrity_check(self.folder.database_path, self._writer.driver)
        if not problems:
            self.integrity_check_due = False
        return problems

    # -- inside --

    def _settled(self, conversation: Conversation) -> Conversation:
        """As the next transaction will find it; see live_turns.py."""
        turn_id = conversation.running_turn_id
        if turn_id is None or not self._turns.is_dead(turn_id):
            return conversation
        return replace(conversation, running_turn_id=None)

    def _settled_turn(self, turn: StoredTurn) -> StoredTurn:
        if turn.state is not TurnState.RUNNING or not self._turns.is_dead(turn.turn_id):
            return turn
        return replace(turn, state=TurnState.INTERRUPTED)

    def _refuse_taken(self, conn: Connection, conversation_id: str, tenant: str) -> None:
        if rows.find_conversation(conn, conversation_id, tenant) is not None:
            raise AlreadyExists(f"there is a conversation {conversation_id!r} already")

    def _shared_head(self, conn: Connection, new: NewConversation) -> list[Link]:
        """The head of the conversations with this prefix_id, if the tokens are the same too."""
        first = rows.first_with_prefix(conn, new.tenant, new.prefix_id) if new.prefix_id else None
        if first is None:
            return []
        number, holder = first
        head = rows.links(conn, number, until_revision=0)
        messages = rows.read_messages(conn, number, holder, 0, len(head), True)
        said = [(each.role, each.content, each.tool_call_id, each.extra) for each in messages]
        says = [(each.role, each.content, each.tool_call_id, each.extra) for each in new.messages]
        if said != says or list(holder.tools) != list(new.tools):
            raise PrefixTaken(f"prefix {new.prefix_id!r} has another system prompt or other tools")
        same_tokens = all(
            list(each.token_ids or ()) == list(other.token_ids)
            for each, other in zip(messages, new.messages, strict=True)
        )
        return head if same_tokens and holder.fingerprint == new.fingerprint else []

    def _truncate(self) -> None:
        self._writer.truncate_journal()
        self._truncate_due = False

    def _compact_if_wasteful(self) -> None:
        with self._writer.reading() as conn:
            if not bodies.wasteful(conn, self._compact_bytes_min):
                return
        # The deletion is done; a disk too full for the rewrite leaves it to the next deletion.
        with contextlib.suppress(StoreUnavailable), self._writer.reading() as conn:
            bodies.compact(conn)


def _inserted(
    conn: Connection, messages: Sequence[NewMessage], turn_id: int | None, revision: int
) -> list[Link]:
    return [
        Link(rows.insert_message(conn, message, turn_id), revision, len(message.token_ids))
        for message in messages
    ]


def _refuse_running(conversation: Conversation) -> None:
    if conversation.running_turn_id is not None:
        raise TurnRunning(conversation.conversation_id, str(conversation.running_turn_id))


def _links_until(
    conn: Connection, number: int, conversation: Conversation, revision: int
) -> list[Link]:
    """The history up to a revision that is in it: 0, a message's, or the present one."""
    links = rows.links(conn, number, revision)
    if revision not in (0, conversation.revision) and (not links or links[-1].revision != revision):
        raise NotFound(
            f"conversation {conversation.conversation_id!r} has no message of revision {revision}"
        )
    return links
