"""Convert a gRPC status to the error of `pensieve.errors` that the server raised.

The server sends a reason with each error, its details, and perhaps a retry delay. The reason selects the
class in `pensieve.errors`, and the details become its attributes. If the reason is missing or unknown (an
answer of a proxy, a newer server, unreadable details), the status code selects the class. So every failure
raises a PensieveError.

If the connection breaks, no reason arrives: the stream is reset, or the status is CANCELLED although this
client has cancelled nothing. Such a failure becomes UNAVAILABLE, because the same request may succeed over a
new connection.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError

from pensieve import errors
from pensieve.client.retry import Deadline
from pensieve.v1 import status_pb2

DETAILS_KEY = "grpc-status-details-bin"
TYPE_PREFIX = "type.googleapis.com/google.rpc."
DOMAIN = "pensieve"
NO_CONNECTION = "failed to connect to all addresses"  # gRPC's message if it has sent nothing


@dataclass
class Details:
    """The google.rpc messages of a status. A missing `info` is empty; other missing messages are None."""

    info: status_pb2.ErrorInfo = field(default_factory=status_pb2.ErrorInfo)
    bad_request: status_pb2.BadRequest | None = None
    retry: status_pb2.RetryInfo | None = None


def _subclasses(root: type[errors.PensieveError]) -> Iterator[type[errors.PensieveError]]:
    for each in root.__subclasses__():
        yield each
        yield from _subclasses(each)


BY_REASON = {
    each.reason: each
    for each in _subclasses(errors.PensieveError)  # other modules may add subclasses
    if each.reason != "INTERNAL" and each.__module__ == errors.__name__
}
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
    """Return the error for a status. `timeout`: the timeout of the call, in seconds."""
    text = text or code.name
    details = _details(trailing or ())
    info = details.info
    if info.domain == DOMAIN and info.reason:
        error = _error_of_reason(code, text, details)
    else:
        error = _error_of_code(code, text, details.bad_request)
    if isinstance(error, errors.DeadlineExceeded) and timeout is not None:
        reason = f"{text}; " if info.reason else ""
        error = errors.DeadlineExceeded(f"{reason}the timeout was {timeout:g} s")
    if details.retry is not None:
        error.retry_after_seconds = max(details.retry.retry_delay.ToMilliseconds() / 1000, 0.0)
    return error


def _error_of_reason(code: grpc.StatusCode, text: str, details: Details) -> errors.PensieveError:
    """Return the error for a reason that `pensieve.errors` defines, with its attributes."""
    reason, facts = details.info.reason, dict(details.info.metadata)
    kind = BY_REASON.get(reason)
    if kind is errors.TurnRunning:
        return errors.TurnRunning(facts.get("conversation_id", ""), facts.get("turn_id", ""))
    if kind is errors.StaleRevision:
        return errors.StaleRevision(_number(facts, "expected"), _number(facts, "actual"), text)
    if kind is errors.OwnedElsewhere:
        return errors.OwnedElsewhere(
            facts.get("conversation_id", ""),
            facts.get("replica", "another daemon"),
            facts.get("address", ""),
        )
    if kind is errors.ContextFull:
        return errors.ContextFull(_number(facts, "tokens"), _number(facts, "tokens_max"))
    if kind is errors.InvalidArgument:
        return _invalid(text, details.bad_request)
    if kind is errors.QueueFull:
        full = errors.QueueFull(text)
        full.limit = facts.get("limit", "")
        return full
    if kind is not None:
        return kind(text)
    if code is grpc.StatusCode.INTERNAL and reason != "INTERNAL":
        return errors.TurnFailed(reason, text)
    return _error_of_code(code, text, details.bad_request)


def _error_of_code(
    code: grpc.StatusCode, text: str, bad: status_pb2.BadRequest | None
) -> errors.PensieveError:
    """Return the error for a status without a known reason."""
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return _invalid(text, bad)
    if "larger than max" in text and code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        if text.startswith("CLIENT: Received"):
            return errors.ServerFault(f"the server's answer is too large: {text}")
        return errors.InvalidArgument("request", f"is too large: {text}")
    if "RST_STREAM" in text and code is grpc.StatusCode.INTERNAL:
        return errors.Unavailable(text)
    if code is grpc.StatusCode.UNAVAILABLE:
        unreachable = errors.Unavailable(_why_unreachable(text))
        unreachable.may_have_arrived = not text.startswith(NO_CONNECTION)
        return unreachable
    return BY_CODE.get(code, errors.ServerFault)(text)


def _why_unreachable(text: str) -> str:
    """Return a clearer text for gRPC's message about a failed connection. Other messages are not changed."""
    if found := re.search(r"(?:errors resolving|lookup failed for) (\S+?)(?::\d+)?: ", text):
        return f"no address is known for the host name {found[1]!r} (DNS)"
    found = re.search(r"(?:ipv4|ipv6|unix):(\S+): ", text)
    if found is None:
        return text
    peer = found[1]
    if "Connection refused" in text or "No such file or directory" in text:
        return f"nothing listens at {peer}"
    if "WRONG_VERSION_NUMBER" in text:
        return f"the daemon at {peer} does not speak TLS: connect without TLS"
    if "CERTIFICATE_VERIFY_FAILED" in text:
        why = text.partition("CERTIFICATE_VERIFY_FAILED")[2].strip(": ").partition(":")[0]
        return (
            f"the certificate of {peer} is not trusted ({why}): "
            "pass its CA certificate (--tls-ca FILE, or tls=FILE in Python)"
        )
    if "Hostname Verification Check failed" in text:
        return f"the certificate of {peer} is for another host name"
    if "failed to connect" in text and re.search("Socket closed|Connection reset", text):
        return (
            f"{peer} closed the connection at once. Perhaps the daemon requires TLS (--tls) or a client "
            "certificate, or has reached its limit of connections"
        )
    return text


def _invalid(text: str, bad: status_pb2.BadRequest | None) -> errors.InvalidArgument:
    if bad is not None and bad.field_violations:
        first = bad.field_violations[0]
        return errors.InvalidArgument(first.field, first.description)
    return errors.InvalidArgument("request", text)


def _details(trailing: Iterable[tuple[str, Any]]) -> Details:
    details = Details()
    for key, value in trailing:
        if key != DETAILS_KEY or not isinstance(value, bytes):
            continue
        try:
            for each in status_pb2.Status.FromString(value).details:
                match each.type_url.removeprefix(TYPE_PREFIX):
                    case "ErrorInfo":
                        details.info = status_pb2.ErrorInfo.FromString(each.value)
                    case "BadRequest":
                        details.bad_request = status_pb2.BadRequest.FromString(each.value)
                    case "RetryInfo":
                        details.retry = status_pb2.RetryInfo.FromString(each.value)
        except DecodeError:
            return details  # the format is unknown, so only the status code is used
    return details


def _number(facts: dict[str, str], name: str) -> int:
    try:
        return int(facts.get(name, ""))
    except ValueError:
        return 0


class FailedCall(Protocol):
    """A gRPC error of either client."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...
    def trailing_metadata(self) -> Any: ...  # key-value pairs, or None


def error_of_call(failure: FailedCall, deadline: Deadline) -> errors.PensieveError:
    """Return the error for a failed call."""
    return error_of(
        failure.code(), failure.details(), failure.trailing_metadata(), deadline.seconds
    )
