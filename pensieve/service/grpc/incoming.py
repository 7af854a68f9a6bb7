"""Takes in the one message of a call, once its caller is known: few at a time, and not for ever.

gRPC receives the request of a method that takes one message before it asks what to do with the call, so
anybody could have the daemon hold bodies that never end.  To gRPC, all our methods take a stream of
messages, which is the same on the wire: of a stream it receives no more than a window (WINDOW_BYTES, in
server.py) until somebody reads.  We read when the caller is known (auth.py), and only the first message.

* Callers that are known, by a token or because none are needed, have RECEIVING_MAX bodies on their way per
  group, which is a tenant, or whoever comes by the socket in the data folder, so that nobody keeps the
  operator out.  The others wait, and hold a window each; waiting and receiving may take BODY_SECONDS.  So
  they do while HELD_BYTES_MAX of the group's requests are being handled, each until its answer begins.
* Of a call that sends many messages (a job's file) one at a time is received, as soon as the one before was
  taken in; a group has SENDING_MAX such calls, and each message may take BODY_SECONDS.
* Everybody else may ask for health.  A check is always answered, because an orchestrator ends a daemon that
  does not: nothing that strangers do on other connections counts against it.  The calls of a connection whose
  answers are not taken are few, and so are connections (server.py); of the bodies on their way the oldest
  makes way for the newest, since one that comes whole is there at once.  A watch lasts, so all have few.

All of it belongs to the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from pensieve.errors import DeadlineExceeded, InvalidArgument, QueueFull
from pensieve.service.counts import Counts

RECEIVING_MAX = 16
SENDING_MAX = 4  # calls of a group that send many messages
BODY_SECONDS = 30.0
HELD_BYTES_MAX = 32 << 20
LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Terms:
    """What a group of callers may have on its way."""

    receiving_max: int = RECEIVING_MAX
    seconds: float = BODY_SECONDS  # that a body may take


@dataclass(frozen=True)
class StrangersTerms:
    """What those without a token may have."""

    receiving_max: int = 8  # of all of them; the oldest is given up for another
    seconds: float = 2.0  # that a body may take
    calls_max: int = 16  # of a connection, until their answers are taken
    watches_max: int = 64  # of all of them


class Held:
    """The memory that a request takes while it is handled."""

    def __init__(self, bytes_held: Counts[str], group: str, num_bytes: int) -> None:
        self._bytes_held = bytes_held
        self._group = group
        self._num_bytes = num_bytes
        bytes_held[group] += num_bytes

    def release(self) -> None:
        """More than once does no harm."""
        self._bytes_held[self._group] -= self._num_bytes
        self._num_bytes = 0


class Incoming:
    """The bodies that are on their way."""

    def __init__(self, known: Terms | None = None, strangers: StrangersTerms | None = None) -> None:
        self._known = known or Terms()
        self._strangers = strangers or StrangersTerms()
        self._slots: dict[str, asyncio.Semaphore] = {}  # by group; as many as in the token file
        self.bytes_held = Counts[str]()  # by group
        self._num_sending = Counts[str]()  # calls that send many messages, by group
        self._strangers_bodies: list[asyncio.Timeout] = []  # the oldest first
        self._strangers_calls = Counts[str]()  # by connection
        self._num_watches = 0

    async def body(self, context: Any, group: str) -> tuple[bytes, Held]:
        """The bytes of a call's request, whose caller is known; they are held until released."""
        seconds = self._known.seconds
        slots = self._slots.setdefault(group, asyncio.Semaphore(self._known.receiving_max))
        try:
            async with asyncio.timeout(seconds), slots:
                await self._wait_for_room(group)
                raw = _whole(await context.read())
        except TimeoutError:
            raise _too_late(seconds) from None
        return raw, Held(self.bytes_held, group, len(raw))

    async def piecewise(self, context: Any, group: str) -> tuple[bytes, Held]:
        """As `body`, of one that comes in pieces.

        A short one needs no place among those on their way, so slow ones are in the way of nobody.
        """
        seconds = self._known.seconds
        try:
            async with asyncio.timeout(seconds):
                if await context.read_ahead():
                    await self._wait_for_room(group)
                    raw = await context.read()
                    return raw, Held(self.bytes_held, group, len(raw))
        except TimeoutError:
            raise _too_late(seconds) from None
        return await self.body(context, group)

    async def bodies(self, context: Any, group: str) -> AsyncIterator[bytes]:
        """The bytes of each message of a call whose caller is known; QueueFull if there are too many."""
        if self._num_sending[group] >= SENDING_MAX:
            raise QueueFull(f"{SENDING_MAX} files are on their way already; try again later")
        self._num_sending[group] += 1

        def ended(_: Any) -> None:
            self._num_sending[group] -= 1

        context.add_done_callback(ended)
        while True:
            try:
                async with asyncio.timeout(self._known.seconds):
                    await self._wait_for_room(group)
                    raw = await context.read()
            except TimeoutError:
                raise _too_late(self._known.seconds) from None
            if not isinstance(raw, bytes):  # the end of the stream
                return
            held = Held(self.bytes_held, group, len(raw))
            try:
                yield raw
            finally:
                held.release()

    async def _wait_for_room(self, group: str) -> None:
        while self.bytes_held[group] > HELD_BYTES_MAX:
            await asyncio.sleep(LOOK_SECONDS)

    async def strangers_body(self, context: Any, peer: str, *, is_watch: bool) -> bytes:
        """The same of somebody's who is not known; QueueFull where there are too many calls."""
        if is_watch:
            self._enter_watch(context)
        else:
            self._enter_call(context, peer)
        seconds, bodies = self._strangers.seconds, self._strangers_bodies
        if len(bodies) >= self._strangers.receiving_max:
            oldest = bodies.pop(0)
            if not oldest.expired():
                oldest.reschedule(0.0)
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                bodies.append(limit)
                raw = await context.read()
        except TimeoutError:
            raise _too_late(seconds) from None
        finally:
            if limit in bodies:
                bodies.remove(limit)
        return _whole(raw)

    def _enter_call(self, context: Any, peer: str) -> None:
        """Count it until it has ended for gRPC: the answer may wait long after ours."""
        calls = self._strangers_calls
        if calls[peer] >= self._strangers.calls_max:
            raise QueueFull("too many calls without a token; try again later")
        calls[peer] += 1

        def ended(_: Any) -> None:
            calls[peer] -= 1

        context.add_done_callback(ended)

    def _enter_watch(self, context: Any) -> None:
        if self._num_watches >= self._strangers.watches_max:
            raise QueueFull("too many watches without a token; check instead, or try again later")
        self._num_watches += 1

        def ended(_: Any) -> None:
            self._num_watches -= 1

        context.add_done_callback(ended)


def _too_late(seconds: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"the request did not arrive within {seconds:g} s")


def _whole(raw: Any) -> bytes:
    if not isinstance(raw, bytes):  # the end of the stream
        raise InvalidArgument("request", "is missing")
    return raw
