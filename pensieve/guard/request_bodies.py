"""Receive request bodies, with limits for each group of callers.

For a unary method, gRPC receives the whole request before our code can authenticate the caller. Unknown
callers could fill the memory with requests. So we register all methods as client streams, which look the same
on the wire. gRPC then receives only a window of the body. We authenticate the caller, and then read one
message. HTTP bodies are also read after authentication.

* A group of known callers is a tenant, or the callers on the socket in the data folder. At most RECEIVING_MAX
  bodies of a group are received at a time. Further calls of the group wait, for at most BODY_SECONDS each.
  They also wait while the group holds more than HELD_BYTES_MAX of requests (`ReceivedBytes`).
* A client stream (the upload of a job's file) receives one message at a time, after the previous message was
  consumed. A group has at most SENDING_MAX such calls, and each message may take BODY_SECONDS.
* Unknown callers may only check health. A check is always answered, because an orchestrator kills a daemon
  that does not answer. If too many unknown callers send bodies, the oldest unfinished body is dropped. The
  number of watches is limited, and so is the number of calls with unread answers on a connection.

Runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from pensieve.errors import DeadlineExceeded, InvalidArgument, QueueFull
from pensieve.guard.limits import Counts

RECEIVING_MAX = 16
SENDING_MAX = 4  # client streams per group
BODY_SECONDS = 30.0
HELD_BYTES_MAX = 32 << 20
POLL_SECONDS = 0.05


class BodySource(Protocol):
    """The source of a request's messages."""

    def read(self) -> Awaitable[Any]:
        """Return the bytes of the next message; any other value means the end."""

    def add_done_callback(self, callback: Callable[[Any], None], /) -> Any:
        """Call the function once, when the call has ended."""


class PieceSource(BodySource, Protocol):
    def read_ahead(self) -> Awaitable[bool]:
        """Receive up to the size of a short body, and return whether the body is complete."""


class Transport(PieceSource, Protocol):
    """A call over gRPC or HTTP; only HTTP bodies need `read_ahead`."""

    def peer(self) -> str: ...
    def time_remaining(self) -> float | None: ...


@dataclass(frozen=True)
class BodyLimits:
    """Limits of each group of known callers."""

    receiving_max: int = RECEIVING_MAX
    seconds: float = BODY_SECONDS  # for receiving a body


@dataclass(frozen=True)
class UnknownCallerLimits:
    """Limits of all unknown callers together."""

    receiving_max: int = 8  # bodies at a time; if another body arrives, the oldest is dropped
    seconds: float = 2.0  # for receiving a body
    calls_max: int = 16  # per connection; a call counts until its answer is read
    watches_max: int = 64


class ReceivedBytes:
    """The bytes of a request, which count towards the group's limit until `release`."""

    def __init__(self, bytes_held: Counts[str], group: str, num_bytes: int) -> None:
        self._bytes_held = bytes_held
        self._group = group
        self._num_bytes = num_bytes
        bytes_held[group] += num_bytes

    def release(self) -> None:
        """Stop counting the bytes; may be called more than once."""
        self._bytes_held[self._group] -= self._num_bytes
        self._num_bytes = 0


class IncomingBodies:
    def __init__(
        self, known: BodyLimits | None = None, unknown: UnknownCallerLimits | None = None
    ) -> None:
        self._known = known or BodyLimits()
        self._unknown_limits = unknown or UnknownCallerLimits()
        self._slots: dict[str, asyncio.Semaphore] = {}  # by group; bounded by the token file
        self.bytes_held = Counts[str]()  # by group
        self._num_sending = Counts[str]()  # client streams, by group
        self._unknown_bodies: list[asyncio.Timeout] = []  # oldest first
        self._unknown_calls = Counts[str]()  # by connection
        self._num_watches = 0

    async def body(self, source: BodySource, group: str) -> tuple[bytes, ReceivedBytes]:
        """Return a request of a known caller, and the object that releases its bytes."""
        seconds = self._known.seconds
        slots = self._slots.setdefault(group, asyncio.Semaphore(self._known.receiving_max))
        try:
            async with asyncio.timeout(seconds), slots:
                await self._wait_for_room(group)
                raw = _require_message(await source.read())
        except TimeoutError:
            raise _timeout_error(seconds) from None
        return raw, ReceivedBytes(self.bytes_held, group, len(raw))

    async def http_body(self, source: PieceSource, group: str) -> tuple[bytes, ReceivedBytes]:
        """Return an HTTP body of a known caller.

        A short body is received even if RECEIVING_MAX other bodies are being received.
        """
        seconds = self._known.seconds
        try:
            async with asyncio.timeout(seconds):
                if await source.read_ahead():
                    await self._wait_for_room(group)
                    raw = await source.read()
                    return raw, ReceivedBytes(self.bytes_held, group, len(raw))
        except TimeoutError:
            raise _timeout_error(seconds) from None
        return await self.body(source, group)

    async def bodies(self, source: BodySource, group: str) -> AsyncIterator[bytes]:
        """Yield the messages of a known caller's stream; raises QueueFull if there are too many streams."""
        if self._num_sending[group] >= SENDING_MAX:
            raise QueueFull(f"{SENDING_MAX} uploads are running already; try again later")
        self._num_sending[group] += 1

        def on_end(_: Any) -> None:
            self._num_sending[group] -= 1

        source.add_done_callback(on_end)
        while True:
            try:
                async with asyncio.timeout(self._known.seconds):
                    await self._wait_for_room(group)
                    raw = await source.read()
            except TimeoutError:
                raise _timeout_error(self._known.seconds) from None
            if not isinstance(raw, bytes):  # the end of the stream
                return
            held = ReceivedBytes(self.bytes_held, group, len(raw))
            try:
                yield raw
            finally:
                held.release()

    async def _wait_for_room(self, group: str) -> None:
        while self.bytes_held[group] > HELD_BYTES_MAX:
            await asyncio.sleep(POLL_SECONDS)

    async def unknown_callers_body(self, source: BodySource, peer: str, *, is_watch: bool) -> bytes:
        """Return a request of an unknown caller; raises QueueFull if there are too many calls."""
        if is_watch:
            self._enter_watch(source)
        else:
            self._enter_call(source, peer)
        seconds, bodies = self._unknown_limits.seconds, self._unknown_bodies
        if len(bodies) >= self._unknown_limits.receiving_max:
            oldest = bodies.pop(0)
            if not oldest.expired():
                oldest.reschedule(0.0)
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                bodies.append(limit)
                raw = await source.read()
        except TimeoutError:
            raise _timeout_error(seconds) from None
        finally:
            if limit in bodies:
                bodies.remove(limit)
        return _require_message(raw)

    def _enter_call(self, source: BodySource, peer: str) -> None:
        """Count the call until its transport ends: the client may leave the answer unread for long."""
        calls = self._unknown_calls
        if calls[peer] >= self._unknown_limits.calls_max:
            raise QueueFull("too many calls without a token; try again later")
        calls[peer] += 1

        def on_end(_: Any) -> None:
            calls[peer] -= 1

        source.add_done_callback(on_end)

    def _enter_watch(self, source: BodySource) -> None:
        if self._num_watches >= self._unknown_limits.watches_max:
            raise QueueFull("too many watches without a token; check instead, or try again later")
        self._num_watches += 1

        def on_end(_: Any) -> None:
            self._num_watches -= 1

        source.add_done_callback(on_end)


def _timeout_error(seconds: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"the request did not arrive within {seconds:g} s")


def _require_message(raw: Any) -> bytes:
    if not isinstance(raw, bytes):  # the end of the stream
        raise InvalidArgument("request", "is missing")
    return raw
