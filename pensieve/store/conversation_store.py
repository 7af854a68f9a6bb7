"""The public class of the store: the exact token logs of all conversations, and the turns that change them.

    begin_turn ──> running ──finish_turn──> completed | cancelled     messages and reply join the log
                      │ ^
                      │ └─begin_turn, same request_id──┐
                      ├──interrupt_turn──> interrupted ┤              the log is unchanged
                      └──fail_turn──────-> failed ─────┘

Invariants, whatever happens to the process or the disk:

* Every public method is one transaction: it takes effect completely or not at all. When `finish_turn` has
  returned, its result is on the disk.
* A turn's messages join the history only in `finish_turn`, so an unfinished turn does not change the log. At
  most one turn of a conversation is `running`.
* A turn is `running` while the daemon that owns the conversation computes the turn (owners.py). Turns of dead
  daemons become `interrupted` when this store is opened or claims the conversation.
* If the end of a turn could not be written (for example, the disk is full), the next write first reads from
  the disk whether the end was committed. If not, the turn becomes `interrupted` (transactions.py).
* Revision numbers only increase; a rewind also creates a new revision. Messages removed by a rewind stay
  readable through their turn, until the conversation is deleted or the request is forgotten (forgetting.py).
* Messages are shared by reference and never changed. They are wiped when nothing refers to them any more.
  After `delete_conversation`, no byte of them is left in SQLite's files (PostgreSQL: postgres/backend.py).
  While `erasure.due` is true, the caller must call `erasure.step` from time to time.

Up to `num_lanes` threads may use the store concurrently. With PostgreSQL, each has its own connection. With
SQLite, they share one connection and its commits (shared_commits.py). Only one thread at a time may make
calls for a given conversation. `verify`, `integrity_check` and the result of `reader` open their own
read-only connections and may run in other threads.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pensieve.errors import (
    InvalidArgument,
    NotFound,
    PensieveError,
    PrefixTaken,
    StoreError,
    Unavailable,
)
from pensieve.store import conversation_rows, message_rows, turn_rows
from pensieve.store.backend import BUSY_TIMEOUT_SECONDS, STATEMENT_SECONDS, Backend, ScrubSteps
from pensieve.store.bodies import bytes_of_tenant
from pensieve.store.chains import Chains, insert_state
from pensieve.store.compaction import COMPACT_BYTES_MIN
from pensieve.store.conversation_changes import ConversationChanges, pending_json, take_pending
from pensieve.store.conversation_rows import refuse_running, refuse_stale, require_conversation
from pensieve.store.declared_prefixes import PrefixStore
from pensieve.store.folder import DATABASE_NAME, DataFolder, daemon_identity
from pensieve.store.forgetting import Forgetting
from pensieve.store.history_reader import HistoryReader, page_of_conversations, some_messages
from pensieve.store.housekeeper import Housekeeper
from pensieve.store.job_owners import JobOwners
from pensieve.store.leases import Leases
from pensieve.store.owners import LEASE_SECONDS, Opening, Owners
from pensieve.store.records import (
    LEGAL_TRANSITIONS,
    PREFIX_MARK,
    BeginResult,
    ChainState,
    KeyedTurn,
    LookedUp,
    NewConversation,
    NewMessage,
    NewTurn,
    Page,
    Rewound,
    StoredConversation,
    StoredMessage,
    StoredTurn,
    StoredTurnState,
    TurnMessages,
    check_id,
    check_text,
)
from pensieve.store.responses import ResponseStore, StoredResponse, put_response
from pensieve.store.salts import Salts
from pensieve.store.shared_file import SQLITE_SCHEME, open_shared, path_of
from pensieve.store.transactions import TAKEN, StoreTransactions, repeated

if TYPE_CHECKING:
    from sqlite3 import Connection


LANES = 16  # default limit for threads that use the store concurrently


class ConversationStore:
    """The store. `ConversationStore.open` creates one, which owns the data folder until `close`."""

    def __init__(
        self,
        folder: DataFolder,
        now: Callable[[], float] = time.time,
        driver: Any = None,
        busy_timeout_seconds: float = BUSY_TIMEOUT_SECONDS,
        compact_bytes_min: int = COMPACT_BYTES_MIN,
        statement_seconds: float = STATEMENT_SECONDS,
        url: str = "",
        replica: str = "",
        lease_seconds: float = LEASE_SECONDS,
        num_lanes: int = LANES,
        random_bits: Callable[[int], int] = secrets.randbits,
    ) -> None:
        """Open the history in `folder`, or the history at `url`, which several daemons may share.

        `url` is the address of a PostgreSQL database or a SQLite file. Without a `url`, the history is in the
        folder, for this process only. `replica` is this daemon's name among the daemons that share the
        history. `num_lanes` is how many threads may use the store concurrently.
        `random_bits` makes the salts of tenants.
        """
        self.folder = folder
        self.now = now
        times = busy_timeout_seconds, compact_bytes_min, statement_seconds
        housekeeper = Housekeeper(is_ours=not url)
        self._backend = open_backend(
            *(folder, url, driver, *times, housekeeper, lease_seconds),
            num_lanes=num_lanes,
            is_exclusive=False,
        )
        self._writer, self.num_lanes = self._backend.writer, self._backend.num_lanes
        self._transactions = StoreTransactions(self._writer, now)
        self.figures, self.erasure = self._backend.figures, self._backend.erasure
        self.forgetting = Forgetting(self._transactions, housekeeper)
        self.owners = Owners(self._transactions, now)
        self.job_owners = JobOwners(self._transactions, self.owners)
        self._salts = Salts(self._transactions, random_bits)
        self.prefixes = PrefixStore(self._transactions, self.owners, now)
        self.chains = Chains(self._transactions, housekeeper)
        self.responses = ResponseStore(self._transactions, self.erasure)
        self.changes = ConversationChanges(self._transactions, self.owners, self.erasure, now)
        self.replica = replica
        self.housekeeper = housekeeper
        self._leases: Leases | None = None
        try:
            opening = Opening(replica)
            if self.is_shared:
                opening = Opening(replica, daemon_identity(folder.path), lease_seconds)
            interrupted = self.erasure.run_deletion(lambda: self.owners.open_session(opening))
            self._share()
            self.erasure.resume()
            self.interrupted_at_open = tuple(self.get_turn(turn_id) for turn_id in interrupted)
            self.marks = self._backend.marks
            self.integrity_check_due = self.marks.is_check_due
        except BaseException:
            if self._leases is not None:
                self._leases.close()
            self._backend.give_up()
            raise

    def _share(self) -> None:
        """Let other daemons open a shared history, and start to renew the lease."""
        self._backend.share()
        if self.is_shared:
            self._leases = Leases(
                self._backend.lease_connection(), self.owners, self.housekeeper, self.erasure.tidy
            )
            self._leases.start()

    @classmethod
    def open(cls, path: Path, holder: str, **options: Any) -> ConversationStore:
        """Lock the folder `path` and open its history. `holder` names this process, e.g. "pensieve chat".

        Opening empties the write-ahead log and reads the `running` rows; it takes no longer for a larger
        history. After an unclean stop, `integrity_check_due` stays true until an `integrity_check` has
        passed, also across restarts.
        """
        url = options.get("url", "")
        is_file = url.startswith(SQLITE_SCHEME)
        if is_file and path_of(url) == path.resolve() / DATABASE_NAME:
            raise StoreError(
                f"--data {path} is the folder of the shared history: give each daemon its own --data"
                " folder"
            )
        folder = DataFolder.open(path, holder, has_database=not url)
        try:
            return cls(folder, **options)
        except BaseException:
            folder.close(clean=not folder.stopped_unclean)
            raise

    def close(self) -> None:
        """Checkpoint, close and release the folder. A second call does nothing.

        Other daemons that share the history may then claim this daemon's conversations immediately.
        """
        clean = False
        leases, self._leases = self._leases, None
        try:
            if leases is not None:
                leases.close()
                with contextlib.suppress(PensieveError):  # if this fails, the lease expires
                    self.owners.end()
            self._backend.close()
            clean = not self.integrity_check_due
        finally:
            self._backend.release(clean=clean)
            self.folder.close(clean)

    def __enter__(self) -> ConversationStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- conversations --

    @repeated
    def create_conversation(self, new: NewConversation) -> StoredConversation:
        """Create a conversation at revision 0. Its log has only its head messages, usually a system prompt.

        Raises PrefixTaken if earlier conversations with the same prefix_id have a different head.
        """
        check_id("conversation_id", new.conversation_id)
        if new.prefix_id:
            check_id("prefix_id", new.prefix_id)
        check_text((*new.messages, *new.pending))
        now = self.now() if new.created_at is None else new.created_at
        with self._transactions.writing(is_serializable=bool(new.prefix_id)) as conn:
            conversation_rows.refuse_existing(conn, new.conversation_id, new.tenant)
            shared = _shared_head(conn, new)
            number = conversation_rows.insert_conversation(
                conn, new.without_messages(now), pending_json(new.pending)
            )
            head = shared or message_rows.insert_messages(conn, new.tenant, new.messages, None, 0)
            message_rows.append_history(conn, number, head)
            _, created = require_conversation(conn, new.conversation_id, new.tenant)
            self.owners.own_new(conn, number, created)
            return created

    def get_conversation(self, conversation_id: str, *, tenant: str = "") -> StoredConversation:
        with self._transactions.reading() as conn:
            found = require_conversation(conn, conversation_id, tenant)[1]
            if conversation_id.startswith(PREFIX_MARK):
                self.owners.drop_stale_prefix(found)
            return self._transactions.as_read(conn, found)

    def num_conversations(self) -> int:
        """Return the number of conversations of all tenants. Declared prefixes do not count."""
        with self._transactions.reading() as conn:
            return conversation_rows.num_conversations(conn)

    def stored_bytes(self, tenant: str = "") -> int:
        """Return the size of the tenant's conversations."""
        with self._transactions.reading() as conn:
            return bytes_of_tenant(conn, tenant)

    def list_conversations(
        self, page_size: int = 100, page_token: str = "", *, tenant: str = ""
    ) -> Page:
        """Return a page of conversations, newest first. New conversations do not shift later pages."""
        with self._transactions.reading(is_snapshot=True) as conn:
            return page_of_conversations(conn, self._transactions, page_size, page_token, tenant)

    @repeated
    def fork_conversation(
        self,
        source_id: str,
        at_revision: int,
        new_id: str,
        *,
        metadata: Mapping[str, Any] | None = None,
        tenant: str = "",
    ) -> StoredConversation:
        """Create a conversation that shares the source's messages up to `at_revision`.

        A turn of the source may be running. The fork then gets only the committed messages.
        """
        check_id("conversation_id", new_id)
        now = self.now()
        with self._transactions.writing(is_serializable=True) as conn:
            number, source = require_conversation(conn, source_id, tenant)
            conversation_rows.refuse_existing(conn, new_id, tenant)
            links = message_rows.require_links(conn, number, source, at_revision)
            self.owners.drop_stale_source(conn, number, source)
            fork = conversation_rows.insert_conversation(
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
            message_rows.append_history(conn, fork, links)
            _, forked = require_conversation(conn, new_id, tenant)
            self.owners.own_new(conn, fork, forked)
            return forked

    @repeated
    def rewind_conversation(
        self,
        conversation_id: str,
        to_revision: int,
        expected_revision: int | None = None,
        *,
        tenant: str = "",
    ) -> Rewound:
        """Remove the messages of later revisions. Return the new revision and the length of the log.

        Raises StaleRevision if the conversation is not at the expected revision. None accepts any revision.
        """
        with self._transactions.writing(is_serializable=True) as conn:
            number, conversation = require_conversation(conn, conversation_id, tenant)
            conversation = self.owners.hold(conn, number, conversation)
            refuse_running(conversation)
            refuse_stale(conversation, expected_revision)
            links = message_rows.require_links(conn, number, conversation, to_revision)
            if conversation.has_pending:
                take_pending(conn, number, conversation)
            message_rows.cut_history(conn, number, tenant, to_revision)
            conversation_rows.set_revision(conn, number, conversation.revision + 1, self.now())
            return Rewound(conversation.revision + 1, sum(link.num_tokens for link in links))

    @repeated
    def replace_log(
        self,
        conversation_id: str,
        fingerprint: str,
        token_ids: Sequence[Sequence[int]],
        *,
        tenant: str = "",
    ) -> StoredConversation:
        """Replace the tokens of all messages, because the model, tokenizer or template has changed.

        `token_ids` has one sequence per message of the history, in order.
        """
        with self._transactions.writing(is_serializable=True) as conn:
            number, conversation = require_conversation(conn, conversation_id, tenant)
            conversation = self.owners.hold(conn, number, conversation)
            refuse_running(conversation)
            if len(token_ids) != conversation.num_messages:
                raise InvalidArgument(
                    "token_ids",
                    f"{len(token_ids)} sequences for {conversation.num_messages} messages",
                )
            message_rows.replace_tokens(conn, number, tenant, token_ids)
            conversation_rows.set_fingerprint(conn, number, fingerprint)
            return require_conversation(conn, conversation_id, tenant)[1]

    @repeated
    def delete_conversation(
        self,
        conversation_id: str,
        *,
        tenant: str = "",
        unchanged: StoredConversation | None = None,
    ) -> None:
        """Delete the conversation and erase it from the disk. Messages that a fork holds stay with the fork.

        No turn of the conversation may be running. ErasurePending means that the conversation is deleted but
        not yet erased from the files. To retry the erasure, call again: the call raises ErasurePending again,
        or NotFound if the erasure is complete.

        `unchanged`: the conversation as the caller read it. Raises StaleRevision if it has changed since.
        """

        def delete() -> None:
            with self._transactions.writing(is_serializable=True) as conn:
                number, conversation = require_conversation(conn, conversation_id, tenant)
                conversation = self.owners.hold(conn, number, conversation)
                refuse_running(conversation)
                if unchanged is not None:
                    conversation_rows.refuse_changed(conversation, unchanged)
                conversation_rows.delete_conversation(conn, number, tenant)
                self.erasure.prepare()

        try:
            self.erasure.run_deletion(delete)
        except NotFound:
            self.erasure.finish()
            raise
        self.erasure.finish()

    # -- turns --

    @repeated
    def begin_turn(
        self, conversation_id: str, request: NewTurn, *, tenant: str = ""
    ) -> BeginResult:
        """Commit a turn as `running`, or return the turn that an earlier request with this request_id began.

        A running or finished turn is returned unchanged. An interrupted or failed turn begins again with its
        first seed. Raises InvalidArgument if the content differs from that of the first request.
        """
        check_id("request_id", request.request_id)
        check_text(request.messages)
        content_hash = request.content_hash()
        with self._transactions.writing() as conn:
            number, conversation, known_turn_id, owner = conversation_rows.require_with_request(
                conn, conversation_id, tenant, request.request_id
            )
            conversation = self.owners.hold(conn, number, conversation, owner)
            stored = None if known_turn_id is None else turn_rows.require_turn(conn, known_turn_id)
            if stored is not None and stored.content_hash != content_hash:
                raise InvalidArgument("request_id", "was already used with different content")
            if stored and StoredTurnState.RUNNING not in LEGAL_TRANSITIONS[stored.turn.state]:
                return BeginResult(stored.turn, must_run=False)
            refuse_running(conversation)
            refuse_stale(conversation, request.expected_revision, request.expected_created_at)
            if request.pending or conversation.has_pending:
                take_pending(conn, number, conversation, request.pending)
            if stored is None:
                turn = turn_rows.insert_turn(
                    conn, number, conversation, request, content_hash, self.now()
                )
            else:
                turn_rows.restart_turn(conn, stored.turn.turn_id, tenant, request)
                turn = turn_rows.require_turn(conn, stored.turn.turn_id).turn
            message_rows.insert_messages(conn, tenant, request.messages, turn.turn_id, 0)
            self._transactions.note_begun(turn.turn_id)
        return BeginResult(turn, must_run=True)

    @repeated
    def finish_turn(
        self,
        turn_id: int,
        reply: NewMessage,
        finish_reason: str,
        usage: Mapping[str, Any],
        chain_state: ChainState | None = None,
        response: StoredResponse | None = None,
        attempt: int = 0,
    ) -> int:
        """Append the turn's messages and its reply to the log. Return the new revision.

        A `response` is stored with that revision. After an error, the call may be repeated: a turn is never
        committed twice. With `attempt`, the call ends only that attempt of the turn. It raises NotFound if
        the turn was begun again since, and Unavailable if another daemon has claimed the conversation.
        """
        is_cancelled = finish_reason == StoredTurnState.CANCELLED.value
        state = StoredTurnState.CANCELLED if is_cancelled else StoredTurnState.COMPLETED
        with self._transactions.ending(turn_id) as conn:
            check_text([reply])
            now = self.now()
            progress = turn_rows.require_progress(conn, turn_id)
            is_ours = self._transactions.may_end(turn_id, attempt, progress)
            committed, tenant = progress.revision, progress.tenant
            if (
                progress.state is state
                and committed is not None
                and attempt in (0, progress.attempt)
            ):
                return committed
            if not is_ours:
                raise Unavailable(TAKEN)
            if progress.state is not StoredTurnState.RUNNING:
                raise NotFound(f"turn {turn_id} is not running any more, it is {progress.state}")
            conversation, revision = progress.conversation, progress.conversation_revision + 1
            links = [
                message_rows.HistoryRow(message, revision, length)
                for message, length in progress.messages
            ]
            message = message_rows.insert_message(conn, tenant, reply, turn_id, finish_reason)
            links.append(message_rows.HistoryRow(message, revision, len(reply.token_ids)))
            message_rows.append_history(conn, conversation, links, progress.end)
            turn_rows.insert_logprobs(conn, tenant, turn_id, reply.logprobs)
            if chain_state is not None:
                insert_state(conn, tenant, chain_state, message, now)
            if response is not None:
                put_response(conn, conversation, replace(response, revision=revision))
            conversation_rows.set_revision(conn, conversation, revision, now)
            turn_rows.finish_turn(conn, turn_id, state, finish_reason, usage, revision, now)
            return revision

    @repeated
    def fail_turn(self, turn_id: int, failure: str, attempt: int = 0) -> StoredTurn:
        """End a turn that the engine could not finish. Its messages do not join the history."""
        with self._transactions.ending(turn_id) as conn:
            fence = turn_rows.require_fence(conn, turn_id)
            is_ours = self._transactions.may_end(turn_id, attempt, fence)
            is_running = fence.state is StoredTurnState.RUNNING
            if not is_ours and (is_running or attempt not in (0, fence.attempt)):
                raise Unavailable(TAKEN)
            if is_running:
                turn_rows.fail_turn(conn, turn_id, failure, self.now())
            return turn_rows.require_turn(conn, turn_id).turn

    @repeated
    def interrupt_turn(self, turn_id: int, attempt: int = 0) -> StoredTurn:
        """End a turn that no client waits for any more. Its messages do not join the history.

        If another daemon has taken over the turn, nothing happens.
        """
        with self._transactions.ending(turn_id) as conn:
            fence = turn_rows.require_fence(conn, turn_id)
            is_ours = self._transactions.may_end(turn_id, attempt, fence)
            if is_ours and fence.state is StoredTurnState.RUNNING:
                turn_rows.interrupt_turn(conn, turn_id, self.now())
            return turn_rows.require_turn(conn, turn_id).turn

    def get_turn(self, turn_id: int) -> StoredTurn:
        with self._transactions.reading() as conn:
            return self._transactions.turn_as_read(conn, turn_rows.require_turn(conn, turn_id).turn)

    def find_turn(
        self, conversation_id: str, request_id: str, *, tenant: str = ""
    ) -> StoredTurn | None:
        """Return the turn that a request_id began. None if there is no such turn or conversation."""
        with self._transactions.reading() as conn:
            key = conversation_rows.conversation_key(conversation_id, tenant)
            found = turn_rows.find_turn_of_request(conn, key, request_id)
            return None if found is None else self._transactions.turn_as_read(conn, found.turn)

    def find_turn_by_key(self, request_id: str, *, tenant: str = "") -> KeyedTurn | None:
        """Return the turn of a request with an Idempotency-Key, in any conversation of the tenant.

        Return None if there is no such turn, or if the turn is not running and has no reply.
        """
        with self._transactions.reading() as conn:
            return turn_rows.find_turn_by_key(conn, tenant, request_id)

    def look_up(
        self, conversation_id: str, request_id: str, num_tokens: int, *, tenant: str = ""
    ) -> LookedUp:
        """Combine `get_conversation`, `find_turn` and `log_end`, without lookups that cannot succeed."""
        found, known, log_end = (
            self.get_conversation(conversation_id, tenant=tenant),
            None,
            array("I"),
        )
        if request_id and (found.revision or found.running_turn_id is not None):
            known = self.find_turn(conversation_id, request_id, tenant=tenant)
        if found.num_tokens:
            log_end = self.log_end(conversation_id, num_tokens, tenant=tenant)
        return LookedUp(found, known, log_end)

    def turn_messages(self, turn_id: int) -> TurnMessages:
        """Return the messages and the reply of a turn, even if a rewind has removed them."""
        with self._transactions.reading(is_snapshot=True) as conn:
            turn_rows.require_turn(conn, turn_id)
            return turn_rows.read_turn_messages(conn, turn_id)

    # -- other daemons --

    @property
    def is_shared(self) -> bool:
        """Whether other daemons may have the history open at the same time."""
        return self._backend.is_shared

    @property
    def database_path(self) -> Path | None:
        """The file of the history; None if it is in PostgreSQL."""
        return self._backend.path if self.is_shared else self.folder.database_path

    @property
    def is_housekeeper(self) -> bool:
        """Whether this daemon is the housekeeper (housekeeper.py). Any thread may ask."""
        return self.housekeeper.is_ours

    @property
    def kv_sources(self) -> MutableMapping[tuple[str, str], str]:
        """Addresses of daemons that may still have KV of a conversation, by tenant and conversation id."""
        return self.owners.kv_sources

    def watch(self, on_stale: Callable[[str, str], None]) -> None:
        """Set the callback that gets tenant and id of each conversation whose KV may be outdated.

        The store calls it in the caller's thread, before the method that detects the outdated KV returns.
        """
        self.owners.on_stale = on_stale

    def claim(self, conversation_id: str, *, tenant: str = "") -> None:
        """Claim a conversation for this daemon, for work that does not write to the history.

        Raises OwnedElsewhere if another daemon has the conversation. Does nothing if it does not exist.
        """
        self.owners.claim(conversation_id, tenant=tenant)

    def take(self, conversation_id: str, *, tenant: str = "") -> None:
        """Like `claim`, but also from a live daemon, unless that daemon runs a turn of the conversation."""
        self.owners.claim(conversation_id, tenant=tenant, from_live_owner=True)

    def announce(self, address: str, http_address: str, metrics_address: str) -> None:
        self.owners.announce(address, http_address, metrics_address)

    def drain(self) -> None:
        """Accept no more turns: other daemons may take each conversation whose turn has ended."""
        self.owners.drain()

    def salt_of(self, tenant: str) -> bytes:
        """Return the tenant's random salt, which never changes. Only a new tenant's first call writes."""
        return self._salts.get(tenant)

    # -- reading --

    def log(
        self, conversation_id: str, num_tokens: int | None = None, *, tenant: str = ""
    ) -> array[int]:
        """Return the token ids of the conversation, or only the first `num_tokens`. Verifies checksums."""
        with self._transactions.reading(is_snapshot=True) as conn:
            number, conversation = require_conversation(conn, conversation_id, tenant)
            return message_rows.read_log(conn, number, conversation, num_tokens)

    def log_end(self, conversation_id: str, num_tokens: int, *, tenant: str = "") -> array[int]:
        """Return the last `num_tokens` token ids. Takes no longer for a long conversation."""
        with self._transactions.reading() as conn:
            number, conversation = require_conversation(conn, conversation_id, tenant)
            return message_rows.read_log_end(conn, number, conversation, num_tokens)

    def messages(
        self,
        conversation_id: str,
        start: int = 0,
        limit: int | None = None,
        *,
        include_token_ids: bool = False,
        tenant: str = "",
    ) -> list[StoredMessage]:
        """Return the messages at positions [start, start + limit), or all from `start` on."""
        with self._transactions.reading(is_snapshot=True) as conn:
            return some_messages(conn, conversation_id, start, limit, include_token_ids, tenant)

    def reader(self) -> HistoryReader:
        """Return a reader for another thread."""
        return HistoryReader(
            self._backend.snapshots(), self._transactions, lambda: self.erasure.pending
        )

    def scrub(self) -> ScrubSteps:
        """Return the steps of a check of the whole history. Only one thread at a time may take a step."""
        return self._backend.scrub()

    # -- checking --

    def verify(self, conversation_id: str | None = None, *, tenant: str = "") -> list[str]:
        """Check that the records agree with each other. Return the problems found."""
        return self._backend.verify(conversation_id, tenant)

    def integrity_check(self) -> list[str]:
        """Run the database's own check, and `verify` if damage was found before. Return the problems."""
        problems = self._backend.integrity_check()
        if not problems and self.marks.is_damaged:
            problems = self.verify()
        if not problems:
            self.integrity_check_due = False
            self.marks.mark_damaged(False)
        return problems


def _shared_head(conn: Connection, new: NewConversation) -> list[message_rows.HistoryRow]:
    """Return the head messages that a new conversation shares through its prefix_id, or an empty list.

    The first conversation with a prefix_id fixes system prompt and tools. Raises PrefixTaken if `new` has a
    different system prompt or tools. Later conversations hold the messages of the first conversation, so that
    they also share its KV. Exception: if the model or tokenizer has changed since, they share nothing.
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
        raise PrefixTaken(
            f"prefix {new.prefix_id!r} was already used with a different system prompt or tools"
        )
    same_tokens = all(
        list(each.token_ids or ()) == list(other.token_ids)
        for each, other in zip(messages, new.messages, strict=True)
    )
    return head if same_tokens and holder.fingerprint == new.fingerprint else []


def _texts(messages: Iterable[StoredMessage | NewMessage]) -> list[tuple[Any, ...]]:
    return [(each.role, each.content, each.tool_call_id, each.extra) for each in messages]


def open_backend(
    folder: DataFolder,
    url: str,
    driver: Any,
    busy_timeout_seconds: float,
    compact_bytes_min: int,
    statement_seconds: float,
    housekeeper: Housekeeper | None = None,
    lease_seconds: float = LEASE_SECONDS,
    num_lanes: int = 1,
    is_exclusive: bool = True,
) -> Backend:
    """Create the backend for `url` (PostgreSQL or a shared SQLite file), or for the data folder.

    The first use of the backend opens the database.
    """
    if url and not url.startswith(SQLITE_SCHEME):
        from pensieve.store.postgres.backend import PostgresBackend
        from pensieve.store.postgres.connection import Address

        return PostgresBackend(
            *(Address(url, driver), folder.holder, busy_timeout_seconds, statement_seconds),
            num_lanes,
            is_exclusive,
            lease_seconds / 2,
        )
    from pensieve.store.connection import preferred_driver
    from pensieve.store.sqlite_backend import SqliteBackend

    driver = driver or preferred_driver
    return SqliteBackend(
        folder,
        driver,
        busy_timeout_seconds,
        compact_bytes_min,
        statement_seconds,
        housekeeper or Housekeeper(is_ours=True),
        open_shared(url, driver, folder.holder if is_exclusive else "") if url else None,
        lease_seconds,
        num_lanes,
    )
