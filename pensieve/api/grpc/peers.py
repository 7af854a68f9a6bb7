"""Connect to the other daemons that share the history, and detect when a daemon no longer responds.

A suspended process (SIGSTOP) still accepts connections. So while a forwarded call waits for its answer,
`OwnerWatch` tries once a second to claim the conversation. The claim fails while the owner's lease is valid.
If many calls wait for one owner, only the oldest call tries this.

Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

import grpc

from pensieve.api.grpc.interceptor import CALLER_KEY, FORWARDED
from pensieve.errors import NotFound, OwnedElsewhere, PensieveError, whole_line
from pensieve.guard.callers import caller, encode_caller
from pensieve.guard.limits import Counts

log = logging.getLogger("pensieve")
NOT_PASSED_ON = ("user-agent", "te", "content-type", FORWARDED, CALLER_KEY)
LOOK_SECONDS = 1.0
BYTES_MAX = 64 << 20
CHANNELS_MAX = 256
OPTIONS = (
    ("grpc.max_receive_message_length", BYTES_MAX),
    ("grpc.max_send_message_length", BYTES_MAX),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2000),  # timeout of a connection attempt
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_retries", 0),
    ("grpc.keepalive_time_ms", 2000),  # detects a daemon that does not respond
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.bdp_probe", 0),  # windows stay small, so a slow client does not fill our memory
)
Metadata = tuple[tuple[str, str | bytes], ...]
Claim = Callable[[str, str], Awaitable[OwnedElsewhere | None]]  # arguments: conversation, tenant


class Peers:
    """Channels to the other daemons, by address, and the metadata of forwarded calls."""

    def __init__(
        self, name: str, secret: str = "", credentials: grpc.ChannelCredentials | None = None
    ) -> None:
        """`name`: this daemon's name. `credentials`: None without TLS between daemons.

        Without a `secret`, a daemon cannot prove that it is a daemon. So it forwards the client's token.
        """
        self._name, self._secret, self._credentials = name, secret, credentials
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._num_calls = Counts[str]()  # number of calls, by address

    @asynccontextmanager
    async def channel(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        """Return the channel to an address. The channel stays open until the block ends."""
        self._num_calls[address] += 1
        try:
            if address not in self._channels:
                await self._make_room()
            yield self._open(address)
        finally:
            self._num_calls[address] -= 1

    async def _make_room(self) -> None:
        """If there are CHANNELS_MAX channels, close the oldest without calls: its daemon may be long gone."""
        if len(self._channels) >= CHANNELS_MAX:
            idle = (each for each in self._channels if not self._num_calls[each])
            if (oldest := next(idle, None)) is not None:
                await self._channels.pop(oldest).close()

    def _open(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = (
                grpc.aio.insecure_channel(address, OPTIONS)
                if self._credentials is None
                else grpc.aio.secure_channel(address, self._credentials, OPTIONS)
            )
        return self._channels[address]

    def metadata(self, given: Iterable[tuple[str, str | bytes]]) -> Metadata:
        """Return metadata for a forwarded call, with the caller's identity."""
        hidden = (*NOT_PASSED_ON, "authorization") if self._secret else NOT_PASSED_ON
        kept = [
            (key, value)
            for key, value in given
            if key not in hidden and not key.startswith((":", "grpc-"))
        ]
        kept.append((FORWARDED, self._name))
        if self._secret:
            kept.append(("authorization", f"Bearer {self._secret}"))
            kept.append((CALLER_KEY, encode_caller(caller())))
        return tuple(kept)

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()


class Wait:
    """A forwarded call that waits for the owner's answer."""

    def __init__(self, owner: OwnedElsewhere, tenant: str, on_loss: Callable[[], object]) -> None:
        """`on_loss`: called when the owner has lost the conversation."""
        self.owner, self.tenant, self.on_loss = owner, tenant, on_loss
        self.is_over = False  # the owner has lost the conversation
        self.next_owner: OwnedElsewhere | None = None  # valid if `is_over`; None: this daemon


class OwnerWatch:
    def __init__(self, claim: Claim, look_seconds: float = LOOK_SECONDS) -> None:
        self._claim, self._look_seconds = claim, look_seconds
        self._waits: dict[str, dict[Wait, None]] = {}  # by the owner's address, oldest first
        self._watching: dict[str, asyncio.Task[None]] = {}

    def begin(self, owner: OwnedElsewhere, tenant: str, on_loss: Callable[[], object]) -> Wait:
        wait, address = Wait(owner, tenant, on_loss), owner.address
        self._waits.setdefault(address, {})[wait] = None
        if address not in self._watching:
            self._watching[address] = asyncio.get_running_loop().create_task(self._watch(address))
        return wait

    def end(self, wait: Wait) -> None:
        """End the wait; may be called more than once."""
        self._waits.get(wait.owner.address, {}).pop(wait, None)

    async def close(self) -> None:
        for task in self._watching.values():
            task.cancel()
        await asyncio.gather(*self._watching.values(), return_exceptions=True)

    async def _watch(self, address: str) -> None:
        waits = self._waits[address]
        try:
            while True:
                await asyncio.sleep(self._look_seconds)
                if not waits:
                    return
                for wait in tuple(waits):
                    if wait in waits and await self._check(wait):
                        break
        finally:
            del self._watching[address], self._waits[address]

    async def _check(self, wait: Wait) -> bool:
        """Return whether the owner still has the conversation; True also if this cannot be read.

        If this daemon or another one has it now, end the wait and call `on_loss`.
        """
        try:
            found = await self._claim(wait.owner.conversation_id, wait.tenant)
        except NotFound:
            return False  # the conversation was deleted; try the next waiting call's conversation
        except PensieveError as error:
            log.warning("owners of conversations cannot be read: %s", whole_line(error))
            return True
        if found is not None and found.address == wait.owner.address:
            return True
        if wait not in self._waits[wait.owner.address]:
            return False  # the answer has begun meanwhile, so the call no longer waits
        self.end(wait)
        wait.is_over, wait.next_owner = True, found
        wait.on_loss()
        return False
