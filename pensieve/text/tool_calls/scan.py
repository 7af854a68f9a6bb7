"""Scanners: generators that receive a text one character at a time.

    scan = some_scanner(…); next(scan); scan.send("{"); scan.send('"'); …

A scanner returns when it has read a complete call or value. It raises `NoCall` at the first character that
does not fit. Its state is in its local variables, so the text may be cut anywhere. A scanner uses another
scanner with `yield from`. No scanner is recursive, so a character costs the same at any nesting depth.

A scanner of a value gets the first character of the value as an argument. If it had to read the character
after the value (for example, to find the end of a number), it returns that character, otherwise "".
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Scan: TypeAlias = Generator[None, str, T]
Emit: TypeAlias = Callable[[str], object]

WHITE = " \t\n\r"  # white space between the parts of JSON


class NoCall(Exception):
    """The text is not what the scanner looks for. This is not an error: the characters stay text."""


def ignore(text: str) -> None:
    """An `Emit` that drops the text."""


def nonspace(emit: Emit = ignore) -> Scan[str]:
    """Return the next character that is not white space."""
    while (character := (yield)) in WHITE:
        emit(character)
    return character


def expect(text: str) -> Scan[None]:
    for each in text:
        if (yield) != each:
            raise NoCall


def take_until(end: str, emit: Emit, *, most: int) -> Scan[None]:
    """Read up to the character `end`. Raises NoCall after more than `most` characters."""
    for _ in range(most + 1):
        character = yield
        if character == end:
            return
        emit(character)
    raise NoCall
