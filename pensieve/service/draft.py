"""A turn before it begins, and the tokens of its new messages.

Only what is new is ever rendered and tokenized: the *delta* behind the end of the log.  So tokens of the
past never change, and a turn of a long conversation costs what a turn of a short one does.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

from pensieve.core.turn import FinishReason, TurnOptions
from pensieve.errors import InvalidArgument
from pensieve.store import records
from pensieve.text import ChatTemplate, Message, Setting, ToolCall

BYTES_PER_TOKEN_MAX = 16  # longer text is refused before it is tokenized


@dataclass(frozen=True, slots=True)
class ConversationSettings:
    """What a client fixes when it creates a conversation."""

    conversation_id: str
    system_prompt: str = ""
    tools: Sequence[Mapping[str, Any]] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    prefix_id: str = ""
    tenant: str = ""


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
    metadata: Mapping[str, Any] = field(default_factory=dict)  # stored with its messages
    given_sampling: Mapping[str, Any] | None = None  # what the client set; None: all of `options`

    @property
    def sampling_given(self) -> dict[str, Any]:
        """By which the same request is known again, though defaults have changed meanwhile."""
        if self.given_sampling is not None:
            return dict(self.given_sampling)
        values = asdict(self.options.sampling)
        return values if values["seed"] else {k: v for k, v in values.items() if k != "seed"}

    @property
    def num_characters(self) -> int:
        return sum(len(each.content) + len(each.thinking or "") for each in self.messages)

    def says_the_same_as(self, other: Ask) -> bool:
        """Whether both may share a request_id."""
        return (self.messages, self.sampling_given, self.metadata) == (
            other.messages,
            other.sampling_given,
            other.metadata,
        )


@dataclass(frozen=True, slots=True)
class Draft:
    """Everything that tokenizing a turn's messages needs, and nothing shared.

    `prompt` may be called in any thread; it takes as long as the text is long.
    """

    ask: Ask
    conversation: records.Conversation
    log_end: array[int]  # its last tokens, as long as the conversation's revision is what it was
    head: records.Message | None  # a system prompt whose tokens come with the first turn
    template: ChatTemplate

    @property
    def num_characters(self) -> int:
        """That `prompt` has to render and tokenize."""
        if self.log_end:
            return self.ask.num_characters
        tools = sum(len(str(each)) for each in self.conversation.tools)
        return self.ask.num_characters + len(self.head.content if self.head else "") + tools

    def prompt(self) -> list[list[int]]:
        """The tokens of each new message."""
        setting = setting_of(self.conversation)
        if self.log_end:
            delta = self.template.delta(self.ask.messages, self.log_end[-1], setting)
            return [delta.token_ids[start:stop] for start, stop in delta.spans]
        if self.head is None:
            return opening(self.template, self.ask.messages, setting)
        return opening(self.template, [message_of(self.head), *self.ask.messages], setting)[1:]


class SettingsCheck(NamedTuple):
    """Whether a conversation could begin with such settings, and how many tokens that took; in any thread."""

    template: ChatTemplate
    context_max: int

    def __call__(self, settings: ConversationSettings) -> int:
        size = len(settings.system_prompt) + sum(len(str(each)) for each in settings.tools)
        check_length("system_prompt and tools", size, self.context_max)
        system_prompt, options = settings.system_prompt, dict(settings.template_options)
        head = [Message("system", system_prompt)] if system_prompt else []
        if not (head or settings.tools or options):
            return 0
        # A dry run shows at once whether the template takes them.
        setting = Setting(settings.tools, options)
        return len(self.template.opening([*head, Message("user", "?")], setting).token_ids)


def check_length(field_name: str, size: int, context_max: int) -> None:
    """Refuse before it is tokenized what cannot fit."""
    if size > BYTES_PER_TOKEN_MAX * context_max:
        raise InvalidArgument(
            field_name, f"{size:,} characters cannot fit a context of {context_max:,} tokens"
        )


def opening(
    template: ChatTemplate, messages: Sequence[Message], setting: Setting
) -> list[list[int]]:
    """A system prompt that leads has no tokens of its own: they belong to what follows it."""
    delta = template.opening(messages, setting)
    tokens = [delta.token_ids[start:stop] for start, stop in delta.spans]
    if len(tokens) > 1 and messages[0].role == "system":
        tokens[:2] = [[], tokens[0] + tokens[1]]
    return tokens


@dataclass(frozen=True, slots=True)
class Outdated:
    """A conversation whose tokens are those of another tokenizer or template, and what new ones take.

    `tokens` may be called in any thread; it takes as long as the history is long.
    """

    conversation: records.Conversation
    messages: Sequence[records.Message]
    template: ChatTemplate

    def tokens(self) -> list[list[int]]:
        """Of each message."""
        return _tokenized_again(self.template, self.messages, setting_of(self.conversation))


def _tokenized_again(
    template: ChatTemplate, stored: Sequence[records.Message], setting: Setting
) -> list[list[int]]:
    tokens: list[list[int]] = []
    since_reply: list[records.Message] = []
    last_token_id: int | None = None
    for message in stored:
        if message.finish_reason is None:
            since_reply.append(message)
            continue
        new = [message_of(each) for each in since_reply]
        if last_token_id is None and not any(tokens):
            tokens += opening(template, new, setting)
        else:
            delta = template.delta(new, last_token_id, setting)
            tokens += [delta.token_ids[start:stop] for start, stop in delta.spans]
        reply = list(template.tokenizer.encode(message.content).ids)
        if message.finish_reason == FinishReason.STOP and template.end_id is not None:
            reply.append(template.end_id)
        tokens.append(reply)
        last_token_id = reply[-1] if reply else None
        since_reply = []
    tokens += [[] for _ in since_reply]  # a system prompt without a turn yet
    return tokens


def setting_of(conversation: records.Conversation) -> Setting:
    began = datetime.fromtimestamp(conversation.created_at, UTC)
    return Setting(conversation.tools, conversation.template_options, began)


def new_messages(ask: Ask, prompt: Sequence[Sequence[int]]) -> list[records.NewMessage]:
    """What a client sends, with the tokens of each message, as the store takes it."""
    pairs = zip(ask.messages, prompt, strict=True)
    return [_new_message(message, token_ids, ask.metadata) for message, token_ids in pairs]


def _new_message(
    message: Message, token_ids: Sequence[int], metadata: Mapping[str, Any]
) -> records.NewMessage:
    extra: dict[str, Any] = {"metadata": dict(metadata)} if metadata else {}
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
    """A message of the store as the template takes it."""
    calls = stored.extra.get("tool_calls", ())
    return Message(
        stored.role,
        stored.content,
        stored.extra.get("thinking"),
        tuple(ToolCall(call["name"], call["arguments"], call["id"]) for call in calls),
        stored.tool_call_id or None,
        stored.extra.get("name"),
    )
