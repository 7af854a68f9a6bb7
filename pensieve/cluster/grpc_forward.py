"""Calls to a daemon: bytes in, bytes out, with everything that belongs to a call.

    unary     in the replica.  What Ray brings: the request, and a context that has metadata and the client's
              address.  What goes back: a message, and in the context the status, its details and trailing
              metadata.  Ray forgets the context when a method raises, so an error is an empty message with
              the error in its context
    direct    in the proxy: the messages of a stream (direct.py)

**Cancellation**: the task of a call whose client left is cancelled, and the daemon's call with it.

One channel for each daemon, used by one event loop.
"""

from __future__ import annotations

import asyncio
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
# Metadata between the client and Ray, or of this connection.
NOT_FORWARDED = frozenset(
    {"user-agent", "application", "request_id", "multiplexed_model_id", KEY, TIMEOUT}
)
GONE = "the replica that had this call is gone or is about to end; another one takes its calls"
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

    async def close(self) -> None:
        await self._channel.close()

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

    async def direct(
        self,
        method: Method,
        request: bytes,
        requested: Any,
        context: Any,
        gone: asyncio.Future[None],
    ) -> AsyncIterator[bytes]:
        """The messages of a stream, in the proxy; UNAVAILABLE when its replica is `gone`.

        `requested` has the metadata of the call, and `context` gets what comes of it.
        """
        call = self._begin(method, request, requested)
        gone.add_done_callback(lambda _: call.cancel())
        try:
            async for data in call:
                yield data
            self._end(context, await call.trailing_metadata())
        except grpc.aio.AioRpcError as error:
            self._fail(context, error)
        except asyncio.CancelledError:
            if not gone.done() or gone.cancelled():
                raise
            self.gone(context)
        finally:
            call.cancel()

    def gone(self, context: Any) -> None:
        """The replica is not there, or wants the call to end."""
        context.set_code(grpc.StatusCode.UNAVAILABLE)
        context.set_details(GONE)
        self._end(context, ())

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
