"""Rules for tool calls become a constraint, or are refused by their name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pensieve.api.anthropic.parse import parse as parse_message
from pensieve.api.json_fields import Refusal
from pensieve.api.openai.request import ParsedRequest, RequestKind, Served, parse
from pensieve.core.constraint import OBJECTS_MAX, TEXT_BYTES_MAX, ConstraintKind
from pensieve.text import style_named
from tests.api.openai.bodies import SERVED
from tests.text.families import QWEN_3, template_of

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "a city"}},
    "required": ["city"],
}
BARE = {**PARAMETERS, "properties": {"city": {"type": "string"}}}
STYLE = style_named("hermes", template_of(QWEN_3))
HELD = SERVED._replace(call_style=STYLE)


def tool(name: str = "get", **members: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": PARAMETERS, **members}}


def flat(name: str = "get", **members: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": PARAMETERS, **members}


def chat(served: Served = HELD, **members: Any) -> ParsedRequest:
    messages = [{"role": "user", "content": "hi"}]
    return parse(RequestKind.CHAT, {"model": "tiny", "messages": messages, **members}, served)


def response(**members: Any) -> ParsedRequest:
    return parse(RequestKind.RESPONSE, {"model": "tiny", "input": "hi", **members}, HELD)


def message(**members: Any) -> ParsedRequest:
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "tiny", "max_tokens": 9, "messages": messages, **members}
    return parse_message(body, HELD)


def wanted_of(request: ParsedRequest) -> dict[str, Any]:
    assert request.turn.options.constraint is not None
    assert request.turn.options.constraint.kind is ConstraintKind.TOOL_CALLS
    assert request.params["constraint.tool_calls"] == "tools"
    found: dict[str, Any] = json.loads(request.turn.options.constraint.text)
    return found


def refused(call: Any, **members: Any) -> tuple[str, str]:
    with pytest.raises(Refusal) as caught:
        call(**members)
    return caught.value.field, caught.value.problem


def test_without_strict_tools_or_tool_choice_calls_are_not_constrained() -> None:
    for members in ({}, {"tool_choice": "auto"}, {"parallel_tool_calls": True}):
        assert (
            chat(tools=[tool(), tool("set", strict=False)], **members).turn.options.constraint
            is None
        )
    assert chat(tools=[tool(strict=True)], tool_choice="none").turn.options.constraint is None
    assert chat(tools=[], parallel_tool_calls=False).turn.options.constraint is None


def test_only_strict_tools_are_constrained_to_their_schema() -> None:
    found = wanted_of(chat(tools=[tool(strict=True), tool("set")]))
    assert found == {
        "form": "hermes",
        "tools": [
            {"name": "get", "schema": BARE, "is_lenient": False},
            {"name": "set", "schema": None, "is_lenient": True},
        ],
        "must": False,
        "single": False,
        "reply": None,
    }
    assert wanted_of(response(tools=[flat(strict=True), flat("set")])) == found
    strict = {"name": "get", "input_schema": PARAMETERS, "strict": True}
    assert wanted_of(message(tools=[strict, {"name": "set", "input_schema": {}}])) == found
    shown = chat(tools=[tool(strict=True)]).tools
    assert shown == (tool(),)  # the template sees no difference to other tools


def test_tool_choice_selects_the_tools_and_may_require_a_call() -> None:
    def chosen(request: ParsedRequest) -> tuple[list[str], bool, bool]:
        found = wanted_of(request)
        return [each["name"] for each in found["tools"]], found["must"], found["single"]

    tools, flats = [tool("a"), tool("b")], [flat("a"), flat("b")]
    plain = [{"name": each, "input_schema": PARAMETERS} for each in ("a", "b")]
    named: Any = {"type": "function", "function": {"name": "b"}}
    assert chosen(chat(tools=tools, tool_choice="required")) == (["a", "b"], True, False)
    assert chosen(chat(tools=tools, tool_choice=named)) == (["b"], True, False)
    assert chosen(response(tools=flats, tool_choice="required")) == (["a", "b"], True, False)
    named = {"type": "function", "name": "a"}
    assert chosen(response(tools=flats, tool_choice=named)) == (["a"], True, False)
    assert chosen(message(tools=plain, tool_choice={"type": "any"})) == (["a", "b"], True, False)
    named = {"type": "tool", "name": "b", "disable_parallel_tool_use": True}
    assert chosen(message(tools=plain, tool_choice=named)) == (["b"], True, True)
    some: Any = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "b"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": some}
    assert chosen(chat(tools=tools, tool_choice=choice)) == (["b"], False, False)
    some = {"type": "allowed_tools", "mode": "required", "tools": [named | {"type": "function"}]}
    del some["tools"][0]["disable_parallel_tool_use"]
    assert chosen(response(tools=flats, tool_choice=some)) == (["b"], True, False)
    assert chosen(chat(tools=tools, parallel_tool_calls=False)) == (["a", "b"], False, True)


def test_a_required_call_of_a_tool_that_is_not_strict_is_lenient() -> None:
    found = wanted_of(chat(tools=[tool(), tool("set", strict=True)], tool_choice="required"))
    assert [(each["schema"], each["is_lenient"]) for each in found["tools"]] == [
        (BARE, True),
        (BARE, False),
    ]


def test_only_annotations_are_removed_from_a_schema() -> None:
    parameters = {
        "title": "T",
        "description": "d",
        "type": ["object", "null"],
        "properties": {
            "description": {"type": "string", "description": "d", "const": {"title": 1}},
            "default": {"anyOf": [{"title": "t", "type": "integer"}], "default": 5},
        },
        "$defs": {"title": {"description": "d", "enum": [{"description": "d"}]}},
        "items": {"examples": [1]},
    }
    (found,) = wanted_of(chat(tools=[tool(parameters=parameters, strict=True)]))["tools"]
    assert found["schema"] == {
        "type": "object",
        "properties": {
            "description": {"type": "string", "const": {"title": 1}},
            "default": {"anyOf": [{"type": "integer"}]},
        },
        "$defs": {"title": {"enum": [{"description": "d"}]}},
        "items": {},
    }
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
    recursive = {"$ref": "#/$defs/node", "$defs": {"node": node}}
    (found,) = wanted_of(chat(tools=[tool(parameters=recursive, strict=True)]))["tools"]
    assert found["schema"] == recursive
    bare = {"type": "function", "function": {"name": "f", "strict": True}}
    (found,) = wanted_of(chat(tools=[bare]))["tools"]
    assert found["schema"] == {"type": "object", "properties": {}, "additionalProperties": False}


def test_a_response_format_applies_to_replies_without_calls() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 1}}}
    found = wanted_of(chat(tools=[tool()], response_format=form))
    assert found["reply"] == ["json_schema", '{"const": 1}']
    assert (
        wanted_of(chat(tools=[tool()], response_format=form, tool_choice="required"))["reply"]
        is None
    )
    alone = chat(tools=[tool()], response_format=form, tool_choice="none").turn.options.constraint
    assert alone is not None
    assert alone.kind is ConstraintKind.JSON_SCHEMA
    without = chat(SERVED, tools=[tool()], response_format=form).turn.options.constraint
    assert without is not None
    assert without.kind is ConstraintKind.JSON_SCHEMA  # this model's calls cannot be constrained
    lark = {"grammar": 'start: "a"'}
    free = chat(tools=[tool()], structured_outputs=lark).turn.options.constraint
    assert free is not None
    assert free.kind is ConstraintKind.GRAMMAR
    members = {"tools": [tool(strict=True)], "structured_outputs": lark}
    assert refused(chat, **members)[0] == "tools[0].function.strict"


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": 5}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        (
            {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
        ),
        (
            {"tools": [tool()], "tool_choice": {"type": "allowed_tools", "mode": "auto"}},
            "tool_choice.tools",
        ),
        (
            {"tools": [tool()], "tool_choice": {"type": "allowed_tools", "mode": "now"}},
            "tool_choice.mode",
        ),
        ({"tools": [tool(strict=True)], "ignore_eos": True}, "ignore_eos"),
        (
            {"tools": [tool(strict=True, parameters={"type": "string"})]},
            "tools[0].function.strict",
        ),
        ({"tools": [tool(strict=1)]}, "tools[0].function.strict"),
    ],
)
def test_invalid_tool_choices_are_refused_by_name(members: dict[str, Any], param: str) -> None:
    assert refused(chat, **members)[0] == param


@pytest.mark.parametrize("style", [None, style_named("pythonic", template_of(QWEN_3))])
@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [tool(), tool("set", strict=True)]}, "tools[1].function.strict"),
    ],
)
def test_call_constraints_are_refused_if_the_model_does_not_write_json_calls(
    style: Any, members: dict[str, Any], param: str
) -> None:
    served = SERVED._replace(call_style=style)
    where, problem = refused(chat, served=served, **{"tools": [tool()], **members})
    assert where == param
    assert "not JSON" in problem


def test_the_schemas_of_all_tools_share_one_size_limit() -> None:
    half = {"type": "object", "properties": {f"p{n}": {} for n in range(OBJECTS_MAX // 2)}}
    held = tool(parameters=half, strict=True)
    assert wanted_of(chat(tools=[held]))
    where, problem = refused(chat, tools=[held, held])
    assert (where, "objects" in problem) == ("tools", True)
    long = {"type": "object", "properties": {"a": {"const": "x" * TEXT_BYTES_MAX}}}
    assert refused(chat, tools=[tool(parameters=long, strict=True)])[0] == "tools"
