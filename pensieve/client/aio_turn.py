"""A turn as its reader has it, for asyncio: `AsyncTurn`, from which turn.py is generated.

What it does next is decided in turn_progress.py; how a turn that was left is ended stands in connection.py.
As in aio.py, only what reads the same for tasks and for threads may stand here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType

from pensieve.client.aio_connection import AsyncConnection, AsyncStream, Sleep
from pensieve.client.turn_progress import TurnCourse
from pensieve.client.values import Delta, Reply, Restarted
from pensieve.errors import PensieveError
from pensieve.v1 import conversation_pb2 as pb


class AsyncTurn:
    """A message that is sent and its reply; made by `AsyncConversation.send`.

    Iterate over it once for the pieces of the reply: each is a `Delta`, or a `Restarted` when the server
    had to begin the reply again.  A broken connection does not end the iteration: the turn is attached to
    again, and nothing is given out twice.  One task at a time may iterate.

    A turn is left if it is closed, or its `async with` ends, or it is dropped as by a `break` in the loop
    over `send(...)`, or its timeout passes, or an exception such as CancelledError or KeyboardInterrupt
    interrupts the wait for its next piece.  The server ends it at once: what was delivered stays in the
    history, or nothing does (`keep_partial`), and the next message may be sent.  Where nothing was delivered
    nothing stays.  Leaving waits for the server, two seconds at most; one that does not answer ends the turn
    when it notices that nobody reads, and keeps nothing of it.  A turn whose reply was complete before the
    server heard of it stays whole.

    `cancel` ends a turn too, and keeps all that was generated; the iteration goes on to the end of that.
    """

    def __init__(
        self,
        connection: AsyncConnection,
        course: TurnCourse,
        sleep: Sleep,
        cancel: Callable[[str], Awaitable[bool]],
    ) -> None:
        """`sleep` waits between tries; `cancel` is the conversation's, for a turn's id."""
        self.conversation_id = course.request.conversation_id
        self.request_id = course.request.request_id
        self._stream: AsyncStream[pb.SendMessageResponse] | None = None  # while it is attached
        self._connection = connection
        self._course = course
        self._sleep = sleep
        self._cancel = cancel

    def __repr__(self) -> str:
        which = f"{type(self).__name__} {self.turn_id or self.request_id}"
        return f"<{which} of {self.conversation_id!r}: {self._course.standing}>"

    def __aiter__(self) -> AsyncTurn:
        return self

    async def __anext__(self) -> Delta | Restarted:
        try:
            event = await self._next()
        except (PensieveError, GeneratorExit):
            raise
        except BaseException:  # its reader was interrupted, and leaves
            await self.close()
            raise
        if event is None:
            raise StopAsyncIteration
        return event

    async def _next(self) -> Delta | Restarted | None:
        """The next event; None at the end."""
        course = self._course
        while course.under_way:
            error: PensieveError | None = None
            try:
                stream = await self._attached()
                response = await stream.read() if stream is not None else None
            except PensieveError as failure:
                error, response = failure, None
            if response is not None:
                if (event := await self._take(response)) is not None:
                    return event
                continue
            self._detach()
            if error is not None and course.is_over_time(error):
                request = course.end_request()
                answer = await self._connection.end_turn(request, course.route) if request else None
                course.time_is_over(error, answer)
            elif pause := course.stream_ended(error):
                await self._sleep(pause)
        return None

    @property
    def turn_id(self) -> str:
        """The server's id of this turn; empty until the server has accepted it."""
        return self._course.progress.turn_id

    async def reply(self) -> Reply:
        """The whole reply; iterates to the end of the turn if necessary.

        Raises:
            TurnInterrupted: the turn was left before its end; the message says what stays of it.
        """
        async for _ in self:
            pass
        if (request := self._course.question()) is not None:
            self._course.was_ended(await self._connection.end_turn(request, self._course.route))
        return self._course.reply

    async def cancel(self) -> bool:
        """End the turn and keep what it has generated; returns whether there was something to end.

        Any task may call it.  A turn that has not started yet is ended as soon as it does.
        """
        self._course.cancelling = True
        return await self._cancel(self.turn_id) if self.turn_id else True

    async def close(self) -> None:
        """Leave the turn: if it has not ended, the server ends it, and keeps what `keep_partial` says."""
        self._detach()
        if (request := self._course.leave()) is not None:
            self._course.was_ended(await self._connection.end_turn(request, self._course.route))

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
        """It was dropped; nobody can wait for its end but the next call in this conversation."""
        self._connection.end_reading(self._course)
        if (request := self._course.leave()) is not None:
            self._connection.begin_ending(request, self._course.route)

    async def _attached(self) -> AsyncStream[pb.SendMessageResponse] | None:
        """None if another task has closed the turn, which may have been before the request was sent."""
        if self._stream is None:
            course, connection = self._course, self._connection
            request, deadline = course.request, course.deadline
            await connection.wait_for_endings(request.conversation_id, deadline)
            course.was_sent = True  # before it is: an interrupt may come in between
            self._stream = await connection.stream(
                lambda at: at.stub.SendMessage, request, deadline, course.route
            )
            connection.begin_reading(course, self._stream)
            if course.was_left and (end_request := course.end_request()) is not None:
                self._detach()
                course.was_ended(await connection.end_turn(end_request, course.route))
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
