"""Conversations: where text, history and engine meet.

One object serves `pensieve chat`, the tests and the daemon.  It has no thread, lock or socket: its
owner calls it from one thread and hands it the engine's events.

A turn, in order:

1. `send` reads the end of the log, renders and tokenises the *delta* of the new messages (nothing else is
   ever rendered), checks that it fits, commits the turn as `running`, and submits the delta to the
   engine, which asks for the log where it does not know it.
2. `handle` takes the engine's events.  Deltas are collected on the `LiveTurn`; with the last one,
   ONE transaction appends the user's and the reply's tokens to the log, and only then is the turn
   done.  A turn that fails or is interrupted leaves the history as it was.
3. A request_id that was completed before is answered from the store and computes nothing.

After `cancel` no further token is delivered, and the log ends at the last one that was.

The engine may hold KV for tokens that never reached the log (a turn that failed in the store, say).
That does no harm: a turn says how long its conversation's log is, and the engine cuts behind it.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import count
from typing import Any, Protocol

from pensieve.core.iteration import SampledToken
from pensieve.core.sampling import Sampling
from pensieve.core.turn import FinishReason, TurnOptions
from pensieve.engine.messages import (
    CancelTurn,
    DeleteConversation,
    Event,
    ForkConversation,
    LogNeeded,
    ProvideLog,
    RewindConversation,
    SubmitTurn,
    TurnEnded,
)
from pensieve.engine.messages import Message as EngineMessage
from pensieve.errors import (
    ContextFull,
    InvalidArgument,
    NotFound,
    PensieveError,
    QueueFull,
    StaleRevision,
    TurnFailed,
    TurnInterrupted,
    TurnRunning,
    Unavailable,
)
from pensieve.service.live_turn import (
    Ask,
    Draft,
    LiveTurn,
    RecomputeReason,
    cache_key,
    message_of,
    new_message,
    opening,
    setting_of,
    usage_figures,
)
from pensieve.service.prefixes import TOKENS_MAX as SHARED_TOKENS_MAX
from pensieve.service.prefixes import Prefixes
from pensieve.store import records
from pensieve.store.conversation_store import ConversationStore
from pensieve.text import ChatTemplate, Message, Part, PartMarker, Setting

BYTES_PER_TOKEN_MAX = 16  # longer text is refused before it is tokenised
PROMPT_TAIL_TOKENS = 16  # a template may open the thinking in the generation prompt
KNOWN_STATES = frozenset(
    {records.TurnState.RUNNING, records.TurnState.COMPLETED, records.TurnState.CANCELLED}
)


class MessageSink(Protocol):
    """Where messages for the engine go: a mailbox, or a pipe to another process."""

    def put(self, message: EngineMessage) -> None: ...


class Conversations:
    def __init__(
        self,
        store: ConversationStore,
        template: ChatTemplate,
        mailbox: MessageSink,
        *,
        context_max: int,
        vocab_size: int,
        fingerprint: str,
        defaults: Sampling | None = None,
        report: Callable[[str], None] = lambda line: None,
        wall_clock: Callable[[], float] = time.time,
        random_bits: Callable[[int], int] = secrets.randbits,
        on_end: Callable[[LiveTurn], None] = lambda live: None,
    ) -> None:
        """`on_end` is told of each turn that has finished, in whatever thread that happened.

        `random_bits` draws the seeds and the request ids that clients leave to us.
        """
        self.store = store
        self.template = template
        self.context_max = context_max
        template.tokenizer.tokens_max = context_max
        self.defaults = defaults or Sampling()
        self.engine_since = wall_clock()  # KV of earlier turns is gone
        self._mailbox = mailbox
        self._vocab_size = vocab_size
        self._fingerprint = fingerprint
        self._report = report
        self._random_bits = random_bits
        self._on_end = on_end
        self._live: dict[int, LiveTurn] = {}  # by the number that the engine knows them by
        self._numbers = count(1)
        self._prefixes = Prefixes()
        self._translated: set[tuple[str, str]] = set()  # since their last turn

    # -- conversations --

    def create(
        self,
        conversation_id: str,
        *,
        system_prompt: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        template_options: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        prefix_id: str = "",
        tenant: str = "",
    ) -> records.Conversation:
        """The system prompt's tokens come with the first turn: templates differ in where it goes."""
        options = dict(template_options or {})
        head = [Message("system", system_prompt)] if system_prompt else []
        self._check_length(len(system_prompt))
        if head or tools or options:
            # A dry run tells at once whether the template takes them.
            self.template.opening([*head, Message("user", "?")], Setting(tools, options))
        return self.store.create_conversation(
            records.NewConversation(
                conversation_id,
                self._fingerprint,
                [records.NewMessage("system", system_prompt)] if system_prompt else [],
                list(tools),
                options,
                dict(metadata or {}),
                prefix_id,
                tenant,
            )
        )

    def fork(
        self,
        source_id: str,
        new_id: str,
        at_revision: int | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        tenant: str = "",
    ) -> records.Conversation:
        if at_revision is None:
            at_revision = self.store.get_conversation(source_id, tenant=tenant).revision
        fork = self.store.fork_conversation(
            source_id, at_revision, new_id, metadata=metadata, tenant=tenant
        )
        self._tell(
            ForkConversation(
                cache_key(tenant, source_id), fork.num_tokens, cache_key(tenant, new_id)
            )
        )
        return fork

    def rewind(
        self, conversation_id: str, to_revision: int, *, tenant: str = ""
    ) -> records.Rewound:
        self._prefixes.forget(tenant, conversation_id)
        rewound = self.store.rewind_conversation(conversation_id, to_revision, tenant=tenant)
        self._tell(RewindConversation(cache_key(tenant, conversation_id), rewound.num_tokens))
        return rewound

    def delete(self, conversation_id: str, *, tenant: str = "") -> None:
        conversation = self.store.get_conversation(conversation_id, tenant=tenant)
        if conversation.running_turn_id is not None:
            self.interrupt(conversation.running_turn_id)
        self._tell(DeleteConversation(cache_key(tenant, conversation_id)))
        self._translated.discard((tenant, conversation_id))
        self._prefixes.forget(tenant, conversation_id)
        self.store.delete_conversation(conversation_id, tenant=tenant)

    def warm(self, conversation_id: str, *, tenant: str = "") -> None:
        """Ask the engine to bring the conversation's KV to the device; best effort."""
        conversation = self._current(conversation_id, tenant)
        length = conversation.num_tokens
        if length and conversation.running_turn_id is None:
            key = cache_key(tenant, conversation_id)
            self._tell(
                SubmitTurn(next(self._numbers), key, b"", length, warm=True, first_position=length)
            )

    def provide_log(self, needed: LogNeeded) -> None:
        """Tell the engine the tokens that it does not know.

        It asks before it runs a turn, so the log is still as long as it was when the turn was submitted; a
        warm's may have changed meanwhile, and then that is ended.
        """
        tenant, _, conversation_id = needed.conversation_id.rpartition("/")
        try:
            log = self.store.log(conversation_id, needed.num_tokens, tenant=tenant)
        except NotFound:
            log = array("I")
        if len(log) == needed.num_tokens:
            self._tell(ProvideLog(needed.turn_id, log.tobytes()))
        else:
            self._tell(CancelTurn(needed.turn_id, 0))

    # -- turns --

    def send(
        self,
        conversation_id: str,
        messages: Sequence[Message] | str,
        *,
        request_id: str | None = None,
        sampling: Sampling | None = None,
        expected_revision: int | None = None,
        tenant: str = "",
    ) -> LiveTurn:
        """Begin a turn; `handle` the engine's events until its `finish` is set."""
        if isinstance(messages, str):
            messages = [Message("user", messages)]
        return self.say(
            Ask(
                conversation_id,
                tuple(messages),
                TurnOptions(sampling or self.defaults),
                tenant,
                request_id or "",
                expected_revision,
            )
        )

    def say(self, ask: Ask) -> LiveTurn:
        """Draft, tokenise and begin in one go."""
        drafted = self.draft(ask)
        return drafted if isinstance(drafted, LiveTurn) else self.begin(drafted, drafted.prompt())

    def draft(self, ask: Ask) -> Draft | LiveTurn:
        """Look up what a turn goes on from; the turn itself where its request_id is known already."""
        self._check(ask)
        conversation_id, tenant = ask.conversation_id, ask.tenant
        try:
            conversation = self._current(conversation_id, tenant)
        except NotFound:
            if not ask.create_if_missing:
                raise
            conversation = self.create(conversation_id, tenant=tenant)
        fresh = not conversation.revision and conversation.running_turn_id is None
        if ask.request_id and not fresh:
            stored = self.store.find_turn(conversation_id, ask.request_id, tenant=tenant)
            if stored is not None and stored.state in KNOWN_STATES:
                request = self._request(ask, ask.request_id, None, ask.expected_revision)
                begun = self.store.begin_turn(conversation_id, request, tenant=tenant)
                assert not begun.must_run
                return self._known(begun.turn)
        if conversation.running_turn_id is not None:
            raise TurnRunning(conversation_id, str(conversation.running_turn_id))
        if ask.expected_revision not in (None, conversation.revision):
            raise StaleRevision(ask.expected_revision, conversation.revision)
        log_end, head = array("I"), None
        if conversation.num_tokens:
            log_end = self.store.log_end(conversation_id, PROMPT_TAIL_TOKENS, tenant=tenant)
        elif conversation.num_messages:
            (head,) = self.store.messages(conversation_id, 0, 1, tenant=tenant)
        return Draft(ask, conversation, log_end, head, self.template)

    def begin(self, draft: Draft, prompt: Sequence[Sequence[int]]) -> LiveTurn:
        """Commit the turn and submit it; StaleRevision if the conversation has moved on meanwhile."""
        ask, conversation = draft.ask, draft.conversation
        conversation_id, tenant = conversation.conversation_id, conversation.tenant
        num_prompt = sum(len(token_ids) for token_ids in prompt)
        history_tokens = conversation.num_tokens
        if history_tokens + num_prompt >= self.context_max:
            raise ContextFull(history_tokens + num_prompt + 1, self.context_max)
        request_id = ask.request_id or f"{self._random_bits(128):032x}"
        request = self._request(ask, request_id, prompt, conversation.revision)
        begun = self.store.begin_turn(conversation_id, request, tenant=tenant)
        if not begun.must_run:
            return self._known(begun.turn)
        tokens = array("I")
        for token_ids in prompt:
            tokens.extend(token_ids)
        log = None  # its beginning, where another conversation may share it
        if conversation.prefix_id:
            log = self._log_beginning(conversation, tokens)
        live = LiveTurn(
            begun.turn.turn_id,
            conversation_id,
            history_tokens,
            num_prompt,
            tenant=tenant,
            number=next(self._numbers),
            request_id=request_id,
            first_revision=conversation.revision,
            attempt=begun.turn.attempts,
            recompute_reason=self._why_recompute(conversation),
            marker=PartMarker(
                self.template.tokenizer, (draft.log_end + tokens)[-PROMPT_TAIL_TOKENS:]
            ),
            prefix_id=conversation.prefix_id,
            log=log,
        )
        shared = None
        if log is not None and not history_tokens:
            shared = self._prefixes.shared(tenant, conversation.prefix_id, log)
        self._live[live.number] = live
        try:
            self._mailbox.put(
                SubmitTurn(
                    live.number,
                    cache_key(tenant, conversation_id),
                    tokens.tobytes(),
                    history_tokens,
                    replace(
                        ask.options,
                        sampling=replace(ask.options.sampling, seed=begun.turn.seed),
                    ),
                    first_position=history_tokens,
                    prefix_of=cache_key(tenant, shared.conversation_id) if shared else "",
                    prefix_tokens=shared.num_tokens if shared else 0,
                )
            )
        except Unavailable as error:
            self.fail(live, error)
            raise
        except BaseException:
            self.interrupt(live.turn_id)
            raise
        return live

    def cancel(self, live: LiveTurn) -> None:
        """End a turn and keep what was delivered; the turn is done when `handle` says so."""
        if live.finish is None and not live.cancelled:
            live.cancelled = True
            keep = live.history_tokens + live.prompt_tokens + live.num_tokens
            self._tell(CancelTurn(live.number, keep))

    def interrupt(self, turn_id: int) -> None:
        """End a turn and keep nothing of it: nobody waits for it any more."""
        for live in list(self._live.values()):
            if live.turn_id == turn_id:
                del self._live[live.number]
                self._tell(CancelTurn(live.number, live.history_tokens))
                live.failure = TurnInterrupted(
                    "the turn was given up; its conversation is unchanged"
                )
                live.finish = FinishReason.CANCELLED
                self._on_end(live)
        self.store.interrupt_turn(turn_id)

    def fail(self, live: LiveTurn, failure: PensieveError) -> None:
        """End a turn that the engine will never end; the history stays as it was."""
        if self._live.pop(live.number, None) is not None:
            live.failure = failure
            live.finish = FinishReason.FAILED
            self._on_end(live)
            self.store.interrupt_turn(live.turn_id)

    def handle(self, event: Event) -> LiveTurn | None:
        """Take in one event of the engine; the turn that it concerns, if somebody reads it."""
        if isinstance(event, SampledToken):
            return self.deliver(event)
        if isinstance(event, LogNeeded):
            self.provide_log(event)
        if isinstance(event, TurnEnded) and (live := self._live.get(event.turn_id)) is not None:
            self.settle(live, event)
            return live
        return None

    def deliver(self, token: SampledToken) -> LiveTurn | None:
        """Append a token to its turn, unless it was cancelled; touches no disk."""
        live = self._live.get(token.turn_id)
        if live is not None and not live.cancelled:
            live.take(token)
        return live

    def live(self, number: int) -> LiveTurn | None:
        """A turn by the number that the engine knows it by."""
        return self._live.get(number)

    def running(self, conversation_id: str, *, tenant: str = "") -> LiveTurn | None:
        """The turn that a conversation runs in this process."""
        for live in list(self._live.values()):
            if live.conversation_id == conversation_id and live.tenant == tenant:
                return live
        return None

    def all_live(self) -> list[LiveTurn]:
        return list(self._live.values())

    @property
    def num_live(self) -> int:
        return len(self._live)

    def engine_restarted(self, now: float) -> None:
        """Whatever KV there was is gone."""
        self.engine_since = now

    # -- beginnings --

    def _check(self, ask: Ask) -> None:
        if (problem := ask.options.sampling.problem(self._vocab_size)) is not None:
            raise InvalidArgument(f"sampling.{problem[0]}", problem[1])
        for message in ask.messages:
            if message.role == "user" and not message.content:
                raise InvalidArgument("content", "a message must not be empty")
        self._check_length(ask.num_characters)

    def _check_length(self, size: int) -> None:
        limit = BYTES_PER_TOKEN_MAX * self.context_max
        if size > limit:
            raise InvalidArgument(
                "content",
                f"{size:,} characters cannot fit a context of {self.context_max:,} tokens",
            )

    def _log_beginning(self, conversation: records.Conversation, prompt: array[int]) -> array[int]:
        """Of a conversation with this prompt behind it: as much as may be shared."""
        log = array("I")
        if conversation.num_tokens:
            log = self.store.log(
                conversation.conversation_id, SHARED_TOKENS_MAX, tenant=conversation.tenant
            )
        return (log + prompt)[:SHARED_TOKENS_MAX]

    def _request(
        self,
        ask: Ask,
        request_id: str,
        prompt: Sequence[Sequence[int]] | None,
        expected_revision: int | None,
    ) -> records.TurnRequest:
        messages, sampling = ask.messages, ask.options.sampling
        tokens = prompt or [[] for _ in messages]
        values = {name: value for name, value in asdict(sampling).items() if name != "seed"}
        return records.TurnRequest(
            request_id,
            [new_message(message, ids) for message, ids in zip(messages, tokens, strict=True)],
            values | ({"seed": sampling.seed} if sampling.seed else {}),
            sampling.seed or self._random_bits(63) + 1,
            expected_revision,
        )

    def _current(self, conversation_id: str, tenant: str) -> records.Conversation:
        """The conversation, its tokens being those of the present tokenizer and template."""
        conversation = self.store.get_conversation(conversation_id, tenant=tenant)
        if conversation.fingerprint == self._fingerprint:
            return conversation
        if conversation.running_turn_id is not None:
            raise TurnRunning(conversation_id, str(conversation.running_turn_id))
        stored = self.store.messages(conversation_id, tenant=tenant)
        self._report(
            f"conversation {conversation_id} was written under another tokenizer or template; "
            f"tokenising its {len(stored)} messages again"
        )
        setting = setting_of(conversation)
        tokens: list[list[int]] = []
        waiting: list[records.Message] = []  # since the last reply
        last_token_id: int | None = None
        for message in stored:
            if message.finish_reason is None:
                waiting.append(message)
                continue
            said = [message_of(each) for each in waiting]
            if last_token_id is None and not any(tokens):
                tokens += opening(self.template, said, setting)
            else:
                delta = self.template.delta(said, last_token_id, setting)
                tokens += [delta.token_ids[start:stop] for start, stop in delta.spans]
            reply = list(self.template.tokenizer.encode(message.content).ids)
            if message.finish_reason == FinishReason.STOP and self.template.end_id is not None:
                reply.append(self.template.end_id)
            tokens.append(reply)
            last_token_id = reply[-1] if reply else None
            waiting = []
        tokens += [[] for _ in waiting]  # a system prompt without a turn yet
        self._translated.add((tenant, conversation_id))
        self._prefixes.forget(tenant, conversation_id)
        return self.store.replace_log(conversation_id, self._fingerprint, tokens, tenant=tenant)

    def _why_recompute(self, conversation: records.Conversation) -> RecomputeReason:
        """Should KV be missing: the latest thing that made it go."""
        key = (conversation.tenant, conversation.conversation_id)
        if key in self._translated:
            self._translated.discard(key)
            return RecomputeReason.FINGERPRINT_CHANGED
        if conversation.updated_at < self.engine_since:
            return RecomputeReason.ENGINE_RESTARTED
        return RecomputeReason.DROPPED

    def _tell(self, message: EngineMessage) -> None:
        """Of what the store has done already.  Should it not arrive, KV is missing or unused; no turn
        is wrong for it, since each says how long its log is."""
        with contextlib.suppress(Unavailable, QueueFull):
            self._mailbox.put(message)

    # -- ends --

    def settle(self, live: LiveTurn, ended: TurnEnded) -> None:
        """The engine has ended a turn: commit it, or record that it failed."""
        if self._live.pop(live.number, None) is None:
            return
        live.usage = ended.usage
        finish = ended.finish
        if finish is FinishReason.FAILED:
            reason = ended.failure or "FAILED"
            live.failure = _failure(reason)
            self.store.fail_turn(live.turn_id, reason)
        else:
            if live.cancelled:
                finish = FinishReason.CANCELLED
            text = live.text
            if (
                live.cancelled and ended.finish is not FinishReason.STOP
            ):  # what might have become a stop string is text now
                text = self.template.tokenizer.decode(live.token_ids)
                live.tail = text[len(live.text) :]
            reply = records.NewMessage("assistant", text, live.token_ids)
            figures = usage_figures(ended.usage)
            if ended.usage.recomputed_tokens:
                live.figures["recompute_reason"] = live.recompute_reason
            live.figures.update(figures)
            live.revision = self.store.finish_turn(live.turn_id, reply, finish.value, live.figures)
            if live.log is not None:
                self._prefixes.remember(live.tenant, live.prefix_id, live.conversation_id, live.log)
        live.finish = finish
        self._on_end(live)

    def _known(self, stored: records.StoredTurn) -> LiveTurn:
        """A turn whose request_id came before: the one that runs, or what the store kept of it."""
        for live in list(self._live.values()):
            if live.turn_id == stored.turn_id:
                return live
        if stored.state is records.TurnState.RUNNING:
            raise TurnRunning(stored.conversation_id, str(stored.turn_id))
        return self._replay(stored)

    def _replay(self, stored: records.StoredTurn) -> LiveTurn:
        reply = self.store.turn_messages(stored.turn_id).reply
        assert reply is not None
        assert stored.finish_reason is not None
        live = LiveTurn(
            stored.turn_id,
            stored.conversation_id,
            0,
            0,
            replayed=True,
            tenant=stored.tenant,
            request_id=stored.request_id,
            attempt=stored.attempts,
            figures=dict(stored.usage),
        )
        live.token_ids = list(reply.token_ids)
        live.texts = [reply.content]
        live.parts = [Part.TEXT] * live.num_tokens
        live.revision = stored.revision
        live.first_revision = (stored.revision or 1) - 1
        live.finish = FinishReason(stored.finish_reason)
        return live


def _failure(reason: str) -> PensieveError:
    """What a reader is told when the engine could not finish a turn."""
    if reason == "QUEUE_FULL":
        return QueueFull("too many turns are waiting; try again later")
    if reason in ("ENGINE_FAILED", "TURN_RUNNING"):
        return Unavailable("the engine could not run the turn; the conversation is unchanged")
    text = f"the turn failed ({reason}); the conversation is unchanged"
    if reason == "NAN_LOGITS":
        text = "the model computed values that are not numbers; the conversation is unchanged"
    return TurnFailed(reason, text)
