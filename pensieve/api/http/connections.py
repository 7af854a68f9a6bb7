"""HTTP connections of uvicorn with more limits.

    head       HEAD_SECONDS, HEAD_BYTES_MAX, and LINES_MAX, because parsing takes time for each line
    body       the time limit of guard/request_bodies.py; for a body that no endpoint reads: HEAD_SECONDS and
               UNWANTED_BYTES_MAX
    pipelined  a client may send its next request early; it is parsed after the current request is answered
    answer     a client that reads nothing for STALL_SECONDS is disconnected
    idle       closed after IDLE_SECONDS, before the first request and between requests

The parser gets a few KiB at a time, because h11 blocks the event loop for a millisecond per KiB of short
lines.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from pensieve.extras import need

PURPOSE = "the HTTP API"
HEAD_SECONDS = 10.0
IDLE_SECONDS = 75
HEAD_BYTES_MAX = 32 << 10
LINES_MAX = 256  # per head
STALL_SECONDS = 30.0  # time in which a client must read something of an answer
SLICE_BYTES = 4 << 10  # bytes of a head that are parsed at once
BODY_SLICE_BYTES = 16 << 10  # bytes of a body that are parsed at once
UNWANTED_BYTES_MAX = 32 << 20  # many: a client may read the answer only after it has sent its body
HEAD_END = re.compile(rb"\n\r?\n")
TOO_LARGE = b"431 Request Header Fields Too Large"
FULL = b"503 Service Unavailable\r\nretry-after: 1"


def protocol(connections_max: int) -> Any:
    """Return uvicorn's protocol class with these limits, for at most `connections_max` connections."""
    uvicorns = need("http", "uvicorn.protocols.http.h11_impl", PURPOSE)
    h11 = need("http", "h11", PURPOSE)

    class Protocol(uvicorns.H11Protocol):  # type: ignore[misc, name-defined]
        _deadline: asyncio.TimerHandle | None = None
        _next_check: asyncio.TimerHandle | None = None
        _in_head = False  # `_deadline` is for a head, or for a body that no endpoint reads
        _head = b""  # received part of a head
        _num_unwanted = 0  # received bytes of a body after its request was answered
        _next_data = b""  # received data after a request that is not answered yet

        def connection_made(self, transport: Any) -> None:
            if len(self.connections) >= connections_max:
                self.transport = transport
                self._refuse(FULL)
                return
            super().connection_made(transport)
            self._close_after(IDLE_SECONDS)
            self._check_reading(0)

        def data_received(self, data: bytes) -> None:
            while data and not self.transport.is_closing():
                is_head = self.conn.their_state is h11.IDLE
                if not is_head and self.conn.their_state is not h11.SEND_BODY:
                    self._keep(data)
                    break
                size = SLICE_BYTES if is_head else BODY_SLICE_BYTES
                piece, data = data[:size], data[size:]
                if not is_head and not self._is_answering and not self._add_unwanted(len(piece)):
                    self.transport.abort()
                    return
                if is_head and not self._add_to_head(piece):
                    self._refuse(TOO_LARGE)
                    return
                super().data_received(piece)
            if self.transport.is_closing():
                return
            if self._is_answering:
                self._close_after(None)
            elif not self._in_head:
                self._close_after(HEAD_SECONDS, in_head=True)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._num_unwanted = 0
            if self.conn.their_state is h11.SEND_BODY:
                self._close_after(HEAD_SECONDS, in_head=True)
            else:
                self._close_after(None)  # from now on, uvicorn's own timer closes the connection
            next_data, self._next_data = self._next_data, b""
            if next_data:
                self.data_received(next_data)

        def send_400_response(self, msg: str) -> None:
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                super().send_400_response(msg)
            else:  # during an answer
                self.transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            self._close_after(None)
            if self._next_check is not None:
                self._next_check.cancel()
            if self in self.connections:
                super().connection_lost(exc)

        def _add_to_head(self, piece: bytes) -> bool:
            """Add a piece to the head, and return whether the head is within its limits."""
            before, self._head = max(len(self._head) - 2, 0), self._head + piece
            end = HEAD_END.search(self._head, before)
            head = self._head if end is None else self._head[: end.end()]
            if end is not None:
                self._head = b""
            return len(head) <= HEAD_BYTES_MAX and head.count(b"\n") <= LINES_MAX

        def _add_unwanted(self, num_bytes: int) -> bool:
            """Count more bytes of a body that no endpoint reads. Return whether they are accepted."""
            self._num_unwanted += num_bytes
            return self._num_unwanted <= UNWANTED_BYTES_MAX

        def _keep(self, data: bytes) -> None:
            """Keep data of the next request until the current request is answered."""
            self._next_data += data
            if len(self._next_data) > HEAD_BYTES_MAX:
                self.flow.pause_reading()  # until the current request is answered

        def _refuse(self, status: bytes) -> None:
            head = b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
            self.transport.write(head)
            self.transport.close()

        def _check_reading(self, num_unread_before: int) -> None:
            """Abort if the client has read nothing since the last check.

            `transport.close` would wait until the client reads.
            """
            num_unread = self.transport.get_write_buffer_size()
            if num_unread_before and num_unread >= num_unread_before:
                self.transport.abort()
                return
            self._next_check = self.loop.call_later(STALL_SECONDS, self._check_reading, num_unread)

        @property
        def _is_answering(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _close_after(self, seconds: float | None, *, in_head: bool = False) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
            self._in_head, self._deadline = in_head, None
            if seconds is not None and not self.transport.is_closing():
                self._deadline = self.loop.call_later(seconds, self.transport.abort)

    return Protocol
