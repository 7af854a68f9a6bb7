"""Read lists and mappings, whose syntax is the same in JSON and in Python, and the values in them.

A value is checked while it is streamed, and written as JSON. The only state is the list of open brackets.
JSON is written unchanged, including its white space. For Python literals, white space and a comma before a
closing bracket are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from pensieve.text.message import DEPTH_MAX
from pensieve.text.tool_calls.scan import WHITE, Emit, NoCall, Scan, ignore, nonspace

CLOSERS = {"{": "}", "[": "]"}
WORD_CHARACTERS = frozenset("0123456789+-.abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
WORD_CHARACTERS_MAX = 400  # no number in the range of a double needs more digits


class Notation(NamedTuple):
    """The syntax of scalars in a language. `scalar` is called with the first character."""

    scalar: Callable[[str, Emit], Scan[str]]  # reads a scalar, including strings
    quotes: str  # possible first characters of a string or key
    is_json: bool


def value(character: str, emit: Emit, notation: Notation) -> Scan[str]:
    """Read one value of any kind."""
    white = emit if notation.is_json else ignore
    closers: list[str] = []  # the closing brackets that are still expected
    while True:
        if character in CLOSERS:
            if len(closers) == DEPTH_MAX:
                raise NoCall
            closers.append(CLOSERS[character])
            emit(character)
            character = yield from nonspace(white)
            if character != closers[-1]:
                if closers[-1] == "}":
                    character = yield from _key(character, emit, white, notation)
                continue
        else:
            character = yield from notation.scalar(character, emit)
        while closers:  # after a value, or after the opening bracket of an empty list or mapping
            character = yield from past_white(character, white)
            if character == ",":
                if notation.is_json:
                    emit(",")
                character = yield from nonspace(white)
                if notation.is_json or character != closers[-1]:
                    if not notation.is_json:
                        emit(",")
                    if closers[-1] == "}":
                        character = yield from _key(character, emit, white, notation)
                    break
            if character != closers[-1]:
                raise NoCall
            closers.pop()
            emit(character)
            character = ""
        else:
            return character


def _key(character: str, emit: Emit, white: Emit, notation: Notation) -> Scan[str]:
    """Read a key and its colon. Return the first character of the value."""
    if character not in notation.quotes:
        raise NoCall
    character = yield from notation.scalar(character, emit)
    if (yield from past_white(character, white)) != ":":
        raise NoCall
    emit(":")
    return (yield from nonspace(white))


def past_white(character: str, emit: Emit = ignore) -> Scan[str]:
    """Return the first character that is not white space: `character` itself or a later character.

    If `character` is empty, start with the next character.
    """
    if character and character not in WHITE:
        return character
    emit(character)
    return (yield from nonspace(emit))


def word(character: str) -> Scan[tuple[str, str]]:
    """Read a number or a name. Return its text and the character after it."""
    found: list[str] = []
    while character in WORD_CHARACTERS:
        if len(found) == WORD_CHARACTERS_MAX:
            raise NoCall
        found.append(character)
        character = yield
    return "".join(found), character


def is_number(text: str) -> bool:
    """Return whether the text is a JSON number within the range of a double."""
    mantissa, exponent_mark, exponent = text.lower().partition("e")
    whole, point, fraction = mantissa.partition(".")
    digits = whole.removeprefix("-")
    return (
        text.isascii()
        and digits.isdigit()
        and (digits[0] != "0" or digits == "0")
        and (fraction.isdigit() or not point)
        and (exponent[exponent[:1] in ("+", "-") :].isdigit() or not exponent_mark)
        and math.isfinite(float(text))
    )
