"""Bodies of the Responses API: input items become messages."""

from __future__ import annotations

from typing import Any

import pytest

from pensieve.text import Message, ToolCall
from tests.api.openai.bodies import refused, response

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "2"}


def items(*given: Any) -> tuple[Message, ...]:
    return response(input=list(given)).turn.messages


def test_a_string_input_is_a_user_message() -> None:
    assert response(input="hi").turn.messages == (Message("user", "hi"),)


def test_instructions_are_the_system_prompt() -> None:
    assert response(instructions="Be brief.").turn.messages == (
        Message("system", "Be brief."),
        Message("user", "hi"),
    )


def test_the_items_of_one_assistant_turn_become_one_message() -> None:
    assert items(
        {"role": "user", "content": "1 + 1?"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "I should ask f."}],
        },
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "A moment.", "annotations": []}],
        },
        CALL | {"id": "fc_1", "status": "completed"},
        CALL | {"call_id": "c2"},
        OUTPUT,
        OUTPUT | {"call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "So?"}]},
    ) == (
        Message("user", "1 + 1?"),
        Message(
            "assistant",
            "A moment.",
            "I should ask f.",
            (ToolCall("f", {}, "c1"), ToolCall("f", {}, "c2")),
        ),
        Message("tool", "2", tool_call_id="c1"),
        Message("tool", "two", tool_call_id="c2"),
        Message("user", "So?"),
    )


def test_a_function_call_without_text_is_a_message() -> None:
    calls = (ToolCall("f", {}, "c1"),)
    assert items(CALL) == (Message("assistant", tool_calls=calls),)


def test_two_assistant_messages_are_not_merged() -> None:
    once = {"role": "assistant", "content": "a"}
    assert items(once, once) == (Message("assistant", "a"), Message("assistant", "a"))


def test_reasoning_without_text_is_dropped_and_encrypted_reasoning_refused() -> None:
    reasoning = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "s"}]}
    user = {"role": "user", "content": "hi"}
    assert items(reasoning, user) == (Message("user", "hi"),)
    sealed = reasoning | {"encrypted_content": "gAAA"}
    assert refused(items, sealed) == (
        "input[0].encrypted_content",
        "encrypted reasoning cannot be read",
    )


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "item_reference", "id": "x"}, "input[0].type"),
        ({"type": "file_search_call"}, "input[0].type"),
        ({"role": "tool", "content": "2"}, "input[0].role"),
        ({"role": "user"}, "input[0].content"),
        ({"content": "hi"}, "input[0].role"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[0].content[0].type"),
        (CALL | {"call_id": None}, "input[0].call_id"),
        (CALL | {"arguments": "["}, "input[0].arguments"),
        (OUTPUT | {"output": None}, "input[0].output"),
        (OUTPUT | {"output": 5}, "input[0].output"),
        (OUTPUT | {"mood": 5}, "input[0].mood"),
        ("hi", "input[0]"),
    ],
)
def test_invalid_items_are_refused_with_their_path(item: Any, param: str) -> None:
    assert refused(items, item)[0] == param


def test_the_input_is_required_and_limited() -> None:
    assert refused(response, input=None) == ("input", "is required")
    assert refused(response, input=[]) == ("input", "must not be empty")
    assert refused(response, input=5) == ("input", "must be a string or a list of items")
    user = {"role": "user", "content": "hi"}
    assert refused(items, *[user] * 4097) == ("input", "a request has at most 4096 messages")


def test_tools_are_converted_to_the_format_of_chat_completions() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
    assert response(tools=[tool]).tools == (
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
    )
    assert refused(response, tools=[{"type": "web_search"}])[0] == "tools[0].type"
    assert refused(response, tools=[tool | {"strict": True}])[0] == "tools[0].strict"


def test_previous_response_and_conversation_are_parsed() -> None:
    assert response(previous_response_id="resp_1").previous_response_id == "resp_1"
    assert response(conversation="conv_1").conversation == "conv_1"
    assert response(background=True).background
    assert response(conversation={"id": "conv_1"}).conversation == "conv_1"
    both = {"previous_response_id": "resp_1", "conversation": "conv_1"}
    assert refused(response, **both)[0] == "previous_response_id"
    assert refused(response, conversation={}) == ("conversation.id", "is required")


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"truncation": "auto"}, "truncation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"verbosity": 5}}, "text.verbosity"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"reasoning": {"mood": "high"}}, "reasoning.mood"),
        ({"n": 2}, "n"),
        ({"max_tokens": 2}, "max_tokens"),
        ({"metadata": {"a": 1}}, "metadata"),
    ],
)
def test_unsupported_fields_are_refused(members: Any, param: str) -> None:
    assert refused(response, **members)[0] == param


def test_fields_without_effect_are_accepted() -> None:
    request = response(
        background=False,
        truncation="disabled",
        text={"format": {"type": "text"}, "verbosity": "medium"},
        reasoning={"effort": None, "summary": "auto"},
        max_tool_calls=3,
        store=False,
    )
    assert request.turn.messages == response().turn.messages
    assert request.sampling == response().sampling
    assert request.turn.settings.template_options == {}


def test_reasoning_effort_becomes_a_template_option() -> None:
    assert response(reasoning={"effort": "none"}).turn.settings.template_options == {
        "enable_thinking": False
    }


def test_later_errors_use_the_field_names_of_the_body() -> None:
    assert response().param("content") == "input"
    assert response().param("max_tokens") == "max_output_tokens"
