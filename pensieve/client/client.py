"""The SDK for threads: `Client`, `Conversation`, `Turn` and `Prefix`.

Generated from aio.py by scripts/generate_sync_client; do not edit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Unpack

from pensieve.client.base_client import PAGE_SIZE, BaseClient
from pensieve.client.channel import CHECK_SECONDS
from pensieve.client.connection import Stream
from pensieve.client.jobs import Jobs
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


class Client(BaseClient):
    """A connection to a Pensieve daemon, or to several that have one history.

    Several threads may share one client.  Nothing is sent before the first call.  Use the client by
    `with`, or `close` it: that leaves the turns that are being read, and frees the connection.
    Whatever fails raises a subclass of `pensieve.errors.PensieveError`.

    Args:
        address: HOST:PORT or unix:PATH, with or without grpc:// before it; several of them as a list, or
            with commas between.  By default $PENSIEVE_DAEMON, else 127.0.0.1:50051.
        token: the access token, if the daemon asks for one.
        tls: False for none; True trusts the system's certificate authorities; a path names the
            certificate of the one authority to trust; or gRPC channel credentials.
        timeout: seconds for each call or turn that names no timeout of its own, retries included;
            None waits without limit.
        retry: how often and when a request that met an unavailable server is sent again, and how long a
            server that loads its model is waited for.
        sleep: waits between tries; for tests.
    """

    def conversation(self, conversation_id: str | None = None) -> Conversation:
        """The conversation of this name, whether it exists on the server yet or not; sends nothing.

        Without a `conversation_id`, a new random one is chosen.
        """
        chosen = new_id() if conversation_id is None else check_id(conversation_id)
        return Conversation(self, chosen)

    def conversations(self, timeout: float | None = None) -> Iterator[ConversationState]:
        """Iterate over all conversations of this client's tenant, the newest first.

        `timeout` is for each page that is fetched.
        """
        request = pb.ListConversationsRequest()
        for page in self.pages(lambda at: at.stub.ListConversations, request, timeout):
            for each in page.conversations:
                yield state_of(each)

    def prefix(self, prefix_id: str) -> Prefix:
        """The prefix with this `prefix_id`, whether it is declared yet or not; sends nothing."""
        return Prefix(self, check_id(prefix_id, "prefix_id"))

    def prefixes(self, timeout: float | None = None) -> Iterator[PrefixState]:
        """Iterate over the declared prefixes of this client's tenant, the oldest first.

        They are without their messages, tools and options.  `timeout` is for each page that is fetched.
        """
        request = pb.ListPrefixesRequest()
        for page in self.pages(lambda at: at.stub.ListPrefixes, request, timeout):
            for each in page.prefixes:
                yield prefix_of(each)

    @property
    def jobs(self) -> Jobs:
        """The batch jobs of this client's tenant."""
        return Jobs(self)

    def healthy(self, timeout: float | None = 5.0) -> bool:
        """Whether a daemon can be reached and accepts new turns: one of them, where there are several."""
        deadline, names = Deadline(timeout), self._connection.addresses.names
        for name in names:
            left = deadline.left()
            most = left if len(names) == 1 else min(CHECK_SECONDS, left or CHECK_SECONDS)
            error = self._connection.serves(name, most)
            if error is None:
                return True
            if not isinstance(error, Unavailable | DeadlineExceeded):
                raise error
        return False

    def server_info(self, timeout: float | None = None) -> ServerInfo:
        """Which model the daemon serves, and how; it answers also while the model is loading."""
        request = pb.GetServerInfoRequest()
        answer = self.call(lambda at: at.stub.GetServerInfo, request, timeout, repeat=True)
        return info_of(answer.server)


class Conversation:
    """A conversation on the server, named by its id; made by `Client.conversation`.

    It holds no state of its own: two objects with one id are the same conversation.  Each method that
    talks to the server takes a `timeout` in seconds, retries included; None is the client's.  `get`,
    `messages`, `warm` and `cancel`, which may safely be repeated, are retried when the server is
    unavailable, and so is a turn.  `create`, `delete`, `fork` and `rewind` are not, because the second try
    of one that had succeeded would fail.
    """

    def __init__(self, client: Client, conversation_id: str) -> None:
        self.client = client
        self.conversation_id = conversation_id

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.conversation_id!r} at {self.client.address}>"

    def create(
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
        """Create the conversation with settings that last for its life.

        Only needed for such settings: by default the first `send` creates a conversation without any.

        Args:
            system_prompt: the first message, with the role "system".
            tools: tools that the model may call, each as the JSON schema its chat template expects.
            template_options: variables for the model's chat template.
            metadata: any JSON object; the server keeps it and returns it with the state.
            prefix_id: of a declared prefix, which brings its own system prompt, tools and options; else a
                name that conversations with the same system prompt and tools share, so that their common
                beginning is computed once.
            messages: a history to begin with, behind the system prompt, as `send` takes messages, in a form
                that a user's message may follow.  It may be as long as the model's context.  No rewind
                removes it.

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
            created = self.client.call(lambda at: at.stub.CreateConversation, request, timeout)
            return state_of(created.conversation)
        imported = self.client.send_all(
            lambda at: at.stub.ImportConversation, pieces, self.conversation_id, timeout
        )
        return state_of(imported.conversation)

    def get(self, timeout: float | None = None) -> ConversationState:
        """The conversation's state: revision, sizes, metadata and times.

        Raises:
            NotFound: there is no such conversation.
        """
        request = pb.GetConversationRequest(conversation_id=self.conversation_id)
        answer = self.client.call(lambda at: at.stub.GetConversation, request, timeout, repeat=True)
        return state_of(answer.conversation)

    def delete(self, timeout: float | None = None) -> None:
        """Delete the conversation with its messages and cached state, for good.

        Raises:
            NotFound: there is no such conversation.
        """
        request = pb.DeleteConversationRequest(conversation_id=self.conversation_id)
        self.client.call(lambda at: at.stub.DeleteConversation, request, timeout)

    @explains_sampling
    def send(self, message: MessageInput, **options: Unpack[SendOptions]) -> Turn:
        """Send a message; iterate over the turn that this returns for the reply as it is generated.

        Nothing is sent before the iteration begins.  The message is a text of the user, or a list of
        messages in the form of OpenAI's API: {"role": …, "content": …, "tool_call_id": …}, for example the
        results of tools; one of the assistant may have `tool_calls` and `reasoning_content`.

        Args:
            request_id: names this message; sent again with the same id, it is answered with the same
                turn and added only once.  Random by default.
            expected_revision: refuse the message unless the conversation is at this revision.
            create_if_missing: create the conversation if it does not exist (the default).
            expected_return_seconds: when the next message is expected, as a hint for the cache.
            last_turn: no further message is expected, as a hint for the cache.
            priority: -8 to 8; a turn with a higher priority is next, and takes the place of a lower one.
            metadata: any JSON object of at most 16 KiB; `messages` returns it with what this turn sent.
            constraint: what the reply has to be: {"json_schema": schema}, {"json_object": True},
                {"regex": "…"}, {"choice": ["yes", "no"]} or {"grammar": "…"}.
            timeout: seconds for the whole turn, retries included.
            keep_partial: what stays if the turn is left before its end, by a timeout or in another way (the
                class of what this returns says which).  True keeps what was delivered of the reply, with
                the message; False keeps nothing, as if the message had never been sent.  So that the
                history is what the caller has seen, it is True here, and False for `ask`, whose
                caller sees nothing before the end.
            (and the sampling parameters)

        Raises:
            InvalidArgument: an argument cannot be right; nothing was sent.
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
        return Turn(self, course)

    def ask(self, message: MessageInput, **options: Unpack[SendOptions]) -> Reply:
        """Send a message and wait for the whole reply; takes the arguments of `send`.

        If the reply does not come to its end, because the timeout has passed or the caller is interrupted,
        the server ends the turn and nothing of it stays, unless `keep_partial` is given.  A reply that was
        complete when the timeout passed is returned all the same, a moment late.
        """
        options.setdefault("keep_partial", False)
        return self.send(message, **options).reply

    def messages(
        self,
        include_token_ids: bool = False,
        timeout: float | None = None,
        *,
        cut_replies: bool = False,
        page_size: int = PAGE_SIZE,
    ) -> Iterator[Message]:
        """Iterate over the messages of the conversation, the oldest first.

        With `include_token_ids` each message carries its exact tokens; with `cut_replies` what the model
        thought and the calls that it wrote are not in a reply's text but beside it.  `timeout` is for each
        page of `page_size` messages; a page is fetched when the iteration comes to it.
        """
        request = pb.ListMessagesRequest(
            conversation_id=self.conversation_id,
            include_token_ids=include_token_ids,
            cut_replies=cut_replies,
        )
        for page in self.client.pages(lambda at: at.stub.ListMessages, request, timeout, page_size):
            for each in page.messages:
                yield message_of(each)

    def fork(
        self,
        at_revision: int | None = None,
        *,
        conversation_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Conversation:
        """Create a second conversation with this one's history, and return it.

        Args:
            at_revision: take the history up to this revision; by default, all of it.
            conversation_id: the id of the new conversation; random by default.
            metadata: any JSON object, for the new conversation.
        """
        addresses = self.client._connection.addresses
        if conversation_id is None:
            conversation_id = addresses.id_beside(self.conversation_id)
        request = fork_request(self.conversation_id, at_revision, conversation_id, metadata)
        answer = self.client.call(lambda at: at.stub.ForkConversation, request, timeout)
        addresses.learn(conversation_id, addresses.order(self.conversation_id)[0])
        return Conversation(self.client, answer.conversation.conversation_id)

    def rewind(
        self,
        to_revision: int,
        timeout: float | None = None,
        *,
        expected_revision: int | None = None,
    ) -> ConversationState:
        """Remove all messages after `to_revision`; 0 is the beginning.  Returns the new state.

        With an `expected_revision`, nothing is removed unless the conversation is at this revision.

        Raises:
            StaleRevision: the conversation is at another revision.
        """
        request = pb.RewindConversationRequest(
            conversation_id=self.conversation_id,
            to_revision=to_revision,
            expected_revision=expected_revision,
        )
        answer = self.client.call(lambda at: at.stub.RewindConversation, request, timeout)
        return state_of(answer.conversation)

    def warm(self, timeout: float | None = None) -> None:
        """Ask the server to bring the conversation's KV to the device, ahead of its next message."""
        request = pb.WarmConversationRequest(conversation_id=self.conversation_id)
        self.client.call(lambda at: at.stub.WarmConversation, request, timeout, repeat=True)

    def cancel(self, turn_id: str = "", timeout: float | None = None) -> bool:
        """End the running turn and keep what it has generated; returns whether one was running.

        With a `turn_id` only that turn is ended.
        """
        request = pb.CancelTurnRequest(
            conversation_id=self.conversation_id, turn_id=check_text("turn_id", turn_id)
        )
        answer = self.client.call(lambda at: at.stub.CancelTurn, request, timeout, repeat=True)
        return answer.was_running


class Turn:
    """A message that is sent and its reply; made by `Conversation.send`.

    Iterate over it once for the pieces of the reply: each is a `Delta`, or a `Restarted` when the server
    had to begin the reply again.  A broken connection does not end the iteration: the turn is attached to
    again, and nothing is given out twice.  One thread at a time may iterate.

    A turn is left if it is closed, or its `with` ends, or it is dropped as by a `break` in the loop
    over `send(...)`, or its timeout passes, or an exception such as CancelledError or KeyboardInterrupt
    interrupts the wait for its next piece.  The server ends it at once: what was delivered stays in the
    history, or nothing does (`keep_partial`), and the next message may be sent.  Where nothing was delivered
    nothing stays.  Leaving waits for the server, two seconds at most; one that does not answer ends the turn
    when it notices that nobody reads, and keeps nothing of it.  A turn whose reply was complete before the
    server heard of it stays whole.

    `cancel` ends a turn too, and keeps all that was generated; the iteration goes on to the end of that.
    """

    def __init__(self, conversation: Conversation, course: TurnCourse) -> None:
        self.conversation_id = course.request.conversation_id
        self.request_id = course.request.request_id
        self._stream: Stream[pb.SendMessageResponse] | None = None  # while it is attached
        self._connection = conversation.client._connection
        self._sleep = conversation.client._sleep
        self._cancel = conversation.cancel
        self._course = course

    def __repr__(self) -> str:
        which = f"{type(self).__name__} {self.turn_id or self.request_id}"
        return f"<{which} of {self.conversation_id!r}: {self._course.standing}>"

    def __iter__(self) -> Turn:
        return self

    def __next__(self) -> Delta | Restarted:
        try:
            event = self._next()
        except (PensieveError, GeneratorExit):
            raise
        except BaseException:  # its reader was interrupted, and leaves
            self.close()
            raise
        if event is None:
            raise StopIteration
        return event

    def _next(self) -> Delta | Restarted | None:
        """The next event; None at the end."""
        course = self._course
        while course.under_way:
            error: PensieveError | None = None
            try:
                stream = self._attached()
                response = stream.read() if stream is not None else None
            except PensieveError as failure:
                error, response = failure, None
            if response is not None:
                if (event := self._take(response)) is not None:
                    return event
                continue
            self._detach()
            if error is not None and course.is_over_time(error):
                request = course.end_request()
                answer = self._connection.end_turn(request, course.route) if request else None
                course.time_is_over(error, answer)
            elif pause := course.stream_ended(error):
                self._sleep(pause)
        return None

    @property
    def turn_id(self) -> str:
        """The server's id of this turn; empty until the server has accepted it."""
        return self._course.progress.turn_id

    @property
    def reply(self) -> Reply:
        """The whole reply; iterates to the end of the turn if necessary.

        Raises:
            TurnInterrupted: the turn was left before its end; the message says what stays of it.
        """
        for _ in self:
            pass
        if (request := self._course.question()) is not None:
            self._course.was_ended(self._connection.end_turn(request, self._course.route))
        return self._course.reply

    def cancel(self) -> bool:
        """End the turn and keep what it has generated; returns whether there was something to end.

        Any thread may call it.  A turn that has not started yet is ended as soon as it does.
        """
        self._course.cancelling = True
        return self._cancel(self.turn_id) if self.turn_id else True

    def close(self) -> None:
        """Leave the turn: if it has not ended, the server ends it, and keeps what `keep_partial` says."""
        self._detach()
        if (request := self._course.leave()) is not None:
            self._course.was_ended(self._connection.end_turn(request, self._course.route))

    def __enter__(self) -> Turn:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        """It was dropped; nobody can wait for its end but the next call in this conversation."""
        self._connection.end_reading(self._course)
        if (request := self._course.leave()) is not None:
            self._connection.begin_ending(request, self._course.route)

    def _attached(self) -> Stream[pb.SendMessageResponse] | None:
        """None if another thread has closed the turn, which may have been before the request was sent."""
        if self._stream is None:
            course, connection = self._course, self._connection
            request, deadline = course.request, course.deadline
            connection.wait_for_endings(request.conversation_id, deadline)
            course.was_sent = True  # before it is: an interrupt may come in between
            self._stream = connection.stream(
                lambda at: at.stub.SendMessage, request, deadline, course.route
            )
            connection.begin_reading(course, self._stream)
            if course.was_left and (end_request := course.end_request()) is not None:
                self._detach()
                course.was_ended(connection.end_turn(end_request, course.route))
        return self._stream

    def _take(self, response: pb.SendMessageResponse) -> Delta | Restarted | None:
        try:
            event = self._course.take(response)
        except PensieveError:
            self._detach()
            raise
        if self._course.must_cancel(response):
            self._cancel(self.turn_id)
        return event

    def _detach(self) -> None:
        stream, self._stream = self._stream, None
        self._connection.end_reading(self._course)
        if stream is not None:
            stream.cancel()


class Prefix:
    """A prefix on the server, named by its id: what conversations may begin with.

    Made by `Client.prefix`.  It is tokenized once and its KV is computed once, for all conversations
    that are created with its id as their `prefix_id`:

        rules = client.prefix("rules")
        rules.create(system_prompt="Answer in one sentence.", keep_warm=True)
        client.conversation("trip-42").create(prefix_id="rules")

    It holds no state of its own.  `get`, which may safely be repeated, is retried when the server is
    unavailable; `create` and `delete` are not.
    """

    def __init__(self, client: Client, prefix_id: str) -> None:
        self._client = client
        self.prefix_id = prefix_id

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.prefix_id!r}>"

    def create(
        self,
        *,
        system_prompt: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        template_options: Mapping[str, Any] | None = None,
        messages: Sequence[Mapping[str, Any]] = (),
        keep_warm: bool = False,
        timeout: float | None = None,
    ) -> PrefixState:
        """Declare the prefix: a system prompt, tools or messages at least.

        Args:
            system_prompt: the first message, with the role "system".
            tools: tools that the model may call, each as the JSON schema its chat template expects.
            template_options: variables for the model's chat template.
            messages: few-shot turns, in the form of OpenAI's API (see `send` of a conversation), that a
                user's message may follow.
            keep_warm: have the daemon compute its KV now, and again when it was lost.
            timeout: seconds for the call; None is the client's.

        Raises:
            AlreadyExists: there is a prefix with this id.
        """
        request = prefix_request(
            self.prefix_id, system_prompt, tools, template_options, messages, keep_warm
        )
        answer = self._client.call(lambda at: at.stub.CreatePrefix, request, timeout)
        return prefix_of(answer.prefix)

    def get(self, timeout: float | None = None) -> PrefixState:
        """The prefix as it is now, with its messages, tools and options.

        `timeout` is in seconds, retries included; None is the client's.

        Raises:
            NotFound: there is no such prefix.
        """
        request = pb.GetPrefixRequest(prefix_id=self.prefix_id)
        answer = self._client.call(lambda at: at.stub.GetPrefix, request, timeout, repeat=True)
        return whole_prefix_of(answer)

    def delete(self, timeout: float | None = None) -> None:
        """Delete the prefix.  Conversations that began under it stay whole.

        `timeout` is in seconds; None is the client's.

        Raises:
            NotFound: there is no such prefix.
        """
        request = pb.DeletePrefixRequest(prefix_id=self.prefix_id)
        self._client.call(lambda at: at.stub.DeletePrefix, request, timeout)
