"""gRPC calls through a replica keep the daemon's messages, errors, deadlines and cancellations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest

from pensieve.cluster.grpc_edge import GONE, _wrap
from pensieve.cluster.grpc_forward import GrpcForward
from pensieve.cluster.grpc_methods import TIMEOUT, methods
from pensieve.cluster.replica import NEEDS_TOKENS, DaemonReplica, add_methods
from pensieve.cluster.settings import ClusterSettings
from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.rig_daemon import ECHO, DaemonRig


class ReplicaWithMethods(DaemonReplica):
    SendMessage: Any
    GetConversation: Any


add_methods(ReplicaWithMethods)
METHODS = {each.name: each for each in methods()}
SEND, GET = METHODS["SendMessage"], METHODS["GetConversation"]


class Context:
    """The context that gRPC gives to a servicer, and Ray to a replica."""

    def __init__(self, left: float | None = None, peer: str = "ipv4:127.0.0.1:9") -> None:
        self.left, self._peer = left, peer
        self.said: dict[str, Any] = {}

    def time_remaining(self) -> float | None:
        return self.left

    def invocation_metadata(self) -> Any:
        return (("session_id", "c"), ("user-agent", "a client"))

    def trailing_metadata(self) -> Any:
        return tuple(self.said.get("trailing", {}).items())

    def peer(self) -> str:
        return self._peer

    def code(self) -> Any:
        return self.said.get("code")

    def set_code(self, code: Any) -> None:
        self.said["code"] = code

    def set_details(self, details: Any) -> None:
        self.said["details"] = details

    def set_trailing_metadata(self, metadata: Any) -> None:
        self.said["trailing"] = dict(metadata)


class World:
    """The path of a call: our wrapper around Ray's handler, which calls a replica's method."""

    def __init__(self, address: str, **settings: Any) -> None:
        self.replica: Any = ReplicaWithMethods()
        self.replica.settings = ClusterSettings(local=True, **settings)
        self.replica.grpc = GrpcForward(address, "one")

    async def _stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        async with aclosing(self.replica.SendMessage(request, context)) as messages:
            async for each in messages:
                yield each.data

    async def _unary(self, request: bytes, context: Any) -> bytes:
        return bytes((await self.replica.GetConversation(request, context)).data)

    def send(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        handler: Any = grpc.unary_stream_rpc_method_handler(self._stream)
        found: AsyncIterator[bytes] = _wrap(SEND, handler).unary_stream(request, context)
        return found

    async def get(self, request: bytes, context: Context) -> bytes:
        handler: Any = grpc.unary_unary_rpc_method_handler(self._unary)
        return bytes(await _wrap(GET, handler).unary_unary(request, context))


def run(address: str, work: Callable[[World], Awaitable[None]], **settings: Any) -> None:
    async def inside() -> None:
        world = World(address, **settings)
        try:
            async with asyncio.timeout(60.0):
                await work(world)
        finally:
            await world.replica.grpc.close()

    asyncio.run(inside())


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


@pytest.fixture
def daemon(tmp_path: Path) -> Any:
    with DaemonRig(tmp_path, program=(*ECHO, "--seconds", "0.01")) as rig:
        yield rig


def request(max_tokens: int = 20, **more: Any) -> bytes:
    sampling = pb.Sampling(max_tokens=max_tokens, ignore_eos=True, **more)
    messages = [pb.NewMessage(content="Hello.")]
    return pb.SendMessageRequest(
        conversation_id="c", messages=messages, sampling=sampling, create_if_missing=True
    ).SerializeToString()


def test_method_names_are_unique_because_ray_drops_the_service_name() -> None:
    names = [each.name for each in methods()]
    assert len(names) == len(set(names)) == 39
    assert SEND.kind == "unary_stream"
    assert METHODS["CreateJob"].kind == "stream_unary"
    assert METHODS["GetStats"].path == "/pensieve.v1.AdminService/GetStats"


def test_messages_and_trailing_metadata_come_from_the_daemon(daemon: DaemonRig) -> None:
    async def work(world: World) -> None:
        context = Context(30.0)
        found = [
            pb.SendMessageResponse.FromString(each).WhichOneof("event")
            async for each in world.send(request(), context)
        ]
        assert (found[0], found[-1]) == ("started", "completed")
        assert found.count("delta") > 5
        assert context.said["trailing"]["pensieve-replica"] == "one"
        assert "code" not in context.said

    run(daemon.server.address, work)


def test_a_daemons_error_keeps_its_status_and_details(daemon: DaemonRig) -> None:
    async def work(world: World) -> None:
        context = Context()
        assert [each async for each in world.send(request(temperature=-1.0), context)] == []
        assert context.said["code"] is grpc.StatusCode.INVALID_ARGUMENT
        assert "temperature" in context.said["details"]
        assert "grpc-status-details-bin" in context.said["trailing"]
        nowhere = pb.GetConversationRequest(conversation_id="nowhere").SerializeToString()
        context = Context()
        await world.get(nowhere, context)
        assert context.said["code"] is grpc.StatusCode.NOT_FOUND
        assert "nowhere" in context.said["details"]

    run(daemon.server.address, work)


def test_the_daemon_receives_the_deadline(daemon: DaemonRig) -> None:
    async def work(world: World) -> None:
        context = Context(0.5)
        found = [each async for each in world.send(request(3000), context)]
        assert found
        assert context.said["code"] is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: daemon.num_live == 0)

    run(daemon.server.address, work)


def test_a_client_that_disconnects_ends_the_daemons_call(daemon: DaemonRig) -> None:
    async def work(world: World) -> None:
        async def read() -> None:
            async for _ in world.send(request(3000), Context()):
                pass

        reading = asyncio.create_task(read())
        await until(lambda: daemon.num_live == 1)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await until(lambda: daemon.num_live == 0)

    run(daemon.server.address, work)


def test_an_unreachable_daemon_is_reported_as_unavailable() -> None:
    async def work(world: World) -> None:
        context = Context()
        assert [each async for each in world.send(b"", context)] == []
        assert context.said["code"] is grpc.StatusCode.UNAVAILABLE

    run("127.0.0.1:1", work)


def test_calls_from_other_machines_are_refused_if_there_are_no_tokens() -> None:
    async def work(world: World) -> None:
        context = Context(peer="ipv4:192.0.2.1:9")
        assert [each async for each in world.send(b"", context)] == []
        assert context.said["code"] is grpc.StatusCode.PERMISSION_DENIED
        assert context.said["details"] == NEEDS_TOKENS

    run("127.0.0.1:1", work)


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.NOT_FOUND])
@pytest.mark.parametrize("num_messages", [0, 1])
def test_rays_own_errors_are_reported_as_unavailable(
    code: grpc.StatusCode, num_messages: int
) -> None:
    """The replica is gone, perhaps in the middle of a stream, or the whole cluster is gone."""

    async def ray_handler(_: bytes, context: Any) -> AsyncIterator[bytes]:
        for _number in range(num_messages):
            context.set_trailing_metadata([("pensieve-replica", "one")])
            yield b"a message"
        context.set_code(code)
        context.set_details("a traceback")

    async def ray_unary_handler(_: bytes, context: Any) -> bytes:
        context.set_code(code)
        return b""

    async def work() -> None:
        context = Context()
        around = _wrap(SEND, grpc.unary_stream_rpc_method_handler(ray_handler))
        assert len([each async for each in around.unary_stream(b"", context)]) == num_messages
        assert context.said["code"] is grpc.StatusCode.UNAVAILABLE
        assert context.said["details"] == GONE
        context = Context()
        await _wrap(GET, grpc.unary_unary_rpc_method_handler(ray_unary_handler)).unary_unary(
            b"", context
        )
        assert context.said["code"] is grpc.StatusCode.UNAVAILABLE

    asyncio.run(work())


def test_the_deadline_is_forwarded_as_metadata() -> None:
    found = []

    async def ray_handler(_: bytes, context: Any) -> bytes:
        found.extend(context.invocation_metadata())
        context.set_trailing_metadata([("pensieve-replica", "one")])
        return b""

    around = _wrap(GET, grpc.unary_unary_rpc_method_handler(ray_handler))
    asyncio.run(around.unary_unary(b"", Context(30.0)))
    assert dict(found)[TIMEOUT] == "30.000"
