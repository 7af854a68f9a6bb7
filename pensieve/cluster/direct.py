"""A response that goes past Ray: from the daemon straight to Ray's proxy, while Ray counts it as a call.

Each message of a stream costs Ray a task in the proxy and one in the replica, some 2.4 ms of a core in all; a
token is a message.  So of a stream of gRPC's, and of an HTTP response, Ray carries one message, which says
where the daemon is:

    client ──> proxy ──Ray──> replica          "the daemon is at A; the hold is at H, under this ticket"
                 ├──connection to H──> replica keeps Ray's call open until this closes
                 └──gRPC or HTTP to A──> daemon    the request and its messages

Ray sees a call that runs: it counts it for its choice of replicas and for scaling, and waits for it before it
ends a replica.  Neither side outlives the other: the replica ends Ray's call when the connection of the hold
is closed (the response has ended, or the proxy is gone), or when none came within HOLD_SECONDS; the proxy
ends the response when the replica closes it, as it does when Ray ends the call.  A stream that watches has no
end of its own, and Ray waits for the end of all calls before a replica may end: so a replica that is to end
closes these.

The daemon decides who may call, by the client's own metadata; without tokens the replica has decided before
it says where the daemon is.  A ticket opens nothing: it ends a call at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

DIRECT = "pensieve-direct"  # trailing metadata of the one message, or a header of the response
HOLD_SECONDS = 10.0
# A proxy whose machine is gone closes nothing: found out after some 30 s.
KEEPALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


class Way(NamedTuple):
    """Where a stream goes on."""

    daemon: str  # its address
    hold: str  # the replica's
    ticket: str
    replica: str  # its name

    def written(self) -> str:
        return " ".join(self)


def way_of(metadata: Any) -> Way:
    """What is written in trailing metadata."""
    return read(next(value for name, value in metadata if name == DIRECT))


def read(written: str) -> Way:
    return Way(*written.split(" "))


@dataclass(eq=False)
class _Hold:
    watches: bool
    writer: asyncio.StreamWriter | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Holds:
    """The replica's side: calls of Ray that stay open while their streams run."""

    def __init__(self) -> None:
        self.address = ""
        self._server: asyncio.Server | None = None
        self._holds: dict[str, _Hold] = {}  # by ticket
        self.ends_watching = False

    @property
    def num_open(self) -> int:
        return len(self._holds)

    async def listen(self, host: str) -> None:
        self._server = await asyncio.start_server(self._connected, host, 0)
        port = self._server.sockets[0].getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def ticket(self, *, watches: bool = False) -> str:
        """For one stream, of a kind that watches or another; until `forget`."""
        ticket = secrets.token_hex(16)
        self._holds[ticket] = _Hold(watches)
        return ticket

    async def hold(self, ticket: str) -> None:
        """Until the stream with this ticket has ended."""
        hold = self._holds[ticket]
        try:
            await asyncio.wait_for(hold.begun.wait(), HOLD_SECONDS)
            await hold.ended.wait()
        except TimeoutError:
            pass  # the proxy is gone, or its client left before

    def forget(self, ticket: str) -> None:
        """Ray's call has ended."""
        if hold := self._holds.pop(ticket, None):
            self._end([hold])

    def end_watching(self) -> None:
        """Streams that watch end, as UNAVAILABLE: they have no end of their own."""
        self.ends_watching = True
        self._end([each for each in self._holds.values() if each.watches])

    def end_all(self) -> None:
        self._end(list(self._holds.values()))

    async def close(self) -> None:
        self.end_all()
        if self._server is not None:
            self._server.close()

    def _end(self, holds: Iterable[_Hold]) -> None:
        for each in holds:
            if each.writer is not None:
                each.writer.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hold: _Hold | None = None
        try:
            _keep_alive(writer.get_extra_info("socket"))
            async with asyncio.timeout(HOLD_SECONDS):
                line = await reader.readuntil(b"\n")
            hold = self._holds.get(line.decode("ascii").strip())
            if hold is not None and not (hold.watches and self.ends_watching):
                hold.writer = writer
                hold.begun.set()
                await reader.read(1)
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError):
            pass  # it is closed, or was no proxy's
        finally:
            if hold is not None:
                hold.begun.set()
                hold.ended.set()
            writer.close()


def _keep_alive(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


@contextlib.asynccontextmanager
async def held(way: Way) -> AsyncIterator[asyncio.Future[None]]:
    """The proxy's side: while in it, the replica keeps Ray's call open.

    What it gives is done when the replica wants that no more.  OSError where the replica cannot be reached.
    """
    host, _, port = way.hold.rpartition(":")
    opened = asyncio.open_connection(host.strip("[]"), int(port))
    reader, writer = await asyncio.wait_for(opened, HOLD_SECONDS)
    _keep_alive(writer.get_extra_info("socket"))
    gone = asyncio.ensure_future(_until_closed(reader))
    try:
        writer.write(way.ticket.encode() + b"\n")
        yield gone
    finally:
        gone.cancel()
        writer.close()


async def _until_closed(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        await reader.read(1)
