"""The Python format: a list of function calls whose named arguments are literals.

    [get_weather(city="Paris", days=3), get_time()]

The literals are converted to JSON while they are streamed, and are never evaluated. Supported are strings
(with escapes, also in triple quotes), numbers, True, False, None, lists, and dicts with string keys. If the
list contains other Python (expressions, tuples, sets, string prefixes, positional arguments), it is text.
"""

from __future__ import annotations

import json

from pensieve.text.tool_calls.calls import NAME_CHARACTERS_MAX, ParsedCalls
from pensieve.text.tool_calls.json_values import END, HIGH, hex_number
from pensieve.text.tool_calls.scan import Emit, NoCall, Scan, nonspace
from pensieve.text.tool_calls.values import Notation, is_number, past_white, value, word

NAME_CHARACTERS = frozenset("0123456789_.-abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
WORDS = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",  # models sometimes write the JSON words; their meaning is clear
}
ESCAPES = {
    "\\": "\\",
    "'": "'",
    '"': '"',
    "\n": "",
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
}
HEX_DIGITS = {"x": 2, "u": 4, "U": 8}  # number of digits of a numeric escape


def pythonic(calls: ParsedCalls, needs_mark: bool) -> Scan[None]:
    """`needs_mark` has no effect, because this format has no mark at the beginning of a call."""
    if (yield) != "[":
        raise NoCall
    character = yield from nonspace()
    while True:
        name, character = yield from _name(character)
        if character != "(":
            raise NoCall
        calls.check(name)
        yield from _arguments(name, calls)
        character = yield from nonspace()
        if character == "]":
            return
        if character != ",":
            raise NoCall
        character = yield from nonspace()


def _name(character: str) -> Scan[tuple[str, str]]:
    """Read a name. Return the name and the character after it."""
    found: list[str] = []
    while character in NAME_CHARACTERS:
        if len(found) == NAME_CHARACTERS_MAX:
            raise NoCall
        found.append(character)
        character = yield
    return "".join(found), character


def _arguments(name: str, calls: ParsedCalls) -> Scan[None]:
    """Read all arguments and the closing bracket."""
    keys: set[str] = set()
    character = yield from nonspace()
    while character != ")":
        key, character = yield from _name(character)
        character = yield from past_white(character)
        if character != "=" or not key or key in keys:
            raise NoCall
        character = yield from nonspace()
        if character == "=":
            raise NoCall
        if not keys:
            calls.begin(name)
        calls.write(f"{',' if keys else '{'}{json.dumps(key)}:")
        keys.add(key)
        character = yield from value(character, calls.write, PYTHON)
        character = yield from past_white(character)
        if character == ",":
            character = yield from nonspace()
        elif character != ")":
            raise NoCall
    if not keys:
        calls.begin(name)
        calls.write("{")
    calls.write("}")
    calls.end()


def _scalar(character: str, emit: Emit) -> Scan[str]:
    if character in "'\"":
        return (yield from _string(character, emit))
    found, character = yield from word(character)
    if found in WORDS:
        emit(WORDS[found])
    else:
        emit(_number(found))
    return character


def _number(text: str) -> str:
    """Return a number as JSON.

    Unlike JSON, Python allows numbers without digits before or after the point (`.5`, `1.`).
    """
    mantissa, exponent_mark, exponent = text.lower().partition("e")
    if mantissa.endswith("."):
        mantissa += "0"
    if mantissa.removeprefix("-").startswith("."):
        mantissa = mantissa.replace(".", "0.", 1)
    has_digits = bool(text.strip("-."))
    text = mantissa + exponent_mark + exponent
    if not has_digits or not is_number(text):
        raise NoCall
    return text


def _string(quote: str, emit: Emit) -> Scan[str]:
    """Read a string after its first quote.

    If the string is empty, return the character after it, because that character had to be read to see that
    the string is not triple-quoted. Otherwise return "".
    """
    emit('"')
    character, num_quotes, end = (yield), 0, 1
    if character == quote:
        character = yield
        if character != quote:
            emit('"')
            return character
        character, end = (yield), 3
    while True:
        if character == quote:
            num_quotes += 1
            if num_quotes == end:
                emit('"')
                return ""
        else:
            emit(json.dumps(quote * num_quotes)[1:-1])
            num_quotes = 0
            if character == "\n" and end == 1:
                raise NoCall
            text = (yield from _escape()) if character == "\\" else character
            emit(json.dumps(text, ensure_ascii=False)[1:-1])
        character = yield


def _escape() -> Scan[str]:
    """Read an escape after its backslash."""
    character = yield
    if character in ESCAPES:
        return ESCAPES[character]
    if character not in HEX_DIGITS:
        if character in "01234567N":  # octal escapes and \N{…} are not supported
            raise NoCall
        return "\\" + character
    number = yield from hex_number(HEX_DIGITS[character])
    if HIGH <= number < END or number > 0x10FFFF:
        raise NoCall
    return chr(number)


PYTHON = Notation(_scalar, "'\"", is_json=False)
