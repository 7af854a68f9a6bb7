"""Read a call that is a JSON object: {"name": …, "arguments": {…}}. Several model families use this format.

`parameters` is accepted instead of `arguments`. Other members are ignored. If the name comes first, the
arguments are streamed. If the arguments come first, they are withheld until the name is known. The arguments
may also be a string that contains the JSON of an object.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pensieve.text.tool_calls.calls import ParsedCalls
from pensieve.text.tool_calls.json_values import JSON, string
from pensieve.text.tool_calls.scan import WHITE, Emit, NoCall, Scan, ignore, nonspace
from pensieve.text.tool_calls.values import past_white, value

ARGUMENTS = ("arguments", "parameters")


def call_object(calls: ParsedCalls, *, needs_arguments: bool = False) -> Scan[str]:
    """Read the object after its opening brace. Return "".

    If the closing brace is missing, return the character that follows in its place.

    `needs_arguments`: an object with only a name is not a call.
    """
    name: str | None = None
    withheld: list[str] | None = None  # arguments that came before the name
    is_done = False
    character = yield from nonspace()
    while True:
        if character != '"':
            raise NoCall
        key: list[str] = []
        yield from string(ignore, key.append)
        if (yield from nonspace()) != ":":
            raise NoCall
        character, member = (yield from nonspace()), "".join(key)
        if is_done or member not in ("name", *ARGUMENTS):
            character = yield from value(character, ignore, JSON)
        elif member == "name":
            if character != '"' or name is not None:
                raise NoCall
            written: list[str] = []
            yield from string(ignore, written.append)
            name, character = "".join(written), ""
            calls.check(name)
            if withheld is not None:
                _report(calls, name, "".join(withheld))
                is_done = True
        elif withheld is not None:
            raise NoCall
        elif name is None:
            withheld = []
            character = yield from _arguments(character, partial(_withhold, withheld))
        else:
            character = yield from _arguments(character, partial(_begin, calls, name))
            calls.end()
            is_done = True
        character = yield from past_white(character)
        if character == "}":
            break
        if character != ",":
            if is_done:
                return character
            raise NoCall
        character = yield from nonspace()
    if not is_done:
        if name is None or needs_arguments:
            raise NoCall
        _report(calls, name, "{}")
    calls.discard()
    return ""


def _report(calls: ParsedCalls, name: str, arguments: str) -> None:
    calls.begin(name)
    calls.write(arguments)
    calls.end()


def _begin(calls: ParsedCalls, name: str) -> Emit:
    calls.begin(name)
    return calls.write


def _withhold(withheld: list[str]) -> Emit:
    return withheld.append


def _arguments(character: str, begin: Callable[[], Emit]) -> Scan[str]:
    """Read an object, or a string that contains an object. null and the empty string mean an empty object.

    `begin` is called when these are certainly arguments. It returns the function that receives their text.
    """
    if character == "{":
        return (yield from value(character, begin(), JSON))
    if character == '"':
        inner = _Inner(begin)
        yield from string(ignore, inner.push)
        inner.end()
        return ""
    written: list[str] = []
    character = yield from value(character, written.append, JSON)
    if written != ["null"]:
        raise NoCall
    begin()("{}")
    return character


class _Inner:
    """Reads arguments inside a string."""

    def __init__(self, begin: Callable[[], Emit]) -> None:
        self._begin = begin
        self._scan: Scan[str] | None = None  # None: not begun, or finished
        self._is_whole = False

    def push(self, character: str) -> None:
        if self._scan is not None:
            try:
                self._scan.send(character)
            except StopIteration:
                self._scan, self._is_whole = None, True
        elif character == "{" and not self._is_whole:
            self._scan = value(character, self._begin(), JSON)
            next(self._scan)
        elif character not in WHITE:
            raise NoCall

    def end(self) -> None:
        if self._scan is not None:
            raise NoCall
        if not self._is_whole:
            self._begin()("{}")
