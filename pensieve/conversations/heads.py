"""Render and tokenize the messages that a conversation has before its first turn.

The *head* is the part of these messages' tokens that the log already contains before the first turn:

    kind of conversation    messages before the first turn    tokens
    plain                   a system prompt, or none          none: they come with the first turn
    declared prefix         system prompt, few-shot turns     a head; see text/template.py
    given history           system prompt, messages           a head, which nobody shares

A first turn is rendered together with all these messages. The head is already in the log, so only the text
after the head is tokenized. The log then has the same tokens as if the first turn had brought all messages.
A head ends with a control token that the template writes before the next message. If the template writes
none there, the head is empty, and all tokens come with the first turn.

A declared prefix without messages (with only tools, for example) is stored with an empty system message,
`STAND_IN`, to which the prefix's tokens belong. The template does not see this message.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from pensieve.errors import ContextFull, InvalidArgument
from pensieve.store import records
from pensieve.store.bodies import canonical_json
from pensieve.text import ChatTemplate, Message, TemplateSetting, ToolCall
from pensieve.text.template import NO_HEAD, CommonOpening

CHARACTERS_PER_TOKEN_MAX = 16  # longer text is refused before it is tokenized
STAND_IN = records.NewMessage("system", "")
HEADS_MAX = 64  # remembered
CHARACTERS_MAX = 8 << 20  # of all remembered heads together
CACHE_SALT_BYTES_MAX = 256


@dataclass(frozen=True, slots=True)
class PrefixSettings:
    prefix_id: str
    system_prompt: str = ""
    tools: Sequence[Mapping[str, Any]] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Message] = ()  # the few-shot turns
    keep_warm: bool = False
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class ConversationSettings:
    """The settings that a client gives when it creates a conversation."""

    conversation_id: str
    system_prompt: str = ""
    tools: Sequence[Mapping[str, Any]] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    prefix_id: str = ""
    tenant: str = ""
    messages: Sequence[Message] = ()  # a given history, after the system prompt
    pending: Sequence[records.NewMessage] = ()  # added without a turn; the first turn takes them


# Settings of a declared prefix, or of a conversation with a given history (whose prefix_id is empty).
BeginningSettings = PrefixSettings | ConversationSettings


def all_messages(settings: BeginningSettings) -> list[Message]:
    """Return the system prompt and the messages."""
    system = [Message("system", settings.system_prompt)] if settings.system_prompt else []
    return [*system, *settings.messages]


class GivenHistory:
    """Collect a history that arrives in pieces. Refuse the history as soon as it cannot fit the context."""

    def __init__(self, context_max: int) -> None:
        self.messages: list[Message] = []
        self._context_max = context_max
        self._num_characters = 0

    def extend(self, messages: Sequence[Message]) -> None:
        self.messages += messages
        self._num_characters += sum(each.num_characters for each in messages)
        if len(self.messages) > self._context_max:  # each message takes at least a token
            raise _too_long("messages", f"{len(self.messages):,} messages", self._context_max)
        check_length("messages", self._num_characters, self._context_max)


class PromptHeads:
    """Tokenize heads, with a cache of the latest. Thread-safe."""

    def __init__(self, template: ChatTemplate, context_max: int) -> None:
        self._template = template
        self._context_max = context_max
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, CommonOpening] = OrderedDict()
        self._num_characters = 0

    def of(self, messages: Sequence[Message], setting: TemplateSetting) -> CommonOpening:
        """Return the head of a log that begins with these messages.

        The setting must have sorted keys, as the store returns it (see `as_stored`).
        """
        key = _key(messages, setting)
        with self._lock:
            if (known := self._known.get(key)) is not None:
                self._known.move_to_end(key)
                return known
        head = self._template.head(messages, setting)
        with self._lock:
            if self._known.setdefault(key, head) is head:
                self._num_characters += len(head.text)
            while len(self._known) > HEADS_MAX or self._num_characters > CHARACTERS_MAX:
                self._num_characters -= len(self._known.popitem(last=False)[1].text)
        return head

    def declared(self, settings: BeginningSettings, template_time: float) -> list[list[int]]:
        """Check a prefix or a given history, and return the tokens of each message."""
        messages = all_messages(settings)
        if not (messages or settings.tools):
            raise InvalidArgument("prefix", "must have a system prompt, tools or messages")
        for each in settings.messages:
            # In a given history, messages after the first may be system messages. A system message at the
            # beginning must be given as the system prompt.
            is_later = not settings.prefix_id and each.content and each is not messages[0]
            if each.role not in ("user", "assistant", "tool") and not (
                each.role == "system" and is_later
            ):
                raise InvalidArgument("messages", "must have the role user, assistant or tool")
            if each.role == "user" and not each.content:
                raise InvalidArgument("content", "a message must not be empty")
        size = sum(each.num_characters for each in messages) + sum(
            map(len, map(str, settings.tools))
        )
        check_length("prefix" if settings.prefix_id else "messages", size, self._context_max)
        now = datetime.fromtimestamp(template_time, UTC)
        tools, options = as_stored([list(settings.tools), dict(settings.template_options)])
        messages = [
            replace(each, tool_calls=tuple(map(_call_as_stored, each.tool_calls)))
            for each in messages
        ]
        head = self.of(messages, TemplateSetting(tools, options, now))
        if len(head.token_ids) + 2 > self._context_max:  # a token of a message, and one of a reply
            raise ContextFull(len(head.token_ids) + 2, self._context_max)
        return tokens_of(head, len(messages) or 1)

    def knows(self, messages: Sequence[Message], setting: TemplateSetting) -> bool:
        """Whether this head is in the cache."""
        with self._lock:
            return _key(messages, setting) in self._known


def as_stored(value: Any) -> Any:
    """Sort the keys as the store does, because a template writes keys in the order in which it gets them."""
    return json.loads(canonical_json(value))


def _call_as_stored(call: ToolCall) -> ToolCall:
    return replace(call, arguments=as_stored(dict(call.arguments)))


def _key(messages: Sequence[Message], setting: TemplateSetting) -> bytes:
    given = [list(setting.tools), dict(setting.options), setting.now.timestamp()]
    return hashlib.blake2b(canonical_json([[asdict(each) for each in messages], given])).digest()


def check_salt(cache_salt: str) -> None:
    if len(cache_salt.encode()) > CACHE_SALT_BYTES_MAX:
        raise InvalidArgument("cache_salt", f"must have at most {CACHE_SALT_BYTES_MAX} bytes")


def check_length(field_name: str, size: int, context_max: int) -> None:
    """Refuse text that cannot fit the context, before it is tokenized."""
    if size > CHARACTERS_PER_TOKEN_MAX * context_max:
        raise _too_long(field_name, f"{size:,} characters", context_max)


def _too_long(field_name: str, size: str, context_max: int) -> InvalidArgument:
    error = InvalidArgument(field_name, f"{size} cannot fit a context of {context_max:,} tokens")
    error.is_too_long = True
    return error


def tokens_of(head: CommonOpening, num_messages: int) -> list[list[int]]:
    """Return the tokens of each message of a head."""
    if not head.spans:
        return [head.token_ids] * num_messages  # there is only the stand-in
    return [head.token_ids[start:stop] for start, stop in head.spans]


def first_messages(stored: Sequence[records.StoredMessage]) -> list[Message]:
    """Return the messages before the first turn as the template sees them: without the stand-in."""
    return [message_of(each) for each in stored if each.content or each.role != "system"]


def first_turn(
    template: ChatTemplate,
    head: CommonOpening,
    before: Sequence[Message],
    messages: Sequence[Message],
    setting: TemplateSetting,
) -> list[list[int]]:
    """Return the tokens of each message of the first turn.

    `before`: the messages before that turn, whose tokens are in `head`.
    """
    return template.tokens_after_head(head, before, messages, setting)


def check_fits(
    head: CommonOpening, conversation: records.StoredConversation, log_end: Sequence[int]
) -> None:
    """Raise InvalidArgument unless the log has exactly the tokens of this head.

    The tokens differ if the template has changed in a way that its fingerprint does not cover.
    """
    num_tokens = len(head.token_ids)
    if num_tokens != conversation.num_tokens or head.token_ids[-len(log_end) :] != list(log_end):
        raise InvalidArgument(
            "prefix_id", "the template no longer renders this prefix as it was declared"
        )


def head_of(
    heads: PromptHeads,
    stored: Sequence[records.StoredMessage],
    conversation: records.StoredConversation,
) -> CommonOpening:
    """Return the head of a conversation; empty if the log has no tokens before the first turn."""
    if conversation.began_at is None:
        return NO_HEAD
    return heads.of(first_messages(stored), setting_of(conversation))


def setting_of(conversation: records.StoredConversation) -> TemplateSetting:
    template_time = datetime.fromtimestamp(conversation.template_time, UTC)
    return TemplateSetting(conversation.tools, conversation.template_options, template_time)


def message_of(stored: records.StoredMessage) -> Message:
    calls = stored.extra.get("tool_calls", ())
    return Message(
        stored.role,
        stored.content,
        stored.extra.get("thinking"),
        tuple(ToolCall(call["name"], call["arguments"], call["id"]) for call in calls),
        stored.tool_call_id or None,
        stored.extra.get("name"),
    )
