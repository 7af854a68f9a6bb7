"""A daemon's session with the history service: calls that are answered once, over streams that may break.

    open ──> connected ──stream breaks──> away ──a new stream, the same session──> connected
                                            └──the service has ended the session──> connected, a new session

One thread keeps the stream and takes what comes; one more says now and then that the daemon is there.  A call
waits in its own thread until its answer is there, wherever the stream is in between:

* What was not answered when a stream broke is sent again on the next one, in order and marked so; the
  service knows what it has carried out (store/remote/calls.py).  For that, one call that writes is under way
  at a time: the next one is sent when it is answered, and is numbered then.
* When the service has ended the session (this daemon was away for too long, or the service says so), the
  calls that wait fail.  Whether they were carried out is unknown, and the turns that run here are not in the
  history any more: they fail when they end.
* Where another daemon has begun a session with this one's name, this one gets none: two of a name would end
  each other's sessions for ever.  Its calls fail at once, and once in a lease it asks whether the name is
  free.
* A call that waits for longer than `answer_seconds` fails, too.  One that was not sent is taken out of the
  line, and nothing comes of it, unless it ends a turn: that one stays in line, since nobody else would ever
  end the turn, and what is asked behind it finds the turn ended.  One that writes and was sent is sent again
  until it is answered, since it may be carried out already; and a turn that it begins then, for nobody, is
  interrupted before the next call.
* What the daemon says of itself, where it is and that it drains, is so for every stream that follows.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import random
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from pensieve.errors import InvalidArgument, PensieveError, StoreUnavailable, Unauthenticated
from pensieve.store.records import BeginResult
from pensieve.store.remote import wire
from pensieve.store.remote.methods import METHODS, Kind, Method
from pensieve.store.remote.remote_store import Answer
from pensieve.v1 import history_pb2 as pb
from pensieve.v1 import history_pb2_grpc

log = logging.getLogger("pensieve")
PROTOCOL_VERSION = 1
MESSAGE_BYTES_MAX = 256 << 20
ANSWER_SECONDS = 20.0
VERIFY_SECONDS = 24 * 3600.0
OPEN_SECONDS = 30.0
LEASE_SHARE = 5  # words in the time after which the silent one is given up
PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX = 0.02, 1.0
OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2000),  # how long an attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_retries", 0),
    ("grpc.keepalive_time_ms", 5000),  # a connection that went silent is not waited for (TCP would)
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.ping_timeout_ms", 5000),
    ("grpc.http2.max_pings_without_data", 0),
)


@dataclass(frozen=True)
class Replica:
    """Who a daemon is among those that share the history."""

    name: str
    address: str = ""
    http_address: str = ""
    metrics_address: str = ""


@dataclass(eq=False)
class _Waiting:
    """A call without an answer."""

    method: Method
    request: pb.Call  # numbered when it is sent
    done: threading.Event = field(default_factory=threading.Event)
    answer: pb.Answer | None = None
    failure: PensieveError | None = None
    is_wanted: bool = True  # somebody waits for it


class Connection:
    def __init__(
        self,
        target: str,
        replica: Replica,
        *,
        secret: str = "",
        credentials: grpc.ChannelCredentials | None = None,
        answer_seconds: float = ANSWER_SECONDS,
        open_seconds: float = OPEN_SECONDS,
    ) -> None:
        """`target` is HOST:PORT; StoreUnavailable if it does not answer within `open_seconds`.

        `on_lost` may be set: it is called, in a thread of this object, when the session has ended: another
        one has begun, and nothing is sent in that before, or another daemon has the name.
        """
        self.target = target
        self.session = 0
        self._replica = replica
        self._answer_seconds = answer_seconds
        self._metadata = (("authorization", f"Bearer {secret}"),) if secret else ()
        self._channel = (
            grpc.secure_channel(target, credentials, OPTIONS)
            if credentials is not None
            else grpc.insecure_channel(target, OPTIONS)
        )
        self._stub = history_pb2_grpc.HistoryServiceStub(self._channel)
        self._lock = threading.Lock()
        self.on_lost: Callable[[], None] = lambda: None
        self._number = 0
        self._line: deque[_Waiting] = deque()  # not sent yet
        self._waiting: OrderedDict[int, _Waiting] = OrderedDict()  # sent, by number
        self._is_draining = False
        self._outgoing: queue.SimpleQueue[pb.ServeRequest | None] | None = None
        self._stream: Any = None
        self._heard_at = time.monotonic()
        self._lease_seconds = 10.0
        self._problem: PensieveError = StoreUnavailable(f"{target} does not answer")
        self._is_refused = False  # it will not be let in
        self._is_shut_out = False  # while another daemon has its name
        self._closed = threading.Event()
        self._opened = threading.Event()
        self._threads = [
            threading.Thread(target=run, name=f"history-{name}", daemon=True)
            for name, run in (("stream", self._keep_stream), ("alive", self._keep_alive))
        ]
        for thread in self._threads:
            thread.start()
        if not self._opened.wait(open_seconds) or self._is_refused:
            self.close()
            raise self._problem

    def call(self, method: Method, given: tuple[Any, ...], named: Mapping[str, Any]) -> Answer:
        """What the method returned there, or its error; in any thread but those of this object."""
        arguments, parts = method.write_arguments(given, named)
        waiting = self._send(method, arguments, parts)
        if not waiting.done.wait(VERIFY_SECONDS if method.is_long else self._answer_seconds):
            self._give_up(waiting)
        if waiting.failure is not None:
            raise waiting.failure
        answer = waiting.answer
        assert answer is not None
        if answer.failed:
            raise wire.error_read(answer.result)
        value = method.read_result(answer.result, answer.parts)
        return Answer(value, answer.epoch, answer.previous_address, answer.source_epoch)

    def announce(self, address: str, http_address: str = "", metrics_address: str = "") -> None:
        """Say where the daemon listens, as soon as it does."""
        with self._lock:
            self._replica = Replica(self._replica.name, address, http_address, metrics_address)
            if self._outgoing is not None:
                self._outgoing.put(pb.ServeRequest(open=self._opening()))

    def drain(self) -> None:
        """Let others have each conversation as soon as no turn of it runs here."""
        with self._lock:
            self._is_draining = True
            if self._outgoing is not None:
                self._outgoing.put(pb.ServeRequest(drain=pb.Drain()))

    def leave(self) -> None:
        """Give the session up: every conversation of it is anybody's."""
        with self._lock:
            if self._outgoing is not None:
                self._outgoing.put(pb.ServeRequest(leave=pb.Leave()))

    def close(self) -> None:
        """A second call does nothing; the session ends with its lease, or at once after `leave`."""
        self._closed.set()
        with self._lock:
            if self._outgoing is not None:
                self._outgoing.put(None)
            stream = self._stream
        if stream is not None:
            self._threads[0].join(1.0)
            stream.cancel()
        self._channel.close()
        for thread in self._threads:
            thread.join(5.0)

    # -- calls --

    def _send(
        self, method: Method, arguments: str, parts: list[bytes], *, is_next: bool = False
    ) -> _Waiting:
        with self._lock:
            if self._is_shut_out:
                raise self._problem
            if self._closed.is_set() or self._is_refused:
                raise StoreUnavailable(
                    f"the connection to the history service {self.target} is closed"
                )
            request = pb.Call(method=method.name, arguments=arguments, parts=parts)
            waiting = _Waiting(method, request)
            if is_next:
                self._line.appendleft(waiting)
            else:
                self._line.append(waiting)
            self._advance()
        return waiting

    def _advance(self) -> None:
        """Send what may be sent, under the lock: reads, and the rest in order, one that writes at a time."""
        if self._outgoing is None:
            return
        is_writing = any(each.method.writes for each in self._waiting.values())
        held: deque[_Waiting] = deque()
        for waiting in self._line:
            if waiting.method.kind is not Kind.READ:
                if held or (is_writing and waiting.method.writes):
                    held.append(waiting)
                    continue
                is_writing = is_writing or waiting.method.writes
            self._number += 1
            waiting.request.number = self._number
            self._waiting[self._number] = waiting
            self._outgoing.put(pb.ServeRequest(call=waiting.request))
        self._line = held

    def _give_up(self, waiting: _Waiting) -> None:
        with self._lock:
            if waiting.done.is_set():
                return
            waiting.is_wanted = False
            if waiting in self._line:
                if waiting.method.kind is not Kind.TURN:
                    self._line.remove(waiting)
                self._advance()
            elif not waiting.method.writes:
                self._waiting.pop(waiting.request.number, None)
        raise StoreUnavailable(f"the history service {self.target} does not answer")

    def _answered(self, answer: pb.Answer) -> None:
        with self._lock:
            waiting = self._waiting.pop(answer.number, None)
            if waiting is None:
                return
            waiting.answer = answer
            waiting.done.set()
        if not waiting.is_wanted and not answer.failed:
            self._undo(waiting.method, answer)
        with self._lock:
            self._advance()

    def _undo(self, method: Method, answer: pb.Answer) -> None:
        """Of a turn that was begun for nobody."""
        if method.name != "begin_turn":
            return
        begun = method.read_result(answer.result, answer.parts)
        if isinstance(begun, BeginResult) and begun.must_run:
            interrupt = METHODS["interrupt_turn"]
            given = begun.turn.turn_id, begun.turn.attempts
            with contextlib.suppress(
                StoreUnavailable
            ):  # closed; the session ends, and the turn with it
                self._send(interrupt, *interrupt.write_arguments(given, {}), is_next=True)

    # -- the stream --

    def _keep_stream(self) -> None:
        pause = PAUSE_SECONDS_MIN
        while not self._closed.is_set():
            outgoing: queue.SimpleQueue[pb.ServeRequest | None] = queue.SimpleQueue()
            with self._lock:
                before = self._replica
                outgoing.put(pb.ServeRequest(open=self._opening()))
            try:
                self._stream = self._stub.Serve(iter(outgoing.get, None), metadata=self._metadata)
                self._heard_at = time.monotonic()
                for response in self._stream:
                    self._heard_at = time.monotonic()
                    if response.HasField("answer"):
                        self._answered(response.answer)
                    elif response.HasField("opened"):
                        self._has_opened(response.opened, outgoing, before)
                        pause = PAUSE_SECONDS_MIN
            except grpc.RpcError as error:
                self._broke(error)
            except (
                Exception
            ):  # a channel that was closed; else a fault of ours, and the calls go on
                if not self._closed.is_set():
                    log.exception("the connection to the history failed")
            finally:
                with self._lock:
                    self._outgoing = None
                outgoing.put(None)
            if self._is_refused:
                self._opened.set()
                self._fail_all(self._problem)
                return
            if self._is_shut_out:
                self._closed.wait(self._lease_seconds)
                continue
            self._closed.wait(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, PAUSE_SECONDS_MAX)
        self._fail_all(StoreUnavailable("the connection to the history service was closed"))

    def _opening(self) -> pb.OpenSession:
        replica = self._replica
        return pb.OpenSession(
            version=PROTOCOL_VERSION,
            replica=replica.name,
            address=replica.address,
            http_address=replica.http_address,
            metrics_address=replica.metrics_address,
            session=self.session,
        )

    def _has_opened(
        self,
        opened: pb.Opened,
        outgoing: queue.SimpleQueue[pb.ServeRequest | None],
        before: Replica,
    ) -> None:
        if self.session and not opened.goes_on:
            log.warning("the history service %s has begun another session", self.target)
            self._fail_all(
                StoreUnavailable("the history service has ended the session; say it again")
            )
            self.on_lost()
        with self._lock:
            self.session, self._lease_seconds = opened.session, opened.lease_seconds
            self._is_shut_out = False
            if self._replica is not before:  # it was announced meanwhile
                outgoing.put(pb.ServeRequest(open=self._opening()))
            if self._is_draining:
                outgoing.put(pb.ServeRequest(drain=pb.Drain()))
            for waiting in self._waiting.values():
                again = pb.Call()
                again.CopyFrom(waiting.request)
                again.again = True
                outgoing.put(pb.ServeRequest(call=again))
            self._outgoing = outgoing
            self._advance()
        self._opened.set()

    def _broke(self, error: grpc.RpcError) -> None:
        code, details = error.code(), error.details()
        words = f"the history service {self.target}: {details or code}"
        if code is grpc.StatusCode.UNAUTHENTICATED:
            self._problem, self._is_refused = Unauthenticated(words), not self.session
        elif code is grpc.StatusCode.INVALID_ARGUMENT:
            self._problem, self._is_refused = InvalidArgument("store", words), not self.session
        elif code is grpc.StatusCode.ALREADY_EXISTS:
            self._shut_out(StoreUnavailable(words))
        else:
            self._problem = StoreUnavailable(words)
        if self.session and not self._closed.is_set() and not self._is_shut_out:
            log.warning("the connection to the history broke: %s", details or code)

    def _shut_out(self, problem: PensieveError) -> None:
        """Another daemon has the name."""
        with self._lock:
            was_shut_out, self._is_shut_out, self._problem = self._is_shut_out, True, problem
        if not was_shut_out:
            log.error("%s", problem)
            self._fail_all(problem)
            self.on_lost()

    def _fail_all(self, failure: PensieveError) -> None:
        with self._lock:
            waiting = [*self._waiting.values(), *self._line]
            self._waiting, self._line = OrderedDict(), deque()
        for each in waiting:
            each.failure = failure
            each.done.set()

    def _keep_alive(self) -> None:
        while not self._closed.wait(self._lease_seconds / LEASE_SHARE):
            with self._lock:
                if self._outgoing is not None:
                    self._outgoing.put(pb.ServeRequest(alive=pb.Alive()))
                stream = self._stream
            silent = time.monotonic() - self._heard_at
            if stream is not None and silent > self._lease_seconds:
                with contextlib.suppress(Exception):
                    stream.cancel()
