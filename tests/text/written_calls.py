"""Random tool calls in the syntax of each model family, and replies that are cut into tokens anywhere."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from hypothesis import strategies as st

from pensieve.text.parts import Part
from pensieve.text.reply_pieces import Piece, ReplyPieces, Text, Thinking
from pensieve.text.tool_calls import STYLES, CallArguments, CallBegan, CallStyle

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
TOOLS = (WEATHER, TIME)


class Read(NamedTuple):
    """A reply as it was read, with its pieces joined."""

    text: str
    calls: list[tuple[str, str]]  # name and arguments of each call, as they were written
    parsed_calls: list[tuple[str, Mapping[str, Any]]]  # name and parsed arguments of each call
    ends_with_call: bool
    thinking: str


def read(
    style: str | CallStyle,
    *reply: str | tuple[str, Part],
    tools: Sequence[Mapping[str, Any]] = TOOLS,
) -> Read:
    """Read a reply from these tokens."""
    cutter = ReplyPieces(STYLES[style] if isinstance(style, str) else style, tools)
    pieces: list[Piece] = []
    for token in reply:
        text, part = (token, Part.TEXT) if isinstance(token, str) else token
        pieces += cutter.push(text, part)
    pieces += cutter.end()
    assert cutter.end() == []
    return together(pieces, cutter)


def together(pieces: Iterable[Piece], cutter: ReplyPieces) -> Read:
    """Join the pieces. Check that a call's arguments come after the call and before the next call."""
    text, thinking = [], []
    calls: list[tuple[str, list[str]]] = []
    for each in pieces:
        if isinstance(each, CallBegan):
            assert each.index == len(calls)
            calls.append((each.name, []))
            continue
        assert each.text, "an empty piece"
        if isinstance(each, CallArguments):
            assert each.index == len(calls) - 1
            calls[-1][1].append(each.text)
        elif isinstance(each, Text):
            text.append(each.text)
        else:
            assert isinstance(each, Thinking)
            thinking.append(each.text)
    written = [(name, "".join(arguments)) for name, arguments in calls]
    whole = cutter.calls
    assert cutter.num_calls == len(calls)
    for call in whole:
        assert call.name == written[call.index][0]
        assert json.loads(written[call.index][1]) == call.arguments
    return Read(
        "".join(text),
        written,
        [(each.name, each.arguments) for each in whole],
        cutter.ends_with_call,
        "".join(thinking),
    )


def cut(text: str, borders: Iterable[int]) -> list[str]:
    edges = sorted({0, len(text), *(each % (len(text) + 1) for each in borders)})
    return [text[start:stop] for start, stop in pairwise(edges)]


# -- random calls, and how each family writes them --

NAMES = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=8)
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | WORDS
    | st.sampled_from(["</tool_call>", "<tool_call>", "[TOOL_CALLS]", "]", "}", '"', "'", "\\"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), min_size=1, max_size=3
)


def as_hermes(calls: Sequence[tuple[str, Any]]) -> str:
    objects = (json.dumps({"name": name, "arguments": given}) for name, given in calls)
    return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)


def as_hermes_strings(calls: Sequence[tuple[str, Any]]) -> str:
    objects = (json.dumps({"arguments": json.dumps(given), "name": name}) for name, given in calls)
    return "".join(f"<tool_call>{each}</tool_call>" for each in objects)


def as_xml(calls: Sequence[tuple[str, Any]]) -> str:
    def parameter(key: str, value: Any) -> str:
        return f"<parameter={key}>\n{json.dumps(value)}\n</parameter>\n"

    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(parameter(key, value) for key, value in given.items())
        + "</function>\n</tool_call>"
        for name, given in calls
    )


def as_llama(calls: Sequence[tuple[str, Any]]) -> str:
    return "; ".join(
        json.dumps({"name": name, "parameters": given}, ensure_ascii=False) for name, given in calls
    )


def as_mistral_list(calls: Sequence[tuple[str, Any]]) -> str:
    return "[TOOL_CALLS] " + json.dumps(
        [{"name": name, "arguments": given, "id": "a1b2c3d4e"} for name, given in calls]
    )


def as_mistral(calls: Sequence[tuple[str, Any]]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(given)}" for name, given in calls)


def as_python(calls: Sequence[tuple[str, Any]]) -> str:
    def arguments(given: Mapping[str, Any]) -> str:
        return ", ".join(f"{key}={value!r}" for key, value in given.items())

    return "[" + ", ".join(f"{name}({arguments(given)})" for name, given in calls) + "]"


WRITERS = {
    "hermes": as_hermes,
    "hermes strings": as_hermes_strings,
    "hermes xml": as_xml,
    "llama": as_llama,
    "mistral list": as_mistral_list,
    "mistral": as_mistral,
    "pythonic": as_python,
}
