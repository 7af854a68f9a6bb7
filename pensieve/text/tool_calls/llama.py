"""The format of Llama 3: the whole reply is JSON, with semicolons between several calls.

    {"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_time", "parameters": {}}

`<|python_tag|>` may come first. This mark is optional, so an ordinary JSON reply could look like a call.
Therefore an object is a call only if it has the key `parameters` (or `arguments`), whose value may be empty.
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
    raise NoCall  # ends the scan: complete calls are kept, and the rest of the reply is text
