"""Receive the bodies of requests, each group of callers within its own limits.

gRPC receives the request of a method that takes one message before it asks what to do with the call, so
anybody could have the daemon hold bodies that never end. To gRPC, all our methods therefore take a stream of
messages, which is the same on the wire: of a stream it receives no more than a window until somebody reads.
We read when the caller is known, and only the first message. A body over HTTP is read in the same way.

* A group of known callers (a tenant, or whoever comes by the socket in the data folder) receives
  RECEIVING_MAX bodies at a time. Other calls of the group wait, each for BODY_SECONDS at most. They also wait
  while HELD_BYTES_MAX of the group's requests are being handled, each until its answer begins.
* A call that sends many messages (a job's file) receives one at a time, as soon as the one before was taken
  in. A group has SENDING_MAX such calls, and each message may take BODY_SECONDS.
* Callers who are not known may ask for health. A check is always answered, because an orchestrator ends a
  daemon that does not answer: the oldest body on its way makes room for the newest. A connection may have
  only a few calls whose answers are not read, and few watches.

All of it runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from pensieve.errors import DeadlineExceeded, InvalidArgument, QueueFull
from pensieve.guard.limits import Counts

RECEIVING_MAX = 16
SENDING_MAX = 4  # calls of a group that send many messages
BODY_SECONDS = 30.0
HELD_BYTES_MAX = 32 << 20
LOOK_SECONDS = 0.05


class BodySource(Protocol):
    """Where a request's messages come from."""

    def read(self) -> Awaitable[Any]:
        """Return the bytes of the next message; anything else is the end."""

    def add_done_callback(self, callback: Callable[[Any], None], /) -> Any:
        """Have this called once, when the call has ended."""


class PieceSource(BodySource, Protocol):
    def read_ahead(self) -> Awaitable[bool]:
        """Receive what a short body has; return whether that is all of it."""


class Transport(PieceSource, Protocol):
    """A call as its door has it; only bodies that come in pieces need `read_ahead`."""

    def peer(self) -> str: ...
    def time_remaining(self) -> float | None: ...


@dataclass(frozen=True)
class BodyLimits:
    """Limits of each group of known callers."""

    receiving_max: int = RECEIVING_MAX
    seconds: float = BODY_SECONDS  # that a body may take


@dataclass(frozen=True)
class StrangerLimits:
    """Limits of callers who are not known, all of them together."""

    receiving_max: int = 8  # the oldest is given up for another
    seconds: float = 2.0  # that a body may take
    calls_max: int = 16  # of a connection, until their answers are read
    watches_max: int = 64


class ReceivedBytes:
    """The bytes of a request, which count for its group until they are released."""

    def __init__(self, bytes_held: Counts[str], group: str, num_bytes: int) -> None:
        self._bytes_held = bytes_held
        self._group = group
        self._num_bytes = num_bytes
        bytes_held[group] += num_bytes

    def release(self) -> None:
        """More than once does no harm."""
        self._bytes_held[self._group] -= self._num_bytes
        self._num_bytes = 0


class IncomingBodies:
    def __init__(
        self, known: BodyLimits | None = None, strangers: StrangerLimits | None = None
    ) -> None:
        self._known = known or BodyLimits()
        self._strangers = strangers or StrangerLimits()
        self._slots: dict[str, asyncio.Semaphore] = {}  # by group; as many as in the token file
        self.bytes_held = Counts[str]()  # by group
        self._num_sending = Counts[str]()  # calls that send many messages, by group
        self._strangers_bodies: list[asyncio.Timeout] = []  # the oldest first
        self._strangers_calls = Counts[str]()  # by connection
        self._num_watches = 0

    async def body(self, source: BodySource, group: str) -> tuple[bytes, ReceivedBytes]:
        """Return the bytes of the request of a known caller; they count until released."""
        seconds = self._known.seconds
        slots = self._slots.setdefault(group, asyncio.Semaphore(self._known.receiving_max))
        try:
            async with asyncio.timeout(seconds), slots:
                await self._wait_for_room(group)
                raw = _whole(await source.read())
        except TimeoutError:
            raise _too_late(seconds) from None
        return raw, ReceivedBytes(self.bytes_held, group, len(raw))

    async def piecewise(self, source: PieceSource, group: str) -> tuple[bytes, ReceivedBytes]:
        """Return the same of a body that comes in pieces.

        A short body does not count among those on their way, so slow ones do not hold it up.
        """
        seconds = self._known.seconds
        try:
            async with asyncio.timeout(seconds):
                if await source.read_ahead():
                    await self._wait_for_room(group)
                    raw = await source.read()
                    return raw, ReceivedBytes(self.bytes_held, group, len(raw))
        except TimeoutError:
            raise _too_late(seconds) from None
        return await self.body(source, group)

    async def bodies(self, source: BodySource, group: str) -> AsyncIterator[bytes]:
        """Yield the bytes of each message of a known caller; QueueFull if there are too many calls."""
        if self._num_sending[group] >= SENDING_MAX:
            raise QueueFull(f"{SENDING_MAX} files are on their way already; try again later")
        self._num_sending[group] += 1

        def ended(_: Any) -> None:
            self._num_sending[group] -= 1

        source.add_done_callback(ended)
        while True:
            try:
                async with asyncio.timeout(self._known.seconds):
                    await self._wait_for_room(group)
                    raw = await source.read()
            except TimeoutError:
                raise _too_late(self._known.seconds) from None
            if not isinstance(raw, bytes):  # the end of the stream
                return
            held = ReceivedBytes(self.bytes_held, group, len(raw))
            try:
                yield raw
            finally:
                held.release()

    async def _wait_for_room(self, group: str) -> None:
        while self.bytes_held[group] > HELD_BYTES_MAX:
            await asyncio.sleep(LOOK_SECONDS)

    async def strangers_body(self, source: BodySource, peer: str, *, is_watch: bool) -> bytes:
        """Return the bytes of the request of an unknown caller; QueueFull if there are too many calls."""
        if is_watch:
            self._enter_watch(source)
        else:
            self._enter_call(source, peer)
        seconds, bodies = self._strangers.seconds, self._strangers_bodies
        if len(bodies) >= self._strangers.receiving_max:
            oldest = bodies.pop(0)
            if not oldest.expired():
                oldest.reschedule(0.0)
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                bodies.append(limit)
                raw = await source.read()
        except TimeoutError:
            raise _too_late(seconds) from None
        finally:
            if limit in bodies:
                bodies.remove(limit)
        return _whole(raw)

    def _enter_call(self, source: BodySource, peer: str) -> None:
        """Count the call until its transport has ended it: the answer may wait long after ours."""
        calls = self._strangers_calls
        if calls[peer] >= self._strangers.calls_max:
            raise QueueFull("too many calls without a token; try again later")
        calls[peer] += 1

        def ended(_: Any) -> None:
            calls[peer] -= 1

        source.add_done_callback(ended)

    def _enter_watch(self, source: BodySource) -> None:
        if self._num_watches >= self._strangers.watches_max:
            raise QueueFull("too many watches without a token; check instead, or try again later")
        self._num_watches += 1

        def ended(_: Any) -> None:
            self._num_watches -= 1

        source.add_done_callback(ended)


def _too_late(seconds: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"the request did not arrive within {seconds:g} s")


def _whole(raw: Any) -> bytes:
    if not isinstance(raw, bytes):  # the end of the stream
        raise InvalidArgument("request", "is missing")
    return raw
