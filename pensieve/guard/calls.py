"""What the calls of a tenant may hold: open calls, requests on their way, and answers that nobody takes.

**Open calls.**  A call counts from the moment that its caller is known until gRPC has ended it, which is when
its client has taken the end or the connection is gone.  More than `calls_max` are refused before their
request is received.  Of SendMessage and CancelTurn twice as many are let in, because one may be the return of
a client whose connection broke.  The operator's calls and those to health do not count.  A tenant in debt has
its calls begun, and its errors told, at a pace (limits.py).

**Answers.**  An answer that would be too much beside what its tenant has not taken yet (`unread_bytes`) is
refused; a piece of a stream waits, and its reader is cancelled when it has waited too long (readers.py).

**Requests.**  gRPC receives the request of a method that takes one message before it asks what to do with the
call, so anybody could have the daemon hold bodies that never end.  To gRPC, all our methods take a stream of
messages, which is the same on the wire: of a stream it receives no more than a window (WINDOW_BYTES, in
server.py) until somebody reads.  We read when the caller is known (auth.py), and only the first message.

* A group of known callers (a tenant, or whoever comes by the socket in the data folder) has RECEIVING_MAX
  bodies on their way.  The others wait, each for BODY_SECONDS at most.  So they do while HELD_BYTES_MAX of
  the group's requests are being handled, each until its answer begins.
* Of a call that sends many messages (a job's file) one at a time is received, as soon as the one before was
  taken in; a group has SENDING_MAX such calls, and each message may take BODY_SECONDS.
* Everybody else may ask for health.  A check is always answered, because an orchestrator ends a daemon that
  does not: of the bodies on their way the oldest makes way for the newest.  The calls of a connection whose
  answers are not taken are few, and so are watches.

All of it belongs to the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from pensieve.errors import DeadlineExceeded, InvalidArgument, PensieveError, QueueFull
from pensieve.guard.counts import Counts
from pensieve.guard.limits import Allowance

RECEIVING_MAX = 16
SENDING_MAX = 4  # calls of a group that send many messages
BODY_SECONDS = 30.0
HELD_BYTES_MAX = 32 << 20
LOOK_SECONDS = 0.05
SEND_METHOD = "/pensieve.v1.ConversationService/SendMessage"
CANCEL_METHOD = "/pensieve.v1.ConversationService/CancelTurn"


class Call:
    """A call of a tenant; to its handler, the call's context."""

    def __init__(self, context: Any, allowance: Allowance) -> None:
        self._context = context
        self._allowance = allowance
        self._num_bytes = 0  # of an answer, until the call has ended
        self._request: Held | None = None
        allowance.num_calls += 1
        context.add_done_callback(self._ended)

    async def admit(self, method: str) -> None:
        """QueueFull if its tenant has too many; the request of one that is let in was not received yet."""
        allowance, now = self._allowance, _now()
        allowed = 2 if method in (SEND_METHOD, CANCEL_METHOD) else 1
        exceeded = allowance.calls_exceeded(allowed) or allowance.request(now)
        if exceeded is not None:
            raise exceeded
        await self._pause(allowance.seconds_to_begin(now))

    async def refused(self, error: PensieveError) -> None:
        await self._pause(self._allowance.seconds_to_refuse(error, _now()))

    async def _pause(self, seconds: float) -> None:
        """Not beyond half of the time that the caller waits."""
        if seconds:
            left = self._context.time_remaining()
            await asyncio.sleep(seconds if left is None else min(seconds, left / 2))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def received(self, request: Held) -> None:
        """It is held until the first piece of a stream is written, or the call ends."""
        self._request = request

    def answers(self, message: Any) -> None:
        """The call's only answer is about to be sent; QueueFull if it must not be."""
        num_bytes = size_of(message)
        if (exceeded := self._allowance.unread_exceeded(num_bytes)) is not None:
            raise exceeded
        self._hold(num_bytes)
        self._num_bytes = num_bytes

    async def write(self, message: Any) -> None:
        """A piece of a stream; it waits while the tenant's clients have too much to take."""
        if self._request is not None:
            self._request.release()
        num_bytes, allowance = size_of(message), self._allowance
        while allowance.num_unread_bytes and allowance.unread_exceeded(num_bytes) is not None:
            await asyncio.sleep(LOOK_SECONDS)
        self._hold(num_bytes)
        try:
            await self._context.write(message)
        finally:
            self._hold(-num_bytes)

    def _hold(self, num_bytes: int) -> None:
        self._allowance.num_unread_bytes += num_bytes

    def _ended(self, _: Any) -> None:
        self._allowance.num_calls -= 1
        self._hold(-self._num_bytes)


def size_of(message: Any) -> int:
    """Of a message of gRPC, or of the bytes of another protocol."""
    return len(message) if isinstance(message, bytes) else int(message.ByteSize())


def _now() -> float:
    return asyncio.get_running_loop().time()


@dataclass(frozen=True)
class Terms:
    receiving_max: int = RECEIVING_MAX
    seconds: float = BODY_SECONDS  # that a body may take


@dataclass(frozen=True)
class StrangersTerms:
    receiving_max: int = 8  # of all of them; the oldest is given up for another
    seconds: float = 2.0  # that a body may take
    calls_max: int = 16  # of a connection, until their answers are taken
    watches_max: int = 64  # of all of them


class Held:
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
