"""Forward a replica's gRPC calls to its daemon, as bytes, with metadata, deadline and errors.

Ray calls `unary` or `stream` with the request and a context, which has the metadata and the client's address.
Both return the response messages. The context carries status, details and trailing metadata back to Ray's
proxy. Ray drops the trailing metadata if a method raises. So if the call to the daemon fails, the method does
not raise. It puts the error into the context and sends an empty last message, which grpc_edge.py removes.

If a client disconnects, Ray cancels the task of its call. This also cancels the call to the daemon.

Each replica has one channel to its daemon on the same machine, used by one event loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import grpc

from pensieve.cluster.grpc_methods import KEY, REPLICA, TIMEOUT, Method

OPTIONS = (
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_concurrent_streams", 1 << 20),
)
# Metadata that only Ray or this connection uses.
NOT_FORWARDED = frozenset(
    {"user-agent", "application", "request_id", "multiplexed_model_id", KEY, TIMEOUT}
)


class Response(NamedTuple):
    """Bytes with the method that Ray calls on a message."""

    data: bytes

    def SerializeToString(self) -> bytes:
        return self.data


class GrpcForward:
    def __init__(self, address: str, name: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        self._trailing = ((REPLICA, name),)

    async def close(self) -> None:
        await self._channel.close()

    async def unary(self, method: Method, request: Any, context: Any) -> Response:
        call = self._begin(method, request, context)
        try:
            data = await call
            self._end(context, await call.trailing_metadata())
        except grpc.aio.AioRpcError as error:
            return self._end_with_error(context, error)
        finally:
            call.cancel()
        return Response(data)

    async def stream(self, method: Method, request: Any, context: Any) -> AsyncIterator[Response]:
        call = self._begin(method, request, context)
        self._end(context, ())
        try:
            async for data in call:
                yield Response(data)
        except grpc.aio.AioRpcError as error:
            yield self._end_with_error(context, error)
        finally:
            call.cancel()

    def refuse(self, context: Any, code: grpc.StatusCode, details: str) -> Response:
        context.set_code(code)
        context.set_details(details)
        self._end(context, ())
        return Response(b"")

    def _begin(self, method: Method, request: Any, context: Any) -> Any:
        metadata = tuple(context.invocation_metadata())
        timeout = next((float(value) for name, value in metadata if name == TIMEOUT), None)
        make: Any = getattr(self._channel, method.kind)
        forwarded = tuple(each for each in metadata if each[0] not in NOT_FORWARDED)
        return make(method.path)(request, metadata=forwarded, timeout=timeout)

    def _end_with_error(self, context: Any, error: grpc.aio.AioRpcError) -> Response:
        context.set_code(error.code())
        context.set_details(error.details() or "")
        self._end(context, error.trailing_metadata() or ())
        return Response(b"")

    def _end(self, context: Any, trailing: Any) -> None:
        context.set_trailing_metadata(
            [*((name, value) for name, value in trailing), *self._trailing]
        )
