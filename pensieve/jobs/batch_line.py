"""Read a line of an OpenAI Batch file, and write the lines that answer it.

    {"custom_id": "a-1", "method": "POST", "url": "/v1/chat/completions", "body": {…}}

    answered   {"id": …, "custom_id": "a-1", "error": null,
                "response": {"status_code": 200, …, "body": {…}}}
    refused    {"id": …, "custom_id": "a-1", "response": null,
                "error": {"code", "message", "param", "line"}}

Lines are numbered from 1. Each line is read on its own; the worker finds duplicate custom_ids. Other
members of a line are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from pensieve.api.json_fields import Fields, Refusal, quoted, read_json
from pensieve.api.openai.request import ParsedRequest, RequestKind, Served, parse
from pensieve.errors import ContextFull, InvalidArgument, PensieveError, shortened
from pensieve.text.message import plain_text

LINE_BYTES_MAX = 8 << 20
CUSTOM_ID_CHARACTERS_MAX = 512
PARAM_CHARACTERS_MAX = 200
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class BatchLine:
    line: int
    custom_id: str
    request: ParsedRequest


class LineError(NamedTuple):
    line: int
    custom_id: str | None  # None if it could not be read
    code: str
    message: str
    param: str | None = None


def read_line(
    number: int, text: bytes, served: Served, endpoint: str = ""
) -> BatchLine | LineError | None:
    """Read a line; None if it is blank. `endpoint`: the only url that the job allows, or empty."""
    if number == 1:
        text = text.removeprefix(BYTE_ORDER_MARK)
    if not text.strip():
        return None
    custom_id: str | None = None
    path = ""
    try:
        if len(text) > LINE_BYTES_MAX:
            raise Refusal("line", f"has more than {LINE_BYTES_MAX:,} bytes", "line_too_large")
        fields = Fields(read_json(text, "line"), "line")
        custom_id = _custom_id(fields)
        kind = _kind(fields, endpoint)
        body = fields.take("body")
        if body is None:
            raise Refusal("body", "is required", "missing_required_parameter")
        path = "body"
        request = parse(kind, body, served)
        _check_batch(request)
    except InvalidArgument as error:
        return _from_invalid_argument(number, custom_id, error, path)
    return BatchLine(number, custom_id, request)


def error_of_request(batch_line: BatchLine, error: PensieveError) -> LineError:
    """Describe why a valid request cannot be answered: template, tokenizer, context or engine."""
    line, custom_id, request = batch_line.line, batch_line.custom_id, batch_line.request
    if isinstance(error, InvalidArgument):
        refusal = Refusal(request.param(error.field), error.problem)
        return _from_invalid_argument(line, custom_id, refusal, "body")
    if isinstance(error, ContextFull):
        limit = f"the limit is {error.tokens_max:,}"
        refusal = Refusal(
            request.param("messages"),
            f"needs a context of {error.tokens:,} tokens, but {limit}",
            "context_length_exceeded",
        )
        return _from_invalid_argument(line, custom_id, refusal, "body")
    return LineError(line, custom_id, error.reason.lower(), shortened(str(error)))


def answer_line(
    line_id: str, custom_id: str, body: dict[str, Any], request_id: str = ""
) -> dict[str, Any]:
    return {
        "id": f"batch_req_{line_id}",
        "custom_id": custom_id,
        "response": {"status_code": 200, "request_id": request_id or line_id, "body": body},
        "error": None,
    }


def error_line_json(line_id: str, error: LineError) -> dict[str, Any]:
    return {
        "id": f"batch_req_{line_id}",
        "custom_id": error.custom_id,
        "response": None,
        "error": {
            "code": error.code,
            "message": error.message,
            "param": error.param,
            "line": error.line,
        },
    }


def _custom_id(fields: Fields) -> str:
    found = _needed(fields, "custom_id")
    if not 1 <= len(found) <= CUSTOM_ID_CHARACTERS_MAX:
        raise Refusal("custom_id", f"must have 1 to {CUSTOM_ID_CHARACTERS_MAX} characters")
    return plain_text(found, "custom_id")


def _kind(fields: Fields, endpoint: str) -> RequestKind:
    method = _needed(fields, "method")
    if method != "POST":
        raise Refusal("method", f"must be POST, not {quoted(method)}", "invalid_method")
    url = _needed(fields, "url")
    known = [each.value for each in RequestKind]
    if url not in known:
        raise Refusal("url", f"{quoted(url)} is not one of {', '.join(known)}", "invalid_url")
    if endpoint and url != endpoint:
        raise Refusal("url", f"must be {endpoint} in this job", "invalid_url")
    return RequestKind(url)


def _needed(fields: Fields, name: str) -> str:
    """Return a required string of the line. Errors name it without a path."""
    found = fields.take(name)
    if found is None:
        raise Refusal(name, "is required", "missing_required_parameter")
    if not isinstance(found, str):
        raise Refusal(name, "must be a string", "invalid_type")
    return found


def _check_batch(request: ParsedRequest) -> None:
    """Refuse options that only work for a client that waits for the answer or continues from it."""
    for name, given, problem in (
        ("stream", request.stream, "a batch has no streams"),
        ("previous_response_id", request.previous_response_id, "a batch keeps no conversations"),
        ("conversation", request.conversation, "a batch keeps no conversations"),
        ("background", request.background, "a batch always runs in the background"),
    ):
        if given:
            raise Refusal(name, problem, "unsupported_parameter")


def _from_invalid_argument(
    number: int, custom_id: str | None, error: InvalidArgument, path: str
) -> LineError:
    param = error.field if not path or error.field == path else f"{path}.{error.field}"
    code = error.code if isinstance(error, Refusal) else "invalid_value"
    if param == "line":
        code = "line_too_large" if code == "line_too_large" else "invalid_json_line"
        return LineError(number, None, code, shortened(f"the line {error.problem}"))
    shown = param[:PARAM_CHARACTERS_MAX]
    return LineError(number, custom_id, code, shortened(f"{shown}: {error.problem}"), shown)
