"""HTTP requests that go past Ray: the client sees the daemon's answer, and Ray a call that runs as long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from pensieve.cluster.direct import Holds
from pensieve.cluster.http_direct import HttpDirect
from pensieve.cluster.http_edge import HttpEdge
from pensieve.cluster.http_forward import GONE
from pensieve.cluster.replica import STRANGER, Replica, forward_http
from pensieve.cluster.settings import ClusterSettings

CHAT = "/v1/chat/completions"
CLIENT = ("127.0.0.1", 9)


class Daemon:
    """Answers with what it was sent; on /endless a message every 10 ms, on /cut two and no end."""

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


class Ray:
    """What Ray Serve's HTTP proxy does with a call: hears of a client that leaves, and cancels it then."""

    def __init__(self, replica: Any) -> None:
        self.replica = replica
        self.num_live = 0
        self.was_cancelled = False
        self.bodies: list[bytes] = []  # that the replica was sent

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        heard: asyncio.Queue[Any] = asyncio.Queue()

        async def hear() -> None:
            while True:
                message = await receive()
                await heard.put(message)
                self.bodies.append(message.get("body", b""))
                if message["type"] == "http.disconnect":
                    return

        self.num_live += 1
        hearing = asyncio.create_task(hear())
        call = asyncio.create_task(forward_http(self.replica, scope, heard.get, send))
        try:
            await asyncio.wait([hearing, call], return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                self.was_cancelled = True
            else:
                await call
        finally:
            call.cancel()
            hearing.cancel()
            self.num_live -= 1


class Client:
    """One request, as uvicorn brings it."""

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
        self.left = asyncio.Event()
        self.said: list[Any] = []
        self._body: list[bytes] = [body or b""]

    async def receive(self) -> Any:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self.left.wait()
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
async def cluster(**settings: Any) -> AsyncIterator[tuple[Daemon, Ray, HttpEdge]]:
    daemon = Daemon()
    application = web.Application()
    application.router.add_route("*", "/{any:.*}", daemon.handle)
    runner = web.AppRunner(application, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    daemon.address = "{}:{}".format(*runner.addresses[0][:2])
    replica: Any = Replica()
    replica.settings = ClusterSettings(local=True, **settings)
    replica.name, replica.http_address, replica.holds = "one", daemon.address, Holds()
    await replica.holds.listen("127.0.0.1")
    ray = Ray(replica)
    edge = HttpEdge(ray)
    try:
        async with asyncio.timeout(60):
            yield daemon, ray, edge
    finally:
        await edge._direct._forward.close()
        await replica.holds.close()
        await runner.cleanup()


def run(work: Callable[[Daemon, Ray, HttpEdge], Awaitable[None]]) -> None:
    async def inside() -> None:
        async with cluster() as (daemon, ray, edge):
            await work(daemon, ray, edge)

    asyncio.run(inside())


def test_the_answer_is_the_daemons_and_ray_has_one_message() -> None:
    async def work(daemon: Daemon, ray: Ray, edge: HttpEdge) -> None:
        client = Client(body=b'{"messages": []}')
        await edge(client.scope, client.receive, client.send)
        assert client.status == 201
        headers = dict(client.said[0]["headers"])
        assert (headers[b"x-of"], headers[b"pensieve-replica"]) == (b"daemon", b"one")
        assert b"pensieve-direct" not in headers
        assert (client.text, client.has_ended) == (b"part 0;part 1;", True)
        [(path, _, body)] = daemon.requests
        assert (path, body) == (CHAT + "?a=%20b", b'{"messages": []}')
        assert not ray.was_cancelled
        assert (ray.num_live, ray.replica.holds.num_open) == (0, 0)

    run(work)


def test_a_request_without_a_body_has_none_at_the_daemon() -> None:
    async def work(daemon: Daemon, _: Ray, edge: HttpEdge) -> None:
        client = Client("/v1/models")
        await edge(client.scope, client.receive, client.send)
        [(_path, headers, body)] = daemon.requests
        assert body == b""
        assert not {"content-length", "transfer-encoding"} & {each.lower() for each in headers}

    run(work)


def test_a_body_that_the_proxy_has_not_read_goes_through_ray() -> None:
    async def work(daemon: Daemon, ray: Ray, edge: HttpEdge) -> None:
        ray.replica.http = edge._direct._forward
        client = Client("/v1/files", b"a file")
        await edge(client.scope, client.receive, client.send)
        assert (client.status, client.text) == (201, b"part 0;part 1;")
        [(_, _, body)] = daemon.requests
        assert body == b"a file" == ray.bodies[0]

    run(work)


def test_ray_sees_a_call_that_runs_and_ends() -> None:
    async def work(daemon: Daemon, ray: Ray, edge: HttpEdge) -> None:
        client = Client("/slow")
        request = asyncio.create_task(edge(client.scope, client.receive, client.send))
        await until(lambda: len(client.said) > 3)
        assert (ray.num_live, ray.replica.holds.num_open) == (1, 1)
        await request
        assert client.has_ended
        assert (ray.num_live, ray.replica.holds.num_open) == (0, 0)

    run(work)


def test_a_client_that_leaves_ends_the_daemons_request_and_rays_call() -> None:
    async def work(daemon: Daemon, ray: Ray, edge: HttpEdge) -> None:
        client = Client("/endless")
        request = asyncio.create_task(edge(client.scope, client.receive, client.send))
        await until(lambda: len(client.said) > 3)
        client.left.set()
        await request
        assert not client.has_ended
        assert not ray.was_cancelled  # it ended with the hold
        await until(lambda: daemon.num_live == 0)
        assert ray.replica.holds.num_open == 0

    run(work)


def test_a_client_that_leaves_while_ray_looks_for_a_replica_is_ray_s() -> None:
    async def work(_: Daemon, ray: Ray, edge: HttpEdge) -> None:
        begun = asyncio.Event()

        async def looking(scope: Any, receive: Any, send: Any) -> None:
            while True:
                begun.set()
                if (await receive())["type"] == "http.disconnect":
                    ray.was_cancelled = True
                    return

        direct = HttpDirect(looking)
        client = Client()
        request = asyncio.create_task(direct(client.scope, None, client.receive, client.send))
        await begun.wait()
        client.left.set()
        await request
        assert ray.was_cancelled
        assert client.said == []

    run(work)


@pytest.mark.parametrize("ends", ["replica", "Ray"])
def test_an_answer_whose_replica_lets_go_is_cut_off(ends: str) -> None:
    async def work(daemon: Daemon, ray: Ray, edge: HttpEdge) -> None:
        client = Client("/endless")
        request = asyncio.create_task(edge(client.scope, client.receive, client.send))
        await until(lambda: len(client.said) > 3)
        if ends == "replica":
            await ray.replica.holds.close()
        else:
            [ticket] = ray.replica.holds._holds
            ray.replica.holds.forget(ticket)
        await request
        assert client.status == 201
        assert not client.has_ended
        await until(lambda: daemon.num_live == 0)

    run(work)


def test_an_answer_that_breaks_off_is_cut_off() -> None:
    async def work(_: Daemon, ray: Ray, edge: HttpEdge) -> None:
        client = Client("/cut")
        await edge(client.scope, client.receive, client.send)
        assert (client.status, client.has_ended) == (201, False)
        assert ray.replica.holds.num_open == 0

    run(work)


@pytest.mark.parametrize("missing", ["daemon", "replica"])
def test_who_is_not_there_is_a_503(missing: str) -> None:
    async def work(_: Daemon, ray: Ray, edge: HttpEdge) -> None:
        if missing == "daemon":
            ray.replica.http_address = "127.0.0.1:1"
        else:
            ray.replica.holds.address = "127.0.0.1:1"
        client = Client()
        request = asyncio.create_task(edge(client.scope, client.receive, client.send))
        await until(lambda: client.has_ended)
        assert (client.status, client.text) == (503, GONE)
        for ticket in list(ray.replica.holds._holds):  # after HOLD_SECONDS
            ray.replica.holds._holds[ticket].begun.set()
            ray.replica.holds._holds[ticket].ended.set()
        await request

    run(work)


def test_what_the_replica_says_itself_is_the_answer() -> None:
    async def work(daemon: Daemon, _: Ray, edge: HttpEdge) -> None:
        client = Client(body=b"{}", peer=("192.0.2.1", 9))
        await edge(client.scope, client.receive, client.send)
        assert (client.status, client.text) == (403, STRANGER.encode())
        assert daemon.requests == []

    run(work)


def test_a_path_without_a_slash_is_no_part_of_an_address() -> None:
    async def work(daemon: Daemon, _: Ray, edge: HttpEdge) -> None:
        client = Client()
        client.scope["raw_path"] = b"%2F@evil.example/"
        await edge(client.scope, client.receive, client.send)
        assert client.status == 400
        assert daemon.requests == []

    run(work)


def test_the_bytes_of_a_header_stay_as_they_are() -> None:
    async def work(daemon: Daemon, _: Ray, edge: HttpEdge) -> None:
        client = Client()
        client.scope["headers"] = [(b"x-session-id", "über".encode())]
        await edge(client.scope, client.receive, client.send)
        [(_path, headers, _body)] = daemon.requests
        assert headers["x-session-id"] == "über"

    run(work)


def test_an_answer_has_the_id_that_ray_has_logged() -> None:
    async def work(_: Daemon, ray: Ray, edge: HttpEdge) -> None:
        client = Client()

        async def with_id(scope: Any, receive: Any, send: Any) -> None:
            async def named(message: Any) -> None:
                if message["type"] == "http.response.start":
                    message = {**message, "headers": [*message["headers"], (b"x-request-id", b"7")]}
                await send(message)

            await ray(scope, receive, named)

        edge._direct._app = with_id
        await edge(client.scope, client.receive, client.send)
        assert client.status == 201
        assert dict(client.said[0]["headers"])[b"x-request-id"] == b"7"

    run(work)


@pytest.mark.parametrize("body", [None, b"a file"], ids=["direct", "through Ray"])
def test_a_cluster_that_ray_does_not_know_is_away(body: bytes | None) -> None:
    """Its 404 would tell clients not to come again."""

    async def ends(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b"not found"})

    async def work() -> None:
        client = Client("/v1/files", body)
        await HttpEdge(ends)(client.scope, client.receive, client.send)
        assert (client.status, client.text) == (503, GONE)

    asyncio.run(work())


def test_an_answer_that_nobody_reads_ends_with_rays_call() -> None:
    async def work(daemon: Daemon, ray: Ray, edge: HttpEdge) -> None:
        client, stalls = Client("/endless"), asyncio.Event()

        async def send(message: Any) -> None:
            await client.send(message)
            if len(client.said) > 3:
                stalls.set()
                await asyncio.Event().wait()

        request = asyncio.create_task(edge(client.scope, client.receive, send))
        await stalls.wait()
        ray.replica.holds.end_all()
        await request
        await until(lambda: daemon.num_live == 0)
        assert (ray.num_live, ray.replica.holds.num_open) == (0, 0)

    run(work)


def test_an_answer_whose_call_ray_has_given_up_ends() -> None:
    """Also where the replica does not hear of it."""

    async def work(daemon: Daemon, ray: Ray, edge: HttpEdge) -> None:
        client, gives_up = Client("/endless"), asyncio.Event()

        async def limited(scope: Any, receive: Any, send: Any) -> None:
            call = asyncio.create_task(ray(scope, receive, send))
            await gives_up.wait()
            calls.append(call)
            raise TimeoutError

        calls: list[asyncio.Task[None]] = []
        edge._direct._app = limited
        request = asyncio.create_task(edge(client.scope, client.receive, client.send))
        await until(lambda: len(client.said) > 3)
        gives_up.set()
        await request
        assert not client.has_ended
        await until(lambda: daemon.num_live == 0)
        await calls[0]

    run(work)
