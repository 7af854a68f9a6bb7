"""HTTP/2 frames made by hand: a peer that does what no gRPC client would do."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import Counter
from types import TracebackType

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1
INITIAL_WINDOW, FRAME_BYTES_MAX = 65_535, 16_384


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    length = struct.pack(">I", len(payload))[1:]
    return length + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def header(name: str, value: str) -> bytes:
    """Encode a header in HPACK, without tables and Huffman codes."""

    def text(raw: bytes) -> bytes:
        if len(raw) < 127:
            return bytes([len(raw)]) + raw
        rest, length = len(raw) - 127, bytearray([127])
        while rest >= 128:
            length.append(rest % 128 + 128)
            rest //= 128
        length.append(rest)
        return bytes(length) + raw

    return b"\0" + text(name.encode()) + text(value.encode())


class RawPeer:
    """A connection on which the test decides every frame. It answers pings and settings by itself."""

    def __init__(self, address: str, *, reads: bool = True, window: int = 2**31 - 1) -> None:
        """`window`: bytes of each answer that the server may send before `take_more`."""
        host, port = address.rsplit(":", 1)
        if host == "unix":
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(port)
        else:
            self._socket = socket.create_connection((host, int(port)))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lock = threading.Lock()  # protects the reader thread's counters
        self._window = INITIAL_WINDOW
        self._initial = INITIAL_WINDOW
        self._windows: dict[int, int] = {}  # stream -> bytes that this peer may still send on it
        self.ended: set[int] = set()  # streams that the server has answered or reset
        self.is_closed = False
        self.num_received: Counter[int] = Counter()  # stream -> bytes of its answer
        self._last = -1
        settings = struct.pack(">HI", 4, window)
        self.send(PREFACE + frame(SETTINGS, 0, 0, settings))
        if reads:
            threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def send(self, raw: bytes) -> None:
        """Send bytes. If the server has closed the connection, do nothing."""
        try:
            self._socket.sendall(raw)
        except OSError:
            self.is_closed = True

    def call(self, path: str, *more: tuple[str, str]) -> int:
        """Open a stream with the headers of a call, and return its number."""
        self._last += 2
        with self._lock:
            self._windows[self._last] = self._initial
        pairs = (
            *((":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x")),
            *(("te", "trailers"), ("content-type", "application/grpc"), *more),
        )
        block = b"".join(header(*pair) for pair in pairs)
        self.send(frame(HEADERS, END_HEADERS, self._last, block))
        return self._last

    def message(self, stream: int, packed: bytes) -> None:
        """Send the whole body of a call, which is one message."""
        raw = b"\0" + struct.pack(">I", len(packed)) + packed
        assert self.body(stream, raw, patience=5.0, end=True) == len(raw)

    def body(self, stream: int, raw: bytes, *, patience: float, end: bool = False) -> int:
        """Send as much of a body as the server's windows allow. Return the number of bytes."""
        sent, until = 0, time.monotonic() + patience
        while sent < len(raw) and stream not in self.ended and not self.is_closed:
            with self._lock:
                size = min(FRAME_BYTES_MAX, len(raw) - sent, self._window, self._windows[stream])
                if size > 0:
                    self._window -= size
                    self._windows[stream] -= size
            if size <= 0:
                if time.monotonic() > until:
                    break
                time.sleep(0.002)
                continue
            last = end and sent + size == len(raw)
            self.send(frame(DATA, END_STREAM if last else 0, stream, raw[sent : sent + size]))
            sent += size
        return sent

    def take_more(self, stream: int, num_bytes: int) -> None:
        """Allow the server to send `num_bytes` more of an answer."""
        more = struct.pack(">I", num_bytes)
        self.send(frame(WINDOW_UPDATE, 0, stream, more) + frame(WINDOW_UPDATE, 0, 0, more))

    def _read(self) -> None:
        try:
            file = self._socket.makefile("rb")
            while len(head := file.read(9)) == 9:
                size, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
                stream = int.from_bytes(head[5:], "big") & 0x7FFFFFFF
                self._take(kind, flags, stream, file.read(size))
        except (OSError, ValueError):
            pass
        self.is_closed = True

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        with self._lock:
            self.num_received[stream] += len(payload) if kind == DATA else 0
            if kind == WINDOW_UPDATE:
                more = int.from_bytes(payload, "big")
                if stream:
                    self._windows[stream] = self._windows.get(stream, self._initial) + more
                else:
                    self._window += more
            elif kind == SETTINGS and not flags & ACK:
                for place in range(0, len(payload), 6):
                    name, value = struct.unpack_from(">HI", payload, place)
                    if name == 4:
                        for each in self._windows:
                            self._windows[each] += value - self._initial
                        self._initial = value
            elif kind in (HEADERS, RST_STREAM):
                self.ended.add(stream)
        if kind == SETTINGS and not flags & ACK:
            self.send(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self.send(frame(PING, ACK, 0, payload))
