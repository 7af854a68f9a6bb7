"""One HTTP request and its answer; to the guard, the transport of a call.

    reading    `read` receives the body, up to a limit
    waiting    if the client leaves, the task that answers is cancelled, and `has_left` is set
    answering  one whole answer (`answer`), or a stream of events (`begin_events`, `write`)
    over       `end` calls the functions of `add_done_callback` once

A stream's headers are sent with its first event, or after KEEP_ALIVE_SECONDS. A failure before that is an
error with a status; a later one is an event. While nothing else is written, a comment is sent every
KEEP_ALIVE_SECONDS, so that proxies keep the connection.
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
SHORT_BODY_BYTES = 64 << 10  # of a body that does not count among those on their way
KEEP_ALIVE_SECONDS = 15.0
QUERY_FIELDS_MAX = 64
KEEP_ALIVE = b": keep-alive\n\n"


class BodyTooLarge(InvalidArgument):
    """The body is larger than BODY_BYTES_MAX."""


class PackedBody(InvalidArgument):
    """The body is compressed, and could become any size."""


WINDOW_BYTES = 64 << 10  # of an answer that are sent at once


class Exchange:
    def __init__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        self.scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.values: Mapping[str, str] = scope.get("path_params", {})
        self.headers: dict[str, str] = {}
        for name, value in scope["headers"]:  # the first of several counts
            self.headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
        self.out: dict[str, str] = {}  # headers of the answer
        self.has_left = False  # the client
        self.num_bytes = 0  # of the body, that were read
        self._body = bytearray()  # what was read of it
        self._has_body = False  # all of it was read
        self.received: bytes | None = None  # the whole body, kept where it may have to be sent on
        self.was_read_elsewhere = False  # a part of the body, piece by piece
        self.retry_key = ""  # names the request where two daemons may come to carry it out
        self.call: GuardedCall | None = None  # None once an error is told
        self._receive, self._send = receive, send
        self._done: list[Callable[[Any], None]] = []
        self.begun = False  # the answer's headers are sent
        self.is_stream = False
        self.status = 200  # of an answer in pieces
        self._watching: asyncio.Task[None] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()  # of what is sent
        self._sent_at = 0.0

    # -- as the guard uses it --

    def peer(self) -> str:
        host, port = self.scope.get("client") or ("unknown", 0)
        return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"

    def add_done_callback(self, function: Callable[[Any], None]) -> None:
        self._done.append(function)

    def time_remaining(self) -> None:
        """HTTP has no deadlines."""

    async def read(self) -> bytes:
        while not self._has_body:
            await self._read_on()
        body, self._body = bytes(self._body), bytearray()
        return body

    async def read_ahead(self) -> bool:
        """Receive as much as a short body has, and return whether that is the whole body."""
        self._check_coding()
        declared = self.headers.get("content-length", "")
        if declared.isdigit() and len(declared) < 20 and int(declared) > BODY_BYTES_MAX:
            raise _too_large()
        while not self._has_body and self.num_bytes <= SHORT_BODY_BYTES:
            await self._read_on()
        return self._has_body

    async def _read_on(self) -> None:
        chunk = await self._next_chunk()
        self.num_bytes += len(chunk)
        if self.num_bytes > BODY_BYTES_MAX:
            raise _too_large()
        self._body += chunk

    async def read_chunk(self) -> bytes | None:
        """Return the next piece of a body of any length; None after the last."""
        if self._has_body:
            return None
        self.was_read_elsewhere = True
        return await self._next_chunk()

    async def _next_chunk(self) -> bytes:
        self._check_coding()
        event = await self._receive()
        if event["type"] == "http.disconnect":
            self.has_left = True
            raise asyncio.CancelledError
        if not event.get("more_body"):
            self._has_body = True
            self._watch()
        chunk: bytes = event.get("body", b"")
        return chunk

    def check_framing(self) -> None:
        """Refuse other versions of HTTP, and a head that gives the length of its body twice.

        A proxy in front may have believed the other length.
        """
        if self.scope.get("http_version") not in ("1.0", "1.1"):
            self.out["connection"] = "close"
            raise InvalidArgument("version", "must be HTTP/1.1")
        if "transfer-encoding" in self.headers and "content-length" in self.headers:
            self.out["connection"] = "close"
            raise InvalidArgument("content-length", "must not be given beside transfer-encoding")

    def _check_coding(self) -> None:
        if self.headers.get("content-encoding", "identity").strip().lower() not in ("identity", ""):
            raise PackedBody("content-encoding", "is not supported: send the body as it is")

    def _watch(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._cancel_when_left(task))

    async def _cancel_when_left(self, task: asyncio.Task[Any]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self.has_left:
            self.has_left = True
            task.cancel()

    async def no_body(self) -> None:
        """Expect no body: from now on the task is cancelled when the client leaves."""
        self._watch()

    # -- the answer --

    def begin_anew(self, headers: Mapping[str, str]) -> None:
        """Forget what was prepared of an answer that has not begun; `headers` stay."""
        self._stop_keeping()
        self.is_stream, self.out = False, dict(headers)

    def pass_on_head(self, status: int, headers: Iterable[tuple[str, str]]) -> None:
        """Answer with the bytes that another daemon sends; the headers are sent with the first."""
        self.out |= dict(headers)
        self.status = status
        self.is_stream = self.out.get("content-type", "").startswith("text/event-stream")

    async def answer(self, value: Mapping[str, Any], status: int = 200) -> None:
        await self.answer_bytes(one_line(value), "application/json", status)

    async def answer_bytes(self, body: bytes, kind: str, status: int = 200) -> None:
        if self.call is not None:
            self.call.answers(len(body))
        self.out |= {"content-type": kind, "content-length": str(len(body))}
        await self._begin(status)
        body = b"" if self.method == "HEAD" else body
        for start in range(
            0, len(body), WINDOW_BYTES
        ):  # each waits until the client has taken the last
            piece = body[start : start + WINDOW_BYTES]
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})

    def begin_events(self) -> None:
        """Answer with a stream of events; the headers are sent with the first."""
        self.is_stream = True
        self.out |= {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # of proxies
        }
        loop = asyncio.get_running_loop()
        self._sent_at = loop.time()
        self._keeping = loop.create_task(self._keep_alive())

    def begin_bytes(self, kind: str) -> None:
        """Answer with a stream of bytes; the headers are sent with the first.

        A failure after that breaks the connection off, so that no client takes the answer for whole.
        """
        self.out["content-type"] = kind

    async def write(self, piece: bytes) -> None:
        """Write a piece of a stream; return when the client may have more."""
        if self.call is None:
            await self.write_now(piece)
        else:
            await self.call.send(len(piece), self.write_now, piece)

    async def write_now(self, piece: bytes) -> None:
        """Write a piece, however much the tenant's clients have still to read."""
        async with self._lock:
            if not self.begun:
                await self._begin(self.status)
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
            self._sent_at = asyncio.get_running_loop().time()

    async def write_events(self, values: Iterable[Mapping[str, Any]]) -> None:
        """Write events, each named by its type if it has one."""
        if events := b"".join(event(each, each.get("type", "")) for each in values):
            await self.write(events)

    async def end_bytes(self) -> None:
        async with self._lock:
            if not self.begun:
                await self._begin(self.status)
            await self._send({"type": "http.response.body", "body": b""})

    async def end_events(self) -> None:
        self._stop_keeping()
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

    def _stop_keeping(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()

    async def end(self) -> None:
        tasks = [each for each in (self._watching, self._keeping) if each is not None]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
        done, self._done = self._done, []
        for function in done:
            function(self)


def event(value: Mapping[str, Any], name: str = "") -> bytes:
    """Return a server-sent event; JSON holds no line end, so one `data` line is enough."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {text}\n\n".encode("utf-8", "replace")


def _header(value: str) -> bytes:
    """Return the value as printable ASCII: a line end would begin another header."""
    return "".join(each if " " <= each <= "~" else "?" for each in value).encode()


def _too_large() -> BodyTooLarge:
    return BodyTooLarge("body", f"has more than {BODY_BYTES_MAX:,} bytes")


def query_of(exchange: Exchange) -> dict[str, str]:
    """Return the query of the path: the first value of each name."""
    raw = exchange.scope.get("query_string", b"").decode("latin-1")
    found: dict[str, str] = {}
    try:
        pairs = parse_qsl(raw, max_num_fields=QUERY_FIELDS_MAX)
    except ValueError:
        raise Refusal("query", f"has more than {QUERY_FIELDS_MAX} fields") from None
    for name, value in pairs:
        found.setdefault(name, value)
    return found


def limit_of(given: str | None, default: int, most: int) -> int:
    if given is None:
        return default
    if not (given.isascii() and given.isdigit() and 1 <= int(given[:9]) <= most):
        raise Refusal("limit", f"must lie in 1..{most}")
    return int(given)


def is_descending(order: str | None) -> bool:
    if order not in (None, "asc", "desc"):
        raise Refusal("order", "is not one of asc, desc")
    return order != "asc"
