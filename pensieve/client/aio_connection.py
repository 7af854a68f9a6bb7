"""One gRPC channel to a daemon, used by the tasks of one event loop: `connection.py` for asyncio.

It differs in five ways.  The channel is opened by the first call, because gRPC binds it to the running
loop.  When the client is closed, gRPC ends a call by raising CancelledError in a task that was not
cancelled; the task gets a PensieveError instead.  A stream that is dropped must be cancelled by hand,
because gRPC's own task keeps it alive.  A turn that was left is ended in a task, which the loop is asked for:
a finalizer may do that, in whichever thread it runs.  Once the loop has ended nothing can be sent, so only
`close` leaves the turns of a program that ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Generic, TypeVar, cast

import grpc

from pensieve.client.channel import OPTIONS, Tls, credentials_of, metadata_of, target_of
from pensieve.client.grpc_errors import error_of_call
from pensieve.client.retry import END_SECONDS, Deadline, Retry, Tries
from pensieve.client.turn_progress import TurnCourse
from pensieve.errors import InvalidArgument, NotFound, PensieveError
from pensieve.v1 import conversation_pb2 as pb
from pensieve.v1 import conversation_pb2_grpc, jobs_pb2, jobs_pb2_grpc

Request = TypeVar("Request")
Response = TypeVar("Response")
Sleep = Callable[[float], Awaitable[None]]


class AsyncEnding:
    """A turn that was left and is being ended."""

    def __init__(self, conversation_id: str) -> None:
        self.conversation_id = conversation_id
        self.over = asyncio.Event()
        self.answer: pb.CancelTurnResponse | None = None  # None: the server has not said
        self.task: asyncio.Task[None] | None = None


class AsyncConnection:
    """A channel, its stub and the caller's token.  Any number of tasks of one event loop may use it."""

    def __init__(self, address: str, token: str | None, tls: Tls) -> None:
        self._metadata = metadata_of(token)
        self._closed = False
        self._target, self._credentials = target_of(address), credentials_of(tls)
        self._endings: set[AsyncEnding] = set()
        self.reading: dict[TurnCourse, AsyncStream[pb.SendMessageResponse]] = {}  # turns
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channel: grpc.aio.Channel | None = None
        self._stub: conversation_pb2_grpc.ConversationServiceAsyncStub | None = None
        self._jobs_stub: jobs_pb2_grpc.JobServiceAsyncStub | None = None

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel, opened in the running event loop on first use."""
        self._check_open()
        if self._channel is None:
            self._loop = asyncio.get_running_loop()
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

    @property
    def jobs_stub(self) -> jobs_pb2_grpc.JobServiceAsyncStub:
        """The methods of JobService on this channel."""
        self._check_open()
        if self._jobs_stub is None:
            self._jobs_stub = jobs_pb2_grpc.JobServiceStub(self.channel)
        return self._jobs_stub

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

    async def create_job(
        self, messages: Iterator[jobs_pb2.CreateJobRequest], deadline: Deadline
    ) -> jobs_pb2.Job:
        """Send the messages of a file, and wait for the job that it makes."""
        self._check_open()
        create, metadata = self.jobs_stub.CreateJob, self._metadata
        try:
            return (await create(messages, timeout=deadline.left(), metadata=metadata)).job
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

    # -- turns that are left --

    async def end_turn(self, request: pb.CancelTurnRequest) -> pb.CancelTurnResponse | None:
        """Have the server end a turn; None if it does not answer in END_SECONDS."""
        ending = self.begin_ending(request)
        await self._wait([ending], Deadline(None))
        return ending.answer

    def begin_ending(self, request: pb.CancelTurnRequest) -> AsyncEnding:
        """The same without waiting.  A finalizer may call it, so nothing in here may wait for a lock."""
        ending = AsyncEnding(request.conversation_id)
        assert self._loop is not None, "something was sent before"
        self._endings.add(ending)
        try:
            self._loop.call_soon_threadsafe(self._start, ending, request)
        except RuntimeError:  # the loop is closed, and the connection with it
            self._endings.discard(ending)
            ending.over.set()
        return ending

    async def wait_for_endings(self, conversation_id: str, deadline: Deadline) -> None:
        """Until the turns of this conversation that were left have ended; END_SECONDS at most."""
        endings = [e for e in self._endings.copy() if e.conversation_id == conversation_id]
        if endings:
            await self._wait(endings, deadline)

    def _start(self, ending: AsyncEnding, request: pb.CancelTurnRequest) -> None:
        ending.task = asyncio.get_running_loop().create_task(self._end(ending, request))

    async def _end(self, ending: AsyncEnding, request: pb.CancelTurnRequest) -> None:
        deadline = Deadline(END_SECONDS)
        tries = Tries(Retry(), deadline)
        try:
            while ending.answer is None:
                ending.answer, error = await self._try_to_end(request, deadline)
                if error is not None:
                    await asyncio.sleep(tries.pause(error))
        except (PensieveError, grpc.aio.UsageError):  # in vain; UsageError: the channel is closed
            pass
        finally:
            self._endings.discard(ending)
            ending.over.set()

    async def _try_to_end(
        self, request: pb.CancelTurnRequest, deadline: Deadline
    ) -> tuple[pb.CancelTurnResponse | None, PensieveError | None]:
        assert self._stub is not None
        try:
            return await self._stub.CancelTurn(
                request, timeout=deadline.left(), wait_for_ready=True, metadata=self._metadata
            ), None
        except grpc.aio.AioRpcError as failure:
            error = error_of_call(failure, deadline)
        if isinstance(error, NotFound):  # the conversation did not come to be, so nothing stays
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

    # -- the end --

    async def close(self) -> None:
        """Leave the turns that are being read, wait for their ends, and end every call that is under way."""
        self._closed = True
        for course, stream in self.reading.copy().items():
            stream.cancel()
            if (request := course.end_request()) is not None:
                self.begin_ending(request)
        await self._wait(list(self._endings.copy()), Deadline(None))
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
        self._cancelled = False

    async def read(self) -> Response | None:
        """The next response; None at the end of the stream."""
        try:
            response = await self._responses.read()
        except grpc.aio.AioRpcError as failure:
            raise error_of_call(failure, self._deadline) from None
        except asyncio.CancelledError:
            self._check_cancelled()
            task = asyncio.current_task()
            if self._cancelled and not (task is not None and task.cancelling()):
                return None  # another task has left the turn; this one was not cancelled
            raise
        return None if response is grpc.aio.EOF else cast("Response", response)

    def cancel(self) -> None:
        """Stop reading: the server sees that this reader has left."""
        self._cancelled = True
        self._responses.cancel()

    def __del__(self) -> None:
        self._responses.cancel()
