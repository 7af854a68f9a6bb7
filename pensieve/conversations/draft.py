"""Turns before they begin: the client's request, and the tokens of its new messages.

gRPC, the APIs over HTTP and the lines of batch jobs are all parsed into a `TurnRequest`.

Only the new messages are rendered and tokenized. Their tokens, the *delta*, are appended to the log. So the
tokens in the log never change, and the cost of a turn does not grow with the length of the conversation.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pensieve.conversations.binding.chain import ChainEnd
from pensieve.conversations.constraints import ConstraintChecker
from pensieve.conversations.heads import (
    ConversationSettings,
    PromptHeads,
    as_stored,
    check_fits,
    check_length,
    first_messages,
    first_turn,
    head_of,
    message_of,
    setting_of,
    tokens_of,
)
from pensieve.core.turn import FinishReason, TurnOptions
from pensieve.store import records
from pensieve.store.responses import StoredResponse
from pensieve.text import ChatTemplate, Message, TemplateSetting

NO_SETTINGS = ConversationSettings("")
CHARACTERS_OF_MESSAGE = 32  # rendering an empty message takes as long as this many characters


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A turn as its client asks for it.

    A request without a conversation_id brings its full history. The binder (binding/binder.py) finds or
    creates the conversation, and keeps only the messages that this conversation does not have yet.
    """

    conversation_id: str  # empty: the request brings its full history
    messages: tuple[Message, ...]
    options: TurnOptions
    tenant: str = ""
    request_id: str = ""  # empty: one is drawn
    expected_revision: int | None = None
    create_if_missing: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)  # stored with the messages
    given_sampling: Mapping[str, Any] | None = None  # what the client set; None: all of `options`
    traceparent: str = ""  # the caller's span, in W3C format
    # The settings of a conversation that the turn creates. The id and the tenant come from the request.
    settings: ConversationSettings = NO_SETTINGS
    pending: tuple[records.NewMessage, ...] | None = (
        None  # earlier messages without a turn; this turn inserts them before its own messages
    )
    # Makes the stored response from the ended LiveTurn, its finish reason and the withheld text.
    response: Callable[[Any, FinishReason, str], StoredResponse] | None = None
    chain: ChainEnd | None = None  # lets the client's next request find the conversation
    # The digest of all messages that the client sent; empty unless a request with a request_id brings its
    # full history.
    history_digest: bytes = b""
    reply_begins: str = ""  # the start of the reply, given by the client (prefill)
    cache_salt: str = ""  # only turns with the same salt share KV by content

    @property
    def stored_sampling(self) -> dict[str, Any]:
        """The parameters that the client set, as they are stored with the turn.

        They identify a retry even if the defaults have changed.
        """
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

    def new_turn(
        self, request_id: str, seed: int, prompt: Sequence[Sequence[int]] | None = None
    ) -> records.NewTurn:
        """Make the record that begins this turn; `prompt`: the tokens of each message, if known."""
        return records.NewTurn(
            request_id,
            stored_messages(self.messages, prompt or [[] for _ in self.messages], self.metadata),
            self.stored_sampling,
            seed,
            self.expected_revision,
            pending=self.pending,
            history_digest=self.history_digest,
        )

    def has_same_content_as(self, other: TurnRequest) -> bool:
        """Whether the store would accept one request as a retry of the other (`begin_turn`)."""
        return self.new_turn("", 0).content() == other.new_turn("", 0).content()


@dataclass(frozen=True, slots=True)
class Draft:
    """Everything that is needed to tokenize a turn's messages.

    `prompt` may be called in any thread. The call takes longer for a longer new text.
    """

    request: TurnRequest
    conversation: records.StoredConversation
    log_end: array[int]  # the last tokens of the log at the conversation's revision
    head: Sequence[records.StoredMessage]  # messages before the first turn; empty for later turns
    template: ChatTemplate
    heads: PromptHeads
    constraints: ConstraintChecker
    new: records.NewConversation | None = None  # the conversation, if the turn creates it

    @property
    def num_characters(self) -> int:
        """The number of characters that `prompt` has to render and tokenize."""
        conversation, messages = self.conversation, self.request.messages
        num_characters = self.request.num_characters + CHARACTERS_OF_MESSAGE * len(messages)
        if self.log_end and (not self.head or self._knows_head):
            return num_characters
        tools = sum(len(str(each)) for each in conversation.tools)
        head = sum(message_of(each).num_characters for each in self.head)
        return num_characters + head + tools

    def prompt(self) -> list[list[int]]:
        """Check the constraint and return the tokens of each new message."""
        if self.request.options.constraint is not None:
            self.constraints.check(self.request.options)
        setting = replace(setting_of(self.conversation), reply_begins=self.request.reply_begins)
        if self.head:
            head = head_of(self.heads, self.head, self.conversation)
            check_fits(head, self.conversation, self.log_end)
            first = first_messages(self.head)
            return first_turn(self.template, head, first, self.request.messages, setting)
        if self.log_end:
            return self.template.delta(self.request.messages, self.log_end[-1], setting)
        return opening(self.template, self.request.messages, setting)

    @property
    def _knows_head(self) -> bool:
        return self.heads.knows(first_messages(self.head), setting_of(self.conversation))


def check_settings(template: ChatTemplate, context_max: int, settings: ConversationSettings) -> int:
    """Raise if no conversation can begin with these settings.

    Return how many tokens were tokenized for the check, because the tenant pays for them. May be called in
    any thread.
    """
    size = len(settings.system_prompt) + sum(len(str(each)) for each in settings.tools)
    check_length("system_prompt and tools", size, context_max)
    system_prompt, options = settings.system_prompt, dict(settings.template_options)
    head = [Message("system", system_prompt)] if system_prompt else []
    if not (head or settings.tools or options):
        return 0
    # A dry run shows whether the template accepts the settings.
    setting = TemplateSetting(settings.tools, options)
    return sum(map(len, template.opening([*head, Message("user", "?")], setting)))


def opening(
    template: ChatTemplate, messages: Sequence[Message], setting: TemplateSetting
) -> list[list[int]]:
    """Return the tokens of each message of a log's first turn.

    The tokens of a leading system prompt belong to the message after it.
    """
    tokens = template.opening(messages, setting)
    if len(tokens) > 1 and messages[0].role == "system":
        tokens[:2] = [[], tokens[0] + tokens[1]]
    return tokens


@dataclass(frozen=True, slots=True)
class OutdatedTokens:
    """A conversation that was stored under another tokenizer or template and must be tokenized again.

    `tokens` may be called in any thread. The call takes longer for a longer history.
    """

    conversation: records.StoredConversation
    messages: Sequence[records.StoredMessage]
    template: ChatTemplate
    heads: PromptHeads

    def tokens(self) -> list[list[int]]:
        """Return the new tokens of each message."""
        setting = setting_of(self.conversation)
        if self.conversation.began_at is None:
            return _tokenize_again(self.template, self.messages, setting)
        beginning = [each for each in self.messages if not each.revision]
        head = head_of(self.heads, beginning, self.conversation)
        first, turns = first_messages(beginning), self.messages[len(beginning) :]

        def begin(new: Sequence[Message]) -> list[list[int]]:
            return first_turn(self.template, head, first, new, setting)

        return tokens_of(head, len(beginning)) + _tokenize_again(
            self.template, turns, setting, begin
        )


def _tokenize_again(
    template: ChatTemplate,
    stored: Sequence[records.StoredMessage],
    setting: TemplateSetting,
    begin: Callable[[Sequence[Message]], list[list[int]]] | None = None,
) -> list[list[int]]:
    """Return the new tokens of each message.

    `begin` tokenizes the first turn's messages if the log begins with a head.
    """
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
            tokens += template.delta(new, last_token_id, setting)
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
    """Convert a client's messages and their tokens to records for the store."""
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
    """Make the record of a new conversation.

    The system prompt gets its tokens with the first turn, because templates differ in where they put it.
    """
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
    """Plan a conversation that is created with its first turn.

    Returns three values: the record to write, the record that the store will return for it, and the messages
    before the first turn (heads.py). The turn is drafted on the second record. The store call that begins the
    turn also stores the conversation. So a request that is refused for its template, tokens or length leaves
    nothing behind. If another request creates a conversation of this name in the meantime, the two creation
    times differ, and the draft is stale.
    """
    new = new_conversation(settings, fingerprint, now)
    head = [
        records.StoredMessage(index, each.role, each.content, "", {}, 0, 0, 0, None, None)
        for index, each in enumerate(new.messages)
    ]
    conversation = replace(
        new.without_messages(now),
        num_messages=len(head),
        tools=tuple(as_stored(new.tools)),
        template_options=as_stored(new.template_options),
        metadata=as_stored(new.metadata),
    )
    return new, conversation, head
