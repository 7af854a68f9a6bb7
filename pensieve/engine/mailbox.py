"""The two bounded queues between an engine and other threads: messages in, events out.

Messages enter through the `Mailbox`. Events leave through a sink, usually an `Outbox`.

A mailbox holds `messages_max` messages. If it is full, `put` raises QueueFull, and `put_when_there_is_room`
waits. Cancels and deletions are always accepted, because they only free memory. An outbox holds `events_max`
events. An engine that publishes into a full outbox waits for the reader. So the reader must not wait for slow
clients: it must limit the unread events of each stream.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from pensieve.engine.messages import EngineEvent, EngineMessage, Freeing
from pensieve.errors import QueueFull, Unavailable


class Mailbox:
    def __init__(self, messages_max: int = 1024) -> None:
        self.messages_max = messages_max
        self._messages: deque[EngineMessage] = deque()
        self._changed = threading.Condition()
        self._closed: str | None = None
        self._woken = False

    def put(self, message: EngineMessage) -> None:
        with self._changed:
            if self._closed is None and not self._has_room_for(message):
                raise QueueFull(
                    f"{self.messages_max} messages are waiting for the engine; retry later"
                )
            self._append(message)

    def put_when_there_is_room(self, message: EngineMessage) -> None:
        """Wait for room, then add a message. The engine takes all messages before every iteration."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed is not None or self._has_room_for(message))
            self._append(message)

    def drain(self) -> list[EngineMessage]:
        with self._changed:
            messages = list(self._messages)
            self._messages.clear()
            self._changed.notify_all()
            return messages

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait for a message, `wake` or `close`. Return False after the timeout."""
        with self._changed:
            was_woken = self._changed.wait_for(
                lambda: self._woken or bool(self._messages) or self._closed is not None,
                timeout_seconds,
            )
            self._woken = False
            return was_woken

    def wake(self) -> None:
        """End the engine's current or next `wait` without a message."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self, reason: str = "the engine is stopping") -> None:
        with self._changed:
            self._closed = self._closed or reason
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        with self._changed:
            return self._closed is not None

    def _has_room_for(self, message: EngineMessage) -> bool:
        return isinstance(message, Freeing) or len(self._messages) < self.messages_max

    def _append(self, message: EngineMessage) -> None:
        if self._closed is not None:
            raise Unavailable(self._closed)
        self._messages.append(message)
        self._changed.notify_all()


class Outbox:
    """A sink that another thread reads."""

    def __init__(self, events_max: int = 65_536) -> None:
        self.events_max = events_max
        self._events: deque[EngineEvent] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def publish(self, events: Sequence[EngineEvent]) -> None:
        if not events:
            return
        with self._changed:
            self._changed.wait_for(lambda: len(self._events) < self.events_max or self._closed)
            self._events.extend(events)
            self._changed.notify_all()

    def get(self, timeout_seconds: float | None = None) -> EngineEvent | None:
        """Return the next event; None after the timeout, or if the outbox is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._events) or self._closed, timeout_seconds)
            if not self._events:
                return None
            event = self._events.popleft()
            self._changed.notify_all()
            return event

    def drain(self, timeout_seconds: float | None = None) -> list[EngineEvent] | None:
        """Wait for events and return all; [] after the timeout, None if the outbox is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._events) or self._closed, timeout_seconds)
            if self._closed and not self._events:
                return None
            events = list(self._events)
            self._events.clear()
            self._changed.notify_all()
            return events

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
