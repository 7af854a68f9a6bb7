"""Lines of a Batch file are read, or refused with the line's number and the parameter's name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pensieve.api.json_fields import one_line, read_json
from pensieve.api.openai.request import RequestKind
from pensieve.errors import ContextFull, InvalidArgument, TurnFailed
from pensieve.jobs.batch_line import (
    BatchLine,
    LineError,
    answer_line,
    error_line_json,
    error_of_request,
    read_line,
)
from pensieve.text import Message
from tests.api.openai.bodies import SERVED, USER

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [USER]}
LINE = {"custom_id": "a-1", "method": "POST", "url": CHAT, "body": BODY}


def read(given: Any, number: int = 7, endpoint: str = "") -> BatchLine | LineError | None:
    text = given if isinstance(given, bytes) else json.dumps(given).encode()
    return read_line(number, text, SERVED, endpoint)


def refused(given: Any, **more: Any) -> LineError:
    found = read(given, **more)
    assert isinstance(found, LineError)
    return found


def test_a_line_is_read_as_a_request() -> None:
    found = read(LINE)
    assert isinstance(found, BatchLine)
    assert (found.line, found.custom_id) == (7, "a-1")
    assert found.request.kind is RequestKind.CHAT
    assert found.request.turn.messages == (Message("user", "hi"),)


def test_each_endpoint_has_its_url() -> None:
    for url, body in (
        ("/v1/completions", {"model": "tiny", "prompt": "a"}),
        ("/v1/responses", {"model": "tiny", "input": "a"}),
    ):
        found = read(LINE | {"url": url, "body": body})
        assert isinstance(found, BatchLine)
        assert found.request.kind == url


def test_a_blank_line_is_ignored() -> None:
    assert read(b"") is None
    assert read(b" \t\r\n") is None


def test_a_line_may_end_with_crlf_and_the_first_may_have_a_byte_order_mark() -> None:
    text = json.dumps(LINE).encode()
    assert isinstance(read(text + b"\r\n"), BatchLine)
    assert isinstance(read(b"\xef\xbb\xbf" + text, number=1), BatchLine)
    assert isinstance(read(b"\xef\xbb\xbf" + text, number=2), LineError)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "the line is not JSON: Expecting property name enclosed in double quotes at"),
        (b"\xff{}", "the line is not UTF-8: byte 1"),
        (b"[]", "the line must be a JSON object"),
        (b"5", "the line must be a JSON object"),
        (b"{} {}", "the line is not JSON: Extra data at character 4"),
        (b'{"a": Infinity}', "the line holds Infinity, which is not JSON"),
        (b'{"a": {"b": 1, "b": 2}}', "the line has 'b' twice in one object"),
        (b"[" * 1_000_000, "the line is nested too deeply"),
        (b'{"a":' * 200_000, "the line is nested too deeply"),
        (b'{"a": [' + b"{}," * 70_000 + b"[]]}", "the line holds more than 65,536 objects and"),
        (b"{" + b'"a":1,' * 70_000 + b'"b":2}', "the line holds more than 65,536 objects and"),
        (b'{"a": ' + b"1" * 5_000 + b"}", "the line holds a number that is too large"),
    ],
)
def test_the_error_for_a_line_that_is_not_json_has_its_number(text: bytes, message: str) -> None:
    found = refused(text)
    assert found.message.startswith(message)
    assert found[:3] == (7, None, "invalid_json_line")
    assert found.param is None


def test_text_may_hold_any_number_of_brackets_and_quotes() -> None:
    content = '{"a": [1]}\\\n' * 100_000
    found = read(LINE | {"body": BODY | {"messages": [{"role": "user", "content": content}]}})
    assert isinstance(found, BatchLine)
    assert found.request.turn.messages == (Message("user", content),)


def test_a_line_that_is_too_large_is_refused() -> None:
    found = refused(b'"' + b"x" * (8 << 20) + b'"')
    assert (found.line, found.custom_id, found.code) == (7, None, "line_too_large")


@pytest.mark.parametrize(
    ("members", "custom_id", "code", "param", "problem"),
    [
        ({"custom_id": None}, None, "missing_required_parameter", "custom_id", "is required"),
        ({"custom_id": 5}, None, "invalid_type", "custom_id", "must be a string"),
        ({"custom_id": ""}, None, "invalid_value", "custom_id", "must have 1 to 512 characters"),
        (
            {"custom_id": "x" * 513},
            None,
            "invalid_value",
            "custom_id",
            "must have 1 to 512 characters",
        ),
        ({"method": "GET"}, "a-1", "invalid_method", "method", "must be POST, not 'GET'"),
        ({"method": None}, "a-1", "missing_required_parameter", "method", "is required"),
        ({"body": None}, "a-1", "missing_required_parameter", "body", "is required"),
        ({"body": []}, "a-1", "invalid_type", "body", "must be a JSON object"),
        (
            {"body": BODY | {"model": "gpt-9"}},
            "a-1",
            "model_not_found",
            "body.model",
            "unknown model 'gpt-9'; this server has tiny",
        ),
        (
            {"body": BODY | {"temperature": -1}},
            "a-1",
            "invalid_value",
            "body.temperature",
            "must lie in 0..100",
        ),
        (
            {"body": BODY | {"stream": True}},
            "a-1",
            "unsupported_parameter",
            "body.stream",
            "a batch has no streams",
        ),
        (
            {"body": {"model": "tiny", "messages": [USER, {"role": "tool", "content": ""}]}},
            "a-1",
            "missing_required_parameter",
            "body.messages[1].tool_call_id",
            "is required",
        ),
        (
            {"url": "/v1/responses", "body": {"model": "tiny", "input": "a", "conversation": "c"}},
            "a-1",
            "unsupported_parameter",
            "body.conversation",
            "a batch keeps no conversations",
        ),
        (
            {
                "url": "/v1/responses",
                "body": {"model": "tiny", "input": "a", "previous_response_id": "r"},
            },
            "a-1",
            "unsupported_parameter",
            "body.previous_response_id",
            "a batch keeps no conversations",
        ),
        (
            {
                "url": "/v1/responses",
                "body": {"model": "tiny", "input": "a", "background": True},
            },
            "a-1",
            "unsupported_parameter",
            "body.background",
            "a batch always runs in the background",
        ),
    ],
)
def test_the_error_of_a_line_names_the_parameter_and_the_problem(
    members: dict[str, Any], custom_id: str | None, code: str, param: str | None, problem: str
) -> None:
    found = refused(LINE | members)
    assert found == LineError(7, custom_id, code, f"{param}: {problem}", param)


def test_an_unknown_url_or_one_of_another_endpoint_is_refused() -> None:
    found = refused(LINE | {"url": "/v1/embeddings"})
    assert (found.code, found.param) == ("invalid_url", "url")
    assert found.message.startswith("url: '/v1/embeddings' is not one of /v1/chat/completions, ")
    assert isinstance(read(LINE, endpoint=CHAT), BatchLine)
    found = refused(LINE, endpoint="/v1/responses")
    assert found.message == "url: must be /v1/responses in this job"


def test_a_custom_id_that_utf8_cannot_encode_is_refused() -> None:
    text = json.dumps(LINE).replace("a-1", "\\ud800").encode()
    found = refused(text)
    assert (found.custom_id, found.param) == (None, "custom_id")


def test_unknown_members_of_a_line_are_ignored() -> None:
    assert isinstance(read(LINE | {"note": "mine"}), BatchLine)


def test_errors_quote_only_a_short_part_of_a_line() -> None:
    found = refused(LINE | {"body": BODY | {"x" * 100_000: 1}})
    assert len(found.message) <= 400
    assert len(found.param or "") <= 200
    found = refused(LINE | {"url": "u" * 100_000})
    assert len(found.message) <= 400


def batch_line() -> BatchLine:
    found = read(LINE)
    assert isinstance(found, BatchLine)
    return found


def test_refusals_of_the_template_context_or_engine_become_line_errors() -> None:
    assert error_of_request(batch_line(), InvalidArgument("role", "no tools")) == LineError(
        7, "a-1", "invalid_value", "body.messages: no tools", "body.messages"
    )
    assert error_of_request(batch_line(), ContextFull(5000, 4096)) == LineError(
        7,
        "a-1",
        "context_length_exceeded",
        "body.messages: needs a context of 5,000 tokens, but the limit is 4,096",
        "body.messages",
    )
    assert error_of_request(batch_line(), TurnFailed("NAN_LOGITS", "no number")) == LineError(
        7, "a-1", "nan_logits", "no number"
    )


def test_lines_of_the_output_have_openais_format() -> None:
    assert answer_line("j-1", "a-1", {"id": "x"}, "r-1") == {
        "id": "batch_req_j-1",
        "custom_id": "a-1",
        "response": {"status_code": 200, "request_id": "r-1", "body": {"id": "x"}},
        "error": None,
    }
    error = LineError(7, "a-1", "invalid_value", "body.n: must lie in 1..16", "body.n")
    assert error_line_json("j-1", error) == {
        "id": "batch_req_j-1",
        "custom_id": "a-1",
        "response": None,
        "error": {
            "code": "invalid_value",
            "message": "body.n: must lie in 1..16",
            "param": "body.n",
            "line": 7,
        },
    }


def test_a_written_line_has_no_line_break_for_any_reader() -> None:
    value = {"text": "a\nb\u2028c\x85d\u2029e\x0bf — 😀"}
    line = one_line(value)
    assert line.endswith(b"}\n")
    assert len(line.decode().splitlines()) == 1
    assert "—" in line.decode()
    assert read_json(line, "line") == value
