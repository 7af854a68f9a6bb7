"""The SDK: a conversation is its id, and a turn is something to iterate over.

    with Client("127.0.0.1:50051") as client:
        trip = client.conversation("trip-42")
        for delta in trip.send("Where shall we go?"):
            print(delta, end="", flush=True)
        print(trip.ask("Why there?"))

A `Client` may be shared by threads; it connects when it first has something to say.  A turn carries a
request_id, so after a broken connection, a restart of the daemon or of its engine the same message is
sent again and said once: the turn goes on where it was, or a `Restarted` says that it begins anew.

Whoever stops listening for good abandons the turn: `close` it, use it in a `with`, or let go of it, as
a `for` over `send(...)` does by itself when it is left.  The server gives an abandoned turn up after a
few seconds, and nothing of it stays.  `cancel` ends a turn and keeps what was said.  A loop that an
exception left while the turn is still held may go on: the next step attaches to it again.

A program that is to survive Ctrl-C lets a thread cancel, started by its handler of SIGINT.  As a
KeyboardInterrupt it may strike within gRPC's own locks, which then stay locked: good enough to end a
program, not to go on with the connection.

Everything that only looks, a cancel and a warm are tried again when the server is away; so is a turn.
Creating, forking, rewinding and deleting are not, because a second try of one that got through would be
answered with an error.  A timeout is in seconds, for a call or turn with all its tries.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import grpc

from pensieve.client import wire
from pensieve.client.conversation import Conversation
from pensieve.client.failures import Deadline, Retry, Tries, failed
from pensieve.client.turns import check_id, new_id
from pensieve.client.values import ConversationState, state_of
from pensieve.errors import DeadlineExceeded, InvalidArgument, Unavailable
from pensieve.v1 import conversation_pb2 as pb
from pensieve.v1 import conversation_pb2_grpc, status_pb2


class Client:
    """A connection to a daemon; `timeout` is for each call that does not say its own."""

    def __init__(
        self,
        address: str = wire.DEFAULT_ADDRESS,
        *,
        token: str | None = None,
        tls: wire.Tls = False,
        timeout: float | None = None,
        retry: Retry | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.address = address
        self.timeout = timeout
        self.retry = retry or Retry()
        self._sleep = sleep
        self._closed = False
        self._metadata = wire.metadata_of(token)
        credentials = wire.credentials_of(tls)
        target = wire.target_of(address)
        if credentials is None:
            self._channel = grpc.insecure_channel(target, options=wire.OPTIONS)
        else:
            self._channel = grpc.secure_channel(target, credentials, options=wire.OPTIONS)
        self._stub = conversation_pb2_grpc.ConversationServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Everything under way ends, and nothing more is sent."""
        self._closed = True
        self._channel.close()

    def conversation(self, conversation_id: str | None = None) -> Conversation:
        """A conversation by its id, whether it exists yet or not; nothing is sent."""
        return Conversation(
            self, new_id() if conversation_id is None else check_id(conversation_id)
        )

    def conversations(self, timeout: float | None = None) -> Iterator[ConversationState]:
        """All of them, the newest first."""
        for page in self._pages(
            self._stub.ListConversations, pb.ListConversationsRequest(), timeout
        ):
            yield from map(state_of, page.conversations)

    def healthy(self, timeout: float | None = 5.0) -> bool:
        """Whether the daemon takes new turns."""
        check = self._channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=status_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=status_pb2.HealthCheckResponse.FromString,
        )
        try:
            answer = self.call(check, status_pb2.HealthCheckRequest(), timeout)
        except (Unavailable, DeadlineExceeded):
            return False
        return bool(answer.status == status_pb2.HealthCheckResponse.SERVING_STATUS_SERVING)

    def call(
        self, method: Any, request: Any, timeout: float | None = None, *, repeat: bool = False
    ) -> Any:
        """One answer to one message; with `repeat` it may be sent more than once."""
        deadline = Deadline(self.timeout if timeout is None else timeout)
        tries = Tries(self.retry, deadline)
        while True:
            self._check_open()
            try:
                return method(request, timeout=deadline.left(), metadata=self._metadata)
            except grpc.RpcError as failure:
                error = failed(failure, deadline)
            if not repeat:
                raise error
            self._sleep(tries.pause(error))

    def _pages(self, method: Any, request: Any, timeout: float | None) -> Iterator[Any]:
        request.page_size = wire.PAGE_SIZE
        while True:
            page = self.call(method, request, timeout, repeat=True)
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgument("client", "is closed")
