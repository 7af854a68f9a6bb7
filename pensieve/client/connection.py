"""One gRPC channel to a daemon, used by threads; the SDK's only synchronous input and output.

`aio_connection.py` is its counterpart for asyncio, with the same names.  Everything above these two files
is written once, in `aio.py`, and generated for threads.  A call that fails raises a PensieveError, and
nothing is sent once `close` was called, but for the ends of turns.

**Turns that are left.**  Each is ended by a CancelTurn in a thread of its own.  Whoever leaves a turn by a
call waits for that, END_SECONDS at most; so does the next call of this client in the same conversation, where
a turn was dropped and nobody could wait.  A thread because Ctrl-C may have struck within gRPC and left one of
its locks held: then only that thread waits for ever.

**The end of the program.**  A client that was not closed leaves its turns when the program ends, after all
threads that the program waits for; the program then waits for their ends.  No thread may be started by then
(Python 3.12), so one stands by for that.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Generic, TypeVar

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
Sleep = Callable[[float], None]


class Ending:
    """A turn that was left and is being ended."""

    def __init__(self, conversation_id: str) -> None:
        self.conversation_id = conversation_id
        self.over = threading.Event()
        self.answer: pb.CancelTurnResponse | None = None  # None: the server has not said


class Standby:
    """A thread that acts at the end of the program, when no other one can be started."""

    def __init__(self) -> None:
        self._actions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._process = 0  # that the thread runs in; a fork has none

    def start(self) -> None:
        """Before it is needed."""
        if self._process != os.getpid():
            self._process = os.getpid()
            with contextlib.suppress(RuntimeError):  # the program ends already
                _thread.start_new_thread(self._run, ())

    def act(self, action: Callable[[], None]) -> None:
        """Any thread may ask for it, and a finalizer: this waits for nothing."""
        self._actions.put(action)

    def _run(self) -> None:
        while True:
            self._actions.get()()


_open: weakref.WeakSet[Connection] = weakref.WeakSet()
_standby = Standby()


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
        self.jobs_stub = jobs_pb2_grpc.JobServiceStub(self.channel)
        _standby.start()
        _open.add(self)

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

    def create_job(
        self, messages: Iterator[jobs_pb2.CreateJobRequest], deadline: Deadline
    ) -> jobs_pb2.Job:
        """Send the messages of a file, and wait for the job that it makes."""
        self._check_open()
        create, metadata = self.jobs_stub.CreateJob, self._metadata
        try:
            return create(messages, timeout=deadline.left(), metadata=metadata).job
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
        _open.add(self)  # again: where it is collected with its turn, it was forgotten before
        try:
            # Not threading.Thread, which waits for locks until the thread runs.
            _thread.start_new_thread(self._end, (ending, request))
        except RuntimeError:  # the program ends
            _standby.act(partial(self._end, ending, request))
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
        self._wait(self._leave(), Deadline(None))
        self.channel.close()

    def _leave(self) -> list[Ending]:
        """Begin to end the turns that are being read; these ends and those that are under way."""
        for course, stream in self.reading.copy().items():
            if self._closed:
                stream.cancel()
            if (request := course.end_request()) is not None:
                self.begin_ending(request)
        return list(self._endings.copy())

    @staticmethod
    def _leave_all() -> None:
        """At the end of the program; gRPC is not touched by this thread, for its locks may be held."""
        endings = [ending for connection in list(_open) for ending in connection._leave()]
        Connection._wait(endings, Deadline(None))

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgument("client", "is closed")


atexit.register(Connection._leave_all)


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
