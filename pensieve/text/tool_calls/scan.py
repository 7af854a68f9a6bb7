"""Scanners: generators that are sent a text one character at a time.

    scan = some_scanner(…); next(scan); scan.send("{"); scan.send('"'); …

A scanner returns when what it looks for is whole, and raises `NoCall` at the first character that cannot
belong to it.  So a text may be cut anywhere, and what a scanner keeps is its local variables.  One scanner
uses another by `yield from`; none of them recurses, so a character costs the same at any depth.

A scanner of a value is given the value's first character, which has been read, and returns the character
after the value if it had to read it (a number has no end of its own), else "".
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Scan: TypeAlias = Generator[None, str, T]
Emit: TypeAlias = Callable[[str], object]

WHITE = " \t\n\r"  # that JSON allows between its parts


class NoCall(Exception):
    """The text is not what the scanner looks for: no error, it is text."""


def ignore(text: str) -> None:
    """An `Emit` for what nobody wants."""


def nonspace(emit: Emit = ignore) -> Scan[str]:
    """The next character that is not white space."""
    while (character := (yield)) in WHITE:
        emit(character)
    return character


def expect(text: str) -> Scan[None]:
    for each in text:
        if (yield) != each:
            raise NoCall


def take_until(end: str, emit: Emit, *, most: int) -> Scan[None]:
    """What stands before a character; it has at most so many characters."""
    for _ in range(most + 1):
        character = yield
        if character == end:
            return
        emit(character)
    raise NoCall
