"""A replica's calls to its daemon, and which of them end when it is to end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from pensieve.cluster.grpc_edge import methods
from pensieve.cluster.grpc_forward import ENDING, Forward

METHODS = {each.name: each for each in methods()}


class Context:
    """Ray's, as far as it is used."""

    def __init__(self) -> None:
        self.code: Any = None
        self.details = ""
        self.trailing: list[tuple[str, str]] = []

    def invocation_metadata(self) -> Any:
        return ()

    def set_code(self, code: Any) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, trailing: list[tuple[str, str]]) -> None:
        self.trailing = trailing


class Daemon(grpc.GenericRpcHandler):
    """Each stream has a first message, and a second one when it is told to go on."""

    def __init__(self) -> None:
        self.goes_on = asyncio.Event()

    def service(self, handler_call_details: Any) -> Any:
        async def stream(request: Any, context: Any) -> AsyncIterator[bytes]:
            yield b"first"
            await self.goes_on.wait()
            yield b"second"

        return grpc.unary_stream_rpc_method_handler(stream)


def with_daemon(scenario: Callable[[Forward, Daemon], Awaitable[None]]) -> None:
    async def run() -> None:
        daemon, server = Daemon(), grpc.aio.server()
        server.add_generic_rpc_handlers((daemon,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        forward = Forward(f"127.0.0.1:{port}", "ada")
        try:
            await asyncio.wait_for(scenario(forward, daemon), 60)
        finally:
            await forward.close()
            await server.stop(0)

    asyncio.run(run())


@pytest.mark.parametrize("name", ["WatchStats", "WatchJob", "Watch"])
def test_streams_that_watch_end_as_unavailable_when_the_replica_is_to_end(name: str) -> None:
    async def scenario(forward: Forward, daemon: Daemon) -> None:
        context = Context()
        stream = forward.stream(METHODS[name], b"", context)
        assert (await anext(stream)).data == b"first"
        forward.end_watching()
        assert [each.data async for each in stream] == [b""]
        assert context.code is grpc.StatusCode.UNAVAILABLE
        assert context.details == ENDING
        assert context.trailing == [("pensieve-replica", "ada")]
        again = Context()
        assert [each.data async for each in forward.stream(METHODS[name], b"", again)] == [b""]
        assert again.code is grpc.StatusCode.UNAVAILABLE

    with_daemon(scenario)


def test_turns_and_results_go_on() -> None:
    async def scenario(forward: Forward, daemon: Daemon) -> None:
        for name in ("SendMessage", "GetResults"):
            stream = forward.stream(METHODS[name], b"", Context())
            assert (await anext(stream)).data == b"first"
            forward.end_watching()
            daemon.goes_on.set()
            assert [each.data async for each in stream] == [b"second"]

    with_daemon(scenario)


def test_a_client_that_leaves_a_stream_that_watches_cancels_it() -> None:
    async def scenario(forward: Forward, daemon: Daemon) -> None:
        context = Context()

        async def read() -> None:
            async for _ in forward.stream(METHODS["WatchStats"], b"", context):
                pass

        reading = asyncio.create_task(read())
        await asyncio.sleep(0.1)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert context.code is None

    with_daemon(scenario)
