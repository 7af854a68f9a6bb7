"""Messages and events: Anthropic's own client assembles a stream into the whole answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from pensieve.api.anthropic.render import (
    SIGNATURE,
    MessageEnding,
    MessageStream,
    blocks_of,
    complete_members,
    ending_of,
    error_body,
    message,
    stop_string_of,
)
from pensieve.api.openai.answer import Heading
from pensieve.conversations.live_turn import PromptTokens, ReplyTokens
from pensieve.core.turn import FinishReason
from pensieve.text import Part, Tokenizer
from pensieve.text.reply_pieces import CallArguments, CallBegan, Piece, ReplyPieces, Text, Thinking
from tests.text.families import QWEN_3, tokenizer_of

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
HEADING = Heading("a1", 1_700_000_000, "tiny")
PROMPT = PromptTokens(12, 8)
REPLY = ReplyTokens([1, 2, 3], ["Hel", "lo", ""], STOP, [Part.THINKING, Part.TEXT, Part.TEXT])
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_of(QWEN_3)


def streamed(pieces: Sequence[Sequence[Piece]], ending: MessageEnding) -> list[dict[str, Any]]:
    stream = MessageStream(HEADING, PromptTokens(12), ReplyPieces(None))
    events = [event for each in pieces for event in stream.events(each)]
    return events + stream.end(REPLY, PROMPT, ending)


def assembled(events: Sequence[dict[str, Any]]) -> Any:
    found: Any = None
    buffers: dict[int, bytes] = {}
    for each in events:
        if each["type"] != "ping":
            found = accumulate_event(
                event=EVENT.validate_python(each), current_snapshot=found, json_bufs=buffers
            )
    return found


def shown(found: Any) -> dict[str, Any]:
    return {
        "content": [each.to_dict() for each in found.content],
        "stop_reason": found.stop_reason,
        "stop_sequence": found.stop_sequence,
        "usage": found.usage.to_dict(),
        "id": found.id,
    }


def test_a_reply_becomes_a_message() -> None:
    pieces: list[Piece] = [Thinking("so"), Text("Hel"), Text("lo")]
    assert message(HEADING, pieces, REPLY, PROMPT, MessageEnding("end_turn")) == {
        "id": "msg_a1",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [
            {"type": "thinking", "thinking": "so", "signature": SIGNATURE},
            {"type": "text", "text": "Hello"},
        ],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 4,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 8,
            "output_tokens": 3,
            "output_tokens_details": {"thinking_tokens": 1},
        },
    }


def test_each_tool_call_is_a_separate_block() -> None:
    pieces: list[Piece] = [
        Text("I'll look."),
        CallBegan(0, "f"),
        CallArguments(0, '{"x"'),
        CallArguments(0, ": [1]}"),
        CallBegan(1, "g"),
        CallArguments(1, "{}"),
        Text("Done."),
    ]
    assert blocks_of(pieces, "a1") == [
        {"type": "text", "text": "I'll look."},
        {"type": "tool_use", "id": "toolu_a100", "name": "f", "input": {"x": [1]}},
        {"type": "tool_use", "id": "toolu_a101", "name": "g", "input": {}},
        {"type": "text", "text": "Done."},
    ]


def test_stream_events_of_thinking_text_and_a_tool_call() -> None:
    pieces: list[list[Piece]] = [
        [],
        [Thinking("so")],
        [Text("Hi")],
        [CallBegan(0, "f"), CallArguments(0, "{}")],
    ]
    events = streamed(pieces, MessageEnding("tool_use"))
    assert [each["type"] for each in events] == [
        *("message_start", "ping"),
        *("content_block_start", "content_block_delta", "content_block_delta"),
        "content_block_stop",
        *("content_block_start", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    assert events[4]["delta"] == {"type": "signature_delta", "signature": SIGNATURE}
    assert [each["index"] for each in events[2:-2]] == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert events[0]["message"]["usage"]["input_tokens"] == 12
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_an_empty_reply_streams_a_message_without_blocks() -> None:
    events = streamed([], MessageEnding("end_turn"))
    kinds = ["message_start", "ping", "message_delta", "message_stop"]
    assert [each["type"] for each in events] == kinds
    assert assembled(events).content == []


WORDS = st.text(min_size=1, max_size=4)
OBJECTS = st.dictionaries(WORDS, st.integers() | WORDS | st.lists(st.booleans()), max_size=3)


@st.composite
def replies(draw: st.DrawFn) -> list[Piece]:
    """Return pieces of a reply. Texts and arguments are cut anywhere."""
    found: list[Piece] = []
    num_calls = 0
    for kind in draw(st.lists(st.sampled_from(["thinking", "text", "call"]), max_size=5)):
        if kind == "call":
            arguments = json.dumps(draw(OBJECTS))
            cut = draw(st.integers(1, len(arguments)))
            found.append(CallBegan(num_calls, "f"))
            found += [
                CallArguments(num_calls, each)
                for each in (arguments[:cut], arguments[cut:])
                if each
            ]
            num_calls += 1
        else:
            piece = Thinking if kind == "thinking" else Text
            found += [piece(each) for each in draw(st.lists(WORDS, min_size=1, max_size=3))]
    return found


@given(replies(), st.data())
def test_a_client_assembles_a_stream_into_the_whole_message(
    pieces: list[Piece], data: st.DataObject
) -> None:
    ending = data.draw(
        st.sampled_from([MessageEnding("end_turn"), MessageEnding("stop_sequence", "x")])
    )
    together: list[list[Piece]] = [[]]
    for each in pieces:
        if data.draw(st.booleans()):
            together.append([])
        together[-1].append(each)
    whole = message(HEADING, pieces, REPLY, PROMPT, ending)
    found = assembled(streamed(together, ending))
    assert shown(found) == shown(Message.model_validate(whole))
    assert [each.to_dict() for each in found.content] == whole["content"]


@pytest.mark.parametrize(
    ("arguments", "whole"),
    [
        ('{"a": 1, "b": "tw', {"a": 1}),
        ('{"a": 1, "b', {"a": 1}),
        ('{"a": {"b": [1, 2', {"a": {"b": [1]}}),
        ('{"a": "x, y", "b": [', {"a": "x, y", "b": []}),
        ('{"a": "\\", ', {}),
        ('{"a": 1, "b": {}', {"a": 1, "b": {}}),
        ("{", {}),
        ("", {}),
        ("[1", {}),
        ('{"a": 1}]', {"a": 1}),
        ("[" * 100_000, {}),
    ],
)
def test_truncated_arguments_keep_their_complete_members(
    arguments: str, whole: dict[str, Any]
) -> None:
    assert complete_members(arguments) == whole


@given(OBJECTS, st.data())
def test_truncated_arguments_contain_only_members_of_the_full_arguments(
    arguments: dict[str, Any], data: st.DataObject
) -> None:
    text = json.dumps(arguments)
    found = complete_members(text[: data.draw(st.integers(0, len(text)))])
    assert list(found) == list(arguments)[: len(found)]
    for name, value in found.items():
        full = arguments[name]
        assert value == full or (isinstance(full, list) and value == full[: len(value)])


# -- endings --


def test_stop_reasons() -> None:
    assert ending_of(STOP, False, None) == MessageEnding("end_turn")
    assert ending_of(STOP, True, None) == MessageEnding("tool_use")
    assert ending_of(LENGTH, True, None) == MessageEnding("max_tokens")
    assert ending_of(STOP, True, "x") == MessageEnding("stop_sequence", "x")


@pytest.mark.parametrize(
    ("released", "sampled", "stops", "found"),
    [
        ("one ", "one two", ("two", "three"), "two"),
        ("one ", "one two", ("three", "tw"), "tw"),
        ("one two", "one two", ("three",), None),
        ("one two", "one two", (), None),
        ("one", "one, two", (",", ", two"), ","),
        ("", "one", ("one",), "one"),
        ("é", "éñ", ("ñ",), "ñ"),
    ],
)
def test_the_stop_string_is_found_from_the_withheld_text(
    tokenizer: Tokenizer, released: str, sampled: str, stops: tuple[str, ...], found: str
) -> None:
    ids = tokenizer.encode_literal(sampled)
    texts = [released, *[""] * (len(ids) - 1)]
    assert (
        stop_string_of(ReplyTokens(ids, texts, STOP), tokenizer, stops, continues_text=False)
        == found
    )
    assert (
        stop_string_of(ReplyTokens(ids, texts, LENGTH), tokenizer, stops, continues_text=False)
        is None
    )


def test_an_end_of_turn_token_is_not_reported_as_a_stop_string(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_literal("one<|im_end|>")
    assert (
        stop_string_of(
            ReplyTokens(ids, ["one"], STOP), tokenizer, ("<|im_end|>", "x"), continues_text=False
        )
        is None
    )


def test_the_error_type_follows_from_the_http_status() -> None:
    assert error_body(404, "gone") == {
        "type": "error",
        "error": {"type": "not_found_error", "message": "gone"},
    }
    kinds = {400: "invalid_request_error", 413: "request_too_large", 429: "rate_limit_error"}
    kinds |= {500: "api_error", 503: "overloaded_error", 418: "api_error"}
    assert {status: error_body(status, "")["error"]["type"] for status in kinds} == kinds
