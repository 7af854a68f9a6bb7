"""HTTP requests through a replica: the client gets the daemon's answer, or 503 for Ray's own errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from pensieve.cluster.http_edge import HttpEdge
from pensieve.cluster.http_forward import GONE, HttpForward
from pensieve.cluster.replica import NEEDS_TOKENS, DaemonReplica, forward_http
from pensieve.cluster.settings import ClusterSettings

CHAT = "/v1/chat/completions"
CLIENT = ("127.0.0.1", 9)


class Daemon:
    """Record requests and answer in parts. /endless sends a part every 10 ms; /cut aborts after two parts."""

    def __init__(self) -> None:
        self.address = ""
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.num_live = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.path_qs, dict(request.headers), await request.read()))
        response = web.StreamResponse(status=201, headers={"x-of": "daemon"})
        self.num_live += 1
        try:
            await response.prepare(request)
            for number in range({"/endless": 10_000, "/slow": 20}.get(request.path, 2)):
                await response.write(b"part %d;" % number)
                await asyncio.sleep(0.01)
            if request.path == "/cut":
                assert request.transport is not None
                request.transport.abort()
        finally:
            self.num_live -= 1
        return response


class Client:
    """One request, as uvicorn delivers it."""

    def __init__(
        self, path: str = CHAT, body: bytes | None = None, method: str = "", peer: Any = CLIENT
    ) -> None:
        self.scope = {
            "type": "http",
            "method": method or ("GET" if body is None else "POST"),
            "path": path,
            "query_string": b"a=%20b",
            "client": peer,
            "headers": [] if body is None else [(b"content-length", str(len(body)).encode())],
        }
        self.disconnected = asyncio.Event()
        self.said: list[Any] = []
        self._body: list[bytes] = [body or b""]

    async def receive(self) -> Any:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self.disconnected.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.said.append(message)

    @property
    def status(self) -> int:
        return int(self.said[0]["status"])

    @property
    def text(self) -> bytes:
        return b"".join(each["body"] for each in self.said[1:])

    @property
    def has_ended(self) -> bool:
        return len(self.said) > 1 and not self.said[-1].get("more_body")


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def cluster(**settings: Any) -> AsyncIterator[tuple[Daemon, Any, HttpEdge]]:
    daemon = Daemon()
    application = web.Application()
    application.router.add_route("*", "/{any:.*}", daemon.handle)
    runner = web.AppRunner(application, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    daemon.address = "{}:{}".format(*runner.addresses[0][:2])
    replica: Any = DaemonReplica()
    replica.settings = ClusterSettings(local=True, **settings)
    replica.http = HttpForward(daemon.address, "one")

    async def ray(scope: Any, receive: Any, send: Any) -> None:
        await forward_http(replica, scope, receive, send)

    try:
        async with asyncio.timeout(60):
            yield daemon, replica, HttpEdge(ray)
    finally:
        await replica.http.close()
        await runner.cleanup()


def run(work: Callable[[Daemon, Any, HttpEdge], Awaitable[None]]) -> None:
    async def inside() -> None:
        async with cluster() as (daemon, replica, edge):
            await work(daemon, replica, edge)

    asyncio.run(inside())


def test_the_client_gets_the_daemons_answer() -> None:
    async def work(daemon: Daemon, _: Any, edge: HttpEdge) -> None:
        client = Client(body=b'{"messages": []}')
        await edge(client.scope, client.receive, client.send)
        assert client.status == 201
        headers = dict(client.said[0]["headers"])
        assert (headers[b"x-of"], headers[b"pensieve-replica"]) == (b"daemon", b"one")
        assert (client.text, client.has_ended) == (b"part 0;part 1;", True)
        [(path, _, body)] = daemon.requests
        assert (path, body) == (CHAT + "?a=%20b", b'{"messages": []}')

    run(work)


def test_a_request_without_a_body_is_forwarded_without_one() -> None:
    async def work(daemon: Daemon, _: Any, edge: HttpEdge) -> None:
        client = Client("/v1/models")
        await edge(client.scope, client.receive, client.send)
        [(_path, headers, body)] = daemon.requests
        assert body == b""
        assert not {"content-length", "transfer-encoding"} & {each.lower() for each in headers}

    run(work)


def test_a_client_that_disconnects_ends_the_daemons_request() -> None:
    """Ray cancels the call."""

    async def work(daemon: Daemon, _: Any, edge: HttpEdge) -> None:
        client = Client("/endless")
        request = asyncio.create_task(edge(client.scope, client.receive, client.send))
        await until(lambda: len(client.said) > 3)
        request.cancel()
        with suppress(asyncio.CancelledError):
            await request
        assert not client.has_ended
        await until(lambda: daemon.num_live == 0)

    run(work)


def test_an_interrupted_answer_of_the_daemon_is_interrupted_for_the_client() -> None:
    async def work(_: Daemon, __: Any, edge: HttpEdge) -> None:
        client = Client("/cut")
        with pytest.raises(aiohttp.ClientError):
            await edge(client.scope, client.receive, client.send)
        assert (client.status, client.has_ended) == (201, False)

    run(work)


def test_an_unreachable_daemon_is_reported_as_503() -> None:
    async def work(_: Daemon, replica: Any, edge: HttpEdge) -> None:
        replica.http = HttpForward("127.0.0.1:1", "one")
        client = Client()
        await edge(client.scope, client.receive, client.send)
        assert (client.status, client.text) == (503, GONE)
        await replica.http.close()

    run(work)


def test_the_replicas_own_refusal_is_the_answer() -> None:
    async def work(daemon: Daemon, _: Any, edge: HttpEdge) -> None:
        client = Client(body=b"{}", peer=("192.0.2.1", 9))
        await edge(client.scope, client.receive, client.send)
        assert (client.status, client.text) == (403, NEEDS_TOKENS.encode())
        assert daemon.requests == []

    run(work)


def test_a_path_without_a_leading_slash_is_refused() -> None:
    async def work(daemon: Daemon, _: Any, edge: HttpEdge) -> None:
        client = Client()
        client.scope["raw_path"] = b"%2F@evil.example/"
        await edge(client.scope, client.receive, client.send)
        assert client.status == 400
        assert daemon.requests == []

    run(work)


def test_header_bytes_are_forwarded_unchanged() -> None:
    async def work(daemon: Daemon, _: Any, edge: HttpEdge) -> None:
        client = Client()
        client.scope["headers"] = [(b"x-session-id", "über".encode())]
        await edge(client.scope, client.receive, client.send)
        [(_path, headers, _body)] = daemon.requests
        assert headers["x-session-id"] == "über"

    run(work)


@pytest.mark.parametrize("status", [404, None])
def test_rays_own_errors_are_reported_as_503(status: int | None) -> None:
    """Ray has no application, or does not answer because the replica died."""

    async def ray(_: Any, __: Any, send: Any) -> None:
        if status is not None:
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": b"Path '/' not found."})

    client = Client()
    asyncio.run(HttpEdge(ray)(client.scope, client.receive, client.send))
    assert (client.status, client.text) == (503, GONE)


def test_a_404_of_the_daemon_stays_a_404() -> None:
    async def ray(_: Any, __: Any, send: Any) -> None:
        headers = [(b"pensieve-replica", b"one")]
        await send({"type": "http.response.start", "status": 404, "headers": headers})
        await send({"type": "http.response.body", "body": b"none", "more_body": False})

    client = Client()
    asyncio.run(HttpEdge(ray)(client.scope, client.receive, client.send))
    assert (client.status, client.text) == (404, b"none")
