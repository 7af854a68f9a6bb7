"""One gRPC channel to a daemon, used by threads; the SDK's only synchronous input and output.

`aio_connection.py` is its counterpart for asyncio, with the same names.  Everything above these two files
is written once, in `aio.py`, and generated for threads.  A call that fails raises a PensieveError, and
nothing is sent once `close` was called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import grpc

from pensieve.client.channel import OPTIONS, Tls, credentials_of, metadata_of, target_of
from pensieve.client.grpc_errors import error_of_call
from pensieve.client.retry import Deadline
from pensieve.errors import InvalidArgument
from pensieve.v1 import conversation_pb2_grpc

Request = TypeVar("Request")
Response = TypeVar("Response")
Sleep = Callable[[float], None]


class Connection:
    """A channel, its stub and the caller's token.  Any number of threads may use it."""

    def __init__(self, address: str, token: str | None, tls: Tls) -> None:
        self._metadata = metadata_of(token)
        self._closed = False
        target, credentials = target_of(address), credentials_of(tls)
        if credentials is None:
            self.channel = grpc.insecure_channel(target, options=OPTIONS)
        else:
            self.channel = grpc.secure_channel(target, credentials, options=OPTIONS)
        self.stub = conversation_pb2_grpc.ConversationServiceStub(self.channel)

    def unary(
        self,
        method: grpc.UnaryUnaryMultiCallable[Request, Response],
        request: Request,
        deadline: Deadline,
    ) -> Response:
        """Send one request and wait for its response."""
        self._check_open()
        try:
            return method(request, timeout=deadline.left(), metadata=self._metadata)
        except grpc.RpcError as failure:
            raise error_of_call(failure, deadline) from None

    def stream(
        self,
        method: grpc.UnaryStreamMultiCallable[Request, Response],
        request: Request,
        deadline: Deadline,
    ) -> Stream[Response]:
        """Send one request whose responses are read from the stream that this returns."""
        self._check_open()
        responses = method(request, timeout=deadline.left(), metadata=self._metadata)
        return Stream(responses, deadline)

    def close(self) -> None:
        """End every call and stream that is under way."""
        self._closed = True
        self.channel.close()

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgument("client", "is closed")


class Stream(Generic[Response]):
    """The responses to one request.  gRPC cancels the stream when this object is collected."""

    def __init__(self, responses: grpc._CallIterator[Response], deadline: Deadline) -> None:
        self._responses = responses
        self._deadline = deadline

    def read(self) -> Response | None:
        """The next response; None at the end of the stream."""
        try:
            return next(self._responses, None)
        except grpc.RpcError as failure:
            raise error_of_call(failure, self._deadline) from None

    def cancel(self) -> None:
        """Stop reading: the server sees that this reader has left."""
        self._responses.cancel()
