"""One gRPC channel to a daemon, used by threads; the SDK's only synchronous input and output.

`aio_connection.py` is its counterpart for asyncio, with the same names.  Everything above these two files
is written once, in `aio.py`, and generated for threads.  A call that fails raises a PensieveError, and
nothing is sent once `close` was called, but for the ends of turns.

**Turns that are left.**  Each is ended by a CancelTurn in a thread of its own.  Whoever leaves a turn by a
call waits for that, END_SECONDS at most; so does the next call of this client in the same conversation, where
a turn was dropped and nobody could wait.  A thread because Ctrl-C may have struck within gRPC and left one of
its locks held: then only that thread waits for ever.
"""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import grpc

from pensieve.client.channel import OPTIONS, Tls, credentials_of, metadata_of, target_of
from pensieve.client.grpc_errors import error_of_call
from pensieve.client.retry import END_SECONDS, Deadline, Retry, Tries
from pensieve.client.turn_progress import TurnCourse
from pensieve.errors import InvalidArgument, NotFound, PensieveError
from pensieve.v1 import conversation_pb2 as pb
from pensieve.v1 import conversation_pb2_grpc

Request = TypeVar("Request")
Response = TypeVar("Response")
Sleep = Callable[[float], None]


class Ending:
    """A turn that was left and is being ended."""

    def __init__(self, conversation_id: str) -> None:
        self.conversation_id = conversation_id
        self.over = threading.Event()
        self.answer: pb.CancelTurnResponse | None = None  # None: the server has not said


class Connection:
    """A channel, its stub and the caller's token.  Any number of threads may use it."""

    def __init__(self, address: str, token: str | None, tls: Tls) -> None:
        self._metadata = metadata_of(token)
        self._closed = False
        self._endings: set[Ending] = set()
        self.reading: dict[TurnCourse, Stream[pb.SendMessageResponse]] = {}  # turns
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

    # -- turns that are left --

    def end_turn(self, request: pb.CancelTurnRequest) -> pb.CancelTurnResponse | None:
        """Have the server end a turn; None if it does not answer in END_SECONDS."""
        ending = self.begin_ending(request)
        ending.over.wait(END_SECONDS)
        return ending.answer

    def begin_ending(self, request: pb.CancelTurnRequest) -> Ending:
        """The same without waiting.  A finalizer may call it, so nothing in here may wait for a lock."""
        ending = Ending(request.conversation_id)
        self._endings.add(ending)
        try:
            # Not threading.Thread, which waits for locks until the thread runs.
            _thread.start_new_thread(self._end, (ending, request))
        except RuntimeError:  # the program ends, and the connection with it
            self._endings.discard(ending)
            ending.over.set()
        return ending

    def wait_for_endings(self, conversation_id: str, deadline: Deadline) -> None:
        """Until the turns of this conversation that were left have ended; END_SECONDS at most."""
        self._wait(
            [e for e in self._endings.copy() if e.conversation_id == conversation_id], deadline
        )

    def _end(self, ending: Ending, request: pb.CancelTurnRequest) -> None:
        deadline = Deadline(END_SECONDS)
        tries = Tries(Retry(), deadline)
        try:
            while ending.answer is None:
                ending.answer, error = self._try_to_end(request, deadline)
                if error is not None:
                    time.sleep(tries.pause(error))
        except (PensieveError, ValueError):  # in vain; ValueError: the channel is closed
            pass
        finally:
            self._endings.discard(ending)
            ending.over.set()

    def _try_to_end(
        self, request: pb.CancelTurnRequest, deadline: Deadline
    ) -> tuple[pb.CancelTurnResponse | None, PensieveError | None]:
        try:
            return self.stub.CancelTurn(
                request, timeout=deadline.left(), wait_for_ready=True, metadata=self._metadata
            ), None
        except grpc.RpcError as failure:
            error = error_of_call(failure, deadline)
        if isinstance(error, NotFound):  # the conversation did not come to be, so nothing stays
            return pb.CancelTurnResponse(), None
        return None, error

    @staticmethod
    def _wait(endings: list[Ending], deadline: Deadline) -> None:
        end = time.monotonic() + END_SECONDS
        for ending in endings:
            left = deadline.left()
            most = max(end - time.monotonic(), 0.0)
            ending.over.wait(most if left is None else min(most, left))

    # -- the end --

    def close(self) -> None:
        """Leave the turns that are being read, wait for their ends, and end every call that is under way."""
        self._closed = True
        for course, stream in self.reading.copy().items():
            stream.cancel()
            if (request := course.end_request()) is not None:
                self.begin_ending(request)
        self._wait(list(self._endings.copy()), Deadline(None))
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
