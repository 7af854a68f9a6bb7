"""Tool calls in answers: separate from the text, with stable ids, in OpenAI's shapes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pensieve.api.openai.answer import Heading, answer
from pensieve.conversations.live_turn import PromptTokens, ReplyTokens
from pensieve.core.turn import FinishReason
from pensieve.text import CallStyle, Message, PartMarker, ToolCall, style_of
from tests.api.openai.bodies import USER, chat, response
from tests.text.families import QWEN_3, template_of, tokenizer_of

HEADING = Heading("a1", 1_700_000_000, "tiny")
CALLS = (
    '<tool_call>\n{"name": "f", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
)
FUNCTIONS = [{"name": "f"}, {"name": "g"}]
CHAT_TOOLS = [{"type": "function", "function": each} for each in FUNCTIONS]
RESPONSE_TOOLS = [{"type": "function", **each} for each in FUNCTIONS]


@pytest.fixture(scope="module")
def style() -> CallStyle | None:
    return style_of(template_of(QWEN_3))


def sampled(text: str, finish: FinishReason = FinishReason.STOP) -> ReplyTokens:
    tokenizer = tokenizer_of(QWEN_3)
    ids = tokenizer.encode_literal(text)
    marker = PartMarker(tokenizer)
    texts = ["" if tokenizer.is_silent(each) else tokenizer.token_text(each) for each in ids]
    return ReplyTokens(ids, texts, finish, [marker.push(each) for each in ids])


def choice_of(style: Any, reply: ReplyTokens, **members: Any) -> dict[str, Any]:
    request = chat(**{"tools": CHAT_TOOLS, **members})
    (choice,) = answer(request, [reply], PromptTokens(12), HEADING, style=style)["choices"]
    return choice


def output_of(style: Any, reply: ReplyTokens) -> list[dict[str, Any]]:
    body = answer(response(tools=RESPONSE_TOOLS), [reply], PromptTokens(12), HEADING, style=style)
    return body["output"]


def test_a_reply_with_only_tool_calls_has_no_content(style: CallStyle) -> None:
    choice = choice_of(style, sampled(f"{CALLS}<|im_end|>"))
    assert choice == {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "tool_calls": [
                {
                    "id": "call_b90547f25f3197bfd5770fad",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"city": "Paris"}'},
                },
                {
                    "id": "call_c2347d94ee0848bfbb813269",
                    "type": "function",
                    "function": {"name": "g", "arguments": "{}"},
                },
            ],
        },
        "logprobs": None,
        "finish_reason": "tool_calls",
    }


def test_a_reply_with_thinking_text_and_tool_calls(style: CallStyle) -> None:
    choice = choice_of(style, sampled(f"<think>\nhm\n</think>\n\nI look.\n{CALLS}\n<|im_end|>"))
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "I look.")
    assert [each["function"]["name"] for each in message["tool_calls"]] == ["f", "g"]
    assert choice["finish_reason"] == "tool_calls"


def test_call_ids_are_unique_per_choice_and_stable(style: CallStyle) -> None:
    request = chat(tools=CHAT_TOOLS, n=2)
    replies = [sampled(CALLS)] * 2

    def ids() -> list[str]:
        choices = answer(request, replies, PromptTokens(12), HEADING, style=style)["choices"]
        return [call["id"] for each in choices for call in each["message"]["tool_calls"]]

    assert len(set(ids())) == 4
    assert ids() == ids()


def test_a_reply_with_text_after_its_calls_finishes_with_stop(style: CallStyle) -> None:
    choice = choice_of(style, sampled(f"{CALLS}\nSo.<|im_end|>"))
    assert (choice["message"]["content"], choice["finish_reason"]) == ("So.", "stop")
    assert len(choice["message"]["tool_calls"]) == 2


def test_a_truncated_call_keeps_its_partial_arguments(style: CallStyle) -> None:
    text = CALLS[: CALLS.index("Paris") + 3]
    choice = choice_of(style, sampled(text, FinishReason.LENGTH))
    assert choice["finish_reason"] == "length"
    assert [each["function"] for each in choice["message"]["tool_calls"]] == [
        {"name": "f", "arguments": '{"city": "Par'}
    ]
    (item,) = output_of(style, sampled(text, FinishReason.LENGTH))
    assert (item["type"], item["status"]) == ("function_call", "incomplete")


def test_a_reply_at_its_length_limit_finishes_with_length_despite_calls(style: CallStyle) -> None:
    choice = choice_of(style, sampled(CALLS, FinishReason.LENGTH))
    assert (choice["finish_reason"], len(choice["message"]["tool_calls"])) == ("length", 2)


@pytest.mark.parametrize("members", [{"tools": None}, {"tool_choice": "none"}])
def test_calls_are_parsed_only_if_the_request_has_tools(
    style: CallStyle, members: dict[str, Any]
) -> None:
    choice = choice_of(style, sampled(CALLS), **members)
    assert choice["message"] == {"role": "assistant", "content": CALLS, "refusal": None}
    assert choice["finish_reason"] == "stop"


def test_calls_stay_text_if_the_models_call_format_is_unknown() -> None:
    choice = choice_of(None, sampled(CALLS))
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALLS, "stop")


def test_a_call_of_an_unknown_tool_stays_text(style: CallStyle) -> None:
    text = '<tool_call>\n{"name": "h", "arguments": {}}\n</tool_call>'
    choice = choice_of(style, sampled(text))
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")


def test_a_response_has_items_for_thinking_text_and_calls(style: CallStyle) -> None:
    items = output_of(style, sampled(f"<think>hm</think>I look.{CALLS}<|im_end|>"))
    assert [each["type"] for each in items] == ["reasoning", "message", *["function_call"] * 2]
    assert [each["status"] for each in items] == ["completed"] * 4
    assert items[2] == {
        "id": "fc_b90547f25f3197bfd5770fad",
        "type": "function_call",
        "call_id": "call_b90547f25f3197bfd5770fad",
        "name": "f",
        "arguments": '{"city": "Paris"}',
        "status": "completed",
    }
    only_calls = output_of(style, sampled(CALLS))
    assert [each["type"] for each in only_calls] == ["function_call"] * 2


def test_an_answer_is_valid_in_the_next_requests_history(style: CallStyle) -> None:
    """The answer is valid in the history of the next request, in both APIs."""
    reply = sampled(f"I look.{CALLS}")
    message = choice_of(style, reply)["message"]
    ids = [each["id"] for each in message["tool_calls"]]
    calls = (ToolCall("f", {"city": "Paris"}, ids[0]), ToolCall("g", {}, ids[1]))
    result = {"role": "tool", "tool_call_id": ids[0], "content": "sunny"}
    assert chat(messages=[USER, message, result]).turn.messages == (
        Message("user", "hi"),
        Message("assistant", "I look.", tool_calls=calls),
        Message("tool", "sunny", tool_call_id=ids[0]),
    )
    items = output_of(style, reply)
    output = {"type": "function_call_output", "call_id": ids[0], "output": "sunny"}
    assert (
        response(input=[USER, *items, output]).turn.messages
        == chat(messages=[USER, message, result]).turn.messages
    )
    json.dumps(items, allow_nan=False)
