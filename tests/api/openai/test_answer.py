"""Answers have the shapes of OpenAI's API, member by member."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pensieve.api.json_fields import one_line
from pensieve.api.openai.answer import Heading, answer
from pensieve.conversations.live_turn import PromptTokens, ReplyTokens
from pensieve.core.iteration import Logprob
from pensieve.core.turn import FinishReason
from pensieve.text import Message, Part, PartMarker, Tokenizer, style_of
from tests.api.openai.bodies import USER, chat, completion, response
from tests.text.families import QWEN_3, template_of, tokenizer_of
from tests.text.tiny_tokenizers import sentencepiece_library

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
HEADING = Heading("a1", 1_700_000_000, "tiny")
PROMPT = PromptTokens(12, 8)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_of(QWEN_3)


def sampled(tokenizer: Tokenizer, text: str, finish: FinishReason = STOP) -> ReplyTokens:
    """Return a reply like the engine's, with control tokens and parts. Each logprob is 0.5 below the last."""
    ids = tokenizer.encode_literal(text)
    marker = PartMarker(tokenizer)
    texts = ["" if tokenizer.is_silent(each) else tokenizer.token_text(each) for each in ids]
    rows = [
        (-0.5 * (n + 1), (Logprob(each, -0.5 * (n + 1)), Logprob(each + 1, -math.inf)))
        for n, each in enumerate(ids)
    ]
    return ReplyTokens(ids, texts, finish, [marker.push(each) for each in ids], rows)


HELLO = ReplyTokens([1, 2, 3], ["Hel", "lo", ""], STOP, [Part.TEXT] * 3)
CUT = ReplyTokens([1, 2], ["Hel", "lo"], LENGTH, [Part.TEXT] * 2)


def test_a_chat_completion() -> None:
    assert answer(chat(), [HELLO], PROMPT, HEADING) == {
        "id": "chatcmpl-a1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 12,
            "completion_tokens": 3,
            "total_tokens": 15,
            "prompt_tokens_details": {"cached_tokens": 8},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
        "system_fingerprint": None,
    }


def test_several_choices_count_the_prompt_once() -> None:
    body = answer(chat(n=2), [HELLO, CUT], PROMPT, HEADING)
    assert [each["index"] for each in body["choices"]] == [0, 1]
    assert [each["finish_reason"] for each in body["choices"]] == ["stop", "length"]
    assert body["usage"]["prompt_tokens"] == 12
    assert body["usage"]["completion_tokens"] == 5
    assert body["usage"]["total_tokens"] == 17


def test_a_text_completion() -> None:
    assert answer(completion(), [CUT], PROMPT, HEADING) == {
        "id": "cmpl-a1",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": "tiny",
        "choices": [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 12,
            "completion_tokens": 2,
            "total_tokens": 14,
            "prompt_tokens_details": {"cached_tokens": 8},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
        "system_fingerprint": None,
    }


def test_a_response() -> None:
    request = response(
        instructions="Be brief.",
        temperature=0.5,
        max_output_tokens=9,
        metadata={"a": "b"},
        store=False,
        user="ada",
        reasoning={"summary": "auto"},
        tools=[{"type": "function", "name": "f"}],
    )
    assert answer(request, [HELLO], PROMPT, HEADING) == {
        "id": "resp_a1",
        "object": "response",
        "created_at": 1_700_000_000,
        "status": "completed",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": "Be brief.",
        "max_output_tokens": 9,
        "max_tool_calls": None,
        "model": "tiny",
        "output": [
            {
                "id": "msg_a1",
                "type": "message",
                "status": "completed",
                "role": "assistant",
                "content": [
                    {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
                ],
            }
        ],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": "auto"},
        "safety_identifier": None,
        "service_tier": "default",
        "store": False,
        "temperature": 0.5,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "tools": [
            {
                "type": "function",
                "name": "f",
                "description": None,
                "parameters": None,
                "strict": False,
            }
        ],
        "top_logprobs": 0,
        "top_p": 0.95,
        "truncation": "disabled",
        "usage": {
            "input_tokens": 12,
            "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 0},
            "output_tokens": 3,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 15,
        },
        "user": "ada",
        "metadata": {"a": "b"},
    }


def test_a_truncated_response_is_incomplete() -> None:
    body = answer(response(), [CUT], PROMPT, HEADING)
    assert body["status"] == body["output"][0]["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["max_output_tokens"] is None


def test_thinking_is_separated_from_the_text(tokenizer: Tokenizer) -> None:
    reply = sampled(tokenizer, "<think>\nI think.\n</think>\n\nHello<|im_end|>")
    body = answer(chat(), [reply], PROMPT, HEADING)
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Hello",
        "refusal": None,
        "reasoning_content": "I think.",
    }
    thought = sum(part is Part.THINKING for part in reply.parts)
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": thought}
    items = answer(response(), [reply], PROMPT, HEADING)["output"]
    assert [each["type"] for each in items] == ["reasoning", "message"]
    assert items[0]["content"] == [{"type": "reasoning_text", "text": "I think."}]
    assert items[1]["content"][0]["text"] == "Hello"


def test_a_reply_cut_during_thinking_has_no_text(tokenizer: Tokenizer) -> None:
    reply = sampled(tokenizer, "<think>\nI think", LENGTH)
    message = answer(chat(), [reply], PROMPT, HEADING)["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("", "I think")
    items = answer(response(), [reply], PROMPT, HEADING)["output"]
    assert [(each["type"], each["status"]) for each in items] == [("reasoning", "incomplete")]


def test_several_thinking_blocks_are_joined(tokenizer: Tokenizer) -> None:
    reply = sampled(tokenizer, "<think>one</think>and<think>two</think>done")
    message = answer(chat(), [reply], PROMPT, HEADING)["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("anddone", "one\n\ntwo")


def test_thinking_may_be_opened_by_the_prompt() -> None:
    reply = ReplyTokens(
        [1, 2, 3], ["why", "</think>", "so"], STOP, [Part.THINKING] * 2 + [Part.TEXT]
    )
    message = answer(chat(), [reply], PROMPT, HEADING)["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("so", "why")


def test_leading_white_space_is_kept_if_there_is_no_thinking() -> None:
    reply = ReplyTokens([1], [" Hello "], STOP, [Part.TEXT])
    assert answer(chat(), [reply], PROMPT, HEADING)["choices"][0]["message"]["content"] == " Hello "


def test_tool_calls_stay_text_if_the_request_has_no_tools(tokenizer: Tokenizer) -> None:
    text = '<tool_call>\n{"name": "f"}\n</tool_call>'
    reply = sampled(tokenizer, f"A moment.{text}<|im_end|>")
    style = style_of(template_of(QWEN_3))
    choice = answer(chat(), [reply], PROMPT, HEADING, style=style)["choices"][0]
    assert choice["message"]["content"] == f"A moment.{text}"
    assert choice["finish_reason"] == "stop"


def test_a_text_completion_keeps_thinking_in_its_text(tokenizer: Tokenizer) -> None:
    reply = sampled(tokenizer, "<think>one</think>two")
    body = answer(completion(), [reply], PROMPT, HEADING)
    assert body["choices"][0]["text"] == "<think>one</think>two"


def test_chat_logprobs_cover_only_the_text(tokenizer: Tokenizer) -> None:
    reply = sampled(tokenizer, "<think>a</think>Grüße 😀<|im_end|>")
    request = chat(logprobs=True, top_logprobs=2)
    body = answer(request, [reply], PROMPT, HEADING, tokenizer)
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["refusal"] is None
    tokens = logprobs["content"]
    assert b"".join(bytes(each["bytes"]) for each in tokens).decode() == "Grüße 😀"
    assert tokens[0]["logprob"] == -0.5 * (1 + reply.parts.index(Part.TEXT))
    first, second = tokens[0]["top_logprobs"]
    assert first == {name: tokens[0][name] for name in ("token", "logprob", "bytes")}
    assert second["logprob"] == -9999.0
    one_line(body)  # JSON does not allow infinity


def test_response_logprobs_are_in_the_text_part(tokenizer: Tokenizer) -> None:
    request = response(include=["message.output_text.logprobs"], top_logprobs=1)
    body = answer(request, [sampled(tokenizer, "Hello")], PROMPT, HEADING, tokenizer)
    tokens = body["output"][0]["content"][0]["logprobs"]
    assert "".join(each["token"] for each in tokens) == "Hello"
    assert body["top_logprobs"] == 1


def test_completion_logprobs_are_parallel_lists(tokenizer: Tokenizer) -> None:
    reply = sampled(tokenizer, "Hello there<|im_end|>")
    body = answer(completion(logprobs=1), [reply], PROMPT, HEADING, tokenizer)
    found = body["choices"][0]["logprobs"]
    assert "".join(found["tokens"]) == "Hello there"
    offset = 0
    for n, token in enumerate(found["tokens"]):
        assert found["text_offset"][n] == offset
        assert found["token_logprobs"][n] == found["top_logprobs"][n][token] == -0.5 * (n + 1)
        offset += len(token)


def test_logprobs_start_with_a_space_only_if_the_text_does() -> None:
    """A message begins without the space that its decoder drops. A completion continues the prompt."""
    tokenizer = Tokenizer(sentencepiece_library().to_str())
    ids = tokenizer.encode_text("Hello the")
    row: tuple[float, tuple[Any, ...]] = (-1.0, ())
    reply = ReplyTokens(ids, ["?"] * len(ids), STOP, [Part.TEXT] * len(ids), [row] * len(ids))
    body = answer(chat(logprobs=True), [reply], PROMPT, HEADING, tokenizer)
    rows = body["choices"][0]["logprobs"]["content"]
    assert "".join(each["token"] for each in rows) == "Hello the"
    body = answer(completion(logprobs=0), [reply], PROMPT, HEADING, tokenizer)
    assert "".join(body["choices"][0]["logprobs"]["tokens"]) == " Hello the"


def test_a_padding_id_of_the_vocabulary_has_no_text(tokenizer: Tokenizer) -> None:
    rows = [(-1.0, (Logprob(tokenizer.vocab_size + 5, -2.0),))]
    reply = ReplyTokens(tokenizer.encode_text("a"), ["a"], STOP, [Part.TEXT], rows)
    body = answer(chat(logprobs=True, top_logprobs=1), [reply], PROMPT, HEADING, tokenizer)
    top = body["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert top == [{"token": "", "logprob": -2.0, "bytes": []}]


def test_a_cancelled_or_missing_reply_gives_no_answer() -> None:
    cancelled = ReplyTokens([1], ["a"], FinishReason.CANCELLED, [Part.TEXT])
    with pytest.raises(AssertionError):
        answer(chat(), [cancelled], PROMPT, HEADING)
    with pytest.raises(AssertionError):
        answer(chat(n=2), [HELLO], PROMPT, HEADING)


def test_an_answer_is_valid_in_the_next_requests_history(tokenizer: Tokenizer) -> None:
    """The whole answer is valid in the history of the next request."""
    reply = sampled(tokenizer, "<think>why</think>so<|im_end|>")
    came_back = (Message("user", "hi"), Message("assistant", "so", "why"))
    message = answer(chat(), [reply], PROMPT, HEADING)["choices"][0]["message"]
    assert chat(messages=[USER, message]).turn.messages == came_back
    request = response(include=["message.output_text.logprobs"], top_logprobs=1)
    items = answer(request, [reply], PROMPT, HEADING, tokenizer)["output"]
    assert response(input=[USER, *items]).turn.messages == came_back
