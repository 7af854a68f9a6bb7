"""One gRPC channel to a daemon, used by the tasks of one event loop: `connection.py` for asyncio.

It differs in three ways.  The channel is opened by the first call, because gRPC binds it to the running
loop.  When the client is closed, gRPC ends a call by raising CancelledError in a task that was not
cancelled; the task gets a PensieveError instead.  A stream that is dropped must be cancelled by hand,
because gRPC's own task keeps it alive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar, cast

import grpc

from pensieve.client.channel import OPTIONS, Tls, credentials_of, metadata_of, target_of
from pensieve.client.grpc_errors import error_of_call
from pensieve.client.retry import Deadline
from pensieve.errors import InvalidArgument
from pensieve.v1 import conversation_pb2_grpc

Request = TypeVar("Request")
Response = TypeVar("Response")
Sleep = Callable[[float], Awaitable[None]]


class AsyncConnection:
    """A channel, its stub and the caller's token.  Any number of tasks of one event loop may use it."""

    def __init__(self, address: str, token: str | None, tls: Tls) -> None:
        self._metadata = metadata_of(token)
        self._closed = False
        self._target, self._credentials = target_of(address), credentials_of(tls)
        self._channel: grpc.aio.Channel | None = None
        self._stub: conversation_pb2_grpc.ConversationServiceAsyncStub | None = None

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel, opened in the running event loop on first use."""
        self._check_open()
        if self._channel is None:
            if self._credentials is None:
                self._channel = grpc.aio.insecure_channel(self._target, options=OPTIONS)
            else:
                self._channel = grpc.aio.secure_channel(
                    self._target, self._credentials, options=OPTIONS
                )
        return self._channel

    @property
    def stub(self) -> conversation_pb2_grpc.ConversationServiceAsyncStub:
        """The methods of ConversationService on this channel."""
        self._check_open()
        if self._stub is None:
            self._stub = conversation_pb2_grpc.ConversationServiceStub(self.channel)
        return self._stub

    async def unary(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[Request, Response],
        request: Request,
        deadline: Deadline,
    ) -> Response:
        """Send one request and wait for its response."""
        self._check_open()
        try:
            return await method(request, timeout=deadline.left(), metadata=self._metadata)
        except grpc.aio.AioRpcError as failure:
            raise error_of_call(failure, deadline) from None
        except asyncio.CancelledError:
            self._check_cancelled()
            raise

    def stream(
        self,
        method: grpc.aio.UnaryStreamMultiCallable[Request, Response],
        request: Request,
        deadline: Deadline,
    ) -> AsyncStream[Response]:
        """Send one request whose responses are read from the stream that this returns."""
        self._check_open()
        responses = method(request, timeout=deadline.left(), metadata=self._metadata)
        return AsyncStream(responses, deadline, self._check_cancelled)

    async def close(self) -> None:
        """End every call and stream that is under way."""
        self._closed = True
        if self._channel is not None:
            await self._channel.close()

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgument("client", "is closed")

    def _check_cancelled(self) -> None:
        """After a CancelledError: raises InvalidArgument if it came from `close`, not from this task."""
        task = asyncio.current_task()
        if self._closed and not (task is not None and task.cancelling()):
            raise InvalidArgument("client", "was closed") from None


class AsyncStream(Generic[Response]):
    """The responses to one request.  The stream is cancelled when this object is collected."""

    def __init__(
        self,
        responses: grpc.aio.UnaryStreamCall[Any, Response],
        deadline: Deadline,
        check_cancelled: Callable[[], None],
    ) -> None:
        self._responses = responses
        self._deadline = deadline
        self._check_cancelled = check_cancelled

    async def read(self) -> Response | None:
        """The next response; None at the end of the stream."""
        try:
            response = await self._responses.read()
        except grpc.aio.AioRpcError as failure:
            raise error_of_call(failure, self._deadline) from None
        except asyncio.CancelledError:
            self._check_cancelled()
            raise
        return None if response is grpc.aio.EOF else cast("Response", response)

    def cancel(self) -> None:
        """Stop reading: the server sees that this reader has left."""
        self._responses.cancel()

    def __del__(self) -> None:
        self._responses.cancel()
