"""The SDK for asyncio: `client.py` word for word, with `await`.

async with AsyncClient() as client:
    trip = client.conversation("trip-42")
    async for delta in trip.send("Where shall we go?"):
        print(delta, end="", flush=True)
    print(await trip.ask("Why there?"))
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc

from pensieve.client import wire
from pensieve.client.failures import Retry, error_of
from pensieve.client.turns import Said, TurnProgress, new_id, request_of
from pensieve.client.values import (
    ConversationState,
    Delta,
    Message,
    Reply,
    Restarted,
    message_of,
    state_of,
)
from pensieve.errors import PensieveError, Unavailable
from pensieve.v1 import conversation_pb2 as pb
from pensieve.v1 import conversation_pb2_grpc, status_pb2


class AsyncClient:
    """A connection to a daemon, made in the loop that uses it."""

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
        credentials = wire.credentials_of(tls)
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=wire.OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=wire.OPTIONS)
        self._stub: Any = conversation_pb2_grpc.ConversationServiceStub(self._channel)

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
        await self._channel.close()

    def conversation(self, conversation_id: str | None = None) -> AsyncConversation:
        return AsyncConversation(self, conversation_id or new_id())

    async def conversations(self, timeout: float | None = None) -> AsyncIterator[ConversationState]:
        token = ""
        while True:
            request = pb.ListConversationsRequest(page_size=wire.PAGE_SIZE, page_token=token)
            page = await self.call(self._stub.ListConversations, request, timeout, repeat=True)
            for each in page.conversations:
                yield state_of(each)
            if not (token := page.next_page_token):
                return

    async def healthy(self, timeout: float | None = 5.0) -> bool:
        check: Any = self._channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=status_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=status_pb2.HealthCheckResponse.FromString,
        )
        try:
            answer = await self.call(check, status_pb2.HealthCheckRequest(), timeout)
        except Unavailable:
            return False
        return bool(answer.status == status_pb2.HealthCheckResponse.SERVING_STATUS_SERVING)

    async def call(
        self, method: Any, request: Any, timeout: float | None = None, *, repeat: bool = False
    ) -> Any:
        deadline = wire.Deadline(self.timeout if timeout is None else timeout)
        num_tries = 0
        while True:
            num_tries += 1
            try:
                return await method(request, timeout=deadline.left(), metadata=self._metadata)
            except grpc.aio.AioRpcError as failure:
                error = failed(failure)
                pause = self.retry.pause(error, num_tries, deadline.left()) if repeat else None
                if pause is None:
                    raise error from None
            await self._sleep(pause)


class AsyncConversation:
    def __init__(self, client: AsyncClient, conversation_id: str) -> None:
        self.client = client
        self.conversation_id = conversation_id
        self._stub = client._stub

    async def create(
        self,
        *,
        system_prompt: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        template_options: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        prefix_id: str = "",
        timeout: float | None = None,
    ) -> ConversationState:
        request = wire.create_request(
            self.conversation_id, system_prompt, tools, template_options, metadata, prefix_id
        )
        answer = await self.client.call(self._stub.CreateConversation, request, timeout)
        return state_of(answer.conversation)

    async def get(self, timeout: float | None = None) -> ConversationState:
        request = pb.GetConversationRequest(conversation_id=self.conversation_id)
        answer = await self.client.call(self._stub.GetConversation, request, timeout, repeat=True)
        return state_of(answer.conversation)

    async def delete(self, timeout: float | None = None) -> None:
        request = pb.DeleteConversationRequest(conversation_id=self.conversation_id)
        await self.client.call(self._stub.DeleteConversation, request, timeout)

    def send(
        self,
        said: Said,
        *,
        request_id: str | None = None,
        expected_revision: int | None = None,
        create_if_missing: bool = True,
        expected_return_seconds: float = 0.0,
        last_turn: bool = False,
        timeout: float | None = None,
        **sampling: Any,
    ) -> AsyncTurn:
        """Say something; iterate over the result, or await its `reply()`."""
        request = request_of(
            self.conversation_id,
            said,
            request_id=request_id,
            expected_revision=expected_revision,
            create_if_missing=create_if_missing,
            sampling=sampling,
            expected_return_seconds=expected_return_seconds,
            last_turn=last_turn,
        )
        return AsyncTurn(self, request, self.client.timeout if timeout is None else timeout)

    async def ask(self, said: Said, **options: Any) -> Reply:
        return await self.send(said, **options).reply()

    async def messages(
        self, include_token_ids: bool = False, timeout: float | None = None
    ) -> AsyncIterator[Message]:
        token = ""
        while True:
            request = pb.ListMessagesRequest(
                conversation_id=self.conversation_id,
                page_size=wire.PAGE_SIZE,
                page_token=token,
                include_token_ids=include_token_ids,
            )
            page = await self.client.call(self._stub.ListMessages, request, timeout, repeat=True)
            for each in page.messages:
                yield message_of(each)
            if not (token := page.next_page_token):
                return

    async def fork(
        self,
        at_revision: int | None = None,
        *,
        conversation_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> AsyncConversation:
        request = wire.fork_request(self.conversation_id, at_revision, conversation_id, metadata)
        answer = await self.client.call(self._stub.ForkConversation, request, timeout)
        return AsyncConversation(self.client, answer.conversation.conversation_id)

    async def rewind(self, to_revision: int, timeout: float | None = None) -> ConversationState:
        request = pb.RewindConversationRequest(
            conversation_id=self.conversation_id, to_revision=to_revision
        )
        answer = await self.client.call(self._stub.RewindConversation, request, timeout)
        return state_of(answer.conversation)

    async def warm(self, timeout: float | None = None) -> None:
        request = pb.WarmConversationRequest(conversation_id=self.conversation_id)
        await self.client.call(self._stub.WarmConversation, request, timeout, repeat=True)

    async def cancel(self, turn_id: str = "", timeout: float | None = None) -> bool:
        request = pb.CancelTurnRequest(conversation_id=self.conversation_id, turn_id=turn_id)
        answer = await self.client.call(self._stub.CancelTurn, request, timeout, repeat=True)
        return bool(answer.was_running)


class AsyncTurn:
    """A message and its reply; iterate once."""

    def __init__(
        self,
        conversation: AsyncConversation,
        request: pb.SendMessageRequest,
        timeout: float | None,
    ) -> None:
        self.conversation = conversation
        self.request_id = request.request_id
        self._request = request
        self._timeout = timeout
        self._progress = TurnProgress()
        self._events: AsyncIterator[Delta | Restarted] | None = None

    def __aiter__(self) -> AsyncIterator[Delta | Restarted]:
        if self._events is None:
            self._events = self._run()
        return self._events

    @property
    def turn_id(self) -> str:
        return self._progress.turn_id

    async def reply(self) -> Reply:
        async for _ in self:
            pass
        if self._progress.reply is None:
            raise Unavailable("the turn was left before its end")
        return self._progress.reply

    async def cancel(self) -> bool:
        return await self.conversation.cancel(self.turn_id)

    async def _run(self) -> AsyncIterator[Delta | Restarted]:
        client, deadline = self.conversation.client, wire.Deadline(self._timeout)
        num_tries = 0
        while True:
            num_tries += 1
            call = client._stub.SendMessage(
                self._request, timeout=deadline.left(), metadata=client._metadata
            )
            try:
                async for response in call:
                    event = self._progress.take(response)
                    if event is not None:
                        num_tries = 1
                        yield event
                if self._progress.reply is not None:
                    return
                error: PensieveError = Unavailable("the server ended the stream within the turn")
            except grpc.aio.AioRpcError as failure:
                error = failed(failure)
            finally:
                call.cancel()
            pause = client.retry.pause(error, num_tries, deadline.left())
            if pause is None:
                raise error from None
            await client._sleep(pause)


def failed(failure: grpc.aio.AioRpcError) -> PensieveError:
    trailing: Any = failure.trailing_metadata()
    return error_of(failure.code(), failure.details(), trailing)
