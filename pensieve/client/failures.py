"""From a status on the wire back to an error of the tree, and whether to try again.

The server says with each error a reason, what names its cause, and perhaps when to come back.  A reason
of our tree becomes that class again, attributes included; whatever else comes (a proxy's UNAVAILABLE, a
newer server's reason) becomes the class of its code.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from pensieve import errors
from pensieve.v1 import status_pb2

DETAILS_KEY = "grpc-status-details-bin"
TYPE_PREFIX = "type.googleapis.com/google.rpc."


def _tree(root: type[errors.PensieveError]) -> Iterator[type[errors.PensieveError]]:
    for each in root.__subclasses__():
        yield each
        yield from _tree(each)


BY_REASON = {each.reason: each for each in _tree(errors.PensieveError) if each.reason != "INTERNAL"}
BY_CODE: dict[grpc.StatusCode, type[errors.PensieveError]] = {
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.ALREADY_EXISTS: errors.AlreadyExists,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.QueueFull,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDenied,
    grpc.StatusCode.CANCELLED: errors.TurnInterrupted,
    grpc.StatusCode.ABORTED: errors.TurnInterrupted,
}


def error_of(
    code: grpc.StatusCode, text: str | None, trailing: Iterable[tuple[str, Any]] | None
) -> errors.PensieveError:
    text = text or code.name
    found = _details(trailing or ())
    info: status_pb2.ErrorInfo = found.get("ErrorInfo", status_pb2.ErrorInfo())
    error = _made(code, text, info.reason, dict(info.metadata), found.get("BadRequest"))
    retry = found.get("RetryInfo")
    if retry is not None:
        error.retry_after_seconds = retry.retry_delay.ToMilliseconds() / 1000
    return error


def _made(
    code: grpc.StatusCode, text: str, reason: str, causes: dict[str, str], bad: Any
) -> errors.PensieveError:
    kind = BY_REASON.get(reason)
    if kind is errors.TurnRunning:
        return errors.TurnRunning(causes.get("conversation_id", ""), causes.get("turn_id", ""))
    if kind is errors.StaleRevision:
        return errors.StaleRevision(_whole(causes, "expected"), _whole(causes, "actual"))
    if kind is errors.ContextFull:
        return errors.ContextFull(_whole(causes, "tokens"), _whole(causes, "tokens_max"))
    if kind is errors.InvalidArgument or (
        kind is None and code is grpc.StatusCode.INVALID_ARGUMENT
    ):
        if bad is not None and bad.field_violations:
            first = bad.field_violations[0]
            return errors.InvalidArgument(first.field, first.description)
        return errors.InvalidArgument("request", text)
    if kind is not None and kind is not errors.TurnFailed:
        return kind(text)
    if reason and code is grpc.StatusCode.INTERNAL and reason != "INTERNAL":
        return errors.TurnFailed(reason, text)
    return BY_CODE.get(code, errors.ServerFault)(text)


def _details(trailing: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    kinds: dict[str, Any] = {
        "ErrorInfo": status_pb2.ErrorInfo,
        "BadRequest": status_pb2.BadRequest,
        "RetryInfo": status_pb2.RetryInfo,
    }
    found: dict[str, Any] = {}
    for key, value in trailing:
        if key == DETAILS_KEY and isinstance(value, bytes):
            for detail in status_pb2.Status.FromString(value).details:
                name = detail.type_url.removeprefix(TYPE_PREFIX)
                if name in kinds:
                    found[name] = kinds[name].FromString(detail.value)
    return found


def _whole(causes: dict[str, str], name: str) -> int:
    text = causes.get(name, "")
    return int(text) if text.lstrip("-").isdigit() else 0


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
