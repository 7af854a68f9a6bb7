"""`conversation.py` word for word, with `await`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

import grpc

from pensieve.client import wire
from pensieve.client.failures import failed
from pensieve.client.turns import (
    Said,
    SamplingOptions,
    SendOptions,
    TurnCourse,
    check_text,
    request_of,
)
from pensieve.client.values import (
    ConversationState,
    Delta,
    Message,
    Reply,
    Restarted,
    message_of,
    state_of,
)
from pensieve.errors import PensieveError
from pensieve.v1 import conversation_pb2 as pb

if TYPE_CHECKING:
    from pensieve.client.aio import AsyncClient


class AsyncConversation:
    def __init__(self, client: AsyncClient, conversation_id: str) -> None:
        self.client = client
        self.conversation_id = conversation_id

    @property
    def _stub(self) -> Any:
        return self.client._stub

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
        priority: int = 0,
        timeout: float | None = None,
        **sampling: Unpack[SamplingOptions],
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
            priority=priority,
        )
        return AsyncTurn(self, request, self.client.timeout if timeout is None else timeout)

    async def ask(self, said: Said, **options: Unpack[SendOptions]) -> Reply:
        return await self.send(said, **options).reply()

    async def messages(
        self, include_token_ids: bool = False, timeout: float | None = None
    ) -> AsyncIterator[Message]:
        request = pb.ListMessagesRequest(
            conversation_id=self.conversation_id, include_token_ids=include_token_ids
        )
        async for page in self.client._pages(self._stub.ListMessages, request, timeout):
            for each in page.messages:
                yield message_of(each)

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
        request = pb.CancelTurnRequest(
            conversation_id=self.conversation_id, turn_id=check_text("turn_id", turn_id)
        )
        answer = await self.client.call(self._stub.CancelTurn, request, timeout, repeat=True)
        return bool(answer.was_running)


class AsyncTurn:
    """A message and its reply: an iterator over what is said, once.  One task may iterate."""

    def __init__(
        self,
        conversation: AsyncConversation,
        request: pb.SendMessageRequest,
        timeout: float | None,
    ) -> None:
        self.conversation = conversation
        self.request_id = request.request_id
        self._call: Any = None  # the stream, while there is one
        self._course = TurnCourse(request, conversation.client.retry, timeout)

    def __aiter__(self) -> AsyncTurn:
        return self

    async def __anext__(self) -> Delta | Restarted:
        course, client = self._course, self.conversation.client
        while course.under_way:
            error = None
            try:
                response = await self._stream().read()
            except grpc.aio.AioRpcError as failure:
                error = failed(failure, course.deadline)
            except BaseException as interruption:  # whoever goes on attaches again
                self._hang_up()
                if isinstance(interruption, asyncio.CancelledError):
                    client._check_closed()
                raise
            else:
                if response is not grpc.aio.EOF:
                    event = await self._heard(response)
                    if event is not None:
                        return event
                    continue
            self._hang_up()
            pause = course.broke_off(error)
            if pause:
                await client._sleep(pause)
        raise StopAsyncIteration

    @property
    def turn_id(self) -> str:
        """Empty until the server has accepted the turn."""
        return self._course.progress.turn_id

    async def reply(self) -> Reply:
        """The whole reply; waits for it."""
        async for _ in self:
            pass
        return self._course.reply

    async def cancel(self) -> bool:
        """End it, keeping what was said; whether there was something to end.

        If the turn has not started yet, as far as is known here, it is ended as soon as it does.
        """
        self._course.cancelling = True
        return await self.conversation.cancel(self.turn_id) if self.turn_id else True

    def close(self) -> None:
        """Abandon it, if it is still under way."""
        self._course.leave()
        self._hang_up()

    def __del__(self) -> None:
        self._hang_up()  # the stream of asyncio holds itself until then

    async def __aenter__(self) -> AsyncTurn:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _stream(self) -> Any:
        if self._call is None:
            client = self.conversation.client
            left = self._course.deadline.left()
            self._call = client._stub.SendMessage(
                self._course.request, timeout=left, metadata=client._metadata
            )
        return self._call

    async def _heard(self, response: pb.SendMessageResponse) -> Delta | Restarted | None:
        try:
            event = self._course.heard(response)
        except PensieveError:
            self._hang_up()
            raise
        if self._course.must_cancel(response):
            await self.conversation.cancel(self.turn_id)
        return event

    def _hang_up(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
