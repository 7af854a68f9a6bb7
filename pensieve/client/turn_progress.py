"""Decide what the reader of a turn gets, and what happens when the connection breaks.

After a failure, the client sends the same request again, with the same request_id. The `started` event then
shows one of three cases:

* The same attempt is running. Its stream begins at the first token again; the tokens that the reader has
  already received are skipped.
* The turn has finished meanwhile, and its reply is replayed. The received tokens are skipped, too.
* A later attempt is running. The received tokens are invalid, and the reader gets a `Restarted`.

In the first two cases, the stream must repeat the received tokens and text exactly. If it does not, the
reader has received a reply that is not in the history. This raises ServerFault.

The retry count is reset when the reply becomes longer than in all earlier attempts. A new attempt that only
repeats the beginning does not count as progress, because the turn itself may crash the engine each time.

A reader that stops early tells the server how much of the reply it has received. With `keep_partial`, the
history keeps this part. Without it, the history keeps nothing of the turn. A timeout also stops the turn. But
if the server answers that the reply was already complete, the client reads the rest instead of raising
DeadlineExceeded. Otherwise the caller would send a message that was already answered. This module does no
I/O.
"""

from __future__ import annotations

from pensieve.client.addresses import Route
from pensieve.client.retry import END_SECONDS, Deadline, Retry, Tries
from pensieve.client.values import (
    KINDS,
    Delta,
    Reply,
    Restarted,
    TokenLogprob,
    finish_reason_of,
    usage_of,
)
from pensieve.errors import (
    DeadlineExceeded,
    PensieveError,
    ServerFault,
    TurnInterrupted,
    Unavailable,
)
from pensieve.v1 import conversation_pb2 as pb

NOT_SENT = "it was not sent"
NO_ANSWER = f"the server did not confirm within {END_SECONDS:g} s which part is in the history"
KEPT_TEXTS = {
    pb.FINISH_REASON_UNSPECIFIED: "nothing of it is in the history",
    pb.FINISH_REASON_CANCELLED: "the delivered part of it is in the history",
}
ALL_KEPT_TEXT = "its whole reply is in the history"


class ReplyAccumulator:
    """Collects the reply of one turn and removes repeated parts."""

    def __init__(self) -> None:
        self.reply: Reply | None = None
        self.turn_id = ""
        self.furthest = 0  # tokens plus characters of the longest attempt so far
        self._started: pb.TurnStarted | None = None
        self._text = ""
        self._token_ids: list[int] = []
        self._read_text = 0  # characters read from the current stream
        self._read_tokens = 0  # tokens read from the current stream

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the reader has received."""
        return len(self._token_ids)

    @property
    def attempt(self) -> int:
        """The number of the attempt that the received tokens come from; 0 before the first attempt."""
        return self._started.attempt if self._started is not None else 0

    def take(self, response: pb.SendMessageResponse) -> Delta | Restarted | None:
        """Add an event of the stream. Return the part that is new to the reader, if any."""
        match response.WhichOneof("event"):
            case "started":
                return self._start(response.started)
            case "delta":
                return self._add(response.delta)
            case "completed":
                self._complete(response.completed)
        return None

    def _start(self, started: pb.TurnStarted) -> Restarted | None:
        before, self._started = self._started, started
        self.turn_id = started.turn_id
        self._read_text = self._read_tokens = 0
        same = before is not None and (before.turn_id, before.attempt) == (
            started.turn_id,
            started.attempt,
        )
        if same or not (self._text or self._token_ids):
            return None
        self._text, self._token_ids = "", []
        return Restarted(started.attempt)

    def _add(self, delta: pb.TurnDelta) -> Delta | None:
        """Return the part of a delta that the reader has not seen yet."""
        text, token_ids = delta.text, list(delta.token_ids)
        known_text = self._text[self._read_text :][: len(text)]
        known_tokens = self._token_ids[self._read_tokens :][: len(token_ids)]
        if not text.startswith(known_text) or token_ids[: len(known_tokens)] != known_tokens:
            raise ServerFault("the server sent a different reply for the same turn")
        self._read_text += len(text)
        self._read_tokens += len(token_ids)
        text, token_ids = text[len(known_text) :], token_ids[len(known_tokens) :]
        if not text and not token_ids:
            return None
        self._text += text
        self._token_ids += token_ids
        self.furthest = max(self.furthest, len(self._text) + len(self._token_ids))
        logprobs = tuple(
            TokenLogprob(
                each.logprob, tuple((other.token_id, other.logprob) for other in each.alternatives)
            )
            for each in delta.logprobs[len(known_tokens) :]
        )
        return Delta(text, tuple(token_ids), KINDS.get(delta.kind, "unknown"), logprobs)

    def _complete(self, completed: pb.TurnCompleted) -> None:
        if (self._read_text, self._read_tokens) != (len(self._text), len(self._token_ids)):
            raise ServerFault("the server sent a shorter reply for the same turn")
        started = self._started or pb.TurnStarted()
        self.reply = Reply(
            self._text,
            tuple(self._token_ids),
            finish_reason_of(completed.finish_reason),
            usage_of(completed.usage),
            completed.revision,
            started.turn_id,
            started.request_id,
            started.replayed,
        )


class TurnCourse:
    """Decides what a turn does next. The sync and the asyncio client carry out the decision.

    A turn is under way until it has a reply, has failed, or was stopped by its reader. A failed turn raises
    the same error each time. If `cancel` is called before the turn starts, the turn is cancelled when it
    starts, even over a new connection or in a new attempt.
    """

    def __init__(
        self,
        request: pb.SendMessageRequest,
        retry: Retry,
        timeout: float | None,
        route: Route,
        keep_partial: bool = True,
    ) -> None:
        """`keep_partial`: if the reader stops early, the history keeps the delivered part of the reply."""
        self.request = request
        self.route = route
        self.deadline = Deadline(timeout)
        self.progress = ReplyAccumulator()
        self.cancelling = False
        # Set just before the request is sent. Stopping a turn that the server does not know is harmless.
        self.was_sent = False
        self._keep_partial = keep_partial
        self._tries = Tries(retry, self.deadline)
        self._failure: PensieveError | None = None
        self._reader_stopped = False
        self._is_late = False  # the turn has timed out, but its reply was complete
        # What the history keeps of a stopped turn; empty until the server has answered.
        self._kept_text = ""

    @property
    def under_way(self) -> bool:
        """Whether more can be read. Raises the error that the turn failed with."""
        if self._failure is not None:
            raise self._failure
        return not self._reader_stopped

    @property
    def status_text(self) -> str:
        """The progress of the turn, as readable text."""
        if self.progress.reply is not None:
            return f"ended ({self.progress.reply.finish_reason})"
        if self._failure is not None:
            return f"failed ({type(self._failure).__name__})"
        if self._reader_stopped:
            return "stopped"
        return f"{self.progress.num_tokens} tokens so far" if self.was_sent else "not sent yet"

    @property
    def reply(self) -> Reply:
        """The reply, once the turn has ended. Raises TurnInterrupted if the turn was stopped early."""
        if self.progress.reply is None:
            kept_text = self._kept_text_or_unknown if self.was_sent else NOT_SENT
            raise TurnInterrupted(f"the turn was stopped before its end; {kept_text}")
        return self.progress.reply

    def take(self, response: pb.SendMessageResponse) -> Delta | Restarted | None:
        """Add an event of the stream. Return the part that is new to the reader, if any."""
        before = self.progress.furthest
        try:
            event = self.progress.take(response)
        except PensieveError as error:
            self._failure = error
            raise
        if self.progress.furthest > before:
            self._tries.made_progress()
        return event

    def must_cancel(self, response: pb.SendMessageResponse) -> bool:
        """Return whether this event starts a turn that was already cancelled."""
        return self.cancelling and response.HasField("started")

    def stream_ended(self, error: PensieveError | None) -> float:
        """Return the seconds to wait before reconnecting, after the stream ended, perhaps with `error`."""
        if self.progress.reply is not None:
            # The reply is complete, so an error of the connection does not matter.
            self._reader_stopped = True
        if self._reader_stopped:
            return 0.0
        error = error or Unavailable("the server ended the stream before the end of the turn")
        if self.route.try_next_address(error):
            return 0.0
        error = self.route.explained(error)
        try:
            pause = self._tries.pause(error)
        except PensieveError:
            self._failure = error
            raise
        self.route.begin_round()
        return pause

    # -- stopping early --

    @property
    def reader_stopped(self) -> bool:
        """Whether nothing more is read: the reply is complete, or the turn was closed (by any thread)."""
        return self._reader_stopped

    def leave(self) -> pb.CancelTurnRequest | None:
        """Stop reading. Return the request that stops the turn, or None if there is nothing to stop."""
        if self._reader_stopped or self._failure is not None:
            return None
        self._reader_stopped = True
        return self.end_request()

    def end_request(self) -> pb.CancelTurnRequest | None:
        """Return the request that stops the turn; None if the turn was not sent or its reply is complete."""
        if not self.was_sent or self.progress.reply is not None:
            return None
        request = pb.CancelTurnRequest(
            conversation_id=self.request.conversation_id, request_id=self.request.request_id
        )
        if not self.cancelling:  # a cancel keeps all generated text
            request.keep_tokens = self.progress.num_tokens if self._keep_partial else 0
            request.attempt = self.progress.attempt
        return request

    def repeated_end_request(self) -> pb.CancelTurnRequest | None:
        """Return a request that stops the turn again, if the server has not yet said what the history keeps.

        Another thread may be stopping the turn while this thread waits for the reply. Both threads must learn
        what the history keeps.
        """
        return self.end_request() if self._reader_stopped and not self._kept_text else None

    def note_end_answer(self, answer: pb.CancelTurnResponse | None) -> None:
        """Note the server's answer to the request that stops the turn. None: the server did not answer."""
        if answer is not None:
            self._kept_text = KEPT_TEXTS.get(answer.finish_reason, ALL_KEPT_TEXT)

    def has_timed_out(self, error: PensieveError | None) -> bool:
        """Return whether the stream ended with a timeout before the reply was complete."""
        return (
            isinstance(error, DeadlineExceeded)
            and self.progress.reply is None
            and not self._reader_stopped
        )

    def finish_after_timeout(
        self, error: PensieveError, answer: pb.CancelTurnResponse | None
    ) -> None:
        """Raise DeadlineExceeded. Return instead if the server says that the reply is complete."""
        self.note_end_answer(answer)
        if answer is None:
            self.route.doubt(error)
        if self._kept_text == ALL_KEPT_TEXT and not self._is_late:
            self._is_late = True
            self.deadline = Deadline(END_SECONDS)
            return
        self._failure = DeadlineExceeded(f"{error}; {self._kept_text_or_unknown}")
        raise self._failure

    @property
    def _kept_text_or_unknown(self) -> str:
        return self._kept_text or NO_ANSWER
