"""TCP connections that can be held, slowed, reset and refused: the network between the parts of a cluster.

A `Link` listens at its own address and forwards bytes to its target, which may be a Unix socket. It has
these faults:

    hold      no data arrives, in one or both directions, and neither side gets an error: a partition. The
              data arrives after the fault, as after TCP retransmissions
    slow      all data arrives later
    reset     existing connections end with RST
    refuse    existing and new connections get RST

A link runs on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from enum import Enum

PIECE_BYTES = 65_536


class Way(Enum):
    """A direction, as seen by the connecting side."""

    THERE = "there"
    BACK = "back"


class Link:
    def __init__(self, target: str, port: int = 0) -> None:
        self.target = target
        self.num_connections = 0
        self._port = port
        self._server: asyncio.Server | None = None
        self._flows = {way: asyncio.Event() for way in Way}
        self._seconds = 0.0
        self._writers: set[asyncio.StreamWriter] = set()
        self._is_refusing = False
        for flow in self._flows.values():
            flow.set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.reset()
        self.heal()

    # -- faults --

    def hold(self, *ways: Way) -> None:
        for way in ways or tuple(Way):
            self._flows[way].clear()

    def slow(self, seconds: float) -> None:
        self._seconds = seconds

    def reset(self) -> None:
        writers, self._writers = self._writers, set()
        for writer in writers:
            _abort(writer)

    def refuse(self) -> None:
        self._is_refusing = True
        self.reset()

    def heal(self) -> None:
        """Remove all faults."""
        self._is_refusing, self._seconds = False, 0.0
        for flow in self._flows.values():
            flow.set()

    # -- inside --

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_refusing:
            _abort(writer)
            return
        self.num_connections += 1
        self._writers.add(writer)
        far: asyncio.StreamWriter | None = None
        try:
            await self._flows[Way.THERE].wait()
            far_reader, far = await _connect(self.target)
            self._writers.add(far)
            ways = (
                asyncio.create_task(self._pass(reader, far, Way.THERE)),
                asyncio.create_task(self._pass(far_reader, writer, Way.BACK)),
            )
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
        except OSError:
            pass
        finally:
            for each in (writer, far):
                if each is not None:
                    self._writers.discard(each)
                    _abort(each)

    async def _pass(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, way: Way
    ) -> None:
        with contextlib.suppress(OSError):
            while piece := await source.read(PIECE_BYTES):
                if self._seconds:
                    await asyncio.sleep(self._seconds)
                await self._flows[way].wait()
                sink.write(piece)
                await sink.drain()


async def _connect(target: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to `target`: HOST:PORT, or the path of a Unix socket."""
    if target.startswith("/"):
        return await asyncio.open_unix_connection(target)
    host, _, port = target.rpartition(":")
    return await asyncio.open_connection(host, int(port))


def _abort(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
