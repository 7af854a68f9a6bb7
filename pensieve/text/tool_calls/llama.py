"""Calls as Llama 3 writes them: a reply that is JSON from its beginning, several parted by semicolons.

    {"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_time", "parameters": {}}

`<|python_tag|>` may stand before them.  Nothing else marks a call, so an object needs its arguments to be
one.
"""

from __future__ import annotations

from pensieve.text.tool_calls.calls import ParsedCalls
from pensieve.text.tool_calls.json_call import call_object
from pensieve.text.tool_calls.scan import NoCall, Scan, expect, nonspace
from pensieve.text.tool_calls.values import past_white

PYTHON_TAG = "<|python_tag|>"


def llama(calls: ParsedCalls, needs_mark: bool) -> Scan[None]:
    character = yield
    if character == PYTHON_TAG[0]:
        yield from expect(PYTHON_TAG[1:])
        character = yield from nonspace()
    while character == "{":
        character = yield from call_object(calls, needs_arguments=True)
        if (yield from past_white(character)) != ";":
            break
        character = yield from nonspace()
    raise NoCall  # of what comes behind the last one
