"""Replies made to be costly: time grows linearly with their length, and depth and memory are bounded.

Time is counted in executed lines of Python, and not measured.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from pensieve.text.message import DEPTH_MAX
from pensieve.text.parts import Part
from pensieve.text.reply_pieces import WHITE_CHARACTERS_MAX, ReplyPieces
from pensieve.text.tool_calls import STYLES, calls
from pensieve.text.tool_calls.finder import WITHHELD_MAX
from tests.text.written_calls import TOOLS, read

CALL = '{"name": "get_weather", "arguments": '
HOSTILE = {
    "hermes": {
        "open brackets": ("<tool_call>" + CALL + '{"a": ', "["),
        "open objects": ("<tool_call>" + CALL, '{"a":'),
        "brackets of another member": ('<tool_call>{"id": ', "["),
        "an unclosed string": ("<tool_call>" + CALL + '{"a": "', "x"),
        "an unclosed name": ('<tool_call>{"name": "', "x"),
        "escapes": ("<tool_call>" + CALL + '"', "\\\\"),
        "marks": ("", "<tool_call>"),
        "beginnings of calls": ("", "<tool_call>" + CALL),
        "beginnings of marks": ("", "<tool_cal"),
        "closing marks": ("<tool_call>" + CALL + "{}}", "</tool_call>"),
        "calls": ("", "<tool_call>" + CALL + "{}}</tool_call>"),
        "an endless value": ("<function=get_weather><parameter=city>", "\n<"),
        "an endless value that is no text": ("<function=get_weather><parameter=days>", "1"),
        "a long number": ("<tool_call>" + CALL + '{"a": ', "1"),
        "white space": ("<tool_call>", " "),
        "white space behind a call": ("<tool_call>" + CALL + "{}}", " "),
        "white space in arguments": ("<tool_call>" + CALL + "{", " "),
    },
    "llama": {"calls": ("", CALL + "{}};"), "brackets": (CALL + '{"a": ', "[")},
    "mistral": {
        "brackets": ("[TOOL_CALLS]", "["),
        "open brackets": ("", "["),
        "a long name": ("[TOOL_CALLS]", "a"),
        "an endless id": ("[TOOL_CALLS]get_time[CALL_ID]", "a"),
        "a list": ("[TOOL_CALLS][", CALL + "{}},"),
    },
    "pythonic": {
        "open brackets": ("[get_weather(city=", "["),
        "open dicts": ("[get_weather(city=", "{'a':"),
        "an unclosed string": ("[get_weather(city='", "\\x41"),
        "quotes": ("[get_weather(city=", '"'),
        "a long name": ("[", "a"),
        "a long number": ("[get_weather(city=", "1"),
        "arguments": ("[get_weather(", "a=1,"),
        "calls": ("[", "get_time(),"),
    },
}
CASES = [(style, name) for style, cases in HOSTILE.items() for name in cases]


def reply_of(style: str, name: str, length: int) -> str:
    lead, again = HOSTILE[style][name]
    return lead + again * (length // len(again))


def num_lines(style: str, reply: str) -> int:
    """Return how many lines of pensieve/text a reply executes, fed character by character."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace if "/pensieve/text/" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        cutter = ReplyPieces(STYLES[style], TOOLS)
        for each in reply:
            cutter.push(each, Part.TEXT)
        cutter.end()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(("style", "name"), CASES)
def test_time_grows_linearly_with_the_length_of_a_reply(
    monkeypatch: pytest.MonkeyPatch, style: str, name: str
) -> None:
    """Limits are reached within the first part, so every further part costs as much as the one before."""
    monkeypatch.setattr(calls, "CALLS_MAX", 16)
    first, second, third = (
        num_lines(style, reply_of(style, name, length)) for length in (2_000, 4_000, 6_000)
    )
    assert second - first > 2_000
    assert third - second < 1.1 * (second - first)


@pytest.mark.parametrize(("style", "name"), CASES)
def test_a_long_hostile_reply_is_read_to_its_end(style: str, name: str) -> None:
    """No text of the reply is lost. Characters outside calls are text."""
    reply = reply_of(style, name, 100_000)
    found = read(style, reply)
    if not found.calls:
        assert found.text == reply


def test_memory_is_bounded() -> None:
    for style, name in CASES:
        if name == "white space behind a call":  # this white space is dropped
            continue
        cutter = ReplyPieces(STYLES[style], TOOLS)
        reply = reply_of(style, name, 100_000)
        num_withheld = 0
        for start in range(0, len(reply), 50):
            text = reply[start : start + 50]
            pieces = cutter.push(text, Part.TEXT)
            num_withheld = 0 if pieces else num_withheld + len(text)
            assert num_withheld <= WITHHELD_MAX + WHITE_CHARACTERS_MAX + 100, (style, name)


@pytest.mark.parametrize(
    ("style", "lead", "end"),
    [
        ("hermes", "<tool_call>" + CALL + '{"a": ', "}}</tool_call>"),
        ("pythonic", "[get_weather(city=", ")]"),
    ],
)
def test_nesting_is_limited_as_in_messages(style: str, lead: str, end: str) -> None:
    most = DEPTH_MAX if style == "pythonic" else DEPTH_MAX - 1  # the arguments object is one level
    assert len(read(style, lead + "[" * most + "]" * most + end).parsed_calls) == 1
    deeper = read(style, lead + "[" * (most + 1) + "]" * (most + 1) + end)
    assert deeper.parsed_calls == []
    assert deeper.text == "[" + "]" * (most + 1) + end
