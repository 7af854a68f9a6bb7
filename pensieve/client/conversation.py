"""A conversation by its id, and a turn of it as something to iterate over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    from pensieve.client.client import Client


class Conversation:
    def __init__(self, client: Client, conversation_id: str) -> None:
        self.client = client
        self.conversation_id = conversation_id
        self._stub = client._stub

    def create(
        self,
        *,
        system_prompt: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        template_options: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        prefix_id: str = "",
        timeout: float | None = None,
    ) -> ConversationState:
        """Begin it with more than the defaults; `send` begins one by itself."""
        request = wire.create_request(
            self.conversation_id, system_prompt, tools, template_options, metadata, prefix_id
        )
        return state_of(
            self.client.call(self._stub.CreateConversation, request, timeout).conversation
        )

    def get(self, timeout: float | None = None) -> ConversationState:
        request = pb.GetConversationRequest(conversation_id=self.conversation_id)
        answer = self.client.call(self._stub.GetConversation, request, timeout, repeat=True)
        return state_of(answer.conversation)

    def delete(self, timeout: float | None = None) -> None:
        """Leave nothing of it."""
        request = pb.DeleteConversationRequest(conversation_id=self.conversation_id)
        self.client.call(self._stub.DeleteConversation, request, timeout)

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
    ) -> Turn:
        """Say something; iterate over the result for the reply.  Nothing is sent before that.

        `said` is a text of the user, or messages as {"role": …, "content": …, "tool_call_id": …}.
        """
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
        return Turn(self, request, self.client.timeout if timeout is None else timeout)

    def ask(self, said: Said, **options: Unpack[SendOptions]) -> Reply:
        """Say something and wait for the whole reply; takes what `send` takes."""
        return self.send(said, **options).reply

    def messages(
        self, include_token_ids: bool = False, timeout: float | None = None
    ) -> Iterator[Message]:
        """The history, oldest first."""
        request = pb.ListMessagesRequest(
            conversation_id=self.conversation_id, include_token_ids=include_token_ids
        )
        for page in self.client._pages(self._stub.ListMessages, request, timeout):
            yield from map(message_of, page.messages)

    def fork(
        self,
        at_revision: int | None = None,
        *,
        conversation_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Conversation:
        """A second conversation that begins as this one did up to a revision (default: now)."""
        request = wire.fork_request(self.conversation_id, at_revision, conversation_id, metadata)
        answer = self.client.call(self._stub.ForkConversation, request, timeout)
        return Conversation(self.client, answer.conversation.conversation_id)

    def rewind(self, to_revision: int, timeout: float | None = None) -> ConversationState:
        """Cut what came after a revision; 0 is the beginning."""
        request = pb.RewindConversationRequest(
            conversation_id=self.conversation_id, to_revision=to_revision
        )
        return state_of(
            self.client.call(self._stub.RewindConversation, request, timeout).conversation
        )

    def warm(self, timeout: float | None = None) -> None:
        """Its next message is about to come: bring its KV-tokens to the device."""
        request = pb.WarmConversationRequest(conversation_id=self.conversation_id)
        self.client.call(self._stub.WarmConversation, request, timeout, repeat=True)

    def cancel(self, turn_id: str = "", timeout: float | None = None) -> bool:
        """End the running turn, keeping what was said; whether one was running."""
        request = pb.CancelTurnRequest(
            conversation_id=self.conversation_id, turn_id=check_text("turn_id", turn_id)
        )
        answer = self.client.call(self._stub.CancelTurn, request, timeout, repeat=True)
        return bool(answer.was_running)


class Turn:
    """A message and its reply: an iterator over what is said, once.  One thread may iterate."""

    def __init__(
        self, conversation: Conversation, request: pb.SendMessageRequest, timeout: float | None
    ) -> None:
        self.conversation = conversation
        self.request_id = request.request_id
        self._call: Any = None  # the stream, while there is one
        self._course = TurnCourse(request, conversation.client.retry, timeout)

    def __iter__(self) -> Turn:
        return self

    def __next__(self) -> Delta | Restarted:
        course, client = self._course, self.conversation.client
        while course.under_way:
            error = None
            try:
                response = next(self._stream())
            except StopIteration:
                pass
            except grpc.RpcError as failure:
                error = failed(failure, course.deadline)
            except BaseException:  # left while waiting; whoever goes on attaches again
                self._hang_up()
                raise
            else:
                event = self._heard(response)
                if event is not None:
                    return event
                continue
            self._hang_up()
            pause = course.broke_off(error)
            if pause:
                client._sleep(pause)
        raise StopIteration

    @property
    def turn_id(self) -> str:
        """Empty until the server has accepted the turn."""
        return self._course.progress.turn_id

    @property
    def reply(self) -> Reply:
        """The whole reply; waits for it."""
        for _ in self:
            pass
        return self._course.reply

    def cancel(self) -> bool:
        """End it, keeping what was said; whether there was something to end.

        Any thread may call it.  If the turn has not started yet, as far as is known here, it is ended as
        soon as it does.
        """
        self._course.cancelling = True
        return self.conversation.cancel(self.turn_id) if self.turn_id else True

    def close(self) -> None:
        """Abandon it, if it is still under way."""
        self._course.leave()
        self._hang_up()

    def __enter__(self) -> Turn:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _stream(self) -> Any:
        if self._call is None:
            client = self.conversation.client
            client._check_open()
            left = self._course.deadline.left()
            self._call = client._stub.SendMessage(
                self._course.request, timeout=left, metadata=client._metadata
            )
        return self._call

    def _heard(self, response: pb.SendMessageResponse) -> Delta | Restarted | None:
        try:
            event = self._course.heard(response)
        except PensieveError:
            self._hang_up()
            raise
        if self._course.must_cancel(response):
            self.conversation.cancel(self.turn_id)
        return event

    def _hang_up(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
