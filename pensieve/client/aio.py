"""The SDK for asyncio: `client.py` word for word, with `await`.

    async with AsyncClient() as client:
        trip = client.conversation("trip-42")
        async for delta in trip.send("Where shall we go?"):
            print(delta, end="", flush=True)
        print(await trip.ask("Why there?"))

The connection belongs to the loop in which the first thing is said.  A task that is cancelled while it
listens leaves its turn as a thread's loop does: close it, let go of it, or listen again later.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any

import grpc

from pensieve.client import wire
from pensieve.client.aio_conversation import AsyncConversation
from pensieve.client.failures import Deadline, Retry, Tries, failed
from pensieve.client.turns import check_id, new_id
from pensieve.client.values import ConversationState, state_of
from pensieve.errors import DeadlineExceeded, InvalidArgument, Unavailable
from pensieve.v1 import conversation_pb2 as pb
from pensieve.v1 import conversation_pb2_grpc, status_pb2


class AsyncClient:
    """A connection to a daemon; `timeout` is for each call that does not say its own."""

    def __init__(
        self,
        address: str = wire.DEFAULT_ADDRESS,
        *,
        token: str | None = None,
        tls: wire.Tls = False,
        timeout: float | None = None,
        retry: Retry | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.address = address
        self.timeout = timeout
        self.retry = retry or Retry()
        self._sleep = sleep
        self._metadata = wire.metadata_of(token)
        self._credentials = wire.credentials_of(tls)
        self._closed = False
        self._opened: grpc.aio.Channel | None = None
        self._methods: Any = None

    @property
    def _channel(self) -> grpc.aio.Channel:
        if self._closed:
            raise InvalidArgument("client", "is closed")
        if self._opened is None:
            target, options = wire.target_of(self.address), wire.OPTIONS
            if self._credentials is None:
                self._opened = grpc.aio.insecure_channel(target, options=options)
            else:
                self._opened = grpc.aio.secure_channel(target, self._credentials, options=options)
        return self._opened

    @property
    def _stub(self) -> Any:
        if self._methods is None or self._closed:
            self._methods = conversation_pb2_grpc.ConversationServiceStub(self._channel)
        return self._methods

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Everything under way ends, and nothing more is sent."""
        self._closed = True
        if self._opened is not None:
            await self._opened.close()

    def conversation(self, conversation_id: str | None = None) -> AsyncConversation:
        chosen = new_id() if conversation_id is None else check_id(conversation_id)
        return AsyncConversation(self, chosen)

    async def conversations(self, timeout: float | None = None) -> AsyncIterator[ConversationState]:
        request = pb.ListConversationsRequest()
        async for page in self._pages(self._stub.ListConversations, request, timeout):
            for each in page.conversations:
                yield state_of(each)

    async def healthy(self, timeout: float | None = 5.0) -> bool:
        check: Any = self._channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=status_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=status_pb2.HealthCheckResponse.FromString,
        )
        try:
            answer = await self.call(check, status_pb2.HealthCheckRequest(), timeout)
        except (Unavailable, DeadlineExceeded):
            return False
        return bool(answer.status == status_pb2.HealthCheckResponse.SERVING_STATUS_SERVING)

    async def call(
        self, method: Any, request: Any, timeout: float | None = None, *, repeat: bool = False
    ) -> Any:
        deadline = Deadline(self.timeout if timeout is None else timeout)
        tries = Tries(self.retry, deadline)
        while True:
            try:
                return await method(request, timeout=deadline.left(), metadata=self._metadata)
            except grpc.aio.AioRpcError as failure:
                error = failed(failure, deadline)
            except asyncio.CancelledError:
                self._check_closed()
                raise
            if not repeat:
                raise error
            await self._sleep(tries.pause(error))

    async def _pages(self, method: Any, request: Any, timeout: float | None) -> AsyncIterator[Any]:
        request.page_size = wire.PAGE_SIZE
        while True:
            page = await self.call(method, request, timeout, repeat=True)
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def _check_closed(self) -> None:
        """A call that ends as cancelled without anybody cancelling its task ends with the client."""
        task = asyncio.current_task()
        if self._closed and not (task is not None and task.cancelling()):
            raise InvalidArgument("client", "was closed") from None
