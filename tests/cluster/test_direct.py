"""Streams that go past Ray: the replica keeps Ray's call open as long as the proxy's stream runs."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from pensieve.cluster import direct as direct_module
from pensieve.cluster.direct import DIRECT, Holds, Way, held, way_of
from pensieve.cluster.grpc_edge import Call, DirectStreams
from pensieve.cluster.grpc_forward import GONE
from pensieve.cluster.grpc_methods import TIMEOUT, methods
from pensieve.cluster.replica import Replica, add_methods
from pensieve.cluster.settings import ClusterSettings
from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.rig_daemon import ECHO, DaemonRig


class ReplicaWithMethods(Replica):
    SendMessage: Any


add_methods(ReplicaWithMethods)
SEND = next(each for each in methods() if each.name == "SendMessage")


def run(work: Callable[[Holds], Awaitable[None]]) -> None:
    problems: list[dict[str, Any]] = []  # of tasks that nobody waits for, such as Ray's call

    async def with_holds() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, found: problems.append(found))
        holds = Holds()
        await holds.listen("127.0.0.1")
        try:
            async with asyncio.timeout(60.0):
                await work(holds)
        finally:
            await holds.close()
        gc.collect()  # a task reports its error when it is freed
        loop.set_exception_handler(None)  # tasks that the end of the loop cancels are no problem

    asyncio.run(with_holds())
    assert problems == []


async def hold(holds: Holds, ticket: str) -> None:
    """As a replica does."""
    try:
        await holds.hold(ticket)
    finally:
        holds.forget(ticket)


def way_to(holds: Holds, daemon: str = "127.0.0.1:1") -> Way:
    return Way(daemon, holds.address, holds.ticket(), "one")


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


def test_a_way_is_written_in_one_value_of_metadata() -> None:
    way = Way("[::1]:50051", "127.0.0.1:9", "ab12", "replica-1")
    assert way_of((("x", "y"), (DIRECT, way.written()))) == way


def test_rays_call_stays_open_until_the_stream_has_ended() -> None:
    async def work(holds: Holds) -> None:
        way = way_to(holds)
        holding = asyncio.create_task(hold(holds, way.ticket))
        async with held(way) as gone:
            await asyncio.sleep(0.1)
            assert not holding.done()
            assert not gone.done()
        await holding
        assert holds.num_open == 0

    run(work)


def test_a_proxy_that_never_comes_does_not_keep_rays_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_module, "HOLD_SECONDS", 0.1)

    async def work(holds: Holds) -> None:
        way = way_to(holds)
        await hold(holds, way.ticket)
        assert holds.num_open == 0
        async with held(way) as gone:  # too late
            await gone

    run(work)


def test_a_replica_that_is_to_end_ends_streams_that_watch_and_no_others() -> None:
    async def work(holds: Holds) -> None:
        turn = way_to(holds)
        watching = turn._replace(ticket=holds.ticket(watches=True))
        holding = [asyncio.create_task(hold(holds, each.ticket)) for each in (turn, watching)]
        async with held(turn) as turn_gone, held(watching) as watch_gone:
            await asyncio.sleep(0.05)
            holds.end_watching()
            assert holds.ends_watching
            await watch_gone
            await holding[1]
            await asyncio.sleep(0.05)
            assert not turn_gone.done()
        await holding[0]

    run(work)


def test_a_stream_that_watches_and_comes_when_they_are_ended_ends_at_once() -> None:
    async def work(holds: Holds) -> None:
        way = Way("127.0.0.1:1", holds.address, holds.ticket(watches=True), "one")
        holding = asyncio.create_task(hold(holds, way.ticket))
        holds.end_watching()
        async with held(way) as gone:
            await gone
        await holding

    run(work)


@pytest.mark.parametrize("sent", [b"\n", b"\xff\n", b"x" * 100_000, b""])
def test_a_stranger_at_the_port_ends_nothing(sent: bytes) -> None:
    async def work(holds: Holds) -> None:
        way = way_to(holds)
        holding = asyncio.create_task(hold(holds, way.ticket))
        host, _, port = holds.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        with suppress(ConnectionError):
            writer.write(sent)
            writer.write_eof()
            assert await reader.read() == b""
        writer.close()
        assert not holding.done()
        async with held(way):
            pass
        await holding

    run(work)


class Context:
    """As gRPC gives it to a servicer."""

    def __init__(self, left: float | None = None) -> None:
        self.left = left
        self.is_over = False
        self.said: dict[str, Any] = {}

    def time_remaining(self) -> float | None:
        return self.left

    def invocation_metadata(self) -> Any:
        return (("session_id", "c"), ("user-agent", "a client"))

    def peer(self) -> str:
        assert not self.is_over, "gRPC frees a context with its call"
        return "ipv4:127.0.0.1:9"

    def set_code(self, code: Any) -> None:
        self.said["code"] = code

    def set_details(self, details: Any) -> None:
        self.said["details"] = details

    def set_trailing_metadata(self, metadata: Any) -> None:
        self.said["trailing"] = dict(metadata)


async def rays(holds: Holds, way: Way, call: Call) -> AsyncIterator[bytes]:
    """What Ray has of a call: nothing more, until the hold is let go; then it says how that ended."""
    await hold(holds, way.ticket)
    assert call.code() is grpc.StatusCode.OK
    call.set_code(grpc.StatusCode.OK)
    call.set_details("Ray's own")
    assert call.peer() == "ipv4:127.0.0.1:9"
    for _ in ():
        yield b""


@pytest.fixture
def daemon(tmp_path: Path) -> Any:
    with DaemonRig(tmp_path, program=(*ECHO, "--seconds", "0.01")) as rig:
        yield rig


def request(**more: Any) -> bytes:
    sampling = pb.Sampling(max_tokens=20, ignore_eos=True, **more)
    messages = [pb.NewMessage(content="Hello.")]
    return pb.SendMessageRequest(
        conversation_id="c", messages=messages, sampling=sampling, create_if_missing=True
    ).SerializeToString()


def test_messages_and_trailing_metadata_come_from_the_daemon(daemon: DaemonRig) -> None:
    async def work(holds: Holds) -> None:
        way, context, found = way_to(holds, daemon.server.address), Context(30.0), []
        call = Call(context, "")
        assert dict(call.invocation_metadata())[TIMEOUT] == "30.000"
        streams = DirectStreams()
        async for each in streams.messages(SEND, way, request(), call, rays(holds, way, call)):
            found.append(pb.SendMessageResponse.FromString(each).WhichOneof("event"))
        context.is_over = True
        assert (found[0], found[-1]) == ("started", "completed")
        assert found.count("delta") > 5
        await until(lambda: holds.num_open == 0)
        assert context.said["trailing"]["pensieve-replica"] == "one"
        assert "code" not in context.said  # what Ray says of its own call is not the call's

    run(work)


def test_an_error_of_the_daemons_keeps_its_status_and_its_details(daemon: DaemonRig) -> None:
    async def work(holds: Holds) -> None:
        way, context = way_to(holds, daemon.server.address), Context()
        call = Call(context, "")
        wrong = request(temperature=-1.0)
        async for _ in DirectStreams().messages(SEND, way, wrong, call, rays(holds, way, call)):
            raise AssertionError("no message")
        assert context.said["code"] is grpc.StatusCode.INVALID_ARGUMENT
        assert "temperature" in context.said["details"]
        assert "grpc-status-details-bin" in context.said["trailing"]

    run(work)


def test_a_stream_whose_replica_ends_is_unavailable(daemon: DaemonRig) -> None:
    async def work(holds: Holds) -> None:
        way, context = way_to(holds, daemon.server.address), Context()
        call = Call(context, "")
        long = pb.SendMessageRequest.FromString(request())
        long.sampling.max_tokens = 3000
        messages = DirectStreams().messages(
            SEND, way, long.SerializeToString(), call, rays(holds, way, call)
        )
        async for _ in messages:
            await holds.close()
        assert context.said["code"] is grpc.StatusCode.UNAVAILABLE
        assert context.said["details"] == GONE
        await until(lambda: daemon.num_live == 0)  # the daemon saw its client leave

    run(work)


@pytest.mark.parametrize("listens", [True, False])
def test_a_daemon_or_a_replica_that_is_not_there_is_unavailable(listens: bool) -> None:
    async def work(holds: Holds) -> None:
        way, context = way_to(holds), Context()
        if not listens:
            await holds.close()
        call = Call(context, "")
        async for _ in DirectStreams().messages(SEND, way, b"", call, rays(holds, way, call)):
            raise AssertionError("no message")
        assert context.said["code"] is grpc.StatusCode.UNAVAILABLE

    run(work)


def test_a_client_that_leaves_ends_the_daemons_call_and_rays(daemon: DaemonRig) -> None:
    async def work(holds: Holds) -> None:
        way, call = way_to(holds, daemon.server.address), Call(Context(), "")
        long = pb.SendMessageRequest.FromString(request())
        long.sampling.max_tokens = 3000
        streams = DirectStreams()

        async def read() -> None:
            raw = long.SerializeToString()
            async for _ in streams.messages(SEND, way, raw, call, rays(holds, way, call)):
                pass

        reading = asyncio.create_task(read())
        await until(lambda: daemon.num_live == 1)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await until(lambda: holds.num_open == 0 and daemon.num_live == 0)

    run(work)


def test_a_call_that_ray_ends_before_it_is_held_leaves_nothing() -> None:
    async def work(holds: Holds) -> None:
        replica: Any = Replica()
        replica.settings = ClusterSettings(insecure=True)
        replica.address, replica.name, replica.holds = "127.0.0.1:1", "one", holds
        stream = ReplicaWithMethods.SendMessage(replica, b"", Context())
        assert (await anext(stream)).data == b""
        assert holds.num_open == 1
        await stream.aclose()
        assert holds.num_open == 0

    run(work)
