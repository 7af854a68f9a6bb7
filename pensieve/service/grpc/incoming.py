"""Takes in the one message of a call, once its caller is known: few at a time, and not for ever.

gRPC receives the request of a method that takes one message before it asks what to do with the call, so
anybody could have the daemon hold bodies that never end.  To gRPC, all our methods take a stream of
messages, which is the same on the wire: of a stream it receives no more than a window (WINDOW_BYTES, in
server.py) until somebody reads.  We read when the caller is known (auth.py), and only the first message.

* Callers that are known, by a token or because none are needed, have RECEIVING_MAX bodies on their way per
  tenant, each of which may take BODY_SECONDS; the others wait, and hold a window each.  So they do while
  HELD_BYTES_MAX of the tenant's requests are being handled, which is until their answer begins.
* Everybody else may ask for health.  All of them share STRANGERS: few calls at once (a watch of health is
  one), few bodies, soon given up; more are refused.

All of it belongs to the loop.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from pensieve.errors import DeadlineExceeded, InvalidArgument, QueueFull

RECEIVING_MAX = 16
BODY_SECONDS = 30.0
HELD_BYTES_MAX = 32 << 20  # of a tenant's, beyond which no further one is received
LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Terms:
    """What a group of callers may have on its way."""

    receiving_max: int
    seconds: float  # that a body may take
    calls_max: int | None = None


KNOWN = Terms(RECEIVING_MAX, BODY_SECONDS)
STRANGERS = Terms(4, 2.0, 512)


class _Group:
    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.slots = asyncio.Semaphore(terms.receiving_max)
        self.num_calls = 0
        self.num_bytes_held = 0


class Held:
    """The memory that a request takes while it is handled."""

    def __init__(self, group: _Group, num_bytes: int) -> None:
        self._group = group
        self._num_bytes = num_bytes
        group.num_bytes_held += num_bytes

    def release(self) -> None:
        """More than once does no harm."""
        self._group.num_bytes_held -= self._num_bytes
        self._num_bytes = 0


class Incoming:
    """The bodies that are on their way."""

    def __init__(self, known: Terms = KNOWN, strangers: Terms = STRANGERS) -> None:
        self._known = known
        self._strangers = _Group(strangers)
        self._groups: dict[
            str, _Group
        ] = {}  # by tenant, of which there are as many as in the token file

    async def body(self, context: Any, tenant: str | None) -> tuple[bytes, Held]:
        """The bytes of a call's request; `tenant` is None for somebody who is not known."""
        group = self._enter(context, tenant)
        seconds = group.terms.seconds
        async with group.slots:
            while group.num_bytes_held > HELD_BYTES_MAX:
                await asyncio.sleep(LOOK_SECONDS)
            try:
                async with asyncio.timeout(seconds):
                    raw = await context.read()
            except TimeoutError:
                raise DeadlineExceeded(f"the request did not arrive within {seconds:g} s") from None
        if not isinstance(raw, bytes):  # the end of the stream
            raise InvalidArgument("request", "is missing")
        return raw, Held(group, len(raw))

    def _enter(self, context: Any, tenant: str | None) -> _Group:
        """Count a stranger's call until it has ended for gRPC: the answer may wait long after ours."""
        if tenant is not None:
            return self._group(tenant)
        group = self._strangers
        calls_max = group.terms.calls_max
        if calls_max is not None and group.num_calls >= calls_max:
            raise QueueFull("too many calls without a token; try again later")
        group.num_calls += 1

        def ended(_: Any) -> None:
            group.num_calls -= 1

        context.add_done_callback(ended)
        return group

    def _group(self, tenant: str) -> _Group:
        return self._groups.setdefault(tenant, _Group(self._known))
