"""Bodies of Anthropic's API: parsed values, and refusals by name."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pensieve.api.anthropic.parse import parse, parse_count
from pensieve.api.json_fields import Refusal
from pensieve.api.openai.request import ParsedRequest, Served
from pensieve.core.constraint import Constraint, ConstraintKind
from pensieve.errors import InvalidArgument
from pensieve.sampling import Sampling
from pensieve.text import Message, ToolCall
from tests.scale import SCALE, SEED

SERVED = Served(
    Sampling(temperature=0.6, top_p=0.95, max_tokens=512),
    models=frozenset({"tiny"}),
    vocab_size=1000,
    template_options=frozenset({"enable_thinking"}),
)
USER = {"role": "user", "content": "hi"}
USE = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"x": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "2"}
TOOL = {"name": "f", "description": "does f", "input_schema": {"type": "object"}}


def ask(**members: Any) -> ParsedRequest:
    return parse({"model": "tiny", "max_tokens": 9, "messages": [USER], **members}, SERVED)


def messages(*given_: Any, **members: Any) -> tuple[Message, ...]:
    return ask(messages=list(given_), **members).turn.messages


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(content: str, **members: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **members}


def refused(**members: Any) -> tuple[str, str, str]:
    with pytest.raises(Refusal) as caught:
        ask(**members)
    return caught.value.field, caught.value.problem, caught.value.code


# -- messages --


def test_a_history_with_tools_becomes_template_messages() -> None:
    ephemeral = {"cache_control": {"type": "ephemeral"}}
    thinking = {"type": "thinking", "thinking": "which?", "signature": "s"}
    assert messages(
        USER,
        assistant(thinking, text("I'll look. "), text("Now."), USE),
        user({**RESULT, **ephemeral}, text("and then", **ephemeral), text("stop")),
        system=[text("Be brief.", **ephemeral), text("Be kind.")],
        tools=[TOOL],
    ) == (
        Message("system", "Be brief.\nBe kind."),
        Message("user", "hi"),
        Message("assistant", "I'll look. Now.", "which?", (ToolCall("f", {"x": 1}, "toolu_1"),)),
        Message("tool", "2", tool_call_id="toolu_1", name="f"),
        Message("user", "and then\nstop"),
    )


def test_adjacent_messages_of_one_role_are_merged() -> None:
    assert messages(
        USER, user(text("there")), assistant(text("a")), assistant(text("b")), USER
    ) == (Message("user", "hi\nthere"), Message("assistant", "ab"), Message("user", "hi"))


def test_a_tool_result_may_be_text_blocks_empty_or_an_error() -> None:
    def answered(**members: Any) -> str:
        result = {"type": "tool_result", "tool_use_id": "toolu_1", **members}
        return messages(USER, assistant(USE), user(result))[-1].content

    assert answered() == ""
    assert answered(content=[]) == ""
    assert answered(content=[text("a"), text("b")]) == "a\nb"
    assert answered(content="no such file", is_error=True) == "Error: no such file"


def test_assistant_messages_may_be_empty_or_have_redacted_thinking() -> None:
    redacted = {"type": "redacted_thinking", "data": "x"}
    assert messages(USER, assistant(), USER)[1] == Message("assistant")
    assert messages(USER, assistant(redacted, text("a")), USER)[1] == Message("assistant", "a")


def test_an_empty_system_prompt_adds_no_message() -> None:
    assert messages(USER, system="") == messages(USER, system=[]) == (Message("user", "hi"),)


def test_a_system_message_may_follow_other_messages() -> None:
    later = {"role": "system", "content": "Be brief."}
    assert messages(USER, assistant(text("a")), later, USER)[2] == Message("system", "Be brief.")


@pytest.mark.parametrize(
    ("given_", "where", "says"),
    [
        ([], "messages", "at least one"),
        ([assistant(text("a")), USER], "messages[0].role", "first message"),
        ([USER, assistant(USE)], "messages[1]", "only text"),
        ([{"role": "tool", "content": "a"}], "messages[0].role", "'tool'"),
        ([user()], "messages[0].content", "empty"),
        ([user({"type": "image", "source": {}})], "messages[0].content[0].type", "'image'"),
        ([user({"type": "document"})], "messages[0].content[0].type", "content is text"),
        ([user(USE)], "messages[0].content[0].type", "'tool_use'"),
        ([user(RESULT)], "messages[0].content[0].tool_use_id", "no tool_use 'toolu_1'"),
        ([USER, assistant(text("a"), RESULT), USER], "messages[1].content[1].type", "tool_result"),
        ([USER | {"name": "ada"}], "messages[0].name", "not supported"),
        ([user(text("a", size=1))], "messages[0].content[0].size", "not supported"),
        ([{"role": "user"}], "messages[0].content", "required"),
        (["hi"], "messages[0]", "object"),
    ],
)
def test_invalid_messages_are_refused_with_their_path(given_: Any, where: str, says: str) -> None:
    field, problem, _ = refused(messages=given_)
    assert field == where
    assert says in problem


def test_a_tool_result_must_follow_its_call_directly() -> None:
    later = [USER, assistant(USE), user(RESULT), assistant(text("a")), user(RESULT)]
    assert refused(messages=later)[0] == "messages[4].content[0].tool_use_id"


def test_images_in_a_tool_result_are_refused() -> None:
    result = {**RESULT, "content": [{"type": "image"}]}
    where = "messages[2].content[0].content[0].type"
    assert refused(messages=[USER, assistant(USE), user(result)])[0] == where


# -- parameters --


def test_omitted_sampling_fields_have_the_models_defaults() -> None:
    request = ask(top_k=5, stop_sequences=["\n"], stream=True)
    assert request.stream
    assert request.sampling == Sampling(0.6, 0.95, 5, max_tokens=9, stop=("\n",))
    assert request.turn.given_sampling == {"max_tokens": 9, "stop": ("\n",), "top_k": 5}


@pytest.mark.parametrize(
    ("members", "where"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"model": "claude"}, "model"),
        ({"n": 2}, "n"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"metadata": {"name": "a"}}, "metadata.name"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format.type"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {}, "name": "x"}}},
            "output_config.format.name",
        ),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"output_config": {"effort": "loud"}}, "output_config.effort"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL | {"strict": True}]}, "tools[0].strict"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        (
            {
                "tools": [TOOL],
                "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            },
            "tool_choice.disable_parallel_tool_use",
        ),
    ],
)
def test_unsupported_fields_are_refused_by_name(members: dict[str, Any], where: str) -> None:
    assert refused(**members)[0] == where


def test_a_model_that_is_not_served_is_not_found() -> None:
    assert refused(model="claude")[2] == "model_not_found"


def test_fields_without_effect_are_accepted() -> None:
    plain = ask()
    passed = ask(
        metadata={"user_id": "u"},
        service_tier="auto",
        cache_control={"type": "ephemeral"},
        speed="standard",
        output_config={"effort": "high"},
        mcp_servers=[],
    )
    assert passed == plain


def test_tools_are_converted_to_the_format_of_chat_completions() -> None:
    function = {"name": "f", "description": "does f", "parameters": {"type": "object"}}
    more = {"type": "custom", "cache_control": {"type": "ephemeral"}, "strict": False}
    wanted = ({"type": "function", "function": function},)
    assert ask(tools=[TOOL]).tools == wanted
    assert ask(tools=[TOOL | more], tool_choice={"type": "auto"}).tools == wanted
    assert ask(tools=[TOOL], tool_choice={"type": "none"}).tools == ()


@pytest.mark.parametrize(
    ("known", "kind", "options"),
    [
        ({"enable_thinking"}, "enabled", {"enable_thinking": True}),
        ({"enable_thinking"}, "adaptive", {"enable_thinking": True}),
        ({"enable_thinking"}, "disabled", {"enable_thinking": False}),
        ({"thinking"}, "disabled", {"thinking": False}),
        (set(), "enabled", {}),
        (set(), "disabled", {}),
    ],
)
def test_thinking_sets_the_template_option_if_the_template_has_one(
    known: set[str], kind: str, options: dict[str, Any]
) -> None:
    body = {"model": "tiny", "max_tokens": 9, "messages": [USER], "thinking": {"type": kind}}
    if kind == "enabled":
        body["thinking"] = {"type": kind, "budget_tokens": 2048}
    served = SERVED._replace(template_options=frozenset(known))
    assert parse(body, served).turn.settings.template_options == options


def test_effort_sets_the_template_option_if_the_template_has_one() -> None:
    body = {"model": "tiny", "messages": [USER], "output_config": {"effort": "low"}}
    served = SERVED._replace(template_options=frozenset({"reasoning_effort"}))
    assert parse_count(body, served).turn.settings.template_options == {"reasoning_effort": "low"}


def test_count_tokens_accepts_only_prompt_fields() -> None:
    body = {"model": "tiny", "messages": [USER], "system": "Be brief.", "tools": [TOOL]}
    request = parse_count(body, SERVED)
    assert request.turn.messages == (Message("system", "Be brief."), Message("user", "hi"))
    assert request.tools
    with pytest.raises(Refusal) as caught:
        parse_count({**body, "max_tokens": 9}, SERVED)
    assert caught.value.field == "max_tokens"


def test_later_errors_use_the_field_names_of_the_body() -> None:
    request = ask()
    assert request.param("content") == "messages"
    assert request.param("stop") == "stop_sequences"
    assert request.param("template_options") == "thinking"


# -- any body --

WHOLE = {
    "model": "tiny",
    "max_tokens": 9,
    "system": [text("Be brief.")],
    "messages": [
        USER,
        assistant({"type": "thinking", "thinking": "t", "signature": ""}, text("a"), USE),
        user({**RESULT, "content": [text("b")], "is_error": True}, text("c")),
    ],
    "tools": [TOOL],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "high"},
    "metadata": {"user_id": "u"},
    "stop_sequences": ["a"],
    "temperature": 1.0,
    "top_p": 0.9,
    "top_k": 4,
    "stream": True,
}
ODD: list[Any] = [
    *(None, True, -1, 2**80, float("inf"), "", "\ud800"),
    *([], [None], {}, {"type": "text"}, [[]]),
]


def places(value: Any) -> list[tuple[Any, Any]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, each in inner:
        found.append((value, key))
        if isinstance(each, dict | list):
            found += places(each)
    return found


def test_bodies_with_odd_values_are_parsed_or_refused() -> None:
    random_ = random.Random(SEED)
    num_taken = 0
    for _ in range(5_000 * SCALE):
        body = copy.deepcopy(WHOLE)
        for _ in range(random_.randint(1, 2)):
            holder, key = random_.choice(places(body))
            holder[key] = copy.deepcopy(random_.choice(ODD))
        try:
            request = parse(body, SERVED)
        except InvalidArgument:
            continue
        num_taken += 1
        assert request.sampling.problem(SERVED.vocab_size) is None
        assert request.turn.messages[-1].role in ("user", "tool", "system")
    assert num_taken > 100


@given(st.recursive(st.none() | st.integers() | st.text(), st.lists))
def test_a_body_that_is_not_an_object_is_refused(value: Any) -> None:
    with pytest.raises(InvalidArgument):
        parse(value, SERVED)


def test_the_output_schema_becomes_a_constraint() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    request = ask(output_config={"format": form, "effort": "high"})
    assert request.turn.options.constraint == Constraint(
        ConstraintKind.JSON_SCHEMA, '{"type": "object"}'
    )
    assert request.params["constraint.json_schema"] == "output_config.format.schema"
    assert ask().turn.options.constraint is None
    body = {"model": "tiny", "messages": [USER], "output_config": {"format": form}}
    assert parse_count(body, SERVED).turn.messages == ask().turn.messages


def test_the_history_has_the_same_length_limit_as_a_chat_completion() -> None:
    turns = [{"role": "user", "content": [text("hi")]}, {"role": "assistant", "content": "ho"}]
    long = [*(turns * 2_500), USER]  # has more values than other parameters may have
    assert len(messages(*long)) == len(long)
    assert refused(messages=long * 8)[0] == "messages"
