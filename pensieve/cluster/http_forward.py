"""Forward a replica's HTTP requests to its daemon, streaming bodies in both directions.

Requests arrive over ASGI and are sent to the daemon with aiohttp. Hop-by-hop headers are not forwarded. If
the client disconnects, its task is cancelled, and the request to the daemon with it. If the daemon does not
answer, the client gets a 503. If the daemon fails during its response, the client's connection is cut off.

A replica has one HttpForward, for one event loop. Connections to the daemon are reused.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from yarl import URL

log = logging.getLogger("ray.serve")

HOP_BY_HOP = frozenset(
    [
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    ]
)
SERVER_HEADERS = frozenset({"date", "server"})  # Ray's proxy sets these
REPLICA = b"pensieve-replica"
CONNECT_SECONDS = 10.0
GONE = (
    b'{"error": {"message": "the replica is gone", "type": "server_error", "code": "unavailable"}}'
)
NO_PATH = (
    b'{"error": {"message": "the path must begin with a slash", "type": "invalid_request_error"}}'
)


class HttpForward:
    def __init__(self, address: str, name: str) -> None:
        """`address`: address of the daemon. `name`: name of the replica."""
        self._address, self._name = address, name
        self._client: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        has_begun = False
        # The path as the client sent it, with its percent-encoding.
        path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1").split("?")[0]
        if not path.startswith("/"):  # in the URL below, it would become part of the host name
            await answer(400, NO_PATH, self._name, send)
            return
        query = scope.get("query_string", b"").decode("latin-1")
        names = {name for name, _ in scope["headers"]}
        has_body = bool(names & {b"content-length", b"transfer-encoding"})
        try:
            async with self._session().request(
                scope["method"],
                URL(f"http://{self._address}{path}" + (f"?{query}" if query else ""), encoded=True),
                headers=_request_headers(scope["headers"]),
                data=_body_parts(receive) if has_body else None,
                allow_redirects=False,
            ) as response:
                has_begun = True
                await send(
                    {
                        "type": "http.response.start",
                        "status": response.status,
                        "headers": [
                            *_headers_without(response.raw_headers, HOP_BY_HOP | SERVER_HEADERS),
                            (REPLICA, self._name.encode()),
                        ],
                    }
                )
                async for chunk in response.content.iter_any():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except aiohttp.ClientError as error:
            log.warning("a request to the daemon of replica %s failed: %s", self._name, error)
            if has_begun:
                raise  # cuts off the client's connection
            await answer(503, GONE, self._name, send)

    def _session(self) -> aiohttp.ClientSession:
        if self._client is None:
            self._client = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            )
        return self._client


async def answer(status: int, body: bytes, name: str, send: Any) -> None:
    headers = [(b"content-type", b"application/json")]
    if name:
        headers.append((REPLICA, name.encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _body_parts(receive: Any) -> AsyncIterator[bytes]:
    """Yield the parts of a body as they arrive."""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


def _headers_without(headers: Any, names: frozenset[str]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name.lower().decode("latin-1") not in names]


def _request_headers(headers: Any) -> list[tuple[str, str]]:
    return [
        (name.decode("latin-1"), _text_of(value))
        for name, value in _headers_without(headers, HOP_BY_HOP)
    ]


def _text_of(value: bytes) -> str:
    """Decode a header as UTF-8, so that aiohttp sends the same bytes; otherwise as Latin-1."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")
