"""The format of Hermes and Qwen: each call is between two marks.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

The closing mark may be missing. The opening mark may be missing if it is a control token without text.

Qwen3-Coder uses the same marks, but another format between them, with an element for each argument:

    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>

A value is plain text, without the line breaks next to its tags. The tool's schema defines the type of the
value. A `string` is streamed. Any other value is withheld until it is complete, and becomes a string if it is
not JSON.
"""

from __future__ import annotations

import json

from pensieve.text.tool_calls.calls import NAME_CHARACTERS_MAX, ParsedCalls
from pensieve.text.tool_calls.json_call import call_object
from pensieve.text.tool_calls.json_values import is_json
from pensieve.text.tool_calls.scan import Emit, NoCall, Scan, expect, nonspace, take_until
from pensieve.text.tool_calls.values import past_white

OPENING, CLOSING = "<tool_call>", "</tool_call>"
FUNCTION = "<function="
END_OF_VALUE = "</parameter>"
WORDS = {"True": "true", "False": "false", "None": "null"}


def hermes(calls: ParsedCalls, needs_mark: bool) -> Scan[None]:
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
            yield from _function_element(calls)
            character = ""
    if character == "{":
        character = yield from call_object(calls)
    elif character:
        raise NoCall
    if (yield from past_white(character)) != "<":
        raise NoCall
    yield from expect(CLOSING[1:])


def _function_element(calls: ParsedCalls) -> Scan[None]:
    """Read the element after `<function=`."""
    name = yield from _name()
    calls.check(name)
    keys: set[str] = set()
    while True:
        if (yield from nonspace()) != "<":
            raise NoCall
        character = yield
        if character == "/":
            yield from expect("function>")
            break
        if character != "p":
            raise NoCall
        yield from expect("arameter=")
        key = yield from _name()
        if key in keys:
            raise NoCall
        if not keys:
            calls.begin(name)
        calls.write(f"{', ' if keys else '{'}{_quoted(key)}: ")
        keys.add(key)
        if calls.type_of(name, key) == "string":
            calls.write('"')
            yield from _text(lambda text: calls.write(_quoted(text)[1:-1]))
            calls.write('"')
        else:
            held: list[str] = []
            yield from _text(held.append)
            calls.write(_json_of("".join(held)))
    if not keys:
        calls.begin(name)
        calls.write("{")
    calls.write("}")
    calls.end()


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _name() -> Scan[str]:
    found: list[str] = []
    yield from take_until(">", found.append, most=NAME_CHARACTERS_MAX)
    return "".join(found)


def _text(emit: Emit) -> Scan[None]:
    """Read a value up to its end, without the line break on either side."""
    withheld = ""  # a line break, and the possible start of the closing tag after it
    is_first = True
    while True:
        character = yield
        is_dropped, is_first = is_first and character == "\n", False
        if is_dropped:
            continue
        mark = (withheld + character).removeprefix("\n")
        if mark == END_OF_VALUE:
            return
        if END_OF_VALUE.startswith(mark):
            withheld += character
            continue
        emit(withheld)
        withheld = character if character in "\n<" else ""
        if not withheld:
            emit(character)


def _json_of(text: str) -> str:
    """Return a value unchanged if it is JSON, otherwise as a JSON string."""
    word = WORDS.get(text.strip(), text.strip())
    return word if is_json(word) else _quoted(text)
