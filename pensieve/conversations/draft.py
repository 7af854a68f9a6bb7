"""A turn before it begins: what its client asks for, and the tokens of its new messages.

Every door parses into a `TurnRequest`: gRPC, the APIs over HTTP, and the lines of batch jobs.

Only what is new is ever rendered and tokenized: the *delta* behind the end of the log.  So tokens of the
past never change, and a turn of a long conversation costs what a turn of a short one does.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pensieve.conversations.binding.chain import ChainEnd
from pensieve.conversations.constraints import ConstraintChecker
from pensieve.conversations.heads import (
    ConversationSettings,
    PromptHeads,
    check_fits,
    check_length,
    first_messages,
    first_turn,
    head_of,
    message_of,
    setting_of,
    tokens_of,
)
from pensieve.conversations.prefixes import SharedPrompt
from pensieve.core.turn import FinishReason, TurnOptions
from pensieve.store import records
from pensieve.store.bodies import canonical_json
from pensieve.store.responses import StoredResponse
from pensieve.text import ChatTemplate, Message, TemplateSetting

NO_SETTINGS = ConversationSettings("")
CHARACTERS_OF_MESSAGE = 32  # that rendering an empty one takes as long as


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A turn as its client asks for it.

    A request that names no conversation brings its whole history. The binder finds or makes the conversation,
    and narrows the request to the messages that are new there (binding/binder.py).
    """

    conversation_id: str  # empty: it names none
    messages: tuple[Message, ...]
    options: TurnOptions
    tenant: str = ""
    request_id: str = ""  # empty: one is drawn
    expected_revision: int | None = None
    create_if_missing: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)  # stored with its messages
    given_sampling: Mapping[str, Any] | None = None  # what the client set; None: all of `options`
    traceparent: str = ""  # the caller's span, as the W3C writes it
    # Of the conversation, should it be created; its id and tenant are the request's.
    settings: ConversationSettings = NO_SETTINGS
    pending: tuple[records.NewMessage, ...] | None = None  # of its conversation's, that it brings
    # Makes the stored response of the LiveTurn that has ended, its finish reason and the text withheld.
    response: Callable[[Any, FinishReason, str], StoredResponse] | None = None
    chain: ChainEnd | None = None  # by which its client's next request will find the conversation
    history_digest: bytes = b""  # of a keyed request, of all messages that its client sent
    shared_prompt: SharedPrompt | None = None  # with the other choices of its request
    reply_begins: str = ""  # beginning of the reply, written by the client (prefill)

    @property
    def sampling_given(self) -> dict[str, Any]:
        """By which the same request is known again, though defaults have changed meanwhile."""
        if self.given_sampling is not None:
            values = dict(self.given_sampling)
        else:
            values = asdict(self.options.sampling)
            if not values["seed"]:
                del values["seed"]
        if (constraint := self.options.constraint) is not None:
            values["constraint"] = constraint.identity
        if self.reply_begins:
            values["reply_begins"] = self.reply_begins
        return values

    @property
    def num_characters(self) -> int:
        return sum(each.num_characters for each in self.messages) + len(self.reply_begins)

    def says_the_same_as(self, other: TurnRequest) -> bool:
        return (self.messages, self.sampling_given, self.metadata, self.history_digest) == (
            other.messages,
            other.sampling_given,
            other.metadata,
            other.history_digest,
        )


@dataclass(frozen=True, slots=True)
class Draft:
    """Everything that tokenizing a turn's messages needs, and nothing shared.

    `prompt` may be called in any thread; it takes as long as the text is long.
    """

    request: TurnRequest
    conversation: records.StoredConversation
    log_end: array[int]  # its last tokens, as long as the conversation's revision is what it was
    head: Sequence[records.StoredMessage]  # what it begins with, before its first turn; else empty
    template: ChatTemplate
    heads: PromptHeads
    constraints: ConstraintChecker
    new: records.NewConversation | None = None  # the conversation, where the turn creates it

    @property
    def num_characters(self) -> int:
        """That `prompt` has to render and tokenize."""
        conversation, messages = self.conversation, self.request.messages
        num_characters = self.request.num_characters + CHARACTERS_OF_MESSAGE * len(messages)
        if self.log_end and (not self.head or self._knows_head):
            return num_characters
        tools = sum(len(str(each)) for each in conversation.tools)
        head = sum(message_of(each).num_characters for each in self.head)
        return num_characters + head + tools

    def prompt(self) -> list[list[int]]:
        """The tokens of each new message; before that, the constraint is checked."""
        if self.request.options.constraint is not None:
            self.constraints.check(self.request.options)
        setting = replace(setting_of(self.conversation), reply_begins=self.request.reply_begins)
        if self.head:
            head = head_of(self.heads, self.head, self.conversation)
            check_fits(head, self.conversation, self.log_end)
            first = first_messages(self.head)
            return first_turn(self.template, head, first, self.request.messages, setting)
        if self.log_end:
            delta = self.template.delta(self.request.messages, self.log_end[-1], setting)
            return [delta.token_ids[start:stop] for start, stop in delta.spans]
        return opening(self.template, self.request.messages, setting)

    @property
    def _knows_head(self) -> bool:
        return self.heads.knows(first_messages(self.head), setting_of(self.conversation))


def check_settings(template: ChatTemplate, context_max: int, settings: ConversationSettings) -> int:
    """Whether a conversation could begin with them, and how many tokens that took; in any thread."""
    size = len(settings.system_prompt) + sum(len(str(each)) for each in settings.tools)
    check_length("system_prompt and tools", size, context_max)
    system_prompt, options = settings.system_prompt, dict(settings.template_options)
    head = [Message("system", system_prompt)] if system_prompt else []
    if not (head or settings.tools or options):
        return 0
    # A dry run shows at once whether the template takes them.
    setting = TemplateSetting(settings.tools, options)
    return len(template.opening([*head, Message("user", "?")], setting).token_ids)


def opening(
    template: ChatTemplate, messages: Sequence[Message], setting: TemplateSetting
) -> list[list[int]]:
    """A system prompt that leads has no tokens of its own: they belong to what follows it."""
    delta = template.opening(messages, setting)
    tokens = [delta.token_ids[start:stop] for start, stop in delta.spans]
    if len(tokens) > 1 and messages[0].role == "system":
        tokens[:2] = [[], tokens[0] + tokens[1]]
    return tokens


@dataclass(frozen=True, slots=True)
class OutdatedTokens:
    """A conversation whose tokens are those of another tokenizer or template, and what new ones take.

    `tokens` may be called in any thread; it takes as long as the history is long.
    """

    conversation: records.StoredConversation
    messages: Sequence[records.StoredMessage]
    template: ChatTemplate
    heads: PromptHeads

    def tokens(self) -> list[list[int]]:
        """Of each message."""
        setting = setting_of(self.conversation)
        if self.conversation.began_at is None:
            return _tokenized_again(self.template, self.messages, setting)
        before = [each for each in self.messages if not each.revision]
        head, first = head_of(self.heads, before, self.conversation), first_messages(before)
        turns = self.messages[len(before) :]

        def begin(new: Sequence[Message]) -> list[list[int]]:
            return first_turn(self.template, head, first, new, setting)

        return tokens_of(head, len(before)) + _tokenized_again(self.template, turns, setting, begin)


def _tokenized_again(
    template: ChatTemplate,
    stored: Sequence[records.StoredMessage],
    setting: TemplateSetting,
    begin: Callable[[Sequence[Message]], list[list[int]]] | None = None,
) -> list[list[int]]:
    """`begin` makes the tokens of the first turn's messages, if they open no log."""
    tokens: list[list[int]] = []
    since_reply: list[records.StoredMessage] = []
    last_token_id: int | None = None
    for message in stored:
        if message.finish_reason is None:
            since_reply.append(message)
            continue
        new = [message_of(each) for each in since_reply]
        if last_token_id is None and not any(tokens):
            tokens += begin(new) if begin is not None else opening(template, new, setting)
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


def stored_messages(
    messages: Sequence[Message],
    tokens: Sequence[Sequence[int]],
    metadata: Mapping[str, Any] | None = None,
) -> list[records.NewMessage]:
    """Messages that a client gave, with the tokens of each, as the store takes them."""
    pairs = zip(messages, tokens, strict=True)
    return [_new_message(message, token_ids, metadata or {}) for message, token_ids in pairs]


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


def new_conversation(
    settings: ConversationSettings, fingerprint: str, created_at: float | None = None
) -> records.NewConversation:
    """The system prompt's tokens come with the first turn: templates differ in where it goes."""
    system_prompt = settings.system_prompt
    return records.NewConversation(
        settings.conversation_id,
        fingerprint,
        [records.NewMessage("system", system_prompt)] if system_prompt else [],
        list(settings.tools),
        dict(settings.template_options),
        dict(settings.metadata),
        settings.prefix_id,
        settings.tenant,
        created_at=created_at,
        pending=settings.pending,
    )


def planned_conversation(
    settings: ConversationSettings, fingerprint: str, now: float
) -> tuple[records.NewConversation, records.StoredConversation, Sequence[records.StoredMessage]]:
    """A conversation that begins with its first turn, before it is stored; as it will be read, with its head.

    Whatever may refuse that turn comes first: its template, its tokens, its length.  So the turn is drafted
    on the record that the conversation will have, and the job that begins the turn stores the conversation.
    A refused request leaves nothing behind.  Should another request take the name meanwhile, the turn is
    drafted again: that conversation was created at another time.
    """
    new = new_conversation(settings, fingerprint, now)
    head = [
        records.StoredMessage(index, each.role, each.content, "", {}, 0, 0, 0, None, None)
        for index, each in enumerate(new.messages)
    ]
    conversation = replace(
        new.at_first(now),
        num_messages=len(head),
        tools=tuple(_as_read(new.tools)),
        template_options=_as_read(new.template_options),
        metadata=_as_read(new.metadata),
    )
    return new, conversation, head


def _as_read(value: Any) -> Any:
    """The store sorts the names of objects, and templates write them in their order."""
    return json.loads(canonical_json(value))
