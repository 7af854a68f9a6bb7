"""Calls between marks, as Hermes and Qwen write them: one in each pair.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Qwen3-Coder writes another form between the same marks (`xml_call`).  The closing mark may be missing, as
may be the opening one where it is a control token that has no text.
"""

from __future__ import annotations

from pensieve.text.tool_calls.calls import Calls
from pensieve.text.tool_calls.json_call import call_object
from pensieve.text.tool_calls.scan import NoCall, Scan, expect, nonspace
from pensieve.text.tool_calls.values import past_white
from pensieve.text.tool_calls.xml_call import function_element

OPENING, CLOSING = "<tool_call>", "</tool_call>"
FUNCTION = "<function="


def hermes(calls: Calls, needs_mark: bool) -> Scan[None]:
    character = yield
    if character == "<":
        character = yield
        is_element = character != OPENING[1]
        if not is_element:
            yield from expect(OPENING[2:])
            character = yield from nonspace()
            is_element = character == "<"
            if is_element:
                character = yield
        if is_element:
            if character != FUNCTION[1]:
                raise NoCall
            yield from expect(FUNCTION[2:])
            yield from function_element(calls)
            character = ""
    if character == "{":
        character = yield from call_object(calls)
    elif character:
        raise NoCall
    if (yield from past_white(character)) != "<":
        raise NoCall
    yield from expect(CLOSING[1:])
