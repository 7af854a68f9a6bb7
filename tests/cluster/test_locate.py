"""How a router asks the history service who owns a conversation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from pensieve.cluster import locate as locate_module
from pensieve.cluster.locate import Locator, Service, locate_from
from pensieve.errors import Unavailable
from pensieve.v1 import history_pb2 as pb
from pensieve.v1 import history_pb2_grpc

CERTS = Path(__file__).parent.parent / "guard" / "certs"  # good for localhost
SECRET = "0123456789abcdef"


class History(history_pb2_grpc.HistoryServiceServicer):
    def __init__(self) -> None:
        self.told: list[dict[str, str]] = []
        self.fails = False
        self.secret = ""

    async def Locate(self, request: pb.LocateRequest, context: Any) -> pb.LocateResponse:
        self.told.append(dict(context.invocation_metadata()))
        if self.fails:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "it is away")
        if self.secret and self.told[-1].get("authorization") != f"Bearer {self.secret}":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you")
        return pb.LocateResponse(replica="ada" if request.conversation_id == "trip-42" else "")

    async def Serve(self, requests: Any, context: Any) -> AsyncIterator[pb.ServeResponse]:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "nobody calls it")
        yield pb.ServeResponse()

    async def ListReplicas(self, request: Any, context: Any) -> pb.ListReplicasResponse:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "nobody calls it")
        return pb.ListReplicasResponse()


def with_history(
    scenario: Callable[[History, str], Awaitable[None]], has_tls: bool = False
) -> None:
    async def run() -> None:
        history, server = History(), grpc.aio.server()
        history_pb2_grpc.add_HistoryServiceServicer_to_server(history, server)
        if has_tls:
            pair = [(CERTS / name).read_bytes() for name in ("server.key", "server.pem")]
            credentials = grpc.ssl_server_credentials([(pair[0], pair[1])])
            port = server.add_secure_port("localhost:0", credentials)
        else:
            port = server.add_insecure_port("localhost:0")
        await server.start()
        try:
            await scenario(history, f"history{'s' if has_tls else ''}://localhost:{port}")
        finally:
            await server.stop(0)

    asyncio.run(run())


async def located(locate: Locator) -> str | None:
    """Until the connection is there, which may take longer than a router waits."""
    for _ in range(50):
        try:
            return await locate("trip-42")
        except Unavailable:
            await asyncio.sleep(0.1)
    raise AssertionError("it does not answer")


def test_the_owner_is_asked_for_with_the_secret(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "secret").chmod(0o600)

    async def scenario(history: History, address: str) -> None:
        locate = Locator(Service(address, str(tmp_path / "secret")))
        assert await located(locate) == "ada"
        assert await locate("nobodys") is None
        assert history.told[-1]["authorization"] == f"Bearer {SECRET}"

    with_history(scenario)


def test_a_history_with_an_authority_of_its_own_is_asked_by_that() -> None:
    async def scenario(history: History, address: str) -> None:
        assert await located(Locator(Service(address, ca=str(CERTS / "ca.pem")))) == "ada"
        with pytest.raises(Unavailable):
            await Locator(Service(address))("trip-42")  # by the system's

    with_history(scenario, has_tls=True)


def test_replicas_say_where_it_is_and_what_is_needed() -> None:
    stats = {"history": "historys://localhost:1", "secret": "", "ca": str(CERTS / "ca.pem")}
    replicas = [SimpleNamespace(routing_stats=each) for each in ({}, None, stats)]

    async def scenario() -> None:
        found = locate_from(replicas)
        assert found is not None
        assert locate_from([SimpleNamespace(routing_stats={})]) is None
        assert locate_from(replicas) is found
        other = SimpleNamespace(routing_stats={**stats, "ca": ""})
        assert locate_from([other]) is not found

    asyncio.run(scenario())


def test_a_service_that_cannot_be_asked_is_logged_once_each_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(history: History, address: str) -> None:
        locate = Locator(Service(address))
        await located(locate)
        caplog.clear()
        for _ in range(2):
            history.fails = True
            for _ in range(3):
                with pytest.raises(Unavailable, match="it is away"):
                    await locate("trip-42")
            history.fails = False
            await located(locate)

    with caplog.at_level(logging.WARNING, "ray.serve"):
        with_history(scenario)
    assert len(caplog.messages) == 2
    assert caplog.messages[0].endswith("owns a conversation, and goes by hash: it is away")


def test_files_that_this_node_lacks_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        Locator(Service("history://localhost:1", secret=str(tmp_path / "secret")))
        Locator(Service("historys://localhost:1", ca=str(tmp_path / "ca.pem")))

    with caplog.at_level(logging.WARNING, "ray.serve"):
        asyncio.run(scenario())
    assert [each.rpartition(": ")[2] for each in caplog.messages] == [
        "No such file or directory"
    ] * 2


def test_a_secret_that_comes_later_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locate_module, "READ_AGAIN_SECONDS", 0.0)
    file = tmp_path / "secret"

    async def scenario(history: History, address: str) -> None:
        history.secret = SECRET
        locate = Locator(Service(address, secret=str(file)))
        with pytest.raises(Unavailable):
            await locate("trip-42")
        for secret in ("another-secret-0", SECRET):
            file.write_text(secret)
            file.chmod(0o600)
            if secret == SECRET:
                assert await located(locate) == "ada"
            else:
                with pytest.raises(Unavailable):
                    await locate("trip-42")

    with_history(scenario)
