"""What conversations begin with before their first turn, and the tokens of that first turn's messages.

                          what it begins with               its tokens
    no prefix             a system prompt, or nothing       none: they come with the first turn
    a declared prefix     system prompt, few-shot turns     the template's head of them; see text/template.py
    a given history       system prompt, messages           the same, as of a prefix that nobody shares

A first turn is rendered as a whole with all of these messages, but for the head, which was tokenized before.
So its log is, token for token, that of a conversation whose first turn brought all of it.  Where a template
writes nothing fixed in front, a head is empty.

A declared prefix without any message, of tools say, has an empty system message for its tokens (`STAND_IN`),
which the template does not see.
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

BYTES_PER_TOKEN_MAX = 16  # longer text is refused before it is tokenized
STAND_IN = records.NewMessage("system", "")
HEADS_MAX = 64  # that are remembered, of
CHARACTERS_MAX = 8 << 20  # together


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
    """What a client fixes when it creates a conversation."""

    conversation_id: str
    system_prompt: str = ""
    tools: Sequence[Mapping[str, Any]] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    prefix_id: str = ""
    tenant: str = ""
    messages: Sequence[Message] = ()  # a history to begin with, behind the system prompt
    pending: Sequence[records.NewMessage] = ()  # that its first turn is to bring


BeginningSettings = (
    PrefixSettings | ConversationSettings
)  # one without a prefix_id: of a given history


def all_messages(begins: BeginningSettings) -> list[Message]:
    system = [Message("system", begins.system_prompt)] if begins.system_prompt else []
    return [*system, *begins.messages]


class GivenHistory:
    """A history that comes in pieces; refused as soon as it cannot fit a context."""

    def __init__(self, context_max: int) -> None:
        self.messages: list[Message] = []
        self._context_max = context_max
        self._num_characters = 0

    def extend(self, messages: Sequence[Message]) -> None:
        self.messages += messages
        self._num_characters += sum(each.num_characters for each in messages)
        if len(self.messages) > self._context_max:  # each takes a token at least
            raise _too_long("messages", f"{len(self.messages):,} messages", self._context_max)
        check_length("messages", self._num_characters, self._context_max)


class PromptHeads:
    """The heads that were asked for lately; any thread may ask."""

    def __init__(self, template: ChatTemplate, context_max: int) -> None:
        self._template = template
        self._context_max = context_max
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, CommonOpening] = OrderedDict()
        self._num_characters = 0

    def of(self, messages: Sequence[Message], setting: TemplateSetting) -> CommonOpening:
        """What a log begins with under a prefix of these messages; tokenized once.

        The setting is as the store has it.
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
        """The tokens of each message that this will be stored with; refuses what cannot be."""
        messages = all_messages(settings)
        if not (messages or settings.tools):
            raise InvalidArgument("prefix", "has a system prompt, tools or messages")
        for each in settings.messages:
            # A given history may have had a system message later on; the first one is the system prompt.
            is_later = not settings.prefix_id and each.content and each is not messages[0]
            if each.role not in ("user", "assistant", "tool") and not (
                each.role == "system" and is_later
            ):
                raise InvalidArgument("messages", "are those of user, assistant and tool")
            if each.role == "user" and not each.content:
                raise InvalidArgument("content", "a message must not be empty")
        size = sum(each.num_characters for each in messages) + sum(
            map(len, map(str, settings.tools))
        )
        check_length("prefix" if settings.prefix_id else "messages", size, self._context_max)
        now = datetime.fromtimestamp(template_time, UTC)
        tools, options = _as_stored([list(settings.tools), dict(settings.template_options)])
        messages = [
            replace(each, tool_calls=tuple(map(_call_as_stored, each.tool_calls)))
            for each in messages
        ]
        head = self.of(messages, TemplateSetting(tools, options, now))
        if len(head.token_ids) + 2 > self._context_max:  # beside it, one to read and one to say
            raise ContextFull(len(head.token_ids) + 2, self._context_max)
        return tokens_of(head, len(messages) or 1)

    def knows(self, messages: Sequence[Message], setting: TemplateSetting) -> bool:
        with self._lock:
            return _key(messages, setting) in self._known


def _as_stored(value: Any) -> Any:
    """As it will be read: the store sorts the keys of objects, and templates write them in their order."""
    return json.loads(canonical_json(value))


def _call_as_stored(call: ToolCall) -> ToolCall:
    return replace(call, arguments=_as_stored(dict(call.arguments)))


def _key(messages: Sequence[Message], setting: TemplateSetting) -> bytes:
    given = [list(setting.tools), dict(setting.options), setting.now.timestamp()]
    return hashlib.blake2b(canonical_json([[asdict(each) for each in messages], given])).digest()


def check_length(field_name: str, size: int, context_max: int) -> None:
    """Refuse before it is tokenized what cannot fit."""
    if size > BYTES_PER_TOKEN_MAX * context_max:
        raise _too_long(field_name, f"{size:,} characters", context_max)


def _too_long(field_name: str, what: str, context_max: int) -> InvalidArgument:
    error = InvalidArgument(field_name, f"{what} cannot fit a context of {context_max:,} tokens")
    error.is_too_long = True
    return error


def tokens_of(head: CommonOpening, num_messages: int) -> list[list[int]]:
    """Of each message that a prefix is stored with."""
    if not head.spans:
        return [head.token_ids] * num_messages  # of the stand-in, which is alone
    return [head.token_ids[start:stop] for start, stop in head.spans]


def first_messages(stored: Sequence[records.StoredMessage]) -> list[Message]:
    """What a conversation begins with, as the template sees it."""
    return [message_of(each) for each in stored if each.content or each.role != "system"]


def first_turn(
    template: ChatTemplate,
    head: CommonOpening,
    first: Sequence[Message],
    messages: Sequence[Message],
    setting: TemplateSetting,
) -> list[list[int]]:
    """The tokens of each message of the first turn, behind the head of the `first` messages."""
    behind = template.behind(head, first, messages, setting)
    return [behind.token_ids[start:stop] for start, stop in behind.spans]


def check_fits(
    head: CommonOpening, conversation: records.StoredConversation, log_end: Sequence[int]
) -> None:
    """That the log is this head; else something has changed that no fingerprint knows of."""
    num_tokens = len(head.token_ids)
    if num_tokens != conversation.num_tokens or head.token_ids[-len(log_end) :] != list(log_end):
        raise InvalidArgument(
            "prefix_id", "the template no longer writes what this prefix was declared with"
        )


def head_of(
    heads: PromptHeads,
    stored: Sequence[records.StoredMessage],
    conversation: records.StoredConversation,
) -> CommonOpening:
    """Of a conversation before its first turn; empty where its first tokens come with that."""
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
