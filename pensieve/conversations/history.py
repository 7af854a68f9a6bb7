"""Draft, begin and end turns in transactions on the history: the store threads' part of every request.

Several store threads may call this module at once, each for different conversations (threads.py). `History`
knows neither live turns nor the pipe to the engine. Its results contain messages for the engine, which the
event loop sends. A turn has these steps:

1. `draft` reads the end of the log. `Draft.prompt` tokenizes the new messages, in any thread. `begin` checks
   that they fit and commits the turn as `running`. Everything that can fail happens before this commit.
   If there is little to tokenize, `begin_if_short` does all of this in one job (a call in a store thread).
2. `finish` appends the tokens of the new messages and of the reply to the log in ONE transaction. `fail` and
   `interrupt` leave the history unchanged.

If an earlier request had the same request_id, `draft` or `begin` returns a `RetriedTurn` instead: the earlier
turn still runs, or the store has its reply.

The engine may have KV for tokens that never reached the log. This is harmless: a turn says how long its log
is, and the engine drops KV after that position. KV before that position always matches the log, because the
engine is told of rewinds and deletions in the order of the store. The engine asks for tokens that it lacks.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

from pensieve.conversations.constraints import ConstraintChecker
from pensieve.conversations.draft import (
    Draft,
    OutdatedTokens,
    TurnRequest,
    check_settings,
    new_conversation,
    planned_conversation,
    stored_messages,
)
from pensieve.conversations.heads import (
    STAND_IN,
    ConversationSettings,
    PrefixSettings,
    PromptHeads,
    all_messages,
    check_length,
    check_salt,
)
from pensieve.conversations.live_turn import (
    CommittedReply,
    RetriedTurn,
    StartedTurn,
    TurnReply,
    cache_key,
    names_of,
)
from pensieve.core.identities import salted
from pensieve.engine.messages import LogNeeded, ProvideLog, SubmitTurn
from pensieve.errors import (
    AlreadyExists,
    ContextFull,
    ErasurePending,
    InvalidArgument,
    NotFound,
    OwnedElsewhere,
    PensieveError,
    PrefixTaken,
    StaleRevision,
    StorageFull,
    TurnInterrupted,
    TurnRunning,
    one_line,
)
from pensieve.sampling import Sampling
from pensieve.store import records
from pensieve.store.conversation_changes import LastDeleted
from pensieve.store.conversation_store import ConversationStore
from pensieve.text import ChatTemplate, Tokenizer

NO_ATTEMPT_ID = 0  # the event loop gives each attempt its id (`Turns.begin`)
PROMPT_TAIL_TOKENS = 16  # a template may open the thinking in these last tokens of a prompt


ROOT_BYTES = 16


class Texts(Protocol):
    """The text parts of a model: template, fingerprint and sampling defaults."""

    @property
    def template(self) -> ChatTemplate: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def defaults(self) -> Sampling: ...
    @property
    def defaults_from_model(self) -> bool: ...


class Deleted(NamedTuple):
    turn_id: int | None  # the turn that this call has interrupted, also if the deletion failed
    error: PensieveError | None  # why the deletion failed
    is_pending: bool  # the deleted text is not yet erased from the files


class History:
    def __init__(
        self,
        store: ConversationStore,
        texts: Texts,
        *,
        context_max: int,
        vocab_size: int,
        random_bits: Callable[[int], int],
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`random_bits` makes seeds and request ids that the client does not give."""
        self._store = store
        self._template, self._fingerprint = texts.template, texts.fingerprint
        self._context_max = context_max
        self.check_settings = partial(check_settings, self._template, context_max)
        self._template.tokenizer.tokens_max = context_max
        self._vocab_size = vocab_size
        self._random_bits = random_bits
        self._report = report
        self.heads = PromptHeads(self._template, context_max)
        self._constraints = ConstraintChecker(self._template.tokenizer)
        self._draft_parts = self._template, self.heads, self._constraints
        self.declared = PrefixHistory(store, self._fingerprint, self._outdated, self._check_storage)
        self.roots: dict[
            str, str
        ] = {}  # by tenant, from the stored salts; read by the event loop too
        self._interim_roots: dict[str, str] = {}
        self._tokenized_again: set[tuple[str, str]] = set()  # conversations, until their next turn
        self._storage: Mapping[str, int] = {}  # maximum bytes of the tenants that have a limit

    @property
    def tokenizer(self) -> Tokenizer:
        return self._template.tokenizer

    def limit_storage(self, storage: Mapping[str, int]) -> None:
        """Set the maximum bytes of each tenant's conversations. Tenants not in `storage` have no limit."""
        self._storage = storage

    # -- conversations --

    def create(self, settings: ConversationSettings) -> records.StoredConversation | OutdatedTokens:
        """Create a conversation, with settings that `check_settings` has accepted.

        Returns OutdatedTokens if the conversation's declared prefix must be tokenized again first.
        """
        self._check_storage(settings.tenant)
        if settings.prefix_id and (begun := self.declared.begin(settings)) is not None:
            return begun
        return self._store.create_conversation(new_conversation(settings, self._fingerprint))

    def fork(
        self,
        source_id: str,
        new_id: str,
        at_revision: int | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        tenant: str = "",
    ) -> records.StoredConversation:
        """Fork a conversation at a revision (None: the latest). The fork begins with the source's log."""
        self._check_storage(tenant)
        if at_revision is None:
            at_revision = self._store.get_conversation(source_id, tenant=tenant).revision
        return self._store.fork_conversation(
            source_id, at_revision, new_id, metadata=metadata, tenant=tenant
        )

    def rewind(
        self,
        conversation_id: str,
        to_revision: int,
        expected_revision: int | None = None,
        *,
        tenant: str = "",
    ) -> records.StoredConversation:
        """Cut a conversation back to a revision and return the conversation.

        Raises StaleRevision if the conversation is not at the expected revision.
        """
        self._store.rewind_conversation(
            conversation_id, to_revision, expected_revision, tenant=tenant
        )
        return self._store.get_conversation(conversation_id, tenant=tenant)

    def delete_last(
        self, seen: records.StoredConversation, pending: Sequence[records.NewMessage]
    ) -> LastDeleted:
        """Delete the last message. Raises StaleRevision if the conversation or `pending` have changed."""
        conversation_id, tenant = seen.conversation_id, seen.tenant
        return self._store.changes.delete_last(
            conversation_id, seen.revision, seen.created_at, pending, tenant=tenant
        )

    def delete(
        self,
        conversation_id: str,
        tenant: str = "",
        unused_since: int | None = None,
        unchanged: records.StoredConversation | None = None,
    ) -> Deleted:
        """Interrupt the running turn of a conversation and delete the conversation, in one job.

        With `unused_since` (a revision) or `unchanged`, raises StaleRevision if a turn runs or the
        conversation has changed since. If the deletion fails, the turn is interrupted anyway. So the error is
        returned together with the turn. A conversation that does not exist may still have to be erased from
        the files.
        """
        try:
            conversation = self._store.get_conversation(conversation_id, tenant=tenant)
        except NotFound as error:
            return Deleted(None, error, self._store.erasure.pending)
        turn_id = conversation.running_turn_id
        expected = unchanged.revision if unchanged is not None else unused_since
        if expected is not None and (turn_id, conversation.revision) != (None, expected):
            raise StaleRevision(expected, conversation.revision)
        self.forget(tenant, conversation_id)
        try:
            if turn_id is not None:
                self._store.erasure.run_deletion(lambda: self.interrupt(turn_id))
            self._store.delete_conversation(conversation_id, tenant=tenant, unchanged=unchanged)
        except ErasurePending:
            return Deleted(turn_id, None, True)
        except (OwnedElsewhere, StaleRevision):
            raise  # nothing was done: another daemon owns the conversation, or the conversation has changed
        except PensieveError as error:
            return Deleted(turn_id, error, False)
        return Deleted(turn_id, None, False)

    def forget(self, tenant: str, conversation_id: str) -> None:
        """Drop the memory of a conversation that was deleted, or that another daemon has written to."""
        self._tokenized_again.discard((tenant, conversation_id))

    def finish_erasure(self) -> None:
        """Erase deleted text from the files. Raises ErasurePending if that is not possible yet."""
        self._store.erasure.finish()

    def warm(
        self, conversation_id: str, attempt_id: int, cache_salt: str = "", *, tenant: str = ""
    ) -> SubmitTurn | OutdatedTokens | None:
        """Make the message that brings the conversation's KV to the device.

        Returns None if there is no log, or if a turn runs and brings the KV itself.
        """
        self._store.claim(conversation_id, tenant=tenant)
        conversation = self._store.get_conversation(conversation_id, tenant=tenant)
        if conversation.fingerprint != self._fingerprint:
            return self._outdated(conversation)
        length = conversation.num_tokens
        if not length or conversation.running_turn_id is not None:
            return None
        key = cache_key(tenant, conversation_id)
        return SubmitTurn(
            *(attempt_id, key, b"", length),
            warm=True,
            first_position=length,
            root=self.root_of(tenant, cache_salt),
        )

    def root_of(self, tenant: str, cache_salt: str = "") -> str:
        """Return the root of the identities of a tenant's chunks (core/identities.py).

        The root also covers the fingerprint of tokenizer and template. This is not necessary, because KV
        depends only on the tokens, but it costs nothing. The salt is random, so nobody can guess an identity.
        If the salt cannot be read, the root is `interim_root`, because a turn that leaves nothing on disk
        must not need the disk.
        """
        if (root := self.roots.get(tenant)) is None:
            try:
                salt = self._store.salt_of(tenant)
            except Exception as error:  # the next call tries again
                if tenant not in self._interim_roots:
                    self._report(f"the salt of tenant {tenant!r} cannot be read: {one_line(error)}")
                root = self.interim_root(tenant)
            else:
                root = self.roots[tenant] = self._root(salt)
        return salted(root, cache_salt)

    def interim_root(self, tenant: str) -> str:
        """Return a root that stands in until the tenant's salt can be read. Thread-safe."""
        root = self._interim_roots.get(tenant)
        if root is None:
            drawn = self._random_bits(8 * ROOT_BYTES).to_bytes(ROOT_BYTES)
            root = self._interim_roots.setdefault(tenant, self._root(drawn))
        return root

    def _root(self, salt: bytes) -> str:
        return blake2b(salt + self._fingerprint.encode(), digest_size=ROOT_BYTES).hexdigest()

    def log_for(self, needed: LogNeeded) -> ProvideLog:
        """Make the message with the tokens that the engine asks for before it runs a turn.

        Raises TurnInterrupted if the log has changed. While a turn runs, the log changes only if the turn is
        given up. While a warm runs, the log may change at any time.
        """
        tenant, conversation_id = names_of(needed.conversation_id)
        try:
            log = self._store.log(conversation_id, needed.num_tokens, tenant=tenant)
        except NotFound:
            log = array("I")
        if len(log) != needed.num_tokens:
            raise TurnInterrupted("the conversation changed before the turn could run")
        return ProvideLog(needed.attempt_id, log.tobytes())

    # -- a turn begins --

    def find_retried(self, request: TurnRequest) -> RetriedTurn | None:
        """Return the turn that this request retries. Raises InvalidArgument if that turn had other content.

        Returns None if there is no such turn, or if the turn failed or was interrupted, so that it may begin
        again. No turn runs because of this call: if the store has begun the turn again, it is interrupted.
        """
        stored = self._store.find_turn(
            request.conversation_id, request.request_id, tenant=request.tenant
        )
        return self._retried_if_known(request, stored)

    def begin_if_short(
        self, request: TurnRequest, short_characters: int
    ) -> StartedTurn | RetriedTurn | Draft | OutdatedTokens:
        """Find the turn that this request retries, or draft a turn (`draft`).

        If there is little to tokenize, begin the turn too, which saves two changes of thread.
        """
        drafted = self.draft(request)
        if not isinstance(drafted, Draft) or drafted.num_characters > short_characters:
            return drafted
        if request.options.constraint is not None and not self._constraints.knows(request.options):
            return drafted
        return self.begin(drafted, drafted.prompt())

    def draft(self, request: TurnRequest) -> Draft | RetriedTurn | OutdatedTokens:
        """Read what is needed to tokenize the new messages, or find the turn that this request retries."""
        self._check_request(request)
        conversation_id, tenant = request.conversation_id, request.tenant
        try:
            conversation, stored, log_end = self._store.look_up(
                conversation_id, request.request_id, PROMPT_TAIL_TOKENS, tenant=tenant
            )
        except NotFound:
            if not request.create_if_missing:
                raise
            return self._draft_opening(request)
        if conversation.fingerprint != self._fingerprint:
            return self._outdated(conversation)
        if (retried := self._retried_if_known(request, stored)) is not None:
            return retried
        if conversation.running_turn_id is not None:
            raise TurnRunning(conversation_id, str(conversation.running_turn_id))
        if request.expected_revision not in (None, conversation.revision):
            raise StaleRevision(request.expected_revision, conversation.revision)
        self._check_storage(tenant)
        head = list[records.StoredMessage]()
        if conversation.num_messages and not self.declared.has_turns(conversation):
            head = self._store.messages(conversation_id, tenant=tenant)
        return Draft(request, conversation, log_end, head, *self._draft_parts)

    def _draft_opening(self, request: TurnRequest) -> Draft | RetriedTurn | OutdatedTokens:
        """Draft the first turn of a conversation that does not exist yet."""
        self._check_storage(request.tenant)
        if request.expected_revision not in (None, 0):
            raise StaleRevision(request.expected_revision, 0)
        settings = replace(
            request.settings, conversation_id=request.conversation_id, tenant=request.tenant
        )
        if settings.prefix_id and (begun := self.declared.begin(settings)) is not None:
            return begun if isinstance(begun, OutdatedTokens) else self.draft(request)
        new, conversation, head = planned_conversation(
            settings, self._fingerprint, self._store.now()
        )
        return Draft(request, conversation, array("I"), head, *self._draft_parts, new)

    def renew(self, outdated: OutdatedTokens, tokens: Sequence[Sequence[int]]) -> None:
        """Replace the tokens of a conversation's log. Does nothing if the conversation has changed since."""
        conversation = outdated.conversation
        conversation_id, tenant = conversation.conversation_id, conversation.tenant
        if self._store.get_conversation(conversation_id, tenant=tenant) != conversation:
            return
        self._store.replace_log(conversation_id, self._fingerprint, tokens, tenant=tenant)
        self._tokenized_again.add((tenant, conversation_id))
        self._report(
            f"conversation {conversation_id} was written under another tokenizer or template; "
            f"its {len(tokens)} messages were tokenized again"
        )

    def begin(self, draft: Draft, prompt: Sequence[Sequence[int]]) -> StartedTurn | RetriedTurn:
        """Commit the turn as `running`.

        Raises StaleRevision if the conversation has changed since the draft.
        """
        request, conversation = draft.request, draft.conversation
        conversation_id, tenant = conversation.conversation_id, conversation.tenant
        tokens = array("I")
        for token_ids in prompt:
            tokens.extend(token_ids)
        history_tokens = conversation.num_tokens
        if history_tokens + len(tokens) >= self._context_max:
            raise ContextFull(history_tokens + len(tokens) + 1, self._context_max)
        if draft.new is not None:
            try:
                self._store.create_conversation(draft.new)
            except PrefixTaken:
                raise
            except AlreadyExists:  # another request took the name; `begin_turn` refuses the draft
                pass
        request_id = request.request_id or f"{self._random_bits(128):032x}"
        new_turn = replace(
            self._new_turn(request, request_id, prompt),
            expected_revision=conversation.revision,
            expected_created_at=conversation.created_at,
        )
        # Read before the commit, because an error after the commit would leave a turn that nobody runs.
        root = self.root_of(tenant, request.cache_salt)
        submitted, first_position = tokens, history_tokens
        if draft.head and history_tokens:  # the first turn: the engine does not have the log yet
            submitted = self._store.log(conversation_id, history_tokens, tenant=tenant) + tokens
            first_position = 0
        begun = self._store.begin_turn(conversation_id, new_turn, tenant=tenant)
        if not begun.must_run:
            return self._with_reply(begun.turn)
        key = (tenant, conversation_id)
        is_tokenized_again = key in self._tokenized_again
        self._tokenized_again.discard(key)
        sampling = replace(request.options.sampling, seed=begun.turn.seed)
        return StartedTurn(
            begun.turn,
            request,
            SubmitTurn(
                NO_ATTEMPT_ID,
                cache_key(tenant, conversation.conversation_id),
                submitted.tobytes(),
                history_tokens,
                replace(request.options, sampling=sampling),
                first_position=first_position,
                root=root,
            ),
            conversation.revision,
            (draft.log_end + tokens)[-PROMPT_TAIL_TOKENS:],
            conversation.updated_at,
            is_tokenized_again,
        )

    # -- a turn ends --

    def finish(self, reply: TurnReply) -> CommittedReply:
        """Append the turn's messages and its reply to the log, on the disk."""
        text = reply.text
        if reply.is_cut:
            tokenizer, token_ids = self._template.tokenizer, list(reply.token_ids)
            text = tokenizer.decode(token_ids, is_first=not reply.begins)
        content = reply.begins + text
        message = records.NewMessage(
            "assistant", content, reply.token_ids, "", reply.stream, reply.logprobs
        )
        state = reply.state if reply.chain is None else reply.chain.state(content, reply.stream)
        revision = self._store.finish_turn(
            *(reply.turn_id, message, reply.finish.value, reply.figures, state, reply.response),
            reply.attempt,
        )
        return CommittedReply(revision, text[len(reply.text) :])

    def fail(self, turn_id: int, reason: str, attempt: int = 0) -> None:
        self._store.fail_turn(turn_id, reason, attempt)

    def interrupt(self, turn_id: int, attempt: int = 0) -> None:
        self._store.interrupt_turn(turn_id, attempt)

    # -- inside --

    def _check_storage(self, tenant: str) -> None:
        """Raise StorageFull if the tenant is at its limit. Replies of running turns are stored anyway."""
        bytes_max = self._storage.get(tenant)
        if bytes_max is not None and (num_bytes := self._store.stored_bytes(tenant)) >= bytes_max:
            raise StorageFull(
                f"the conversations of your tenant take {num_bytes:,} of {bytes_max:,} bytes; delete some"
            )

    def _check_request(self, request: TurnRequest) -> None:
        if (problem := request.options.sampling.problem(self._vocab_size)) is not None:
            raise InvalidArgument(f"sampling.{problem[0]}", problem[1])
        for message in request.messages:
            if message.role == "user" and not message.content:
                raise InvalidArgument("content", "a message must not be empty")
        check_length("content", request.num_characters, self._context_max)
        check_salt(request.cache_salt)

    def _outdated(self, conversation: records.StoredConversation) -> OutdatedTokens:
        conversation_id, tenant = conversation.conversation_id, conversation.tenant
        if conversation.running_turn_id is not None:
            raise TurnRunning(conversation_id, str(conversation.running_turn_id))
        messages = self._store.messages(conversation_id, tenant=tenant)
        return OutdatedTokens(conversation, messages, self._template, self.heads)

    def _new_turn(
        self, request: TurnRequest, request_id: str, prompt: Sequence[Sequence[int]] | None = None
    ) -> records.NewTurn:
        seed = request.options.sampling.seed or self._random_bits(63) + 1
        return request.new_turn(request_id, seed, prompt)

    def _retried_if_known(
        self, request: TurnRequest, stored: records.StoredTurn | None
    ) -> RetriedTurn | None:
        """Return the stored turn with this request_id for a retry; None if it may begin (again)."""
        if stored is None or stored.state not in records.NOT_RESTARTED_STATES:
            return None
        # `begin_turn` begins nothing for a turn in these states, but compares the content.
        new_turn = self._new_turn(request, request.request_id)
        begun = self._store.begin_turn(request.conversation_id, new_turn, tenant=request.tenant)
        if begun.must_run and begun.turn.attempts != stored.attempts:
            # The turn was interrupted in between, so the store has begun it again. Undo this, because
            # nobody would run the turn.
            self._store.interrupt_turn(begun.turn.turn_id, begun.turn.attempts)
        return self._with_reply(begun.turn)

    def _with_reply(self, turn: records.StoredTurn) -> RetriedTurn:
        if turn.state is records.StoredTurnState.RUNNING:
            return RetriedTurn(turn, None)
        reply = self._store.turn_messages(turn.turn_id).reply
        assert reply is not None
        return RetriedTurn(turn, reply)


class PrefixHistory:
    """Store declared prefixes, and begin conversations under them.

    A prefix is stored as a conversation, and a warm brings its KV to the device under that conversation's
    `cache_key`. Conversations under the prefix find its KV by its content, like any other KV.
    """

    def __init__(
        self,
        store: ConversationStore,
        fingerprint: str,
        outdated: Callable[[records.StoredConversation], OutdatedTokens],
        check_storage: Callable[[str], None],
    ) -> None:
        self._store = store
        self._check_storage = check_storage
        self._fingerprint = fingerprint
        self._outdated = outdated

    def declare(
        self,
        settings: PrefixSettings,
        tokens: Sequence[Sequence[int]],
        template_time: float,
        prefixes_max: int,
    ) -> records.StoredPrefix:
        """Store a prefix with the tokens of each message.

        Raises StorageFull if the tenant already has `prefixes_max` prefixes.
        """
        self._check_storage(settings.tenant)
        given = all_messages(settings)
        messages = (
            stored_messages(given, tokens) if given else [replace(STAND_IN, token_ids=tokens[0])]
        )
        if self._store.prefixes.num_of(settings.tenant) >= prefixes_max:
            raise StorageFull(f"your tenant may have {prefixes_max} prefixes; delete some")
        return self._store.prefixes.declare(
            records.NewPrefix(
                settings.prefix_id,
                self._fingerprint,
                messages,
                list(settings.tools),
                dict(settings.template_options),
                settings.keep_warm,
                template_time,
                settings.tenant,
            )
        )

    def begin(
        self, settings: ConversationSettings
    ) -> records.StoredConversation | OutdatedTokens | None:
        """Create a conversation that begins with its declared prefix.

        Returns None if no such prefix is declared. Returns OutdatedTokens if the prefix was tokenized under
        another tokenizer or template.
        """
        found = self._store.prefixes.find(settings.prefix_id, tenant=settings.tenant)
        if found is None:
            return None
        if settings.system_prompt or settings.tools or settings.template_options:
            raise PrefixTaken(
                f"prefix {settings.prefix_id!r} was declared with its own system prompt, tools and "
                "template options; leave these out"
            )
        if found.conversation.fingerprint != self._fingerprint:
            return self._outdated(found.conversation)
        return self._store.prefixes.begin(
            records.NewConversation(
                settings.conversation_id,
                self._fingerprint,
                metadata=dict(settings.metadata),
                prefix_id=settings.prefix_id,
                tenant=settings.tenant,
                pending=settings.pending,
            )
        )

    def begin_with_history(
        self,
        settings: ConversationSettings,
        tokens: Sequence[Sequence[int]],
        template_time: float,
    ) -> records.StoredConversation:
        """Create a conversation with the messages of its settings; `tokens`: the tokens of each message."""
        self._check_storage(settings.tenant)
        return self._store.create_conversation(
            records.NewConversation(
                settings.conversation_id,
                self._fingerprint,
                stored_messages(all_messages(settings), tokens),
                list(settings.tools),
                dict(settings.template_options),
                dict(settings.metadata),
                tenant=settings.tenant,
                began_at=template_time,
                pending=settings.pending,
            )
        )

    def to_keep_warm(self) -> list[tuple[str, str]]:
        """Return (tenant, id) of each prefix that is to be kept warm."""
        return self._store.prefixes.to_keep_warm()

    def has_turns(self, conversation: records.StoredConversation) -> bool:
        """Whether the conversation has messages after its head."""
        if conversation.began_at is None:  # the head has no tokens
            return conversation.num_tokens > 0
        return self._store.prefixes.has_turns(conversation)
