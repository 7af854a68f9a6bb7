"""One request of HTTP and its answer, as the parts of the service that count and limit calls see a call.

    reading    `read` takes the body in, up to a limit
    waiting    the client may leave; then the task that answers is cancelled, and `has_left` says why
    answering  one whole answer (`answer`), or a stream of events (`begin_events`, `write`)
    over       `end`; the functions of `add_done_callback` are called once

A stream's headers are sent with its first event or KEEP_ALIVE_SECONDS later, so what fails before that is an
error with a status; what fails later is an event.  While nothing else is written, a comment is sent every
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
SHORT_BODY_BYTES = 64 << 10  # that a body has without a place among those on their way
KEEP_ALIVE_SECONDS = 15.0
QUERY_FIELDS_MAX = 64
KEEP_ALIVE = b": keep-alive\n\n"


class BodyTooLarge(InvalidArgument):
    """The body is larger than any that is taken."""


class PackedBody(InvalidArgument):
    """The body is compressed: it could become any size."""


WINDOW_BYTES = 64 << 10  # of an answer, at once


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
        self._has_body = False  # all pieces of it were read
        self.call: GuardedCall | None = None  # until an error is told
        self._receive, self._send = receive, send
        self._done: list[Callable[[Any], None]] = []
        self.begun = False  # the answer's headers are sent
        self.is_stream = False
        self._watching: asyncio.Task[None] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()  # of what is sent
        self._sent_at = 0.0

    # -- what calls and incoming bodies ask of a call --

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
        """Read what a short body has; whether that is all of it."""
        self._check_coding()
        declared = self.headers.get("content-length", "")
        if declared.isdigit() and len(declared) < 20 and int(declared) > BODY_BYTES_MAX:
            raise _too_large()
        while not self._has_body and self.num_bytes <= SHORT_BODY_BYTES:
            await self._read_on()
        return self._has_body

    async def _read_on(self) -> None:
        chunk = await self.read_chunk()
        assert chunk is not None
        self.num_bytes += len(chunk)
        if self.num_bytes > BODY_BYTES_MAX:
            raise _too_large()
        self._body += chunk

    async def read_chunk(self) -> bytes | None:
        """The next piece of a body of any length; None behind the last."""
        if self._has_body:
            return None
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
        """Refuse a version that is not spoken here, and a head that says twice how long its body is.

        A proxy in front may have believed the other.
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
        """Of a request that brings none: from now on its task ends when the client leaves."""
        self._watch()

    # -- the answer --

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
        """The answer is a stream; its headers go with its first event."""
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
        """The answer is a stream of bytes; its headers go with the first of them.

        What fails after that breaks the connection off, so that no client takes it for whole.
        """
        self.out["content-type"] = kind

    async def write(self, piece: bytes) -> None:
        """A piece of a stream; returns when the client may have more."""
        if self.call is None:
            await self.write_now(piece)
        else:
            await self.call.send(len(piece), self.write_now, piece)

    async def write_now(self, piece: bytes) -> None:
        """The same, whatever its tenant's clients have to take first."""
        async with self._lock:
            if not self.begun:
                await self._begin(200)
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
            self._sent_at = asyncio.get_running_loop().time()

    async def write_events(self, values: Iterable[Mapping[str, Any]]) -> None:
        """Pieces of a stream, each named by its type, if it has one."""
        if events := b"".join(event(each, each.get("type", "")) for each in values):
            await self.write(events)

    async def end_bytes(self) -> None:
        async with self._lock:
            if not self.begun:
                await self._begin(200)
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
    """A server-sent event; JSON holds no line end, so one `data` line is enough."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {text}\n\n".encode("utf-8", "replace")


def _header(value: str) -> bytes:
    """Printable ASCII, whatever it holds: a line end would begin another header."""
    return "".join(each if " " <= each <= "~" else "?" for each in value).encode()


def _too_large() -> BodyTooLarge:
    return BodyTooLarge("body", f"has more than {BODY_BYTES_MAX:,} bytes")


def query_of(exchange: Exchange) -> dict[str, str]:
    """What stands behind the question mark of the path: the first value of each name."""
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
