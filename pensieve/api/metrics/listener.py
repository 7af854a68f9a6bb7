"""A small HTTP/1.1 listener for GET /metrics and GET /health.

A connection serves one request of at most HEADER_BYTES_MAX. Receiving the request and sending the answer may
take SECONDS_MAX each. At most CONNECTIONS_MAX connections are open; further ones are refused. Bodies are not
read.

    200                   /metrics; /health while turns are accepted
    401                   /metrics without an admin token, if one is needed
    503                   /health while turns are not accepted; too many connections
    400, 404, 405, 431    invalid requests

Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus

from pensieve.api.metrics.families import CONTENT_TYPE
from pensieve.errors import AddressInUse

log = logging.getLogger("pensieve")
HEADER_BYTES_MAX = 8 << 10
SECONDS_MAX = 5.0
CONNECTIONS_MAX = 64
PLAIN = "text/plain; charset=utf-8"


@dataclass(frozen=True)
class Answers:
    metrics: Callable[[], Awaitable[str]]
    is_serving: Callable[[], bool]
    may_scrape: Callable[[str, str], bool]  # arguments: the `authorization` header, the peer


class RequestRefused(Exception):
    """The request is refused with this status; internal to this module."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status)
        self.status = status


class MetricsListener:
    def __init__(self, answers: Answers) -> None:
        self.address = ""
        self._answers = answers
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, address: str) -> str:
        """Open the socket, and return HOST:PORT with the actual port."""
        host, _, port = address.rpartition(":")
        name = host.removeprefix("[").removesuffix("]")
        try:
            self._server = await asyncio.start_server(
                self._on_connection, name, int(port), limit=HEADER_BYTES_MAX, reuse_port=False
            )
        except OSError as error:
            raise AddressInUse(
                f"cannot listen on {address} for metrics: {error.strerror}"
            ) from error
        bound_port = self._server.sockets[0].getsockname()[1]
        self.address = f"{host}:{bound_port}"
        return self.address

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= CONNECTIONS_MAX:
            writer.write(_response(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections\n"))
            writer.close()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._on_end)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a request for metrics failed", exc_info=error)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(TimeoutError, ConnectionError, asyncio.IncompleteReadError):
                async with asyncio.timeout(SECONDS_MAX):
                    try:
                        response = await self._answer(await _head(reader), _peer(writer))
                    except RequestRefused as refused:
                        response = _response(refused.status, f"{refused.status.phrase.lower()}\n")
                async with asyncio.timeout(SECONDS_MAX):
                    writer.write(response)
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
        finally:
            writer.transport.abort()

    async def _answer(self, head: RequestHead, peer: str) -> bytes:
        path = head.target.partition("?")[0]
        if path not in ("/metrics", "/health"):
            raise RequestRefused(HTTPStatus.NOT_FOUND)
        if head.method != "GET":
            raise RequestRefused(HTTPStatus.METHOD_NOT_ALLOWED)
        if path == "/health":
            if self._answers.is_serving():
                return _response(HTTPStatus.OK, "serving\n")
            return _response(HTTPStatus.SERVICE_UNAVAILABLE, "not serving\n")
        if not self._answers.may_scrape(head.authorization, peer):
            raise RequestRefused(HTTPStatus.UNAUTHORIZED)
        return _response(HTTPStatus.OK, await self._answers.metrics(), CONTENT_TYPE)


@dataclass(frozen=True)
class RequestHead:
    method: str
    target: str
    authorization: str = ""


def _peer(writer: asyncio.StreamWriter) -> str:
    """Return the peer's address in gRPC's notation, for the audit log."""
    host, port, *more = writer.get_extra_info("peername") or ("", 0)
    return f"ipv6:[{host}]:{port}" if more else f"ipv4:{host}:{port}"


async def _head(reader: asyncio.StreamReader) -> RequestHead:
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise RequestRefused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE) from None
    return head_of(raw)


def head_of(raw: bytes) -> RequestHead:
    """Parse the head of a request."""
    first, *fields = raw.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise RequestRefused(HTTPStatus.BAD_REQUEST)
    authorization = ""
    for each in fields:
        name, colon, value = each.partition(":")
        if each and (not colon or not name or name != name.strip()):
            raise RequestRefused(HTTPStatus.BAD_REQUEST)
        if name.lower() == "authorization":
            authorization = value.strip()
    return RequestHead(words[0], words[1], authorization)


def _response(status: HTTPStatus, text: str, content_type: str = PLAIN) -> bytes:
    body = text.encode()
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}",
        "Cache-Control: no-store",
        "Connection: close",
    ]
    if status is HTTPStatus.UNAUTHORIZED:
        lines.append("WWW-Authenticate: Bearer")
    if status is HTTPStatus.METHOD_NOT_ALLOWED:
        lines.append("Allow: GET")
    return "\r\n".join([*lines, "", ""]).encode() + body
