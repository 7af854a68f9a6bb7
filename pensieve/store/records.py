"""The frozen values that the store takes and returns.

A conversation's *log* is the sequence of all its token ids. The messages cover the log without gaps: a
message has the positions [first_token_index, first_token_index + num_tokens), and the next message begins at
the end of that range. Every commit to a conversation creates its next *revision*. Each message records the
revision that added it. The messages of a new conversation have revision 0.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from pensieve.errors import InvalidArgument
from pensieve.store.bodies import canonical_json

ID_PATTERN = re.compile(r"[A-Za-z0-9._~-]{1,128}")
PREFIX_MARK = "prefix:"  # start of the id of a conversation that stores a declared prefix
PAGE_SIZE_MAX = 1000
# limit for the records of a page; a page with a single record may be larger
PAGE_BYTES_MAX = 2 << 20


class StoredTurnState(StrEnum):
    """The states of a turn's row. LEGAL_TRANSITIONS lists the allowed changes."""

    RUNNING = "running"
    COMPLETED = "completed"
    CANCELLED = "cancelled"  # ended by the client; the history has the delivered part of the reply
    # the process stopped, or the client disconnected; the turn's messages are not in the history
    INTERRUPTED = "interrupted"
    FAILED = "failed"  # the engine could not finish the turn; its messages are not in the history


# A retry that finds its turn in one of these states does not begin the turn again.
NOT_RESTARTED_STATES = frozenset(
    {StoredTurnState.RUNNING, StoredTurnState.COMPLETED, StoredTurnState.CANCELLED}
)

LEGAL_TRANSITIONS: Mapping[StoredTurnState, frozenset[StoredTurnState]] = {
    StoredTurnState.RUNNING: frozenset(
        {
            StoredTurnState.COMPLETED,
            StoredTurnState.CANCELLED,
            StoredTurnState.INTERRUPTED,
            StoredTurnState.FAILED,
        }
    ),
    StoredTurnState.COMPLETED: frozenset(),
    StoredTurnState.CANCELLED: frozenset(),
    StoredTurnState.INTERRUPTED: frozenset({StoredTurnState.RUNNING}),  # the request was retried
    StoredTurnState.FAILED: frozenset({StoredTurnState.RUNNING}),
}


@dataclass(frozen=True, slots=True)
class NewMessage:
    """A message to append to the log, with exactly the tokens that it adds.

    `extra` is stored as JSON with the message: data that a template needs to render it again (tool calls,
    thinking), the `metadata` of SendMessage, and for a reply `TurnReply.stream`. `logprobs` belong to
    a reply and may have any encoding. The store keeps them with the turn.
    """

    role: str
    content: str
    token_ids: Sequence[int] = ()
    tool_call_id: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    logprobs: bytes = b""

    def private(self) -> dict[str, Any]:
        """Return the JSON object of the message's body."""
        return {
            "content": self.content,
            "tool_call_id": self.tool_call_id,
            "extra": dict(self.extra),
        }


@dataclass(frozen=True, slots=True)
class NewConversation:
    """A conversation to create. `messages` is its head, usually a system prompt. No rewind removes the head.

    If the head already has its tokens, the template uses `began_at` as the current time in every turn.
    """

    conversation_id: str
    fingerprint: str
    messages: Sequence[NewMessage] = ()
    tools: Sequence[Any] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    prefix_id: str = ""
    tenant: str = ""
    began_at: float | None = None
    created_at: float | None = None  # None: now
    pending: Sequence[NewMessage] = ()  # messages that the first turn will insert before its own

    def without_messages(self, now: float) -> StoredConversation:
        """Return the conversation without its messages."""
        return StoredConversation(
            conversation_id=self.conversation_id,
            tenant=self.tenant,
            revision=0,
            num_messages=0,
            num_tokens=0,
            fingerprint=self.fingerprint,
            tools=tuple(self.tools),
            template_options=dict(self.template_options),
            metadata=dict(self.metadata),
            prefix_id=self.prefix_id,
            running_turn_id=None,
            created_at=now,
            updated_at=now,
            began_at=self.began_at,
        )


@dataclass(frozen=True, slots=True)
class NewPrefix:
    """A prefix to declare: messages with their tokens, which begin every conversation under the prefix.

    The template uses `began_at` as the current time, also in conversations under the prefix.
    """

    prefix_id: str
    fingerprint: str
    messages: Sequence[NewMessage]
    tools: Sequence[Any] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)
    keep_warm: bool = False
    began_at: float = 0.0
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class NewTurn:
    """A turn to begin, as its client requested it.

    `sampling` contains only what the client sent: no defaults, and no seed that the service chose. So a
    repeated request compares equal. `seed` is the seed to use.

    The token ids of `messages` are valid only if they follow the log of revision `expected_revision`, in the
    conversation that was created at `expected_created_at`. (A conversation that is created later may have the
    same id.) None accepts any value.
    """

    request_id: str
    messages: Sequence[NewMessage]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    expected_revision: int | None = None
    expected_created_at: float | None = None
    # The conversation's pending messages, if `messages` includes them; otherwise None.
    pending: Sequence[NewMessage] | None = None
    # for a request with an Idempotency-Key and its full history: digest of all messages in it
    history_digest: bytes = b""

    @property
    def has_idempotency_key(self) -> bool:
        """Whether the request has an Idempotency-Key and brings its full history."""
        return bool(self.history_digest)

    def content(self) -> list[Any]:
        """Return everything that a retry must repeat: messages, sampling and `history_digest`."""
        messages = [[message.role, message.private()] for message in self.messages]
        content: list[Any] = [messages, dict(self.sampling)]
        if self.has_idempotency_key:
            content.append(self.history_digest.hex())
        return content

    def content_hash(self) -> str:
        """Return a digest of `content()`. The digest is stored with the turn."""
        return hashlib.sha256(canonical_json(self.content())).hexdigest()


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """A stored conversation without its messages."""

    conversation_id: str
    tenant: str
    revision: int
    num_messages: int
    num_tokens: int  # the length of the log
    fingerprint: str  # identifies the model, tokenizer and template that the token ids are for
    tools: tuple[Any, ...]
    template_options: dict[str, Any]
    metadata: dict[str, Any]
    prefix_id: str
    running_turn_id: int | None
    created_at: float
    updated_at: float
    began_at: float | None = None  # the template's current time, if the head already has its tokens
    has_pending: bool = False  # messages are pending, or were taken by the last turn
    title: str = field(default="", compare=False)  # set only in lists (titles.py)

    @property
    def template_time(self) -> float:
        return self.created_at if self.began_at is None else self.began_at


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """A declared prefix."""

    prefix_id: str
    conversation: StoredConversation  # the conversation that stores it
    keep_warm: bool
    num_conversations: int  # conversations that hold its messages


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message of a history."""

    index: int
    role: str
    content: str
    tool_call_id: str
    extra: dict[str, Any]
    revision: int
    first_token_index: int  # in the log
    num_tokens: int
    finish_reason: str | None  # only for replies
    token_ids: array[int] | None  # 'I'; None unless requested


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """A stored turn without its messages."""

    turn_id: int
    conversation_id: str
    tenant: str
    request_id: str
    state: StoredTurnState
    attempts: int  # how often the turn was begun; above 1 after an interruption or failure
    sampling: dict[str, Any]
    seed: int
    finish_reason: str | None
    failure: str | None  # why the turn failed
    usage: dict[str, Any]
    revision: int | None  # the revision that the turn created
    created_at: float
    finished_at: float | None


class ChainState(NamedTuple):
    """The digest of a history as a client sends it, up to and including a reply. See chains.py."""

    digest: bytes
    client_session: bytes  # digest of the client's own name for the conversation; empty: none


class ChainMatch(NamedTuple):
    """A conversation whose history begins like a client's."""

    digest: bytes  # the longest matching digest
    conversation_id: str
    revision: int  # the revision at the end of the match
    present_revision: int  # the current revision of the conversation
    may_append: bool  # nothing follows the match, no turn is running, and the session is the same


class KeyedTurn(NamedTuple):
    """A turn that a request with an Idempotency-Key began."""

    conversation_id: str
    num_messages: int  # messages that the request added


class BeginResult(NamedTuple):
    """A turn, and whether the caller must compute it. If not, the turn is already running or finished."""

    turn: StoredTurn
    must_run: bool


class LookedUp(NamedTuple):
    """The state that a turn continues from."""

    conversation: StoredConversation
    known: StoredTurn | None  # the turn that an earlier request with the same request_id began
    log_end: array[int]


class TurnMessages(NamedTuple):
    """The messages of a turn."""

    prompt: tuple[NewMessage, ...]
    reply: NewMessage | None  # None unless the turn is completed or cancelled


class Page(NamedTuple):
    """Some conversations of a list."""

    conversations: tuple[StoredConversation, ...]
    next_page_token: str  # empty on the last page
    tokens: tuple[str, ...]  # for each conversation, the page token that continues after it


class PrefixPage(NamedTuple):
    """Some declared prefixes of a list."""

    prefixes: tuple[StoredPrefix, ...]
    next_page_token: str  # empty on the last page


class MessagePage(NamedTuple):
    """Some messages of a history."""

    messages: tuple[StoredMessage, ...]
    has_more: bool


class Rewound(NamedTuple):
    """A conversation after a rewind."""

    revision: int
    num_tokens: int


def check_id(name: str, value: str) -> None:
    """Raise InvalidArgument unless the value is a valid id."""
    if not ID_PATTERN.fullmatch(value):
        raise InvalidArgument(name, "must be 1 to 128 characters of A-Z a-z 0-9 . _ ~ -")


def check_text(messages: Iterable[NewMessage]) -> None:
    """Raise InvalidArgument for text that UTF-8 cannot encode. Called before anything is written."""
    for message in messages:
        try:
            (message.role + message.content).encode()
        except UnicodeEncodeError:
            raise InvalidArgument("messages", "the text has an unpaired surrogate") from None
