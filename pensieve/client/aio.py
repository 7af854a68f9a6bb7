"""The SDK for asyncio: `AsyncClient`, `AsyncConversation`, `AsyncTurn` and `AsyncPrefix`.

scripts/generate_sync_client makes client.py from this file, base_client.py from aio_base_client.py, and
jobs.py from aio_jobs.py. It removes `async`, `await` and the prefix `Async`. So the three source files
contain only code that has the same form for tasks and threads. The gRPC calls differ; they are in
aio_connection.py and connection.py. turn_progress.py decides what a turn does when its stream ends.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Unpack

from pensieve.client.aio_base_client import PAGE_SIZE, AsyncBaseClient
from pensieve.client.aio_connection import AsyncStream
from pensieve.client.aio_jobs import AsyncJobs
from pensieve.client.channel import CHECK_SECONDS
from pensieve.client.requests import (
    MessageInput,
    SendOptions,
    check_id,
    check_text,
    create_request,
    explains_sampling,
    fork_request,
    import_requests,
    new_id,
    prefix_request,
    send_request,
)
from pensieve.client.retry import Deadline
from pensieve.client.turn_progress import TurnCourse
from pensieve.client.values import (
    ConversationState,
    Delta,
    Message,
    PrefixState,
    Reply,
    Restarted,
    ServerInfo,
    info_of,
    message_of,
    prefix_of,
    state_of,
    whole_prefix_of,
)
from pensieve.errors import DeadlineExceeded, PensieveError, Unavailable
from pensieve.v1 import conversation_pb2 as pb


class AsyncClient(AsyncBaseClient):
    """A connection to a Pensieve daemon, or to several daemons that share one history.

    Several tasks may share one client. Nothing is sent before the first call. Use `async with`, or call
    `close`. Both stop the turns that are being read and close the connection. Every failure raises a subclass
    of `pensieve.errors.PensieveError`.

    Args:
        address: HOST:PORT or unix:PATH, optionally with grpc:// before it. Pass several as a list or
            separated by commas. Default: $PENSIEVE_DAEMON, else 127.0.0.1:50051.
        token: the access token, if the daemon requires one.
        tls: False: no TLS. True: trust the system's certificate authorities. A path: trust the CA certificate
            in this file. gRPC channel credentials are also accepted.
        timeout: default timeout in seconds for each call or turn, retries included. None: no timeout.
        retry: how often and when a request is retried while the server is unavailable, and how long the
            client waits for a server that is loading its model.
        sleep: the function that waits between tries; for tests.
    """

    def conversation(self, conversation_id: str | None = None) -> AsyncConversation:
        """Return a handle for a conversation, which may not exist on the server yet. Sends nothing.

        Without a `conversation_id`, a random id is chosen.
        """
        chosen = new_id() if conversation_id is None else check_id(conversation_id)
        return AsyncConversation(self, chosen)

    async def conversations(self, timeout: float | None = None) -> AsyncIterator[ConversationState]:
        """Iterate over all conversations of this client's tenant, newest first.

        `timeout` applies to each page that is fetched.
        """
        request = pb.ListConversationsRequest()
        async for page in self.pages(lambda link: link.stub.ListConversations, request, timeout):
            for each in page.conversations:
                yield state_of(each)

    def prefix(self, prefix_id: str) -> AsyncPrefix:
        """Return a handle for the prefix `prefix_id`, which may not be declared yet. Sends nothing."""
        return AsyncPrefix(self, check_id(prefix_id, "prefix_id"))

    async def prefixes(self, timeout: float | None = None) -> AsyncIterator[PrefixState]:
        """Iterate over the declared prefixes of this client's tenant, oldest first.

        The messages, tools and options of these prefixes are left empty. `AsyncPrefix.get` returns them.
        `timeout` applies to each page that is fetched.
        """
        request = pb.ListPrefixesRequest()
        async for page in self.pages(lambda link: link.stub.ListPrefixes, request, timeout):
            for each in page.prefixes:
                yield prefix_of(each)

    @property
    def jobs(self) -> AsyncJobs:
        """The batch jobs of this client's tenant."""
        return AsyncJobs(self)

    async def healthy(self, timeout: float | None = 5.0) -> bool:
        """Return whether at least one daemon is reachable and accepts new turns."""
        deadline, names = Deadline(timeout), self._connection.addresses.names
        for name in names:
            left = deadline.left()
            most = left if len(names) == 1 else min(CHECK_SECONDS, left or CHECK_SECONDS)
            error = await self._connection.health_problem(name, most)
            if error is None:
                return True
            if not isinstance(error, Unavailable | DeadlineExceeded):
                raise error
        return False

    async def server_info(self, timeout: float | None = None) -> ServerInfo:
        """Return which model the daemon serves, and how. This also works while the model is loading."""
        request = pb.GetServerInfoRequest()
        answer = await self.call(
            lambda link: link.stub.GetServerInfo, request, timeout, repeat=True
        )
        return info_of(answer.server)


class AsyncConversation:
    """A conversation on the server, identified by its id. Create it with `AsyncClient.conversation`.

    The object has no state of its own: two objects with the same id are the same conversation. Each method
    that calls the server takes a `timeout` in seconds, retries included; None uses the client's default.

    The client retries `get`, `messages`, `warm`, `cancel` and turns while the server is unavailable. It does
    not retry `create`, `delete`, `fork` and `rewind`. If the first try succeeded but its answer was lost, a
    second try would fail.
    """

    def __init__(self, client: AsyncClient, conversation_id: str) -> None:
        self.client = client
        self.conversation_id = conversation_id

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.conversation_id!r} at {self.client.address}>"

    async def create(
        self,
        *,
        system_prompt: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        template_options: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        prefix_id: str = "",
        messages: Sequence[Mapping[str, Any]] = (),
        timeout: float | None = None,
    ) -> ConversationState:
        """Create the conversation with settings that never change.

        Without settings, this call is not needed: by default, the first `send` creates the conversation.

        Args:
            system_prompt: the first message, with the role "system".
            tools: tools that the model may call, each as the JSON schema that its chat template expects.
            template_options: variables for the model's chat template.
            metadata: any JSON object. The server keeps it and returns it with the state.
            prefix_id: the id of a declared prefix, whose system prompt, tools and options are used. Any other
                name groups conversations with the same system prompt and tools: the server computes their
                common beginning only once.
            messages: an initial history after the system prompt, in the form that `send` takes. A user's
                message must be able to follow. The history may be as long as the model's context. `rewind`
                never removes it.

        Raises:
            AlreadyExists: a conversation with this id exists.
        """
        request = create_request(
            self.conversation_id,
            system_prompt,
            tools,
            template_options,
            metadata,
            prefix_id,
            messages,
        )
        pieces = import_requests(request)
        if pieces is None:
            created = await self.client.call(
                lambda link: link.stub.CreateConversation, request, timeout
            )
            return state_of(created.conversation)
        imported = await self.client.send_all(
            lambda link: link.stub.ImportConversation, pieces, self.conversation_id, timeout
        )
        return state_of(imported.conversation)

    async def get(self, timeout: float | None = None) -> ConversationState:
        """Return the conversation's state: revision, sizes, metadata and times.

        Raises:
            NotFound: there is no such conversation.
        """
        request = pb.GetConversationRequest(conversation_id=self.conversation_id)
        answer = await self.client.call(
            lambda link: link.stub.GetConversation, request, timeout, repeat=True
        )
        return state_of(answer.conversation)

    async def delete(self, timeout: float | None = None) -> None:
        """Delete the conversation permanently, with its messages and cached state.

        Raises:
            NotFound: there is no such conversation.
        """
        request = pb.DeleteConversationRequest(conversation_id=self.conversation_id)
        await self.client.call(lambda link: link.stub.DeleteConversation, request, timeout)

    @explains_sampling
    def send(self, message: MessageInput, **options: Unpack[SendOptions]) -> AsyncTurn:
        """Send a message and return a turn. Iterate over the turn to read the reply as it is generated.

        Nothing is sent before the iteration begins. `message` is the user's text, or a list of messages in
        the form of OpenAI's API: {"role": …, "content": …, "tool_call_id": …}. Use a list for tool results,
        for example. An assistant message may have `tool_calls` and `reasoning_content`.

        Args:
            request_id: identifies this message. If a message is sent again with the same id, it is not added
                again, and the answer is the first turn. Random by default.
            expected_revision: refuse the message unless the conversation is at this revision.
            create_if_missing: create the conversation if it does not exist (the default).
            expected_return_seconds: a cache hint: the time in seconds until the next message is expected.
            last_turn: a cache hint: no further message is expected.
            priority: -8 to 8. Turns with a higher priority run first, and may suspend turns with a lower
                priority.
            metadata: any JSON object of at most 16 KiB. `messages` returns it with this turn's messages.
            constraint: the form of the reply: {"json_schema": schema}, {"json_object": True}, {"regex":
                "…"}, {"choice": ["yes", "no"]} or {"grammar": "…"}.
            cache_salt: only your turns with the same cache_salt reuse each other's KV for equal first tokens.
            timeout: seconds for the whole turn, retries included.
            keep_partial: what the history keeps if the turn is stopped early (see `AsyncTurn`). True: the
                message and the delivered text. False: nothing, as if the message had never been sent. The
                default is True for `send`, and False for `ask`, whose caller sees no partial text.
            (and the sampling parameters)

        Raises:
            InvalidArgument: an argument is invalid; nothing was sent.
        """
        timeout = options.get("timeout")
        request = send_request(self.conversation_id, message, options)
        course = TurnCourse(
            request,
            self.client.retry,
            self.client.timeout if timeout is None else timeout,
            self.client._connection.route(self.conversation_id),
            options.get("keep_partial", True),
        )
        return AsyncTurn(self, course)

    async def ask(self, message: MessageInput, **options: Unpack[SendOptions]) -> Reply:
        """Send a message and wait for the whole reply. Takes the arguments of `send`.

        If the timeout passes or the caller is interrupted, the server stops the turn. With `keep_partial`,
        the history keeps the text so far; by default, it keeps nothing. If the reply was already complete
        when the timeout passed, it is still returned, a moment late.
        """
        options.setdefault("keep_partial", False)
        return await self.send(message, **options).reply()

    async def messages(
        self,
        include_token_ids: bool = False,
        timeout: float | None = None,
        *,
        cut_replies: bool = False,
        page_size: int = PAGE_SIZE,
    ) -> AsyncIterator[Message]:
        """Iterate over the messages of the conversation, oldest first.

        With `include_token_ids`, each message has its exact tokens. With `cut_replies`, the model's thinking
        and tool calls are in `thinking` and `tool_calls`, not in the text of the reply. The iteration fetches
        pages of `page_size` messages. `timeout` applies to each page.
        """
        request = pb.ListMessagesRequest(
            conversation_id=self.conversation_id,
            include_token_ids=include_token_ids,
            cut_replies=cut_replies,
        )
        async for page in self.client.pages(
            lambda link: link.stub.ListMessages, request, timeout, page_size
        ):
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
        """Create a new conversation with this conversation's history, and return it.

        Args:
            at_revision: copy the history up to this revision. Default: all of it.
            conversation_id: the id of the new conversation; random by default.
            metadata: any JSON object, for the new conversation.
        """
        addresses = self.client._connection.addresses
        if conversation_id is None:
            conversation_id = addresses.id_with_same_home(self.conversation_id)
        request = fork_request(self.conversation_id, at_revision, conversation_id, metadata)
        answer = await self.client.call(lambda link: link.stub.ForkConversation, request, timeout)
        addresses.learn(conversation_id, addresses.order(self.conversation_id)[0])
        return AsyncConversation(self.client, answer.conversation.conversation_id)

    async def rewind(
        self,
        to_revision: int,
        timeout: float | None = None,
        *,
        expected_revision: int | None = None,
    ) -> ConversationState:
        """Remove all messages after `to_revision` and return the new state. Revision 0 is before all turns.

        With an `expected_revision`, nothing is removed unless the conversation is at this revision.

        Raises:
            StaleRevision: the conversation is at another revision.
        """
        request = pb.RewindConversationRequest(
            conversation_id=self.conversation_id,
            to_revision=to_revision,
            expected_revision=expected_revision,
        )
        answer = await self.client.call(lambda link: link.stub.RewindConversation, request, timeout)
        return state_of(answer.conversation)

    async def warm(self, timeout: float | None = None, cache_salt: str = "") -> None:
        """Ask the server to bring the conversation's KV to the device, in advance of the next message.

        Give the `cache_salt` of the conversation's messages. KV that is computed without it is shared.
        """
        request = pb.WarmConversationRequest(
            conversation_id=self.conversation_id, cache_salt=check_text("cache_salt", cache_salt)
        )
        await self.client.call(
            lambda link: link.stub.WarmConversation, request, timeout, repeat=True
        )

    async def cancel(self, turn_id: str = "", timeout: float | None = None) -> bool:
        """Stop the running turn and keep its generated text. Return whether a turn was running.

        With a `turn_id`, only that turn is stopped.
        """
        request = pb.CancelTurnRequest(
            conversation_id=self.conversation_id, turn_id=check_text("turn_id", turn_id)
        )
        answer = await self.client.call(
            lambda link: link.stub.CancelTurn, request, timeout, repeat=True
        )
        return answer.was_running


class AsyncTurn:
    """A message and its reply. Create it with `AsyncConversation.send`.

    Iterate over it once to read the pieces of the reply. Each piece is a `Delta`, or a `Restarted` if the
    server had to begin the reply again. A broken connection does not end the iteration: the client
    reconnects to the turn and delivers no piece twice. Only one task at a time may iterate.

    These stop a turn early: `close`, the end of its `async with`, a `break` out of the loop over
    `send(...)`, a timeout, and an exception such as CancelledError or KeyboardInterrupt while the iteration
    waits for a piece. The server stops the turn at once. Depending on `keep_partial`, the history keeps the
    text already delivered, or nothing. If no text was delivered, the history keeps nothing. You can then send
    the next message.

    The client waits up to two seconds until the server has stopped the turn. If the server does not answer in
    this time, it stops the turn later, when it notices that nobody reads, and the history keeps nothing. If
    the reply was already complete, the history keeps all of it.

    `cancel` also stops a turn, but keeps all generated text. The iteration then continues to the end of this
    text.
    """

    def __init__(self, conversation: AsyncConversation, course: TurnCourse) -> None:
        self.conversation_id = course.request.conversation_id
        self.request_id = course.request.request_id
        # The open stream; None while not connected.
        self._stream: AsyncStream[pb.SendMessageResponse] | None = None
        self._connection = conversation.client._connection
        self._sleep = conversation.client._sleep
        self._cancel = conversation.cancel
        self._course = course

    def __repr__(self) -> str:
        title = f"{type(self).__name__} {self.turn_id or self.request_id}"
        return f"<{title} of {self.conversation_id!r}: {self._course.status_text}>"

    def __aiter__(self) -> AsyncTurn:
        return self

    async def __anext__(self) -> Delta | Restarted:
        try:
            event = await self._next()
        except (PensieveError, GeneratorExit):
            raise
        except BaseException:  # the reader was interrupted
            await self.close()
            raise
        if event is None:
            raise StopAsyncIteration
        return event

    async def _next(self) -> Delta | Restarted | None:
        """Return the next event; None at the end."""
        course = self._course
        while course.under_way:
            error: PensieveError | None = None
            try:
                stream = await self._open_stream()
                response = await stream.read() if stream is not None else None
            except PensieveError as failure:
                error, response = failure, None
            if response is not None:
                if (event := await self._take(response)) is not None:
                    return event
                continue
            self._detach()
            if error is not None and course.has_timed_out(error):
                request = course.end_request()
                answer = await self._connection.end_turn(request, course.route) if request else None
                course.finish_after_timeout(error, answer)
            elif pause := course.stream_ended(error):
                await self._sleep(pause)
        return None

    @property
    def turn_id(self) -> str:
        """The server's id of this turn. Empty until the server has accepted the turn."""
        return self._course.progress.turn_id

    async def reply(self) -> Reply:
        """Return the whole reply, reading the turn to its end if necessary.

        Raises:
            TurnInterrupted: the turn was stopped early. The message says what the history keeps of the turn.
        """
        async for _ in self:
            pass
        if (request := self._course.repeated_end_request()) is not None:
            self._course.note_end_answer(
                await self._connection.end_turn(request, self._course.route)
            )
        return self._course.reply

    async def cancel(self) -> bool:
        """Stop the turn and keep its generated text. Return whether there was a turn to stop.

        Any task may call this. If the turn has not started yet, it is stopped when it starts.
        """
        self._course.cancelling = True
        return await self._cancel(self.turn_id) if self.turn_id else True

    async def close(self) -> None:
        """Stop reading and stop the turn, if it has not ended. `keep_partial` decides what is kept."""
        self._detach()
        if (request := self._course.leave()) is not None:
            self._course.note_end_answer(
                await self._connection.end_turn(request, self._course.route)
            )

    async def __aenter__(self) -> AsyncTurn:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def __del__(self) -> None:
        """Stop the turn if its object was dropped. The next call of this conversation waits for the end."""
        self._connection.end_reading(self._course)
        if (request := self._course.leave()) is not None:
            self._connection.begin_ending(request, self._course.route)

    async def _open_stream(self) -> AsyncStream[pb.SendMessageResponse] | None:
        """Return the open stream, and connect if necessary. None if another task has closed the turn."""
        if self._stream is None:
            course, connection = self._course, self._connection
            request, deadline = course.request, course.deadline
            await connection.wait_for_endings(request.conversation_id, deadline)
            course.was_sent = True  # before sending, because an interrupt may come during the call
            self._stream = await connection.stream(
                lambda link: link.stub.SendMessage, request, deadline, course.route
            )
            connection.begin_reading(course, self._stream)
            if course.reader_stopped and (end_request := course.end_request()) is not None:
                self._detach()
                course.note_end_answer(await connection.end_turn(end_request, course.route))
        return self._stream

    async def _take(self, response: pb.SendMessageResponse) -> Delta | Restarted | None:
        try:
            event = self._course.take(response)
        except PensieveError:
            self._detach()
            raise
        if self._course.must_cancel(response):
            await self._cancel(self.turn_id)
        return event

    def _detach(self) -> None:
        stream, self._stream = self._stream, None
        self._connection.end_reading(self._course)
        if stream is not None:
            stream.cancel()


class AsyncPrefix:
    """A prefix on the server, identified by its id: messages, tools and options that begin conversations.

    Create it with `AsyncClient.prefix`. Pass its id as `prefix_id` to create conversations that begin with
    the prefix. The server tokenizes the prefix and computes its KV only once for all of them:

        rules = client.prefix("rules")
        await rules.create(system_prompt="Answer in one sentence.", keep_warm=True)
        await client.conversation("trip-42").create(prefix_id="rules")

    The object has no state of its own. While the server is unavailable, the client retries `get`, but not
    `create` and `delete`.
    """

    def __init__(self, client: AsyncClient, prefix_id: str) -> None:
        self._client = client
        self.prefix_id = prefix_id

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.prefix_id!r}>"

    async def create(
        self,
        *,
        system_prompt: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        template_options: Mapping[str, Any] | None = None,
        messages: Sequence[Mapping[str, Any]] = (),
        keep_warm: bool = False,
        timeout: float | None = None,
    ) -> PrefixState:
        """Declare the prefix. It needs a system prompt, tools or messages.

        Args:
            system_prompt: the first message, with the role "system".
            tools: tools that the model may call, each as the JSON schema that its chat template expects.
            template_options: variables for the model's chat template.
            messages: few-shot turns, in the form of OpenAI's API (see `AsyncConversation.send`). A user's
                message must be able to follow them.
            keep_warm: compute the KV now, and again whenever it is lost.
            timeout: seconds for the call; None uses the client's default.

        Raises:
            AlreadyExists: a prefix with this id exists.
        """
        request = prefix_request(
            self.prefix_id, system_prompt, tools, template_options, messages, keep_warm
        )
        answer = await self._client.call(lambda link: link.stub.CreatePrefix, request, timeout)
        return prefix_of(answer.prefix)

    async def get(self, timeout: float | None = None) -> PrefixState:
        """Return the current state of the prefix, with its messages, tools and options.

        `timeout` is in seconds, retries included; None uses the client's default.

        Raises:
            NotFound: there is no such prefix.
        """
        request = pb.GetPrefixRequest(prefix_id=self.prefix_id)
        answer = await self._client.call(
            lambda link: link.stub.GetPrefix, request, timeout, repeat=True
        )
        return whole_prefix_of(answer)

    async def delete(self, timeout: float | None = None) -> None:
        """Delete the prefix. Conversations that were created from it keep their whole history.

        `timeout` is in seconds; None uses the client's default.

        Raises:
            NotFound: there is no such prefix.
        """
        request = pb.DeletePrefixRequest(prefix_id=self.prefix_id)
        await self._client.call(lambda link: link.stub.DeletePrefix, request, timeout)
