"""The gRPC channels of a `Client`, one to each address. All blocking I/O of the SDK is here.

aio_connection.py is the counterpart for asyncio, with the same names. The code that uses these two files is
written once, in aio.py, and generated for threads. A failed call raises a PensieveError. After `close`, only
requests that stop turns are sent.

**Stopped turns.** For each turn to stop, a new thread sends CancelTurn. A caller that stops a turn waits for
this thread, at most END_SECONDS. If the turn's object was dropped, the next call in the same conversation
waits. A separate thread is needed because Ctrl-C may have interrupted gRPC while it held a lock, which then
stays locked. In this case, only the separate thread hangs.

**End of the program.** If a client was not closed, its turns are stopped when the program ends, after all
non-daemon threads have ended. The program waits for this. Python 3.12 can start no thread at this time, so a
standby thread, started earlier, stops the turns.
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
    NotFound,
    PensieveError,
    Unavailable,
)
from pensieve.v1 import conversation_pb2 as pb
from pensieve.v1 import conversation_pb2_grpc, jobs_pb2_grpc, status_pb2

Request = TypeVar("Request")
Response = TypeVar("Response")
Sleep = Callable[[float], None]


class Ending:
    """A turn that the server is being asked to stop."""

    def __init__(self, conversation_id: str) -> None:
        self.conversation_id = conversation_id
        self.over = threading.Event()
        self.answer: pb.CancelTurnResponse | None = None  # None: no answer yet


class Standby:
    """A thread that acts at the end of the program, when no other thread can be started."""

    def __init__(self) -> None:
        self._actions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._process = 0  # the thread's process; a forked process has no such thread

    def start(self) -> None:
        """Start the thread in advance."""
        if self._process != os.getpid():
            self._process = os.getpid()
            with contextlib.suppress(RuntimeError):  # the program is already ending
                _thread.start_new_thread(self._run, ())

    def act(self, action: Callable[[], None]) -> None:
        """Have the thread run `action`. Never blocks; any thread and any finalizer may call this."""
        self._actions.put(action)

    def _run(self) -> None:
        while True:
            self._actions.get()()


_open_connections: weakref.WeakSet[Connection] = weakref.WeakSet()
_standby = Standby()


class Link:
    """The channel to one address, with its stubs."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel
        self.stub = conversation_pb2_grpc.ConversationServiceStub(channel)
        self.jobs_stub = jobs_pb2_grpc.JobServiceStub(channel)
        self.check = channel.unary_unary(
            HEALTH_METHOD,
            request_serializer=status_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=status_pb2.HealthCheckResponse.FromString,
        )


class Connection(BaseConnection["Stream[pb.SendMessageResponse]", Ending]):
    """The channels to a client's addresses. Thread-safe."""

    def __init__(self, addresses: Addresses, token: str | None, tls: Tls) -> None:
        super().__init__(addresses, token, tls)
        self._links_lock = threading.Lock()
        self._links: dict[str, Link] = {}  # by address, opened on first use
        _standby.start()
        _open_connections.add(self)

    def link(self, name: str) -> Link:
        """Return the channel to an address. It is opened on first use."""
        if (link := self._links.get(name)) is not None:
            return link
        with self._links_lock:
            if name not in self._links:
                self._check_open()
                if self._credentials is None:
                    channel = grpc.insecure_channel(name, options=self._options)
                else:
                    channel = grpc.secure_channel(name, self._credentials, options=self._options)
                self._links[name] = Link(channel)
            return self._links[name]

    def health_problem(self, name: str, seconds: float | None) -> PensieveError | None:
        """Check the health of an address. Return None if it accepts turns, otherwise the reason why not."""
        check, deadline = self.link(name).check, Deadline(seconds)
        try:
            answer = check(
                status_pb2.HealthCheckRequest(), timeout=seconds, metadata=self._metadata
            )
        except grpc.RpcError as failure:
            return error_of_call(failure, deadline)
        if answer.status == status_pb2.HealthCheckResponse.SERVING_STATUS_SERVING:
            return None
        return Unavailable(NOT_SERVING)

    def _choose_link(self, route: Route, deadline: Deadline) -> Link:
        """Return the channel for the next try of a request, after a health check if the route requires it."""
        while True:
            choice = route.choose()
            if not choice.check_health_first:
                return self.link(choice.name)
            left = deadline.left()
            seconds = CHECK_SECONDS if left is None else min(left, CHECK_SECONDS)
            error = self.health_problem(choice.name, seconds)
            # Any other error: the daemon answers, but has no health service. It counts as serving.
            if not isinstance(error, Unavailable | DeadlineExceeded):
                route.note_serving()
                return self.link(choice.name)
            route.note_not_serving(error, is_reached=str(error) == NOT_SERVING)

    def _begin(self, route: Route, deadline: Deadline) -> tuple[Link, Metadata]:
        self._check_open()
        return self._choose_link(route, deadline), with_routing_key(self._metadata, route.key)

    def unary(
        self,
        method: Callable[[Link], grpc.UnaryUnaryMultiCallable[Request, Response]],
        request: Request,
        deadline: Deadline,
        route: Route,
    ) -> Response:
        """Send one request and wait for its response."""
        link, metadata = self._begin(route, deadline)
        try:
            response, call = method(link).with_call(
                request, timeout=deadline.left(), metadata=metadata
            )
            route.answered(home_of(call.initial_metadata()) if route.are_several else "")
            return response
        except grpc.RpcError as failure:
            raise error_of_call(failure, deadline) from None

    def send_all(
        self,
        method: Callable[[Link], grpc.StreamUnaryMultiCallable[Request, Response]],
        requests: Iterator[Request],
        deadline: Deadline,
        route: Route,
    ) -> Response:
        """Send all requests and wait for their single response."""
        link, metadata = self._begin(route, deadline)
        try:
            response = method(link)(requests, timeout=deadline.left(), metadata=metadata)
            route.answered()
            return response
        except grpc.RpcError as failure:
            raise error_of_call(failure, deadline) from None

    def stream(
        self,
        method: Callable[[Link], grpc.UnaryStreamMultiCallable[Request, Response]],
        request: Request,
        deadline: Deadline,
        route: Route,
    ) -> Stream[Response]:
        """Send one request and return the stream of its responses."""
        link, metadata = self._begin(route, deadline)
        responses = method(link)(request, timeout=deadline.left(), metadata=metadata)
        return Stream(responses, deadline, route)

    # -- stopping turns --

    def end_turn(self, request: pb.CancelTurnRequest, route: Route) -> pb.CancelTurnResponse | None:
        """Ask the server to stop a turn. Return the answer, or None if none arrives within END_SECONDS."""
        ending = self.begin_ending(request, route)
        ending.over.wait(END_SECONDS)
        return ending.answer

    def begin_ending(self, request: pb.CancelTurnRequest, route: Route) -> Ending:
        """Begin to stop a turn without waiting. A finalizer may call this, so it must take no lock."""
        ending = Ending(request.conversation_id)
        self._endings.add(ending)
        # Again: a connection that is being collected has left the weak set.
        _open_connections.add(self)
        try:
            # Not threading.Thread: its `start` takes locks.
            _thread.start_new_thread(self._end, (ending, request, route.at))
        except RuntimeError:  # the program is ending
            _standby.act(partial(self._end, ending, request, route.at))
        return ending

    def wait_for_endings(self, conversation_id: str, deadline: Deadline) -> None:
        """Wait for this conversation's turns that are being stopped, at most END_SECONDS."""
        self._wait(
            [e for e in self._endings.copy() if e.conversation_id == conversation_id], deadline
        )

    def _end(self, ending: Ending, request: pb.CancelTurnRequest, at: str) -> None:
        deadline, route = Deadline(END_SECONDS), Route(self.addresses, ending.conversation_id, at)
        tries = Tries(Retry(), deadline)
        try:
            while ending.answer is None:
                ending.answer, error = self._try_to_end(request, route, deadline)
                if error is not None and not route.try_next_address(error):
                    time.sleep(tries.pause(route.explained(error)))
                    route.begin_round()
        except (PensieveError, ValueError):  # the retries ended; ValueError: the channel is closed
            pass
        finally:
            self._endings.discard(ending)
            ending.over.set()

    def _try_to_end(
        self, request: pb.CancelTurnRequest, route: Route, deadline: Deadline
    ) -> tuple[pb.CancelTurnResponse | None, PensieveError | None]:
        link = self._choose_link(route, deadline)
        try:
            return link.stub.CancelTurn(
                request,
                timeout=deadline.left(),
                wait_for_ready=not route.are_several,
                metadata=with_routing_key(self._metadata, route.key),
            ), None
        except grpc.RpcError as failure:
            error = error_of_call(failure, deadline)
        if isinstance(error, NotFound):  # the turn never created its conversation: nothing to stop
            return pb.CancelTurnResponse(), None
        return None, error

    @staticmethod
    def _wait(endings: list[Ending], deadline: Deadline) -> None:
        end = time.monotonic() + END_SECONDS
        for ending in endings:
            left = deadline.left()
            most = max(end - time.monotonic(), 0.0)
            ending.over.wait(most if left is None else min(most, left))

    # -- closing --

    def close(self) -> None:
        """Stop the turns that are being read, wait for their ends, and end all running calls."""
        self._closed = True
        self._wait(self._begin_ending_all(), Deadline(None))
        for link in [*self._links.values()]:
            link.channel.close()

    def _begin_ending_all(self) -> list[Ending]:
        """Begin to stop the turns that are being read. Return all turns that are being stopped."""
        for course, stream in self._reading.copy().items():
            # Do this before the stream is cancelled, so that its reader does not stop the turn, too.
            if (request := course.end_request()) is not None:
                self.begin_ending(request, course.route)
            if self._closed:
                stream.cancel()
        return list(self._endings.copy())

    @staticmethod
    def _end_all_at_exit() -> None:
        """Stop all turns at the end of the program, without calling gRPC here: its locks may be held."""
        endings = [
            ending
            for connection in list(_open_connections)
            for ending in connection._begin_ending_all()
        ]
        Connection._wait(endings, Deadline(None))


atexit.register(Connection._end_all_at_exit)


class Stream(Generic[Response]):
    """The responses to one request. gRPC cancels the stream when this object is collected."""

    def __init__(
        self, responses: grpc._CallIterator[Response], deadline: Deadline, route: Route
    ) -> None:
        self._responses = responses
        self._deadline = deadline
        self._route = route
        self._has_begun = False

    def read(self) -> Response | None:
        """Return the next response; None at the end of the stream."""
        try:
            response = next(self._responses, None)
            if not self._has_begun and response is not None:
                self._has_begun = True
                several = self._route.are_several
                self._route.answered(home_of(self._responses.initial_metadata()) if several else "")
            return response
        except grpc.RpcError as failure:
            raise error_of_call(failure, self._deadline) from None

    def cancel(self) -> None:
        """Stop reading. The server sees that the reader has disconnected."""
        self._responses.cancel()
