"""A replica's HTTP requests to its daemon: bodies pass through as they come, in both directions.

An ASGI application with aiohttp behind it.  Headers that belong to a connection stay with it; so does the
key that http_edge.py added.  A client that leaves ends the task, and with it the daemon's request.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from yarl import URL

from pensieve.cluster.http_edge import ADDED, BODY, SESSION

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
OF_THE_SERVER = frozenset({"date", "server"})  # which Ray's proxy is
REPLICA = b"pensieve-replica"
GONE = (
    b'{"error": {"message": "the replica is gone", "type": "server_error", "code": "unavailable"}}'
)


class HttpForward:
    def __init__(self, address: str, name: str) -> None:
        self._base = f"http://{address}"
        self._name = name.encode()
        self._client: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1003})
            return
        try:
            # The path as it was sent, with its escapes.
            path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1").split("?")[0]
            query = scope.get("query_string", b"").decode("latin-1")
            async with self._session().request(
                scope["method"],
                URL(self._base + path + (f"?{query}" if query else ""), encoded=True),
                headers=_request_headers(scope["headers"]),
                data=_body(scope, receive),
                allow_redirects=False,
            ) as response:
                await send(
                    {
                        "type": "http.response.start",
                        "status": response.status,
                        "headers": [
                            *_kept(response.raw_headers, HOP_BY_HOP | OF_THE_SERVER),
                            (REPLICA, self._name),
                        ],
                    }
                )
                async for chunk in response.content.iter_any():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except aiohttp.ClientConnectorError:
            headers = [(b"content-type", b"application/json"), (REPLICA, self._name)]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": GONE, "more_body": False})

    def _session(self) -> aiohttp.ClientSession:
        if self._client is None:
            self._client = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            )
        return self._client


def _kept(headers: Any, but: frozenset[str]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name.lower().decode("latin-1") not in but]


def _request_headers(headers: Any) -> list[tuple[str, str]]:
    added = any(name == ADDED for name, _ in headers)
    return [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in _kept(headers, HOP_BY_HOP)
        if name != ADDED and not (added and name == SESSION)
    ]


def _body(scope: Any, receive: Any) -> bytes | AsyncIterator[bytes] | None:
    if BODY in scope:
        whole: bytes = scope[BODY]
        return whole
    names = {name for name, _ in scope["headers"]}
    return _received(receive) if names & {b"content-length", b"transfer-encoding"} else None


async def _received(receive: Any) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return
