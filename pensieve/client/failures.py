"""From a status on the wire back to an error of the tree, and whether to try again.

The server says with each error a reason, what names its cause, and perhaps when to come back.  A reason
of our tree becomes that class again, attributes included.  Everything else (a proxy's answer, a newer
server's reason, bytes that are no details at all) becomes the class of its code, so that whatever comes
in, what goes out is a PensieveError.

A call that something between here and the server cut off (CANCELLED, which nobody here asked for; a
reset stream) is told apart from an error of the server by the missing reason, and is UNAVAILABLE: the
same request may succeed over the next connection.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from pensieve import errors
from pensieve.v1 import status_pb2

DETAILS_KEY = "grpc-status-details-bin"
TYPE_PREFIX = "type.googleapis.com/google.rpc."
DOMAIN = "pensieve"


def _tree(root: type[errors.PensieveError]) -> Iterator[type[errors.PensieveError]]:
    for each in root.__subclasses__():
        yield each
        yield from _tree(each)


BY_REASON = {each.reason: each for each in _tree(errors.PensieveError) if each.reason != "INTERNAL"}
BY_CODE: dict[grpc.StatusCode, type[errors.PensieveError]] = {
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.ALREADY_EXISTS: errors.AlreadyExists,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.CANCELLED: errors.Unavailable,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.QueueFull,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDenied,
    grpc.StatusCode.ABORTED: errors.TurnInterrupted,
}


def error_of(
    code: grpc.StatusCode,
    text: str | None,
    trailing: Iterable[tuple[str, Any]] | None,
    timeout: float | None = None,
) -> errors.PensieveError:
    """The error that a status stands for; `timeout` is what the call was given, in seconds."""
    text = text or code.name
    found = _details(trailing or ())
    info: status_pb2.ErrorInfo = found.get("ErrorInfo", status_pb2.ErrorInfo())
    if info.domain == DOMAIN and info.reason:
        error = _ours(code, text, info.reason, dict(info.metadata), found.get("BadRequest"))
    else:
        error = _foreign(code, text, found.get("BadRequest"))
    if isinstance(error, errors.DeadlineExceeded) and timeout is not None:
        told = f"{text}; " if info.reason else ""
        error = errors.DeadlineExceeded(f"{told}the timeout was {timeout:g} s")
    retry = found.get("RetryInfo")
    if retry is not None:
        error.retry_after_seconds = max(retry.retry_delay.ToMilliseconds() / 1000, 0.0)
    return error


def _ours(
    code: grpc.StatusCode, text: str, reason: str, causes: dict[str, str], bad: Any
) -> errors.PensieveError:
    kind = BY_REASON.get(reason)
    if kind is errors.TurnRunning:
        return errors.TurnRunning(causes.get("conversation_id", ""), causes.get("turn_id", ""))
    if kind is errors.StaleRevision:
        return errors.StaleRevision(_whole(causes, "expected"), _whole(causes, "actual"))
    if kind is errors.ContextFull:
        return errors.ContextFull(_whole(causes, "tokens"), _whole(causes, "tokens_max"))
    if kind is errors.InvalidArgument:
        return _invalid(text, bad)
    if kind is not None:
        return kind(text)
    if code is grpc.StatusCode.INTERNAL and reason != "INTERNAL":
        return errors.TurnFailed(reason, text)
    return _foreign(code, text, bad)


def _foreign(code: grpc.StatusCode, text: str, bad: Any) -> errors.PensieveError:
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return _invalid(text, bad)
    if "larger than max" in text and code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        if text.startswith("CLIENT: Received"):
            return errors.ServerFault(f"the server's answer is too large: {text}")
        return errors.InvalidArgument("request", f"is too large: {text}")
    if "RST_STREAM" in text and code is grpc.StatusCode.INTERNAL:
        return errors.Unavailable(text)
    return BY_CODE.get(code, errors.ServerFault)(text)


def _invalid(text: str, bad: Any) -> errors.InvalidArgument:
    if bad is not None and bad.field_violations:
        first = bad.field_violations[0]
        return errors.InvalidArgument(first.field, first.description)
    return errors.InvalidArgument("request", text)


def _details(trailing: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    kinds: dict[str, Any] = {
        "ErrorInfo": status_pb2.ErrorInfo,
        "BadRequest": status_pb2.BadRequest,
        "RetryInfo": status_pb2.RetryInfo,
    }
    found: dict[str, Any] = {}
    for key, value in trailing:
        if key != DETAILS_KEY or not isinstance(value, bytes):
            continue
        try:
            for detail in status_pb2.Status.FromString(value).details:
                name = detail.type_url.removeprefix(TYPE_PREFIX)
                if name in kinds:
                    found[name] = kinds[name].FromString(detail.value)
        except DecodeError:
            return found  # somebody else's bytes; the code still speaks
    return found


def _whole(causes: dict[str, str], name: str) -> int:
    try:
        return int(causes.get(name, ""))
    except ValueError:
        return 0


@dataclass(frozen=True)
class Retry:
    """How often and how long to wait before the same request is sent again.

    Only what may succeed without anybody's doing is tried again: UNAVAILABLE, and a full queue that says
    when to come back.  The pause grows from `first_seconds` to `most_seconds`, with jitter, and is at
    least what the server asks for.
    """

    retries: int = 8
    first_seconds: float = 0.1
    most_seconds: float = 10.0
    drawn: Callable[[], float] = field(default=random.random)

    def pause(
        self, error: errors.PensieveError, num_tries: int, left: float | None
    ) -> float | None:
        """Seconds to wait before another try; None: give up."""
        worthwhile = isinstance(error, errors.Unavailable) or (
            isinstance(error, errors.QueueFull) and error.retry_after_seconds is not None
        )
        if not worthwhile or num_tries > self.retries:
            return None
        grown = min(self.first_seconds * 2 ** (num_tries - 1), self.most_seconds)
        pause = max(grown * (0.5 + self.drawn() / 2), error.retry_after_seconds or 0.0)
        return None if left is not None and pause >= left else pause


class Deadline:
    """Seconds that shrink from the first time somebody asks; None never ends."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        if seconds is not None and not seconds > 0:
            raise errors.InvalidArgument(
                "timeout", f"is a number of seconds above 0, not {seconds}"
            )
        self.seconds = seconds
        self._clock = clock
        self._end: float | None = None

    def left(self) -> float | None:
        if self.seconds is None:
            return None
        if self._end is None:
            self._end = self._clock() + self.seconds
        return max(self._end - self._clock(), 0.0)


class Tries:
    """How often one request failed since it last got further."""

    def __init__(self, retry: Retry, deadline: Deadline) -> None:
        self._retry = retry
        self._deadline = deadline
        self._num_tries = 0

    def pause(self, error: errors.PensieveError) -> float:
        """After a failure: seconds to wait before the next try.  Raises the error if there is none."""
        self._num_tries += 1
        pause = self._retry.pause(error, self._num_tries, self._deadline.left())
        if pause is None:
            raise error
        return pause

    def got_further(self) -> None:
        self._num_tries = 0


def failed(call: Any, deadline: Deadline) -> errors.PensieveError:
    """The error that a call of either client ended with."""
    return error_of(call.code(), call.details(), call.trailing_metadata(), deadline.seconds)
