"""Errors as bodies of Anthropic's API: their type follows from the status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(
    status: int, message: str, details: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What is in no line of the table is an error of ours."""
    error = {"type": TYPES.get(status, "api_error"), "message": message}
    return {"type": "error", "error": error | ({"details": details} if details else {})}
