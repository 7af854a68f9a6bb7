"""The two crossings between an engine and the rest of the world, and the values that cross.

Messages go in through the `Mailbox`, events come out through a sink, most often an `Outbox`.  Both
carry plain frozen values (ids, bytes, numbers), so they may as well be a pipe to another process.

Bounds.  A mailbox takes `messages_max` messages and refuses the next with QueueFull; cancels and
deletions are always taken, since they only free things.  An outbox holds `events_max` events; an
engine that publishes into a full one waits for its reader, so its memory is bounded, and whoever
reads must bound what each stream leaves unread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pensieve.core.iteration import Logprob
from pensieve.core.sampling import Sampling
from pensieve.core.turn import FinishReason, Usage
from pensieve.errors import QueueFull, Unavailable


@dataclass(frozen=True, slots=True)
class SubmitTurn:
    turn_id: int  # unique for the life of the engine
    conversation_id: str
    tokens: bytes  # the whole log and the new prompt, packed uint32 in native order
    history_tokens: int  # how many of them are the log
    sampling: Sampling = field(default_factory=Sampling)
    warm: bool = False  # only bring the conversation's KV to the device
    away_seconds: float = 0.0  # how long the conversation is expected to be idle after it
    priority: int = 0
    prefix_of: str = ""  # a conversation whose KV of the first prefix_tokens is this one's, too
    prefix_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CancelTurn:
    turn_id: int
    keep_tokens: int  # the log's length after the cancel; KV behind it is forgotten


@dataclass(frozen=True, slots=True)
class ForkConversation:
    source_id: str
    num_tokens: int
    target_id: str


@dataclass(frozen=True, slots=True)
class RewindConversation:
    conversation_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class DeleteConversation:
    conversation_id: str


@dataclass(frozen=True, slots=True)
class EvictConversation:
    conversation_id: str
    to_host: bool = False  # else its KV is dropped
    query_id: int = 0  # 0: nobody waits for the answer


@dataclass(frozen=True, slots=True)
class ListCached:
    query_id: int
    limit: int
    least_valuable: bool = False  # else the largest first


@dataclass(frozen=True, slots=True)
class Explain:
    query_id: int
    conversation_id: str


@dataclass(frozen=True, slots=True)
class GetStats:
    query_id: int


@dataclass(frozen=True, slots=True)
class CheckIntegrity:
    query_id: int


Message = (
    SubmitTurn
    | CancelTurn
    | ForkConversation
    | RewindConversation
    | DeleteConversation
    | EvictConversation
    | ListCached
    | Explain
    | GetStats
    | CheckIntegrity
)


@dataclass(frozen=True, slots=True)
class TurnDelta:
    """One sampled token, and the text that it releases (perhaps none yet)."""

    turn_id: int
    conversation_id: str
    token_id: int
    text: str
    logprob: float | None = None
    top_logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnEnded:
    turn_id: int
    conversation_id: str
    finish: FinishReason
    usage: Usage
    failure: str | None = None  # why, when finish is FAILED


@dataclass(frozen=True, slots=True)
class Answer:
    """To a query: figures by name, the problems found (none: all is well), or rows of values."""

    query_id: int
    figures: dict[str, float] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    rows: tuple[tuple[str | float, ...], ...] = ()


Event = TurnDelta | TurnEnded | Answer


class Mailbox:
    def __init__(self, messages_max: int = 1024) -> None:
        self.messages_max = messages_max
        self._messages: deque[Message] = deque()
        self._changed = threading.Condition()
        self._closed: str | None = None

    def put(self, message: Message) -> None:
        with self._changed:
            if self._closed is not None:
                raise Unavailable(self._closed)
            always = isinstance(message, CancelTurn | DeleteConversation)
            if len(self._messages) >= self.messages_max and not always:
                raise QueueFull(
                    f"{self.messages_max} messages wait for the engine; try again later"
                )
            self._messages.append(message)
            self._changed.notify()

    def drain(self) -> list[Message]:
        with self._changed:
            messages = list(self._messages)
            self._messages.clear()
            return messages

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Until there is a message or the box is closed; False after the timeout."""
        with self._changed:
            return self._changed.wait_for(
                lambda: bool(self._messages) or self._closed is not None, timeout_seconds
            )

    def close(self, reason: str = "the engine is stopping") -> None:
        with self._changed:
            self._closed = self._closed or reason
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        with self._changed:
            return self._closed is not None


class Outbox:
    """A sink that another thread reads."""

    def __init__(self, events_max: int = 65_536) -> None:
        self.events_max = events_max
        self._events: deque[Event] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def publish(self, events: Sequence[Event]) -> None:
        if not events:
            return
        with self._changed:
            self._changed.wait_for(lambda: len(self._events) < self.events_max or self._closed)
            self._events.extend(events)
            self._changed.notify_all()

    def get(self, timeout_seconds: float | None = None) -> Event | None:
        """The next event; None after the timeout, or when closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._events) or self._closed, timeout_seconds)
            if not self._events:
                return None
            event = self._events.popleft()
            self._changed.notify_all()
            return event

    def drain(self) -> list[Event]:
        """Everything that is there, when something is; nothing when closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._events) or self._closed)
            events = list(self._events)
            self._events.clear()
            self._changed.notify_all()
            return events

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
