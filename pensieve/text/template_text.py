"""A string that records which of its characters the chat template wrote.

A template joins its own text ("<|im_start|>") with a client's text. In plain strings, the two could not be
distinguished: a user who types "<|im_end|>" would end the turn. So every constant of a template is a
`TemplateText`, and a client's text is a plain `str`. Joining them keeps a mark for each character: 1 if the
template wrote the character, 0 if a client did. A control token is recognised only if all its characters are
marked 1.

This is safe by default. Only the operations below keep the marks. Any other operation (`replace`, `upper`,
`tojson`, `%`) returns a plain `str`, in which no control token is recognised. No operation changes a mark
from 0 to 1. In comparisons, hashes and lengths, a `TemplateText` behaves like a plain `str`, so a template
takes the same branches as with plain strings.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import SupportsIndex


class TemplateText(str):
    """A string with a mark for each character: 1 if the template wrote it and 0 if a client did."""

    __slots__ = ("written",)
    written: bytes

    def __new__(cls, text: str, written: bytes | None = None) -> TemplateText:
        self = super().__new__(cls, text)
        self.written = bytes(len(text)) if written is None else written
        assert len(self.written) == len(text)
        return self

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> TemplateText:
        if not isinstance(other, str):
            return NotImplemented
        return concat((self, other))

    def __radd__(self, other: str) -> TemplateText:
        if not isinstance(other, str):
            return NotImplemented
        return concat((other, self))

    def __getitem__(self, key: SupportsIndex | slice) -> TemplateText:
        if not isinstance(key, slice):
            index = range(len(self))[key]
            key = slice(index, index + 1)
        return TemplateText(super().__getitem__(key), self.written[key])

    def lstrip(self, chars: str | None = None, /) -> TemplateText:
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None, /) -> TemplateText:
        return self[: len(super().rstrip(chars))]

    def strip(self, chars: str | None = None, /) -> TemplateText:
        return self.lstrip(chars).rstrip(chars)

    def join(self, parts: Iterable[str], /) -> TemplateText:
        pieces: list[str] = []
        for part in parts:
            pieces += (self, part)
        return concat(pieces[1:])


def written(text: str) -> TemplateText:
    """Return the text with all characters marked as the template's."""
    return TemplateText(text, b"\x01" * len(text))


def written_mask(text: str) -> bytes:
    """Return the marks of a text. The marks of a plain `str` are all 0."""
    return text.written if isinstance(text, TemplateText) else bytes(len(text))


def concat(pieces: Iterable[str]) -> TemplateText:
    """Join the pieces and their marks."""
    pieces = list(pieces)
    return TemplateText("".join(pieces), b"".join(map(written_mask, pieces)))
