"""The calls that tenants have open, and the bytes of answers that their clients have not taken.

A call is counted from the moment that its caller is known until it has ended for gRPC, which is when its
client has taken the end or the connection is gone: so connections count by what is done on them.  More than
`calls_max` are refused before their request is received.  Of SendMessage twice as many are let in, because
one may be the return of a client whose connection broke, and whose old call gRPC has not given up yet;
admission.py refuses those that would begin a turn.  So it is with CancelTurn, by which such a call ends.

What a client does not take stays in memory.  An answer that would be too much beside what its tenant has
not taken yet (`unread_bytes`) is refused; a piece of a stream waits, and its reader is cancelled when it has
waited too long (readers.py).

A tenant in debt has its calls begun at a pace, and errors are told at a pace to one that is beyond a limit
(limits.py), so that a client which calls again at once, whatever it is told, takes little of the loop.

The operator's calls and those to health are not counted here.  All of it belongs to the loop.
"""

from __future__ import annotations

import asyncio
from typing import Any

from pensieve.errors import PensieveError
from pensieve.service.grpc.incoming import Held
from pensieve.service.limits import Allowance, Allowances

SEND_METHOD = "/pensieve.v1.ConversationService/SendMessage"
CANCEL_METHOD = "/pensieve.v1.ConversationService/CancelTurn"
LOOK_SECONDS = 0.05  # of a piece of a stream that waits


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
        """Wait until it may be told."""
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
        num_bytes = message.ByteSize()
        if (exceeded := self._allowance.unread_exceeded(num_bytes)) is not None:
            raise exceeded
        self._hold(num_bytes)
        self._num_bytes = num_bytes

    async def write(self, message: Any) -> None:
        """A piece of a stream; it waits while the tenant's clients have too much to take."""
        if self._request is not None:
            self._request.release()
        num_bytes, allowance = message.ByteSize(), self._allowance
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


class Calls:
    def __init__(self, allowances: Allowances) -> None:
        self._allowances = allowances

    def enter(self, context: Any, tenant: str) -> Call:
        """Count a call whose caller is known."""
        return Call(context, self._allowances.of(tenant, _now()))


def _now() -> float:
    return asyncio.get_running_loop().time()
