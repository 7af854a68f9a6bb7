"""Scanners: generators that receive a text one character at a time.

    scan = some_scanner(…); next(scan); scan.send("{"); scan.send('"'); …

A scanner returns when what it looks for is whole, and raises `NoCall` at the first character that cannot
belong to it. So a text may be cut anywhere, and the scanner's state is its local variables. A scanner uses
another one by `yield from`. None recurses, so a character costs the same at any depth.

A scanner of a value gets the value's first character, which has been read. It returns the character after
the value if it had to read that character (nothing marks the end of a number), else "".
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Scan: TypeAlias = Generator[None, str, T]
Emit: TypeAlias = Callable[[str], object]

WHITE = " \t\n\r"  # white space between the parts of JSON


class NoCall(Exception):
    """The text is not what the scanner looks for. This is no error: it stays text."""


def ignore(text: str) -> None:
    """Drop the text. An `Emit`."""


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
    """Read up to the character `end`, at most `most` characters."""
    for _ in range(most + 1):
        character = yield
        if character == end:
            return
        emit(character)
    raise NoCall
