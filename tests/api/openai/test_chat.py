"""Bodies of chat completions: messages and tools, and refusals by name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from pensieve.api.openai.request import RequestKind, parse
from pensieve.errors import InvalidArgument
from pensieve.text import Message, ToolCall
from tests.api.openai.bodies import SERVED, USER, chat, code_of, refused

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
FUNCTION = {"name": "f", "description": "does f", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}


def messages(*given: Any) -> tuple[Message, ...]:
    return chat(messages=list(given)).turn.messages


def refused_message(**members: Any) -> tuple[str, str]:
    return refused(messages, USER, members)


def test_messages_become_template_messages() -> None:
    assert messages(
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "hi", "name": "ada"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "assistant", "content": "It is 2.", "reasoning_content": "1 + 1"},
    ) == (
        Message("system", "Be brief."),
        Message("developer", "Be kind."),
        Message("user", "hi", name="ada"),
        Message("assistant", tool_calls=(ToolCall("f", {"x": 1}, "c1"),)),
        Message("tool", "2", tool_call_id="c1"),
        Message("assistant", "It is 2.", thinking="1 + 1"),
    )


def test_text_parts_are_joined_as_lines() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert messages({"role": "user", "content": parts}) == (Message("user", "one\ntwo"),)
    assert messages({"role": "user", "content": []}) == (Message("user", ""),)


def test_a_reply_message_of_an_sdk_is_accepted_in_the_history() -> None:
    returned: dict[str, Any] = {
        "role": "assistant",
        "content": "hello",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    assert messages(USER, returned, USER)[1] == Message("assistant", "hello")


@pytest.mark.parametrize(
    ("message", "param", "problem"),
    [
        ({"content": "hi"}, "messages[1].role", "is required"),
        (
            {"role": "robot", "content": "hi"},
            "messages[1].role",
            "'robot' is not one of system, developer, user, assistant, tool",
        ),
        ({"role": "user"}, "messages[1].content", "is required"),
        ({"role": "assistant"}, "messages[1].content", "is required"),
        (
            {"role": "user", "content": 5},
            "messages[1].content",
            "must be a string or a list of parts",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[1].content[0].type",
            "'image_url' is not supported: content is text",
        ),
        ({"role": "user", "content": ["hi"]}, "messages[1].content[0]", "must be a JSON object"),
        (
            {"role": "user", "content": [{"type": "text"}]},
            "messages[1].content[0].text",
            "is required",
        ),
        ({"role": "user", "content": "a", "mood": 1}, "messages[1].mood", "is not supported"),
        (
            {"role": "user", "content": "a", "tool_calls": [CALL]},
            "messages[1].tool_calls",
            "is not supported",
        ),
        ({"role": "tool", "content": "2"}, "messages[1].tool_call_id", "is required"),
        (
            {"role": "assistant", "refusal": "no", "content": ""},
            "messages[1].refusal",
            "an earlier refusal is not supported",
        ),
    ],
)
def test_invalid_messages_are_refused_with_their_path(
    message: Any, param: str, problem: str
) -> None:
    assert refused_message(**message) == (param, problem)


def call(**members: Any) -> tuple[str, str]:
    return refused_message(role="assistant", tool_calls=[CALL | members])


def test_invalid_tool_calls_are_refused_with_their_path() -> None:
    where = "messages[1].tool_calls[0]"
    assert call(id=None) == (f"{where}.id", "is required")
    assert call(type="custom") == (f"{where}.type", "only 'function' is supported")
    assert call(function=None) == (f"{where}.function", "is required")
    assert call(function={"name": "f"}) == (f"{where}.function.arguments", "is required")
    assert call(function={"name": "f", "arguments": {}})[1] == "must be a string"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("[]", "must be a JSON object as text"),
        ("{", "is not JSON: Expecting property name enclosed in double quotes at character 2"),
        ('{"a": NaN}', "holds NaN, which is not JSON"),
        ('{"a": 1, "a": 2}', "has 'a' twice in one object"),
        ('{"a": 1e999}', "holds a number that is too large or not finite"),
        ('{"a": ' + "9" * 5000 + "}", "holds a number that is too large"),
        ('{"a": ' + "[" * 100 + "]" * 100 + "}", "is nested deeper than 64"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "is nested too deeply"),
    ],
)
def test_invalid_tool_call_arguments_are_refused(arguments: str, problem: str) -> None:
    found = call(function={"name": "f", "arguments": arguments})
    assert found == ("messages[1].tool_calls[0].function.arguments", problem)


def test_empty_tool_call_arguments_are_accepted() -> None:
    given = CALL | {"function": {"name": "f", "arguments": ""}}
    found = messages(USER, {"role": "assistant", "tool_calls": [given]})
    assert found[1].tool_calls == (ToolCall("f", {}, "c1"),)


def test_the_number_of_messages_is_bounded() -> None:
    assert len(messages(*[USER] * 4096)) == 4096
    assert refused(messages, *[USER] * 4097) == ("messages", "a request has 1 to 4096 messages")
    assert refused(messages) == ("messages", "a request has 1 to 4096 messages")
    assert refused(chat, messages="hi") == ("messages", "must be a list")
    assert refused(chat, messages=None) == ("messages", "is required")


def test_text_that_utf_8_cannot_express_is_refused() -> None:
    half = json.loads('"\\ud800"')
    assert refused_message(role="user", content=half)[0] == "messages"
    assert refused(chat, user=half)[0] == "user"
    assert refused(chat, **{half: 1})[0] == "body"


def test_tools_are_passed_on_unchanged() -> None:
    assert chat(tools=[TOOL]).tools == (TOOL,)
    assert chat(tools=[TOOL], tool_choice="auto", parallel_tool_calls=True).tools == (TOOL,)
    plain = {"type": "function", "function": {"name": "f"}}
    strict = {"type": "function", "function": {"name": "f", "strict": False}}
    assert chat(tools=[plain, strict]).tools == (plain, plain)


def test_tool_choice_none_hides_the_tools() -> None:
    assert chat(tools=[TOOL], tool_choice="none").tools == ()


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [TOOL, {**TOOL, "mood": 1}]}, "tools[1].mood"),
        (
            {"tools": [{"type": "function", "function": FUNCTION | {"strict": True}}]},
            "tools[0].function.strict",
        ),
        (
            {"tools": [{"type": "function", "function": FUNCTION | {"parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": TOOL}, "tools"),
    ],
)
def test_unsupported_tools_are_refused_with_their_path(members: Any, param: str) -> None:
    assert refused(chat, **members)[0] == param


def test_n_must_lie_in_1_to_16() -> None:
    assert chat().num_choices == 1
    assert chat(n=16).num_choices == 16
    for n in (0, 17, -1):
        assert refused(chat, n=n) == ("n", "must lie in 1..16")
    assert refused(chat, n=True) == ("n", "must be an integer")


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": "text"}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"length_penalty": 0.8}, "length_penalty"),
        ({"cache_salt": 1}, "cache_salt"),
        ({"functions": []}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"prompt": "a"}, "prompt"),
        ({"temprature": 0}, "temprature"),
        ({"two words": 0}, "'two words'"),
        ({"x" * 5000: 0}, "'" + "x" * 80 + "...'"),
    ],
)
def test_unsupported_fields_are_refused(members: Any, param: str) -> None:
    assert refused(chat, **members)[0] == param


def test_fields_without_effect_are_accepted() -> None:
    request = chat(
        user="ada",
        metadata={"a": "b"},
        service_tier="flex",
        safety_identifier="s",
        prompt_cache_retention="24h",
        prediction={"type": "content", "content": "hello"},
        response_format={"type": "text"},
        modalities=["text"],
        verbosity="medium",
    )
    assert request == chat()


@pytest.mark.parametrize(
    "members",
    [
        {"keep_alive": "5m"},
        {"ttl": 300},
        {"verbosity": "low"},
        {"cache_prompt": True, "id_slot": 1},
        {"chat_id": "c", "session_id": "s"},
    ],
)
def test_fields_of_other_servers_are_reported_as_ignored(members: Any) -> None:
    request = chat(**members)
    assert set(request.ignored) == set(members)
    assert replace(request, ignored=()) == replace(chat(), ignored=())


def test_default_values_of_other_servers_are_accepted() -> None:
    neutral = {"skip_special_tokens": True, "use_beam_search": False, "length_penalty": 1.0}
    assert chat(**neutral, echo=False, mirostat=0) == chat()
    marked = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    assert chat(messages=[{**USER, "content": [marked], "id": "m1"}]) == chat()


def test_ollamas_tag_is_dropped() -> None:
    assert chat(model="tiny:latest").model == "tiny"
    assert code_of(chat, model="tiny:8b") == "model_not_found"


def test_the_last_message_is_continued_on_request() -> None:
    begun = {"role": "assistant", "content": "Once"}
    messages = [USER, begun]
    assert chat(messages=messages).turn.messages[-1].content == "Once"
    for members in (
        {"messages": messages, "continue_final_message": True},
        {"messages": messages, "continue_final_message": True, "add_generation_prompt": False},
        {"messages": [USER, {**begun, "prefix": True}]},
    ):
        turn = chat(**members).turn
        assert (turn.messages, turn.reply_begins) == (chat().turn.messages, "Once")


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"messages": [USER]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "content": "Once"}]}, "messages[0]"),
        ({"add_generation_prompt": True}, "add_generation_prompt"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        (
            {"messages": [USER, {"role": "assistant", "content": "", "reasoning": "Hm"}]},
            "messages[1]",
        ),
    ],
)
def test_replies_that_cannot_be_continued_are_refused(members: Any, param: str) -> None:
    begun = {"messages": [USER, {"role": "assistant", "content": "Once"}]}
    assert refused(chat, continue_final_message=True, **{**begun, **members})[0] == param


def test_store_and_prompt_cache_key_are_parsed() -> None:
    assert (chat().store, chat().prompt_cache_key) == (None, "")
    request = chat(store=False, prompt_cache_key="k")
    assert (request.store, request.prompt_cache_key) == (False, "k")
    assert refused(chat, store="no") == ("store", "must be true or false")


def test_stream_fields_are_parsed() -> None:
    assert not chat(stream=False).stream
    assert chat(stream=True).stream
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    plain = chat(stream_options={"include_usage": True})
    assert (plain.include_usage, list(plain.ignored)) == (False, ["stream_options"])
    assert refused(chat, stream="yes") == ("stream", "must be true or false")


def test_unknown_template_options_are_refused() -> None:
    options = {"enable_thinking": False}
    assert chat(chat_template_kwargs=options).turn.settings.template_options == options
    assert refused(chat, chat_template_kwargs={"mood": 1}) == (
        "chat_template_kwargs",
        "has 'mood', which this model's template does not know; known: enable_thinking",
    )


def test_reasoning_effort_switches_thinking_if_the_template_knows_no_effort() -> None:
    assert chat(reasoning_effort="none").turn.settings.template_options == {
        "enable_thinking": False
    }
    assert chat(reasoning_effort="medium").turn.settings.template_options == {
        "enable_thinking": True
    }
    assert refused(chat, reasoning_effort="high") == (
        "reasoning_effort",
        "is not supported by this model's template",
    )
    assert refused(chat, reasoning_effort="huge")[0] == "reasoning_effort"


def test_reasoning_effort_is_passed_to_a_template_that_knows_it() -> None:
    body = {"model": "tiny", "messages": [USER], "reasoning_effort": "high"}
    knows = SERVED._replace(template_options={"reasoning_effort"})
    options = parse(RequestKind.CHAT, body, knows).turn.settings.template_options
    assert options == {"reasoning_effort": "high"}


def test_a_model_that_is_not_served_is_refused() -> None:
    assert refused(chat, model="gpt-9") == ("model", "unknown model 'gpt-9'; this server has tiny")
    assert code_of(chat, model="gpt-9") == "model_not_found"
    assert code_of(chat, model=None) == "missing_required_parameter"
    assert refused(chat, model=5) == ("model", "must be a string")
    any_model = SERVED._replace(models=None)
    assert parse(RequestKind.CHAT, {"model": "x", "messages": [USER]}, any_model).model == "x"


@pytest.mark.parametrize("body", [None, [], "text", 5, True])
def test_a_body_must_be_an_object(body: Any) -> None:
    with pytest.raises(InvalidArgument, match="body: must be a JSON object"):
        parse(RequestKind.CHAT, body, SERVED)


def test_later_errors_use_the_field_names_of_the_body() -> None:
    request = chat(max_tokens=5)
    assert request.param("role") == request.param("content") == "messages"
    assert request.param("template_options") == "chat_template_kwargs"
    assert request.param("max_tokens") == "max_tokens"
    assert chat().param("max_tokens") == "max_completion_tokens"
    assert chat().param("logprobs") == "top_logprobs"
    assert chat().param("temperature") == "temperature"
