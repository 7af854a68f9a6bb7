"""What a turn's reader has seen, and what happens next when its connection breaks; no socket in here.

After a failure the same request is sent again, which its request_id makes safe.  The `started` event says
which of three things follows:

* the same attempt, from its first token: what the reader has seen already is cut from its front;
* the turn has finished meanwhile and is replayed: likewise;
* a later attempt: what the reader has seen is void, and a `Restarted` says so.

In the first two, the stream must repeat what the reader has seen, tokens and text, and must not end
sooner.  Otherwise the reader would hold a reply that is not in the history, so this is a ServerFault.

Retries are counted since the reply last grew longer than ever before.  A new attempt that only repeats
the beginning is no progress: it may be the turn itself that crashes the engine.

A reader that leaves on purpose has the server end the turn, and says how much of the reply it has taken:
that stays in the history, or nothing does.  Who runs out of time leaves too.  If the server answers that the
reply was complete by then, it is read to its end after all, for whoever is told that the time was over
would say it again.
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
NO_ANSWER = f"the server has not said within {END_SECONDS:g} s what stays of it"
WHAT_STAYS = {
    pb.FINISH_REASON_UNSPECIFIED: "nothing of it is in the history",
    pb.FINISH_REASON_CANCELLED: "what was delivered of it is in the history",
}
ALL_STAYS = "its whole reply is in the history"


class ReplyAccumulator:
    """What the reader has seen of one turn, and what each event of the stream adds to it."""

    def __init__(self) -> None:
        self.reply: Reply | None = None
        self.turn_id = ""
        self.furthest = 0  # tokens and characters of the longest attempt so far
        self._started: pb.TurnStarted | None = None
        self._text = ""
        self._token_ids: list[int] = []
        self._read_text = 0  # characters of the present stream so far
        self._read_tokens = 0  # and its tokens

    @property
    def num_tokens(self) -> int:
        """That the reader was given."""
        return len(self._token_ids)

    @property
    def attempt(self) -> int:
        """In which it was given them; 0 before the first."""
        return self._started.attempt if self._started is not None else 0

    def take(self, response: pb.SendMessageResponse) -> Delta | Restarted | None:
        """Add an event of the stream; returns what is new to the reader, if anything."""
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
        """The part of a delta that the reader has not seen yet."""
        text, token_ids = delta.text, list(delta.token_ids)
        known_text = self._text[self._read_text :][: len(text)]
        known_tokens = self._token_ids[self._read_tokens :][: len(token_ids)]
        if not text.startswith(known_text) or token_ids[: len(known_tokens)] != known_tokens:
            raise ServerFault("the server sent another reply under the same turn")
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
            raise ServerFault("the server sent a shorter reply under the same turn")
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
    """What a turn does next; the two clients only carry it out.

    It is under way until it has a reply, has failed, or was left.  A turn that failed raises the same
    error again each time.  A cancel is remembered over connections and attempts: whenever the turn starts,
    it is cancelled.
    """

    def __init__(
        self,
        request: pb.SendMessageRequest,
        retry: Retry,
        timeout: float | None,
        route: Route,
        keep_partial: bool = True,
    ) -> None:
        """`route` is its way to a daemon.

        `keep_partial`: what the reader was given stays in the history if it leaves before the end.
        """
        self.request = request
        self.route = route
        self.deadline = Deadline(timeout)
        self.progress = ReplyAccumulator()
        self.cancelling = False
        self.was_sent = (
            False  # or is about to be; to end what the server does not know does no harm
        )
        self._keep_partial = keep_partial
        self._tries = Tries(retry, self.deadline)
        self._failure: PensieveError | None = None
        self._left = False
        self._is_late = False  # its time is over, and its reply complete
        self._fate = ""  # of a turn that was left, once the server has said it

    @property
    def under_way(self) -> bool:
        """Whether more can be read; raises the error that the turn failed with."""
        if self._failure is not None:
            raise self._failure
        return not self._left

    @property
    def standing(self) -> str:
        """How far it is, for people."""
        if self.progress.reply is not None:
            return f"ended ({self.progress.reply.finish_reason})"
        if self._failure is not None:
            return f"failed ({type(self._failure).__name__})"
        if self._left:
            return "left"
        return f"{self.progress.num_tokens} tokens so far" if self.was_sent else "not sent yet"

    @property
    def reply(self) -> Reply:
        """The reply, once the turn has ended."""
        if self.progress.reply is None:
            fate = self._what_stays if self.was_sent else NOT_SENT
            raise TurnInterrupted(f"the turn was left before its end; {fate}")
        return self.progress.reply

    def take(self, response: pb.SendMessageResponse) -> Delta | Restarted | None:
        """Add an event of the stream; returns what is new to the reader, if anything."""
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
        """Whether this event starts a turn that was cancelled before."""
        return self.cancelling and response.HasField("started")

    def stream_ended(self, error: PensieveError | None) -> float:
        """After the stream ended, by itself or with an error: the seconds to wait before the next one."""
        if self.progress.reply is not None:
            self._left = True  # it is complete, so an error of the connection no longer matters
        if self._left:
            return 0.0
        error = error or Unavailable("the server ended the stream within the turn")
        if self.route.goes_on(error):
            return 0.0
        error = self.route.explained(error)
        try:
            pause = self._tries.pause(error)
        except PensieveError:
            self._failure = error
            raise
        self.route.begin_round()
        return pause

    # -- leaving --

    @property
    def was_left(self) -> bool:
        """Whether nobody reads it any further; another thread may have closed it."""
        return self._left

    def leave(self) -> pb.CancelTurnRequest | None:
        """Read no further; the request that ends the turn at the server, unless there is nothing to end."""
        if self._left or self._failure is not None:
            return None
        self._left = True
        return self.end_request()

    def end_request(self) -> pb.CancelTurnRequest | None:
        """What ends the turn at the server, unless it has not begun or its reply is complete."""
        if not self.was_sent or self.progress.reply is not None:
            return None
        request = pb.CancelTurnRequest(
            conversation_id=self.request.conversation_id, request_id=self.request.request_id
        )
        if not self.cancelling:  # else all that was generated stays
            request.keep_tokens = self.progress.num_tokens if self._keep_partial else 0
            request.attempt = self.progress.attempt
        return request

    def question(self) -> pb.CancelTurnRequest | None:
        """The same again for a turn that was left, unless the server has said what stays of it.

        Another thread may be about to leave it; whoever wants the reply meanwhile hears of its end, too.
        """
        return self.end_request() if self._left and not self._fate else None

    def was_ended(self, answer: pb.CancelTurnResponse | None) -> None:
        """The server has ended the turn that was left; None if it has not answered."""
        if answer is not None:
            self._fate = WHAT_STAYS.get(answer.finish_reason, ALL_STAYS)

    def is_over_time(self, error: PensieveError | None) -> bool:
        """Whether the stream ended with this error because the time is over, and not with the reply."""
        return (
            isinstance(error, DeadlineExceeded) and self.progress.reply is None and not self._left
        )

    def time_is_over(self, error: PensieveError, answer: pb.CancelTurnResponse | None) -> None:
        """The server has ended the turn, too; raises the error that says so, or reads a complete reply."""
        self.was_ended(answer)
        if answer is None:
            self.route.doubt(error)
        if self._fate == ALL_STAYS and not self._is_late:
            self._is_late = True
            self.deadline = Deadline(END_SECONDS)
            return
        self._failure = DeadlineExceeded(f"{error}; {self._what_stays}")
        raise self._failure

    @property
    def _what_stays(self) -> str:
        return self._fate or NO_ANSWER
