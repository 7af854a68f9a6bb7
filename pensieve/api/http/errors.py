"""Map PensieveErrors to HTTP statuses and to error bodies of OpenAI's API."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from pensieve import errors
from pensieve.api.http.exchange import BodyTooLarge, PackedBody
from pensieve.api.json_fields import Refusal
from pensieve.guard.client_errors import client_text, retry_seconds


class UnservedEndpoint(errors.NotFound):
    """The endpoint exists in other servers, but not in this server."""


class ErrorShape(NamedTuple):
    status: int
    type: str
    code: str | None


# The first matching class is used.
SHAPES: tuple[tuple[type[errors.PensieveError], ErrorShape], ...] = (
    (BodyTooLarge, ErrorShape(413, "invalid_request_error", "request_too_large")),
    (PackedBody, ErrorShape(415, "invalid_request_error", "unsupported_encoding")),
    (errors.InvalidArgument, ErrorShape(400, "invalid_request_error", "invalid_value")),
    (UnservedEndpoint, ErrorShape(404, "invalid_request_error", "unsupported_endpoint")),
    (errors.NotFound, ErrorShape(404, "invalid_request_error", "not_found")),
    (errors.AlreadyExists, ErrorShape(409, "invalid_request_error", "already_exists")),
    (errors.TurnRunning, ErrorShape(409, "invalid_request_error", "turn_running")),
    (errors.StaleRevision, ErrorShape(409, "invalid_request_error", "stale_revision")),
    (errors.WrongJobState, ErrorShape(409, "invalid_request_error", "wrong_state")),
    (errors.ContextFull, ErrorShape(400, "invalid_request_error", "context_length_exceeded")),
    (errors.QueueFull, ErrorShape(429, "rate_limit_error", "rate_limit_exceeded")),
    (errors.StorageFull, ErrorShape(429, "insufficient_quota", "insufficient_quota")),
    (errors.DeadlineExceeded, ErrorShape(408, "timeout_error", "timeout")),
    (errors.Unauthenticated, ErrorShape(401, "authentication_error", "invalid_api_key")),
    (errors.PermissionDenied, ErrorShape(403, "permission_error", "permission_denied")),
    (errors.DiskFull, ErrorShape(507, "server_error", "disk_full")),
    (errors.Unavailable, ErrorShape(503, "server_error", "unavailable")),
    (errors.TurnInterrupted, ErrorShape(409, "server_error", "turn_interrupted")),
)
OTHER = ErrorShape(500, "server_error", "internal_error")
STATUS_OF_CODES = {"model_not_found": 404, "previous_response_not_found": 404}


def shape_of(error: errors.PensieveError) -> ErrorShape:
    found = next((shape for kind, shape in SHAPES if isinstance(error, kind)), OTHER)
    if isinstance(error, Refusal):
        return ErrorShape(STATUS_OF_CODES.get(error.code, found.status), found.type, error.code)
    if isinstance(error, errors.TurnFailed):
        return ErrorShape(found.status, found.type, error.reason.lower())
    return found


def body_of(error: errors.PensieveError) -> dict[str, Any]:
    shape = shape_of(error)
    param = error.field if isinstance(error, errors.InvalidArgument) else None
    return {
        "error": {
            "message": client_text(error),
            "type": shape.type,
            "param": param,
            "code": shape.code,
        }
    }


def retry_after(error: errors.PensieveError) -> dict[str, str]:
    """Return headers that say when to retry: in whole seconds, and in milliseconds for OpenAI's clients."""
    if (seconds := retry_seconds(error)) is None:
        return {}
    return {
        "retry-after": str(max(1, math.ceil(seconds))),
        "retry-after-ms": str(max(1, math.ceil(seconds * 1000))),
    }
