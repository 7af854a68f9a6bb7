"""What goes into the store and what comes out of it: frozen values, no connection behind them.

A conversation's *log* is its token ids from the first to the last.  Its messages tile the log:
message n covers positions [first_token, first_token + num_tokens), and the next one begins where it
ends.  Every commit of a conversation takes the next *revision*, and a message names the revision
that made it; the messages given at creation have revision 0.
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
PAGE_SIZE_MAX = 1000


class TurnState(StrEnum):
    RUNNING = "running"
    COMPLETED = "completed"
    CANCELLED = "cancelled"  # ended by the client; what was delivered is in the history
    INTERRUPTED = "interrupted"  # the process stopped or the client left; not in the history
    FAILED = "failed"  # the engine could not finish it; not in the history


LEGAL_TRANSITIONS: Mapping[TurnState, frozenset[TurnState]] = {
    TurnState.RUNNING: frozenset(
        {TurnState.COMPLETED, TurnState.CANCELLED, TurnState.INTERRUPTED, TurnState.FAILED}
    ),
    TurnState.COMPLETED: frozenset(),
    TurnState.CANCELLED: frozenset(),
    TurnState.INTERRUPTED: frozenset({TurnState.RUNNING}),  # its request_id came again
    TurnState.FAILED: frozenset({TurnState.RUNNING}),
}


@dataclass(frozen=True, slots=True)
class NewMessage:
    """A message about to join the log, with exactly the tokens it adds to it.

    `extra` holds whatever else a template needs to render it again (tool calls, thinking).
    """

    role: str
    content: str
    token_ids: Sequence[int] = ()
    tool_call_id: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def private(self) -> dict[str, Any]:
        return {
            "content": self.content,
            "tool_call_id": self.tool_call_id,
            "extra": dict(self.extra),
        }


@dataclass(frozen=True, slots=True)
class NewConversation:
    """`messages` is the head, the system prompt as a rule: revision 0, never rewound away."""

    conversation_id: str
    fingerprint: str
    messages: Sequence[NewMessage] = ()
    tools: Sequence[Any] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    prefix_id: str = ""
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What a client asked for.

    `sampling` is what it sent, before defaults and without a seed that the service drew, so that
    the same request compares equal when it comes again; `seed` is the one to use.  The token ids of
    `messages` were made for `expected_revision`; None accepts any.
    """

    request_id: str
    messages: Sequence[NewMessage]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    expected_revision: int | None = None

    def content_hash(self) -> str:
        asked = [[message.role, message.private()] for message in self.messages]
        return hashlib.sha256(canonical_json([asked, dict(self.sampling)])).hexdigest()


@dataclass(frozen=True, slots=True)
class Conversation:
    conversation_id: str
    tenant: str
    revision: int
    num_messages: int
    num_tokens: int  # the length of the log
    fingerprint: str  # of the model, tokenizer and template that the token ids belong to
    tools: tuple[Any, ...]
    template_options: dict[str, Any]
    metadata: dict[str, Any]
    prefix_id: str
    running_turn_id: int | None
    created_at: float
    updated_at: float


@dataclass(frozen=True, slots=True)
class Message:
    index: int
    role: str
    content: str
    tool_call_id: str
    extra: dict[str, Any]
    revision: int
    first_token: int
    num_tokens: int
    finish_reason: str | None  # of a reply; None for every other message
    token_ids: array[int] | None  # 'I'; None unless asked for


@dataclass(frozen=True, slots=True)
class StoredTurn:
    turn_id: int
    conversation_id: str
    tenant: str
    request_id: str
    state: TurnState
    attempts: int  # how often it began; above 1 after an interruption
    sampling: dict[str, Any]
    seed: int
    finish_reason: str | None
    failure: str | None  # why it failed
    usage: dict[str, Any]
    revision: int | None  # the one it made
    created_at: float
    finished_at: float | None


class Begun(NamedTuple):
    """A turn, and whether it is to be computed now (else it is running or finished already)."""

    turn: StoredTurn
    must_run: bool


class TurnMessages(NamedTuple):
    prompt: tuple[NewMessage, ...]
    reply: NewMessage | None  # None unless the turn is completed or cancelled


class Page(NamedTuple):
    conversations: tuple[Conversation, ...]
    next_page_token: str  # empty on the last page


class Rewound(NamedTuple):
    revision: int
    num_tokens: int


def check_id(name: str, value: str) -> None:
    if not ID_PATTERN.fullmatch(value):
        raise InvalidArgument(name, "must be 1 to 128 of A-Z a-z 0-9 . _ ~ -")


def check_text(messages: Iterable[NewMessage]) -> None:
    """Refuse what UTF-8 cannot carry, before anything is written."""
    for message in messages:
        try:
            (message.role + message.content).encode()
        except UnicodeEncodeError:
            raise InvalidArgument("messages", "the text has an unpaired surrogate") from None
