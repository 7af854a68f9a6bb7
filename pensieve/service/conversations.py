"""Conversations: where text, history and engine meet.

One object serves `pensieve chat`, the tests and the daemon.  It has no thread, lock or socket: its
owner calls it from one thread and hands it the engine's events.

A turn, in order:

1. `send` reads the log, renders and tokenises the *delta* of the new messages (nothing else is ever
   rendered), checks that it fits, commits the turn as `running`, and submits the whole log with the
   delta to the engine.
2. `handle` takes the engine's events.  Deltas are collected on the `LiveTurn`; with the last one,
   ONE transaction appends the user's and the reply's tokens to the log, and only then is the turn
   done.  A turn that fails or is interrupted leaves the history as it was.
3. A request_id that was completed before is answered from the store and computes nothing.

After `cancel` no further token is delivered, and the log ends at the last one that was.

The engine may hold KV for tokens that never reached the log (a turn that failed in the store, say).
That does no harm: a turn says how long its conversation's log is, and the engine cuts behind it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from pensieve.core.sampling import Sampling
from pensieve.core.turn import FinishReason, Usage
from pensieve.engine.mailbox import (
    CancelTurn,
    DeleteConversation,
    Event,
    ForkConversation,
    Mailbox,
    RewindConversation,
    SubmitTurn,
    TurnDelta,
    TurnEnded,
)
from pensieve.errors import ContextFull, InvalidArgument, TurnFailed, TurnRunning, Unavailable
from pensieve.store import records
from pensieve.store.conversation_store import ConversationStore
from pensieve.text import ChatTemplate, Message, Setting, ToolCall

BYTES_PER_TOKEN_MAX = 16  # longer text is refused before it is tokenised


@dataclass(slots=True)
class LiveTurn:
    """A turn as its reader sees it; complete when `finish` is set."""

    turn_id: int
    conversation_id: str
    history_tokens: int
    prompt_tokens: int  # of the delta
    deltas: list[TurnDelta] = field(default_factory=list)
    finish: FinishReason | None = None
    failure: TurnFailed | None = None
    usage: Usage | None = None
    revision: int | None = None
    replayed: bool = False
    cancelled: bool = False

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        return [delta.token_id for delta in self.deltas]


class Conversations:
    def __init__(
        self,
        store: ConversationStore,
        template: ChatTemplate,
        mailbox: Mailbox,
        *,
        context_max: int,
        vocab_size: int,
        fingerprint: str,
        defaults: Sampling | None = None,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.store = store
        self.template = template
        self.context_max = context_max
        self.defaults = defaults or Sampling()
        self._mailbox = mailbox
        self._vocab_size = vocab_size
        self._fingerprint = fingerprint
        self._report = report
        self._live: dict[int, LiveTurn] = {}

    # -- conversations --

    def create(
        self,
        conversation_id: str,
        *,
        system_prompt: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        template_options: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> records.Conversation:
        """The system prompt's tokens come with the first turn: templates differ in where it goes."""
        options = dict(template_options or {})
        head = [Message("system", system_prompt)] if system_prompt else []
        self._check_length(head)
        # A dry run tells at once whether the template takes this prompt, these tools and options.
        self.template.opening([*head, Message("user", "?")], Setting(tools, options))
        return self.store.create_conversation(
            records.NewConversation(
                conversation_id,
                self._fingerprint,
                [records.NewMessage("system", system_prompt)] if system_prompt else [],
                list(tools),
                options,
                dict(metadata or {}),
            )
        )

    def fork(
        self, source_id: str, new_id: str, at_revision: int | None = None
    ) -> records.Conversation:
        if at_revision is None:
            at_revision = self.store.get_conversation(source_id).revision
        fork = self.store.fork_conversation(source_id, at_revision, new_id)
        self._mailbox.put(ForkConversation(source_id, fork.num_tokens, new_id))
        return fork

    def rewind(self, conversation_id: str, to_revision: int) -> records.Rewound:
        rewound = self.store.rewind_conversation(conversation_id, to_revision)
        self._mailbox.put(RewindConversation(conversation_id, rewound.num_tokens))
        return rewound

    def delete(self, conversation_id: str) -> None:
        conversation = self.store.get_conversation(conversation_id)
        if conversation.running_turn_id is not None:
            self.interrupt(conversation.running_turn_id)
        self._mailbox.put(DeleteConversation(conversation_id))
        self.store.delete_conversation(conversation_id)

    # -- turns --

    def send(
        self,
        conversation_id: str,
        messages: Sequence[Message] | str,
        *,
        request_id: str | None = None,
        sampling: Sampling | None = None,
        expected_revision: int | None = None,
    ) -> LiveTurn:
        """Begin a turn; `handle` the engine's events until its `finish` is set."""
        if isinstance(messages, str):
            messages = [Message("user", messages)]
        sampling = sampling or self.defaults
        self._check(messages, sampling)
        conversation = self._current(conversation_id)
        if request_id is not None:
            stored = self.store.find_turn(conversation_id, request_id)
            if stored is not None and stored.state in (
                records.TurnState.COMPLETED,
                records.TurnState.CANCELLED,
            ):
                request = self._request(request_id, messages, None, sampling, expected_revision)
                self.store.begin_turn(conversation_id, request)  # refuses other content
                return self._replay(stored)
        log = self.store.log(conversation_id)
        prompt = self._delta(conversation, messages, log[-1] if log else None)
        num_prompt = sum(len(token_ids) for token_ids in prompt)
        if len(log) + num_prompt >= self.context_max:
            raise ContextFull(len(log) + num_prompt + 1, self.context_max)
        if request_id is None:
            request_id = secrets.token_hex(16)
        request = self._request(
            request_id,
            messages,
            prompt,
            sampling,
            conversation.revision if expected_revision is None else expected_revision,
        )
        begun = self.store.begin_turn(conversation_id, request)
        if not begun.must_run:
            raise TurnRunning(conversation_id, str(begun.turn.turn_id))
        turn_id = begun.turn.turn_id
        history_tokens = len(log)
        for token_ids in prompt:
            log.extend(token_ids)
        live = LiveTurn(turn_id, conversation_id, history_tokens, num_prompt)
        self._live[turn_id] = live
        try:
            self._mailbox.put(
                SubmitTurn(
                    turn_id,
                    conversation_id,
                    log.tobytes(),
                    history_tokens,
                    replace(sampling, seed=begun.turn.seed),
                )
            )
        except Unavailable:
            del self._live[turn_id]
            self.store.interrupt_turn(turn_id)
            raise
        return live

    def cancel(self, live: LiveTurn) -> None:
        """End a turn and keep what was delivered; the turn is done when `handle` says so."""
        if live.finish is None and not live.cancelled:
            live.cancelled = True
            keep = live.history_tokens + live.prompt_tokens + len(live.deltas)
            self._mailbox.put(CancelTurn(live.turn_id, keep))

    def interrupt(self, turn_id: int) -> None:
        """End a turn and keep nothing of it: nobody waits for it any more."""
        live = self._live.pop(turn_id, None)
        if live is not None:
            self._mailbox.put(CancelTurn(turn_id, live.history_tokens))
            live.finish = FinishReason.CANCELLED
        self.store.interrupt_turn(turn_id)

    def handle(self, event: Event) -> LiveTurn | None:
        """Take in one event of the engine; the turn that it concerns, if somebody reads it."""
        if not isinstance(event, TurnDelta | TurnEnded):
            return None
        live = self._live.get(event.turn_id)
        if live is None:
            return None
        if isinstance(event, TurnDelta):
            if not live.cancelled:
                live.deltas.append(event)
            return live
        self._end(live, event)
        return live

    @property
    def num_live(self) -> int:
        return len(self._live)

    # -- beginnings --

    def _check(self, messages: Sequence[Message], sampling: Sampling) -> None:
        if (problem := sampling.problem(self._vocab_size)) is not None:
            raise InvalidArgument(f"sampling.{problem[0]}", problem[1])
        for message in messages:
            if message.role == "user" and not message.content:
                raise InvalidArgument("content", "a message must not be empty")
        self._check_length(messages)

    def _check_length(self, messages: Sequence[Message]) -> None:
        limit = BYTES_PER_TOKEN_MAX * self.context_max
        size = sum(len(m.content) + len(m.thinking or "") for m in messages)
        if size > limit:
            raise InvalidArgument(
                "content",
                f"{size:,} characters cannot fit a context of {self.context_max:,} tokens",
            )

    def _request(
        self,
        request_id: str,
        messages: Sequence[Message],
        prompt: Sequence[Sequence[int]] | None,
        sampling: Sampling,
        expected_revision: int | None,
    ) -> records.TurnRequest:
        tokens = prompt or [[] for _ in messages]
        asked = {name: value for name, value in asdict(sampling).items() if name != "seed"}
        return records.TurnRequest(
            request_id,
            [_stored(message, ids) for message, ids in zip(messages, tokens, strict=True)],
            asked | ({"seed": sampling.seed} if sampling.seed else {}),
            sampling.seed or secrets.randbits(63) + 1,
            expected_revision,
        )

    def _current(self, conversation_id: str) -> records.Conversation:
        """The conversation, its tokens being those of the present tokenizer and template."""
        conversation = self.store.get_conversation(conversation_id)
        if conversation.fingerprint == self._fingerprint:
            return conversation
        stored = self.store.messages(conversation_id)
        self._report(
            f"conversation {conversation_id} was written under another tokenizer or template; "
            f"tokenising its {len(stored)} messages again"
        )
        setting = _setting(conversation)
        tokens: list[list[int]] = []
        waiting: list[records.Message] = []  # since the last reply
        last_token_id: int | None = None
        for message in stored:
            if message.finish_reason is None:
                waiting.append(message)
                continue
            asked = [_message(each) for each in waiting]
            if last_token_id is None and not any(tokens):
                tokens += self._opening(asked, setting)
            else:
                delta = self.template.delta(asked, last_token_id, setting)
                tokens += [delta.token_ids[start:stop] for start, stop in delta.spans]
            reply = list(self.template.tokenizer.encode(message.content).ids)
            if message.finish_reason == FinishReason.STOP and self.template.end_id is not None:
                reply.append(self.template.end_id)
            tokens.append(reply)
            last_token_id = reply[-1] if reply else None
            waiting = []
        tokens += [[] for _ in waiting]  # a system prompt without a turn yet
        return self.store.replace_log(conversation_id, self._fingerprint, tokens)

    def _delta(
        self,
        conversation: records.Conversation,
        messages: Sequence[Message],
        last_token_id: int | None,
    ) -> list[list[int]]:
        """The tokens of each new message."""
        setting = _setting(conversation)
        if last_token_id is not None:
            delta = self.template.delta(messages, last_token_id, setting)
            return [delta.token_ids[start:stop] for start, stop in delta.spans]
        head = self.store.messages(conversation.conversation_id, 0, 1)
        if not head:
            return self._opening(messages, setting)
        tokens = self._opening([_message(head[0]), *messages], setting)
        return tokens[1:]

    def _opening(self, messages: Sequence[Message], setting: Setting) -> list[list[int]]:
        """A system prompt that leads has no tokens of its own: they belong to what follows it."""
        delta = self.template.opening(messages, setting)
        tokens = [delta.token_ids[start:stop] for start, stop in delta.spans]
        if len(tokens) > 1 and messages[0].role == "system":
            tokens[:2] = [[], tokens[0] + tokens[1]]
        return tokens

    # -- ends --

    def _end(self, live: LiveTurn, ended: TurnEnded) -> None:
        del self._live[live.turn_id]
        live.usage = ended.usage
        finish = ended.finish
        if finish is FinishReason.FAILED:
            reason = ended.failure or "FAILED"
            live.failure = TurnFailed(reason, _explanation(reason))
            self.store.fail_turn(live.turn_id, reason)
        else:
            if live.cancelled:
                finish = FinishReason.CANCELLED
            reply = records.NewMessage("assistant", live.text, live.token_ids)
            live.revision = self.store.finish_turn(
                live.turn_id, reply, finish.value, usage_figures(ended.usage)
            )
        live.finish = finish

    def _replay(self, stored: records.StoredTurn) -> LiveTurn:
        reply = self.store.turn_messages(stored.turn_id).reply
        assert reply is not None
        assert stored.finish_reason is not None
        live = LiveTurn(stored.turn_id, stored.conversation_id, 0, 0, replayed=True)
        live.deltas = [
            TurnDelta(stored.turn_id, stored.conversation_id, token_id, "")
            for token_id in reply.token_ids
        ]
        if live.deltas:
            live.deltas[-1] = replace(live.deltas[-1], text=reply.content)
        live.revision = stored.revision
        live.finish = FinishReason(stored.finish_reason)
        return live


def usage_figures(usage: Usage) -> dict[str, float]:
    """A turn's cost as it is stored and shown."""
    end = usage.finished_at if usage.finished_at is not None else usage.submitted_at
    admitted = usage.admitted_at if usage.admitted_at is not None else end
    first = usage.first_token_at if usage.first_token_at is not None else end
    return {
        "prompt_tokens": usage.prompt_tokens,
        "new_tokens": usage.new_tokens,
        "device_tokens": usage.device_tokens,
        "host_tokens": usage.host_tokens,
        "recomputed_tokens": usage.recomputed_tokens,
        "output_tokens": usage.output_tokens,
        "suspensions": usage.suspensions,
        "queue_seconds": admitted - usage.submitted_at,
        "first_token_seconds": first - usage.submitted_at,
        "total_seconds": end - usage.submitted_at,
    }


def _explanation(reason: str) -> str:
    return {
        "NAN_LOGITS": "the model computed values that are not numbers; the conversation is unchanged",
        "QUEUE_FULL": "too many turns are waiting; try again later",
        "ENGINE_FAILED": "the engine stopped; the conversation is unchanged",
    }.get(reason, f"the turn failed ({reason}); the conversation is unchanged")


def _setting(conversation: records.Conversation) -> Setting:
    began = datetime.fromtimestamp(conversation.created_at, UTC)
    return Setting(conversation.tools, conversation.template_options, began)


def _stored(message: Message, token_ids: Sequence[int]) -> records.NewMessage:
    extra: dict[str, Any] = {}
    if message.thinking is not None:
        extra["thinking"] = message.thinking
    if message.name is not None:
        extra["name"] = message.name
    if message.tool_calls:
        extra["tool_calls"] = [
            {"name": call.name, "arguments": dict(call.arguments), "id": call.id}
            for call in message.tool_calls
        ]
    return records.NewMessage(
        message.role, message.content, token_ids, message.tool_call_id or "", extra
    )


def _message(stored: records.Message) -> Message:
    calls = stored.extra.get("tool_calls", ())
    return Message(
        stored.role,
        stored.content,
        stored.extra.get("thinking"),
        tuple(ToolCall(call["name"], call["arguments"], call["id"]) for call in calls),
        stored.tool_call_id or None,
        stored.extra.get("name"),
    )
