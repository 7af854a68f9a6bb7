"""The SDK: a conversation is its id, and a turn is something to iterate over.

    with Client("127.0.0.1:50051") as client:
        trip = client.conversation("trip-42")
        for delta in trip.send("Where shall we go?"):
            print(delta, end="", flush=True)
        print(trip.ask("Why there?"))

A `Client` may be shared by threads.  A turn carries a request_id, so after a broken connection, a
restart of the daemon or of its engine the same message is sent again and said once: the turn goes on
where it was, or a `Restarted` says that it begins anew.  Leaving the loop early abandons the turn;
the server gives it up after a few seconds unless somebody attaches again.  `cancel` ends it and keeps
what was said.

Creating, forking, rewinding and deleting are not tried again by themselves, because a second try of one
that got through would be answered with an error; everything that only looks is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

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
        self._metadata = wire.metadata_of(token)
        credentials = wire.credentials_of(tls)
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options=wire.OPTIONS)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=wire.OPTIONS)
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
        self._channel.close()

    def conversation(self, conversation_id: str | None = None) -> Conversation:
        """A conversation by its id, whether it exists yet or not; nothing is sent."""
        return Conversation(self, conversation_id or new_id())

    def conversations(self, timeout: float | None = None) -> Iterator[ConversationState]:
        """All of them, the newest first."""
        token = ""
        while True:
            page = self.call(
                self._stub.ListConversations,
                pb.ListConversationsRequest(page_size=wire.PAGE_SIZE, page_token=token),
                timeout,
                repeat=True,
            )
            yield from map(state_of, page.conversations)
            if not (token := page.next_page_token):
                return

    def healthy(self, timeout: float | None = 5.0) -> bool:
        """Whether the daemon takes new turns."""
        check = self._channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=status_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=status_pb2.HealthCheckResponse.FromString,
        )
        try:
            answer = self.call(check, status_pb2.HealthCheckRequest(), timeout)
        except Unavailable:
            return False
        return bool(answer.status == status_pb2.HealthCheckResponse.SERVING_STATUS_SERVING)

    def call(
        self, method: Any, request: Any, timeout: float | None = None, *, repeat: bool = False
    ) -> Any:
        """One answer to one message; with `repeat` it may be sent more than once."""
        deadline = wire.Deadline(self.timeout if timeout is None else timeout)
        num_tries = 0
        while True:
            num_tries += 1
            try:
                return method(request, timeout=deadline.left(), metadata=self._metadata)
            except grpc.RpcError as failure:
                error = failed(failure)
                pause = self.retry.pause(error, num_tries, deadline.left()) if repeat else None
                if pause is None:
                    raise error from None
            self._sleep(pause)


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
        timeout: float | None = None,
        **sampling: Any,
    ) -> Turn:
        """Say something; iterate over the result for the reply.  Nothing is sent before that.

        `sampling`: temperature, top_p, top_k, min_p, repetition_penalty, presence_penalty,
        frequency_penalty, seed, max_tokens, min_tokens, stop, stop_token_ids, ignore_eos, logprobs,
        logit_bias.  The two hints say what is known of the time after the turn: they make room for
        others first, and cost at most recompute.
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
        )
        return Turn(self, request, self.client.timeout if timeout is None else timeout)

    def ask(self, said: Said, **options: Any) -> Reply:
        """Say something and wait for the whole reply; takes what `send` takes."""
        return self.send(said, **options).reply

    def messages(
        self, include_token_ids: bool = False, timeout: float | None = None
    ) -> Iterator[Message]:
        """The history, oldest first."""
        token = ""
        while True:
            request = pb.ListMessagesRequest(
                conversation_id=self.conversation_id,
                page_size=wire.PAGE_SIZE,
                page_token=token,
                include_token_ids=include_token_ids,
            )
            page = self.client.call(self._stub.ListMessages, request, timeout, repeat=True)
            yield from map(message_of, page.messages)
            if not (token := page.next_page_token):
                return

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
        request = pb.CancelTurnRequest(conversation_id=self.conversation_id, turn_id=turn_id)
        answer = self.client.call(self._stub.CancelTurn, request, timeout, repeat=True)
        return bool(answer.was_running)


class Turn:
    """A message and its reply; iterate once."""

    def __init__(
        self, conversation: Conversation, request: pb.SendMessageRequest, timeout: float | None
    ) -> None:
        self.conversation = conversation
        self.request_id = request.request_id
        self._request = request
        self._timeout = timeout
        self._progress = TurnProgress()
        self._events: Iterator[Delta | Restarted] | None = None

    def __iter__(self) -> Iterator[Delta | Restarted]:
        if self._events is None:
            self._events = self._run()
        return self._events

    @property
    def turn_id(self) -> str:
        """Empty until the server has accepted the turn."""
        return self._progress.turn_id

    @property
    def reply(self) -> Reply:
        """The whole reply; waits for it."""
        for _ in self:
            pass
        if self._progress.reply is None:
            raise Unavailable("the turn was left before its end")
        return self._progress.reply

    def cancel(self) -> bool:
        return self.conversation.cancel(self.turn_id)

    def _run(self) -> Iterator[Delta | Restarted]:
        client, deadline = self.conversation.client, wire.Deadline(self._timeout)
        num_tries = 0
        while True:
            num_tries += 1
            call = client._stub.SendMessage(
                self._request, timeout=deadline.left(), metadata=client._metadata
            )
            try:
                for response in call:
                    event = self._progress.take(response)
                    if event is not None:
                        num_tries = 1  # it went on, so the next failure is a new one
                        yield event
                if self._progress.reply is not None:
                    return
                error: PensieveError = Unavailable("the server ended the stream within the turn")
            except grpc.RpcError as failure:
                error = failed(failure)
            finally:
                call.cancel()
            pause = client.retry.pause(error, num_tries, deadline.left())
            if pause is None:
                raise error from None
            client._sleep(pause)


def failed(failure: grpc.RpcError) -> PensieveError:
    trailing: Any = failure.trailing_metadata()
    return error_of(failure.code(), failure.details(), trailing)
