"""A turn as its reader sees it, whatever happens to the connection; no socket in here.

`request_of` makes what is sent, and the same bytes are sent again after a failure: the request_id makes
that safe.  What comes then is one of three things, told apart by `started`:

* the same attempt, from its first token: what was given out already is taken off its front;
* a finished turn, replayed: likewise;
* a later attempt: everything given out is void, and the reader is told so by a `Restarted`.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from pensieve.client.values import (
    FINISH_REASONS,
    KINDS,
    ROLE_NUMBERS,
    Delta,
    Reply,
    Restarted,
    TokenLogprob,
    usage_of,
)
from pensieve.errors import InvalidArgument, ServerFault
from pensieve.v1 import conversation_pb2 as pb

Said = str | Sequence[Mapping[str, str]]


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
) -> pb.SendMessageRequest:
    """`said` is a text of the user, or messages as {"role": …, "content": …, "tool_call_id": …}."""
    request = pb.SendMessageRequest(
        conversation_id=conversation_id,
        request_id=request_id or new_id(),
        create_if_missing=create_if_missing,
        sampling=sampling_of(sampling),
        hints=pb.Hints(expected_return_seconds=expected_return_seconds, last_turn=last_turn),
    )
    if expected_revision is not None:
        request.expected_revision = expected_revision
    for message in [{"content": said}] if isinstance(said, str) else said:
        role = message.get("role", "user")
        if role not in ROLE_NUMBERS:
            raise InvalidArgument("role", f"is one of {', '.join(ROLE_NUMBERS)}, not {role!r}")
        check_text("content", message["content"])
        request.messages.add(
            role=ROLE_NUMBERS[role],
            content=message["content"],
            tool_call_id=message.get("tool_call_id", ""),
        )
    return request


def check_text(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(name, "the text has an unpaired surrogate") from None


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
        if before is None or before.attempt == started.attempt or not self._token_ids:
            return None
        self._text, self._token_ids = "", []
        return Restarted(started.attempt)

    def _add(self, delta: pb.TurnDelta) -> Delta | None:
        """The part of a delta that was not given out before."""
        known_text = min(max(len(self._text) - self._heard_text, 0), len(delta.text))
        known_tokens = min(max(len(self._token_ids) - self._heard_tokens, 0), len(delta.token_ids))
        expected = self._text[self._heard_text : self._heard_text + known_text]
        if delta.text[:known_text] != expected:
            raise ServerFault("the server told another reply under the same turn")
        self._heard_text += len(delta.text)
        self._heard_tokens += len(delta.token_ids)
        text, token_ids = delta.text[known_text:], tuple(delta.token_ids)[known_tokens:]
        self._text += text
        self._token_ids += token_ids
        if not text and not token_ids:
            return None
        logprobs = tuple(
            TokenLogprob(
                each.logprob, tuple((other.token_id, other.logprob) for other in each.alternatives)
            )
            for each in delta.logprobs[known_tokens:]
        )
        return Delta(text, token_ids, KINDS.get(delta.kind, "text"), logprobs)

    def _complete(self, completed: pb.TurnCompleted) -> None:
        started = self._started or pb.TurnStarted()
        self.reply = Reply(
            self._text,
            tuple(self._token_ids),
            FINISH_REASONS.get(completed.finish_reason, ""),
            usage_of(completed.usage),
            completed.revision,
            started.turn_id,
            started.request_id,
            started.replayed,
        )
