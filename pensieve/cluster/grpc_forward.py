"""A replica's calls to its daemon: bytes in, bytes out, with everything that belongs to a call.

What Ray brings: the request, and a context that has metadata and the client's address.  What goes back:
messages, and in the context the status, its details and trailing metadata.  Ray forgets the context when a
method raises, so an error is a last, empty message with the error in its context (grpc_edge.py takes it
out).

**Cancellation**: Ray cancels the task of a method whose client left; the daemon's call is cancelled with it.

**A stream that watches** has no end of its own, and Ray waits for the end of all calls before a replica may
end.  So a replica that is to end ends these, as UNAVAILABLE: who watches comes back, and is sent elsewhere.

One channel per replica, to a daemon of the same machine, used by one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import grpc

from pensieve.cluster.grpc_edge import KEY, REPLICA, TIMEOUT, Method

OPTIONS = (
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_concurrent_streams", 1 << 20),
)
# Metadata between the client and Ray, or of this connection.
NOT_FORWARDED = frozenset(
    {"user-agent", "application", "request_id", "multiplexed_model_id", KEY, TIMEOUT}
)


ENDING = "the replica is about to end; another one can be watched"


class Response(NamedTuple):
    """Bytes that Ray takes for a message."""

    data: bytes

    def SerializeToString(self) -> bytes:
        return self.data


class Forward:
    def __init__(self, address: str, name: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        self._trailing = ((REPLICA, name),)
        self._watching: set[Any] = set()  # calls of the daemon
        self._is_ending = False

    async def close(self) -> None:
        await self._channel.close()

    def end_watching(self) -> None:
        """All streams that watch, and those that come from now on."""
        self._is_ending = True
        for call in self._watching:
            call.cancel()

    async def unary(self, method: Method, request: Any, context: Any) -> Response:
        call = self._begin(method, request, context)
        try:
            data = await call
            self._end(context, await call.trailing_metadata())
        except grpc.aio.AioRpcError as error:
            self._fail(context, error)
            return Response(b"")
        finally:
            call.cancel()
        return Response(data)

    async def stream(self, method: Method, request: Any, context: Any) -> AsyncIterator[Response]:
        if method.watches and self._is_ending:
            yield self.refuse(context, grpc.StatusCode.UNAVAILABLE, ENDING)
            return
        call = self._begin(method, request, context)
        self._end(context, ())
        if method.watches:
            self._watching.add(call)
        try:
            async for data in call:
                yield Response(data)
        except grpc.aio.AioRpcError as error:
            self._fail(context, error)
            yield Response(b"")
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not (method.watches and self._is_ending) or (task and task.cancelling()):
                raise  # the client left
            yield self.refuse(context, grpc.StatusCode.UNAVAILABLE, ENDING)
        finally:
            self._watching.discard(call)
            call.cancel()

    def refuse(self, context: Any, code: grpc.StatusCode, details: str) -> Response:
        context.set_code(code)
        context.set_details(details)
        self._end(context, ())
        return Response(b"")

    def _begin(self, method: Method, request: Any, context: Any) -> Any:
        metadata = tuple(context.invocation_metadata())
        timeout = next((float(value) for name, value in metadata if name == TIMEOUT), None)
        make: Any = {
            (False, False): self._channel.unary_unary,
            (False, True): self._channel.unary_stream,
            (True, False): self._channel.stream_unary,
            (True, True): self._channel.stream_stream,
        }[method.takes_stream, method.gives_stream]
        forwarded = tuple(each for each in metadata if each[0] not in NOT_FORWARDED)
        return make(method.path)(request, metadata=forwarded, timeout=timeout)

    def _fail(self, context: Any, error: grpc.aio.AioRpcError) -> None:
        context.set_code(error.code())
        context.set_details(error.details() or "")
        self._end(context, error.trailing_metadata() or ())

    def _end(self, context: Any, trailing: Any) -> None:
        context.set_trailing_metadata(
            [*((name, value) for name, value in trailing), *self._trailing]
        )
