"""A turn as its reader sees it, whatever happens to the connection; no socket in here.

`request_of` makes what is sent, and the same bytes are sent again after a failure: the request_id makes
that safe.  What comes then is one of three things, told apart by `started`:

* the same attempt, from its first token: what was given out already is taken off its front;
* a finished turn, replayed: likewise;
* a later attempt: everything given out is void, and the reader is told so by a `Restarted`.

In the first two what is told again must be what was told before, tokens and text, and the end must not
come sooner; else the reader would hold a reply that is in nobody's history, and that is a fault.

A turn whose failures repeat without one token more than ever before is given up after the retries, even
if each new attempt tells its beginning again: it may be the turn itself that kills the engine.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from pensieve.client.failures import Deadline, Retry, Tries
from pensieve.client.values import (
    KINDS,
    ROLE_NUMBERS,
    Delta,
    Reply,
    Restarted,
    TokenLogprob,
    finish_reason_of,
    usage_of,
)
from pensieve.errors import (
    InvalidArgument,
    PensieveError,
    ServerFault,
    TurnInterrupted,
    Unavailable,
)
from pensieve.v1 import conversation_pb2 as pb

Said = str | Sequence[Mapping[str, str]]
ID_PATTERN = re.compile(r"[A-Za-z0-9._~-]{1,128}")
MESSAGE_KEYS = ("role", "content", "tool_call_id")


class SamplingOptions(TypedDict, total=False):
    """How the tokens of a reply are chosen; what is left out or None comes from the model's defaults."""

    temperature: float | None  # 0 is greedy
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    logprobs: int | None  # how many alternatives beside each token's own
    logit_bias: Mapping[int, float] | None


class SendOptions(SamplingOptions, total=False):
    """Everything that can be said beside a message."""

    request_id: str | None
    expected_revision: int | None
    create_if_missing: bool
    expected_return_seconds: float
    last_turn: bool
    priority: int
    timeout: float | None


PRIORITY_MAX = 8


def new_id() -> str:
    return uuid.uuid4().hex


def request_of(
    conversation_id: str,
    said: Said,
    *,
    request_id: str | None,
    expected_revision: int | None,
    create_if_missing: bool,
    sampling: Mapping[str, Any],
    expected_return_seconds: float = 0.0,
    last_turn: bool = False,
    priority: int = 0,
) -> pb.SendMessageRequest:
    """`said` is a text of the user, or messages as {"role": …, "content": …, "tool_call_id": …}."""
    if not isinstance(priority, int) or abs(priority) > PRIORITY_MAX:
        raise InvalidArgument("priority", f"is a whole number in -{PRIORITY_MAX}..{PRIORITY_MAX}")
    request = pb.SendMessageRequest(
        conversation_id=check_id(conversation_id),
        request_id=check_text("request_id", request_id or new_id()),
        create_if_missing=create_if_missing,
        sampling=sampling_of(sampling),
        hints=pb.Hints(expected_return_seconds=expected_return_seconds, last_turn=last_turn),
        priority=priority,
    )
    if expected_revision is not None:
        request.expected_revision = expected_revision
    if isinstance(said, bytes | Mapping) or not isinstance(said, Sequence):
        raise InvalidArgument("messages", "is a text, or a list of messages")
    for message in [{"content": said}] if isinstance(said, str) else said:
        _add_message(request, message)
    return request


def _add_message(request: pb.SendMessageRequest, message: Mapping[str, str]) -> None:
    if not isinstance(message, Mapping) or "content" not in message:
        raise InvalidArgument("messages", f"each is a mapping of {', '.join(MESSAGE_KEYS)}")
    for key in message:
        if key not in MESSAGE_KEYS:
            raise InvalidArgument("messages", f"{key!r} is none of {', '.join(MESSAGE_KEYS)}")
    role = message.get("role", "user")
    if role not in ROLE_NUMBERS:
        raise InvalidArgument("role", f"is one of {', '.join(ROLE_NUMBERS)}, not {role!r}")
    request.messages.add(
        role=ROLE_NUMBERS[role],
        content=check_text("content", message["content"]),
        tool_call_id=check_text("tool_call_id", message.get("tool_call_id", "")),
    )


def check_text(name: str, text: str) -> str:
    """Any text that UTF-8 can carry; NUL is text like any other."""
    if not isinstance(text, str):
        raise InvalidArgument(name, f"is a text, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(name, "the text has an unpaired surrogate") from None
    return text


def check_id(conversation_id: str) -> str:
    """An id that a conversation can have; the server knows no others."""
    if not isinstance(conversation_id, str) or not ID_PATTERN.fullmatch(conversation_id):
        raise InvalidArgument("conversation_id", "must be 1 to 128 of A-Z a-z 0-9 . _ ~ -")
    return conversation_id


def sampling_of(given: Mapping[str, Any]) -> pb.Sampling:
    """Fields of api.md's sampling by name; None means not given."""
    sampling = pb.Sampling()
    known = {field.name for field in pb.Sampling.DESCRIPTOR.fields}
    for name, value in given.items():
        if name not in known:
            raise InvalidArgument(name, "is not a field of sampling")
        if value is None:
            continue
        try:
            if name in ("stop", "stop_token_ids"):
                getattr(sampling, name).extend([value] if isinstance(value, str) else value)
            elif name == "logit_bias":
                sampling.logit_bias.update(value)
            else:
                setattr(sampling, name, value)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(name, str(error)) from None
    return sampling


class TurnProgress:
    """What has been given out of one turn, and what an event adds to it."""

    def __init__(self) -> None:
        self.reply: Reply | None = None
        self.turn_id = ""
        self.furthest = 0  # the most that any attempt has told, tokens and characters
        self._started: pb.TurnStarted | None = None
        self._text = ""
        self._token_ids: list[int] = []
        self._heard_text = 0  # of the present stream, from its beginning
        self._heard_tokens = 0

    def take(self, response: pb.SendMessageResponse) -> Delta | Restarted | None:
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
        self._heard_text = self._heard_tokens = 0
        same = before is not None and (before.turn_id, before.attempt) == (
            started.turn_id,
            started.attempt,
        )
        if same or not (self._text or self._token_ids):
            return None
        self._text, self._token_ids = "", []
        return Restarted(started.attempt)

    def _add(self, delta: pb.TurnDelta) -> Delta | None:
        """The part of a delta that was not given out before."""
        text, token_ids = delta.text, list(delta.token_ids)
        known_text = self._text[self._heard_text :][: len(text)]
        known_tokens = self._token_ids[self._heard_tokens :][: len(token_ids)]
        if not text.startswith(known_text) or token_ids[: len(known_tokens)] != known_tokens:
            raise ServerFault("the server told another reply under the same turn")
        self._heard_text += len(text)
        self._heard_tokens += len(token_ids)
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
        if (self._heard_text, self._heard_tokens) != (len(self._text), len(self._token_ids)):
            raise ServerFault("the server told a shorter reply under the same turn")
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

    It is under way until it has a reply, a failure, or was left.  A failure is told again to whoever asks
    again.  A wish to cancel outlives connections and attempts: it is sent whenever the turn starts.
    """

    def __init__(self, request: pb.SendMessageRequest, retry: Retry, timeout: float | None) -> None:
        self.request = request
        self.deadline = Deadline(timeout)
        self.progress = TurnProgress()
        self.cancelling = False
        self._tries = Tries(retry, self.deadline)
        self._failure: PensieveError | None = None
        self._left = False

    @property
    def under_way(self) -> bool:
        """Whether there is more to hear; raises what it failed with."""
        if self._failure is not None:
            raise self._failure
        return not self._left

    @property
    def reply(self) -> Reply:
        """Once it is over."""
        if self.progress.reply is None:
            raise TurnInterrupted("the turn was left before its end")
        return self.progress.reply

    def heard(self, response: pb.SendMessageResponse) -> Delta | Restarted | None:
        before = self.progress.furthest
        try:
            event = self.progress.take(response)
        except PensieveError as error:
            self._failure = error
            raise
        if self.progress.furthest > before:
            self._tries.got_further()
        return event

    def must_cancel(self, response: pb.SendMessageResponse) -> bool:
        """Whether the turn that just started is one that nobody wants any more."""
        return self.cancelling and response.HasField("started")

    def broke_off(self, error: PensieveError | None) -> float:
        """The stream has ended, with an error or by itself: seconds until it is asked for again."""
        if self.progress.reply is not None:
            self.leave()  # everything has been said; what the connection does now is its own affair
        if self._left:
            return 0.0
        error = error or Unavailable("the server ended the stream within the turn")
        try:
            return self._tries.pause(error)
        except PensieveError:
            self._failure = error
            raise

    def leave(self) -> None:
        self._left = True
