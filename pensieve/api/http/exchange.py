"""An HTTP request and its answer. The guard uses it as the transport of a call.

    reading    `read` receives the body, up to a limit
    waiting    if the client disconnects, the handler's task is cancelled and `has_disconnected` is set
    answering  a whole answer (`answer`), or a stream of events (`begin_events`, `write`)
    over       `end` calls the functions of `add_done_callback` once

The headers of a stream are sent with its first event, or after KEEP_ALIVE_SECONDS. An error before that has
an HTTP status; a later error is an event of the stream. A stream without events sends a comment every
KEEP_ALIVE_SECONDS, so that proxies do not close the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import parse_qsl

from pensieve.api.json_fields import Refusal, one_line
from pensieve.errors import InvalidArgument
from pensieve.guard.guard import GuardedCall

BODY_BYTES_MAX = 8 << 20
# Bodies up to this size do not count towards the limit of bodies received at once (RECEIVING_MAX in
# guard/request_bodies.py).
SHORT_BODY_BYTES = 64 << 10
KEEP_ALIVE_SECONDS = 15.0
QUERY_FIELDS_MAX = 64
KEEP_ALIVE = b": keep-alive\n\n"


class BodyTooLarge(InvalidArgument):
    """The body is larger than BODY_BYTES_MAX."""


class PackedBody(InvalidArgument):
    """The body is compressed, so its real size is unknown."""


WINDOW_BYTES = 64 << 10  # bytes of an answer that are sent at once


class Exchange:
    def __init__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        self.scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.values: Mapping[str, str] = scope.get("path_params", {})
        self.headers: dict[str, str] = {}
        for name, value in scope["headers"]:  # the first of several headers with one name counts
            self.headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
        self.out: dict[str, str] = {}  # headers of the answer
        self.has_disconnected = False  # the client has disconnected
        self.num_bytes = 0  # received bytes of the body
        self._body = bytearray()  # the received part of the body
        self._has_body = False  # the whole body was received
        self.received: bytes | None = None  # the whole body, if the request may be forwarded
        # The handler has read chunks of the body. They are not kept, so the request cannot be forwarded.
        self.was_read_in_chunks = False
        # Drawn by the daemon that forwards the request: identifies the request if both daemons execute it.
        self.forwarding_key = ""
        self.call: GuardedCall | None = None  # None once an error is being sent
        self._receive, self._send = receive, send
        self._done: list[Callable[[Any], None]] = []
        self.begun = False  # the headers of the answer have been sent
        self.is_stream = False
        self.status = 200  # for an answer that is sent in pieces
        self._watch_task: asyncio.Task[None] | None = None
        self._keep_alive_task: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()  # held while sending
        self._sent_at = 0.0

    # -- used by the guard --

    def peer(self) -> str:
        host, port = self.scope.get("client") or ("unknown", 0)
        return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"

    def add_done_callback(self, function: Callable[[Any], None]) -> None:
        self._done.append(function)

    def time_remaining(self) -> None:
        """HTTP has no deadlines."""

    async def read(self) -> bytes:
        while not self._has_body:
            await self._read_next()
        body, self._body = bytes(self._body), bytearray()
        return body

    async def read_ahead(self) -> bool:
        """Receive about SHORT_BODY_BYTES, and return whether the body is complete."""
        self._check_coding()
        declared = self.headers.get("content-length", "")
        if declared.isdigit() and len(declared) < 20 and int(declared) > BODY_BYTES_MAX:
            raise _too_large()
        while not self._has_body and self.num_bytes <= SHORT_BODY_BYTES:
            await self._read_next()
        return self._has_body

    async def _read_next(self) -> None:
        chunk = await self._next_chunk()
        self.num_bytes += len(chunk)
        if self.num_bytes > BODY_BYTES_MAX:
            raise _too_large()
        self._body += chunk

    async def read_chunk(self) -> bytes | None:
        """Return the next piece of a body, whose length is not limited. None after the last piece."""
        if self._has_body:
            return None
        self.was_read_in_chunks = True
        return await self._next_chunk()

    async def _next_chunk(self) -> bytes:
        self._check_coding()
        event = await self._receive()
        if event["type"] == "http.disconnect":
            self.has_disconnected = True
            raise asyncio.CancelledError
        if not event.get("more_body"):
            self._has_body = True
            self._watch()
        chunk: bytes = event.get("body", b"")
        return chunk

    def check_framing(self) -> None:
        """Refuse other versions of HTTP, and requests whose headers give two lengths of the body.

        A proxy in front of the daemon might use the other length (request smuggling).
        """
        if self.scope.get("http_version") not in ("1.0", "1.1"):
            self.out["connection"] = "close"
            raise InvalidArgument("version", "must be HTTP/1.1")
        if "transfer-encoding" in self.headers and "content-length" in self.headers:
            self.out["connection"] = "close"
            raise InvalidArgument("content-length", "must not be combined with transfer-encoding")

    def _check_coding(self) -> None:
        if self.headers.get("content-encoding", "identity").strip().lower() not in ("identity", ""):
            raise PackedBody("content-encoding", "is not supported: send the body uncompressed")

    def _watch(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._watch_task is None:
            self._watch_task = asyncio.get_running_loop().create_task(
                self._cancel_on_disconnect(task)
            )

    async def _cancel_on_disconnect(self, task: asyncio.Task[Any]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self.has_disconnected:
            self.has_disconnected = True
            task.cancel()

    async def no_body(self) -> None:
        """Expect no body. From now on, a disconnect of the client cancels the task."""
        self._watch()

    # -- the answer --

    def begin_anew(self, headers: Mapping[str, str]) -> None:
        """Reset an answer that has not begun. Keep only `headers`."""
        self._stop_keep_alive()
        self.is_stream, self.out = False, dict(headers)

    def pass_on_head(self, status: int, headers: Iterable[tuple[str, str]]) -> None:
        """Begin an answer that comes from another daemon. The headers are sent with the first bytes."""
        self.out |= dict(headers)
        self.status = status
        self.is_stream = self.out.get("content-type", "").startswith("text/event-stream")

    async def answer(self, value: Mapping[str, Any], status: int = 200) -> None:
        await self.answer_bytes(one_line(value), "application/json", status)

    async def answer_bytes(self, body: bytes, kind: str, status: int = 200) -> None:
        if self.call is not None:
            self.call.count_answer(len(body))
        self.out |= {"content-type": kind, "content-length": str(len(body))}
        await self._begin(status)
        body = b"" if self.method == "HEAD" else body
        # A piece is sent after the client has read the previous piece.
        for start in range(0, len(body), WINDOW_BYTES):
            piece = body[start : start + WINDOW_BYTES]
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})

    def begin_events(self) -> None:
        """Begin a stream of events. The headers are sent with the first event."""
        self.is_stream = True
        self.out |= {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # for proxies
        }
        loop = asyncio.get_running_loop()
        self._sent_at = loop.time()
        self._keep_alive_task = loop.create_task(self._keep_alive())

    def begin_bytes(self, kind: str) -> None:
        """Begin a stream of bytes. The headers are sent with the first bytes.

        A later error aborts the connection. Otherwise the client might take the answer for complete.
        """
        self.out["content-type"] = kind

    async def write(self, piece: bytes) -> None:
        """Write a piece of a stream. Return when the client is ready for more."""
        if self.call is None:
            await self.write_now(piece)
        else:
            await self.call.send(len(piece), self.write_now, piece)

    async def write_now(self, piece: bytes) -> None:
        """Write a piece, even if the tenant has too many unread bytes."""
        async with self._lock:
            if not self.begun:
                await self._begin(self.status)
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
            self._sent_at = asyncio.get_running_loop().time()

    async def write_events(self, values: Iterable[Mapping[str, Any]]) -> None:
        """Write events. The name of an event is its `type`."""
        if events := b"".join(event(each, each.get("type", "")) for each in values):
            await self.write(events)

    async def end_bytes(self) -> None:
        async with self._lock:
            if not self.begun:
                await self._begin(self.status)
            await self._send({"type": "http.response.body", "body": b""})

    async def end_events(self) -> None:
        self._stop_keep_alive()
        async with self._lock:
            await self._send({"type": "http.response.body", "body": b""})

    async def _begin(self, status: int) -> None:
        self.begun = True
        headers = [(name.encode("latin-1"), _header(value)) for name, value in self.out.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _keep_alive(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            wait = self._sent_at + KEEP_ALIVE_SECONDS - loop.time()
            if wait > 0:
                await asyncio.sleep(wait)
            else:
                await self.write_now(KEEP_ALIVE)

    def _stop_keep_alive(self) -> None:
        if self._keep_alive_task is not None:
            self._keep_alive_task.cancel()

    async def end(self) -> None:
        tasks = [each for each in (self._watch_task, self._keep_alive_task) if each is not None]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
        done, self._done = self._done, []
        for function in done:
            function(self)


def event(value: Mapping[str, Any], name: str = "") -> bytes:
    """Return a server-sent event. It has one `data` line, because the JSON text has no line ends."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {text}\n\n".encode("utf-8", "replace")


def _header(value: str) -> bytes:
    """Return a header's value as printable ASCII. A line end in the value would start another header."""
    return "".join(each if " " <= each <= "~" else "?" for each in value).encode()


def _too_large() -> BodyTooLarge:
    return BodyTooLarge("body", f"has more than {BODY_BYTES_MAX:,} bytes")


def query_of(exchange: Exchange) -> dict[str, str]:
    """Return the query string's fields: the first value of each name."""
    raw = exchange.scope.get("query_string", b"").decode("latin-1")
    found: dict[str, str] = {}
    try:
        pairs = parse_qsl(raw, max_num_fields=QUERY_FIELDS_MAX)
    except ValueError:
        raise Refusal("query", f"has more than {QUERY_FIELDS_MAX} fields") from None
    for name, value in pairs:
        found.setdefault(name, value)
    return found


def limit_of(given: str | None, default: int, maximum: int) -> int:
    if given is None:
        return default
    if not (given.isascii() and given.isdigit() and 1 <= int(given[:9]) <= maximum):
        raise Refusal("limit", f"must lie in 1..{maximum}")
    return int(given)


def is_descending(order: str | None) -> bool:
    if order not in (None, "asc", "desc"):
        raise Refusal("order", "is not one of asc, desc")
    return order != "asc"
