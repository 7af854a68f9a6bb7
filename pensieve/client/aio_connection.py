"""The gRPC channels of an `AsyncClient`, one to each address. All of it runs on one event loop.

This module differs from connection.py, the counterpart for threads, in five points:

* The first call opens the channel, because gRPC binds a channel to the running event loop.
* When the client is closed, gRPC raises CancelledError in tasks that were not cancelled. These tasks get a
  PensieveError instead.
* If an AsyncStream is dropped, its gRPC call must be cancelled explicitly: a task of gRPC keeps the call
  alive.
* A finalizer may run in any thread. It asks the event loop to start a task that stops the turn.
* After the event loop has ended, nothing can be sent. So turns are not stopped when the program ends,
  unless the client was closed before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Generic, TypeVar, cast

import grpc

from pensieve.client.addresses import Addresses, Route
from pensieve.client.channel import (
    CHECK_SECONDS,
    HEALTH_METHOD,
    NOT_SERVING,
    BaseConnection,
    Metadata,
    Tls,
    home_of,
    with_routing_key,
)
from pensieve.client.grpc_errors import error_of_call
from pensieve.client.retry import END_SECONDS, Deadline, Retry, Tries
from pensieve.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    PensieveError,
    Unavailable,
)
from pensieve.v1 import conversation_pb2 as pb
from pensieve.v1 import conversation_pb2_grpc, jobs_pb2_grpc, status_pb2

Request = TypeVar("Request")
Response = TypeVar("Response")
Sleep = Callable[[float], Awaitable[None]]


class AsyncEnding:
    """A turn that the server is being asked to stop."""

    def __init__(self, conversation_id: str) -> None:
        self.conversation_id = conversation_id
        self.over = asyncio.Event()
        self.answer: pb.CancelTurnResponse | None = None  # None: no answer yet
        self.task: asyncio.Task[None] | None = None


class AsyncLink:
    """The channel to one address, with its stubs."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.stub: conversation_pb2_grpc.ConversationServiceAsyncStub = (
            conversation_pb2_grpc.ConversationServiceStub(channel)
        )
        self.jobs_stub: jobs_pb2_grpc.JobServiceAsyncStub = jobs_pb2_grpc.JobServiceStub(channel)
        self.check = channel.unary_unary(
            HEALTH_METHOD,
            request_serializer=status_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=status_pb2.HealthCheckResponse.FromString,
        )


class AsyncConnection(BaseConnection["AsyncStream[pb.SendMessageResponse]", AsyncEnding]):
    """The channels to a client's addresses. The tasks of one event loop may share it."""

    def __init__(self, addresses: Addresses, token: str | None, tls: Tls) -> None:
        super().__init__(addresses, token, tls)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._links: dict[str, AsyncLink] = {}  # by address, opened on first use

    def link(self, name: str) -> AsyncLink:
        """Return the channel to an address. It is opened on first use."""
        if name not in self._links:
            self._check_open()
            self._loop = asyncio.get_running_loop()
            if self._credentials is None:
                channel = grpc.aio.insecure_channel(name, options=self._options)
            else:
                channel = grpc.aio.secure_channel(name, self._credentials, options=self._options)
            self._links[name] = AsyncLink(channel)
        return self._links[name]

    async def health_problem(self, name: str, seconds: float | None) -> PensieveError | None:
        """Check the health of an address. Return None if it accepts turns, otherwise the reason why not."""
        check, deadline = self.link(name).check, Deadline(seconds)
        try:
            answer = await check(
                status_pb2.HealthCheckRequest(), timeout=seconds, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as failure:
            return error_of_call(failure, deadline)
        except asyncio.CancelledError:
            self._check_cancelled()
            raise
        if answer.status == status_pb2.HealthCheckResponse.SERVING_STATUS_SERVING:
            return None
        return Unavailable(NOT_SERVING)

    async def _choose_link(self, route: Route, deadline: Deadline) -> AsyncLink:
        """Return the channel for the next try of a request, after a health check if the route requires it."""
        while True:
            choice = route.choose()
            if not choice.check_health_first:
                return self.link(choice.name)
            left = deadline.left()
            seconds = CHECK_SECONDS if left is None else min(left, CHECK_SECONDS)
            error = await self.health_problem(choice.name, seconds)
            # Any other error: the daemon answers, but has no health service. It counts as serving.
            if not isinstance(error, Unavailable | DeadlineExceeded):
                route.note_serving()
                return self.link(choice.name)
            route.note_not_serving(error, is_reached=str(error) == NOT_SERVING)

    async def _begin(self, route: Route, deadline: Deadline) -> tuple[AsyncLink, Metadata]:
        self._check_open()
        return await self._choose_link(route, deadline), with_routing_key(self._metadata, route.key)

    async def unary(
        self,
        method: Callable[[AsyncLink], grpc.aio.UnaryUnaryMultiCallable[Request, Response]],
        request: Request,
        deadline: Deadline,
        route: Route,
    ) -> Response:
        """Send one request and wait for its response."""
        link, metadata = await self._begin(route, deadline)
        try:
            call = method(link)(request, timeout=deadline.left(), metadata=metadata)
            response = await call
            route.answered(home_of(await call.initial_metadata()) if route.are_several else "")
            return response
        except grpc.aio.AioRpcError as failure:
            raise error_of_call(failure, deadline) from None
        except asyncio.CancelledError:
            self._check_cancelled()
            raise

    async def send_all(
        self,
        method: Callable[[AsyncLink], grpc.aio.StreamUnaryMultiCallable[Request, Response]],
        requests: Iterator[Request],
        deadline: Deadline,
        route: Route,
    ) -> Response:
        """Send all requests and wait for their single response."""
        link, metadata = await self._begin(route, deadline)
        try:
            response = await method(link)(requests, timeout=deadline.left(), metadata=metadata)
            route.answered()
            return response
        except grpc.aio.AioRpcError as failure:
            raise error_of_call(failure, deadline) from None
        except asyncio.CancelledError:
            self._check_cancelled()
            raise

    async def stream(
        self,
        method: Callable[[AsyncLink], grpc.aio.UnaryStreamMultiCallable[Request, Response]],
        request: Request,
        deadline: Deadline,
        route: Route,
    ) -> AsyncStream[Response]:
        """Send one request and return the stream of its responses."""
        link, metadata = await self._begin(route, deadline)
        responses = method(link)(request, timeout=deadline.left(), metadata=metadata)
        return AsyncStream(responses, deadline, route, self._check_cancelled)

    # -- stopping turns --

    async def end_turn(
        self, request: pb.CancelTurnRequest, route: Route
    ) -> pb.CancelTurnResponse | None:
        """Ask the server to stop a turn. Return the answer, or None if none arrives within END_SECONDS."""
        ending = self.begin_ending(request, route)
        await self._wait([ending], Deadline(None))
        return ending.answer

    def begin_ending(self, request: pb.CancelTurnRequest, route: Route) -> AsyncEnding:
        """Begin to stop a turn without waiting. A finalizer may call this, so it must take no lock."""
        ending = AsyncEnding(request.conversation_id)
        assert self._loop is not None, "a turn is stopped only after a request was sent"
        self._endings.add(ending)
        try:
            self._loop.call_soon_threadsafe(self._start, ending, request, route.at)
        except RuntimeError:  # the event loop is closed, so the connection is, too
            self._endings.discard(ending)
            ending.over.set()
        return ending

    async def wait_for_endings(self, conversation_id: str, deadline: Deadline) -> None:
        """Wait for this conversation's turns that are being stopped, at most END_SECONDS."""
        endings = [e for e in self._endings.copy() if e.conversation_id == conversation_id]
        if endings:
            await self._wait(endings, deadline)

    def _start(self, ending: AsyncEnding, request: pb.CancelTurnRequest, at: str) -> None:
        ending.task = asyncio.get_running_loop().create_task(self._end(ending, request, at))

    async def _end(self, ending: AsyncEnding, request: pb.CancelTurnRequest, at: str) -> None:
        deadline, route = Deadline(END_SECONDS), Route(self.addresses, ending.conversation_id, at)
        tries = Tries(Retry(), deadline)
        try:
            while ending.answer is None:
                ending.answer, error = await self._try_to_end(request, route, deadline)
                if error is not None and not route.try_next_address(error):
                    await asyncio.sleep(tries.pause(route.explained(error)))
                    route.begin_round()
        except (PensieveError, grpc.aio.UsageError):  # retries ended; UsageError: channel is closed
            pass
        finally:
            self._endings.discard(ending)
            ending.over.set()

    async def _try_to_end(
        self, request: pb.CancelTurnRequest, route: Route, deadline: Deadline
    ) -> tuple[pb.CancelTurnResponse | None, PensieveError | None]:
        link = await self._choose_link(route, deadline)
        try:
            return await link.stub.CancelTurn(
                request,
                timeout=deadline.left(),
                wait_for_ready=not route.are_several,
                metadata=with_routing_key(self._metadata, route.key),
            ), None
        except grpc.aio.AioRpcError as failure:
            error = error_of_call(failure, deadline)
        if isinstance(error, NotFound):  # the turn never created its conversation: nothing to stop
            return pb.CancelTurnResponse(), None
        return None, error

    @staticmethod
    async def _wait(endings: list[AsyncEnding], deadline: Deadline) -> None:
        left = deadline.left()
        try:
            async with asyncio.timeout(END_SECONDS if left is None else min(END_SECONDS, left)):
                for ending in endings:
                    await ending.over.wait()
        except TimeoutError:
            pass

    # -- closing --

    async def close(self) -> None:
        """Stop the turns that are being read, wait for their ends, and end all running calls."""
        self._closed = True
        for course, stream in self._reading.copy().items():
            stream.cancel()
            if (request := course.end_request()) is not None:
                self.begin_ending(request, course.route)
        await self._wait(list(self._endings.copy()), Deadline(None))
        for link in [*self._links.values()]:
            await link.channel.close()

    def _check_cancelled(self) -> None:
        """Raise InvalidArgument if a CancelledError came from `close`. Return if this task was cancelled."""
        task = asyncio.current_task()
        if self._closed and not (task is not None and task.cancelling()):
            raise InvalidArgument("client", "was closed") from None


class AsyncStream(Generic[Response]):
    """The responses to one request. The stream is cancelled when this object is garbage-collected."""

    def __init__(
        self,
        responses: grpc.aio.UnaryStreamCall[Any, Response],
        deadline: Deadline,
        route: Route,
        check_cancelled: Callable[[], None],
    ) -> None:
        self._responses = responses
        self._deadline = deadline
        self._route = route
        self._has_begun = False
        self._check_cancelled = check_cancelled
        self._cancelled = False

    async def read(self) -> Response | None:
        """Return the next response; None at the end of the stream."""
        try:
            response = await self._responses.read()
            if not self._has_begun and response is not grpc.aio.EOF:
                self._has_begun = True
                several = self._route.are_several
                home = home_of(await self._responses.initial_metadata()) if several else ""
                self._route.answered(home)
        except grpc.aio.AioRpcError as failure:
            raise error_of_call(failure, self._deadline) from None
        except asyncio.CancelledError:
            self._check_cancelled()
            task = asyncio.current_task()
            if self._cancelled and not (task is not None and task.cancelling()):
                return None  # another task has stopped the turn; this task was not cancelled
            raise
        return None if response is grpc.aio.EOF else cast("Response", response)

    def cancel(self) -> None:
        """Stop reading. The server sees that the reader has disconnected."""
        self._cancelled = True
        self._responses.cancel()

    def __del__(self) -> None:
        self._responses.cancel()
