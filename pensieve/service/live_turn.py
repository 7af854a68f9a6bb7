"""A turn from its draft to its end, as plain values; and messages between store and template."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from pensieve.core.iteration import Logprob, SampledToken
from pensieve.core.turn import FinishReason, TurnOptions, Usage
from pensieve.errors import PensieveError
from pensieve.store import records
from pensieve.text import ChatTemplate, Message, Part, PartMarker, Setting, ToolCall


class RecomputeReason(StrEnum):
    DROPPED = "dropped"  # both tiers were full of more valuable chunks
    ENGINE_RESTARTED = "engine_restarted"
    FINGERPRINT_CHANGED = "fingerprint_changed"


@dataclass(slots=True)
class LiveTurn:
    """A turn as its reader sees it; complete when `finish` is set, which therefore comes last.

    Its tokens lie in columns of plain values, not in an object for each: a thousand turns of a
    thousand tokens are a few thousand objects for the cycle collector (see `pensieve.gc_pause`).
    """

    turn_id: int
    conversation_id: str
    history_tokens: int
    prompt_tokens: int  # of the delta
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # that each token released
    parts: list[Part] = field(default_factory=list)  # that each token belongs to
    logprobs: dict[int, tuple[float, tuple[Logprob, ...]]] = field(default_factory=dict)
    finish: FinishReason | None = None
    failure: PensieveError | None = None
    usage: Usage | None = None
    revision: int | None = None
    replayed: bool = False
    cancelled: bool = False
    tenant: str = ""
    number: int = 0  # what the engine knows it by: another one for each attempt
    request_id: str = ""
    first_revision: int = 0  # of the conversation before it
    attempt: int = 1
    recompute_reason: str = ""  # should something be recomputed
    figures: dict[str, Any] = field(default_factory=dict)  # usage, as it is stored
    marker: PartMarker | None = None
    prefix_id: str = ""
    log: array[int] | None = None  # with the prompt, where there is a prefix to remember
    tail: str = ""  # text after the last token: what a cancelled turn had withheld

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def take(self, token: SampledToken) -> None:
        """Append one sampled token; whoever reads goes by `token_ids`, which therefore comes last."""
        if token.logprob is not None:
            self.logprobs[len(self.token_ids)] = (token.logprob, token.top_logprobs)
        self.texts.append(token.text)
        self.parts.append(self.marker.push(token.token_id) if self.marker else Part.TEXT)
        self.token_ids.append(token.token_id)


@dataclass(frozen=True, slots=True)
class Ask:
    """A turn as its client asks for it."""

    conversation_id: str
    messages: tuple[Message, ...]
    options: TurnOptions
    tenant: str = ""
    request_id: str = ""  # empty: one is drawn
    expected_revision: int | None = None
    create_if_missing: bool = False

    @property
    def num_characters(self) -> int:
        return sum(len(each.content) + len(each.thinking or "") for each in self.messages)


@dataclass(frozen=True, slots=True)
class Draft:
    """A turn that is about to be said: everything that tokenising it needs, and nothing shared.

    `prompt` may be called in any thread; it takes as long as the text is long.
    """

    ask: Ask
    conversation: records.Conversation
    log_end: array[int]  # its last tokens, as long as the conversation's revision is what it was
    head: records.Message | None  # a system prompt whose tokens come with the first turn
    template: ChatTemplate

    def prompt(self) -> list[list[int]]:
        """The tokens of each new message."""
        setting = setting_of(self.conversation)
        if self.log_end:
            delta = self.template.delta(self.ask.messages, self.log_end[-1], setting)
            return [delta.token_ids[start:stop] for start, stop in delta.spans]
        if self.head is None:
            return opening(self.template, self.ask.messages, setting)
        return opening(self.template, [message_of(self.head), *self.ask.messages], setting)[1:]


def opening(
    template: ChatTemplate, messages: Sequence[Message], setting: Setting
) -> list[list[int]]:
    """A system prompt that leads has no tokens of its own: they belong to what follows it."""
    delta = template.opening(messages, setting)
    tokens = [delta.token_ids[start:stop] for start, stop in delta.spans]
    if len(tokens) > 1 and messages[0].role == "system":
        tokens[:2] = [[], tokens[0] + tokens[1]]
    return tokens


def cache_key(tenant: str, conversation_id: str) -> str:
    """What the engine knows a conversation by; ids hold no slash, so tenants never meet."""
    return f"{tenant}/{conversation_id}" if tenant else conversation_id


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


def setting_of(conversation: records.Conversation) -> Setting:
    began = datetime.fromtimestamp(conversation.created_at, UTC)
    return Setting(conversation.tools, conversation.template_options, began)


def new_message(message: Message, token_ids: Sequence[int]) -> records.NewMessage:
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


def message_of(stored: records.Message) -> Message:
    calls = stored.extra.get("tool_calls", ())
    return Message(
        stored.role,
        stored.content,
        stored.extra.get("thinking"),
        tuple(ToolCall(call["name"], call["arguments"], call["id"]) for call in calls),
        stored.tool_call_id or None,
        stored.extra.get("name"),
    )
