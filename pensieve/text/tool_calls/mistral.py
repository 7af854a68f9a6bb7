"""The formats of Mistral: a list of calls in older models, a mark before each call in newer models.

    [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": …}]
    [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[ARGS]{}

`[CALL_ID]` and an id may precede `[ARGS]`. The marks are usually special tokens, which have no text. The
scanner then sees a call such as `get_weather{"city": "Paris"}`, or the list alone.
"""

from __future__ import annotations

from pensieve.text.tool_calls.calls import NAME_CHARACTERS_MAX, ParsedCalls
from pensieve.text.tool_calls.json_call import call_object
from pensieve.text.tool_calls.json_values import JSON
from pensieve.text.tool_calls.scan import WHITE, NoCall, Scan, expect, ignore, nonspace, take_until
from pensieve.text.tool_calls.values import past_white, value

TOOL_CALLS = "[TOOL_CALLS]"


def mistral(calls: ParsedCalls, needs_mark: bool) -> Scan[None]:
    character = yield
    if character == "[":
        character = yield
        if character != TOOL_CALLS[1]:
            if needs_mark:
                raise NoCall
            yield from _list((yield from past_white(character)), calls)
            return
        yield from expect(TOOL_CALLS[2:])
        character = yield from nonspace()
        if character == "[":
            yield from _list((yield from nonspace()), calls)
            return
    if character == "{":
        if (yield from call_object(calls)):
            raise NoCall
        return
    yield from _named(character, calls)


def _list(character: str, calls: ParsedCalls) -> Scan[None]:
    """Read the objects after the opening bracket."""
    while True:
        if character != "{":
            raise NoCall
        character = yield from call_object(calls)
        character = yield from past_white(character)
        if character == "]":
            return
        if character != ",":
            raise NoCall
        character = yield from nonspace()


def _named(character: str, calls: ParsedCalls) -> Scan[None]:
    """Read a name and its arguments."""
    name: list[str] = []
    while character not in "[{":
        if character in WHITE or len(name) == NAME_CHARACTERS_MAX:
            raise NoCall
        name.append(character)
        character = yield
    calls.check("".join(name))
    if character == "[":
        character = yield
        if character == "C":
            yield from expect("ALL_ID]")
            yield from take_until("[", ignore, most=NAME_CHARACTERS_MAX)
            character = yield
        if character != "A":
            raise NoCall
        yield from expect("RGS]")
        character = yield from nonspace()
    if character != "{":
        raise NoCall
    calls.begin("".join(name))
    yield from value(character, calls.write, JSON)
    calls.end()
