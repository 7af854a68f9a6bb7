"""Text that remembers which of its characters the template wrote.

A chat template mixes its own words ("<|im_start|>") with a client's.  Once rendered they look alike,
and a user who types "<|im_end|>" would end his turn himself.  So every constant of a template is a
`Traced` string, a client's text is a plain `str`, and joining them keeps, for each character, one byte
that says who wrote it.  A control token is recognised only where every character of it was written by
the template.

This fails closed.  Only the operations below carry the mark along; whatever else a template does to a
string (`replace`, `upper`, `tojson`, `%`) yields a plain `str`, which nobody trusts.  Nothing a template
does can turn a client's characters into written ones, because only constants are born written.
Apart from the mark a `Traced` string is its text: it compares, hashes and measures the same, so a
template decides exactly as it would elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import SupportsIndex


class Traced(str):
    """A string and, for each of its characters, 1 if the template wrote it and 0 if a client did."""

    __slots__ = ("written",)
    written: bytes

    def __new__(cls, text: str, written: bytes | None = None) -> Traced:
        self = super().__new__(cls, text)
        self.written = bytes(len(text)) if written is None else written
        assert len(self.written) == len(text)
        return self

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> Traced:
        if not isinstance(other, str):
            return NotImplemented
        return concat((self, other))

    def __radd__(self, other: str) -> Traced:
        if not isinstance(other, str):
            return NotImplemented
        return concat((other, self))

    def __getitem__(self, key: SupportsIndex | slice) -> Traced:
        if not isinstance(key, slice):
            index = range(len(self))[key]
            key = slice(index, index + 1)
        return Traced(super().__getitem__(key), self.written[key])

    def lstrip(self, chars: str | None = None, /) -> Traced:
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None, /) -> Traced:
        return self[: len(super().rstrip(chars))]

    def strip(self, chars: str | None = None, /) -> Traced:
        return self.lstrip(chars).rstrip(chars)

    def join(self, parts: Iterable[str], /) -> Traced:
        pieces: list[str] = []
        for part in parts:
            pieces += (self, part)
        return concat(pieces[1:])


def written(text: str) -> Traced:
    """All of it is the template's."""
    return Traced(text, b"\x01" * len(text))


def written_mask(text: str) -> bytes:
    return text.written if isinstance(text, Traced) else bytes(len(text))


def concat(pieces: Iterable[str]) -> Traced:
    pieces = list(pieces)
    return Traced("".join(pieces), b"".join(map(written_mask, pieces)))
