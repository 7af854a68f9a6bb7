"""Collect the calls of one reply. The scanners of all styles report to `ParsedCalls`:

    check(name)      raise NoCall unless the name may be called
    begin(name)      report CallBegan
    write(text)      report CallArguments
    end()            the call is complete
    discard()        the characters read so far belong neither to the text nor to a call

A report cannot be taken back. So a scanner calls `begin` as late as possible: when the name is known and the
arguments have begun, so that the arguments can be streamed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pensieve.text.tool_calls.scan import NoCall

CALLS_MAX = 128  # maximum per reply; further calls are text
NAME_CHARACTERS_MAX = 256


@dataclass(frozen=True, slots=True)
class CallBegan:
    """The start of a call. Calls are counted from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments. All pieces together are the JSON of an object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A complete call."""

    index: int
    name: str
    arguments: Mapping[str, Any]


class ParsedCalls:
    """The calls found so far, and the reports about them."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        functions = [each.get("function", each) for each in tools]
        self._parameters = {each["name"]: each.get("parameters") for each in functions}
        self._names: list[str] = []
        self._arguments: list[list[str]] = []
        self._whole: list[int] = []
        self.reports: list[CallBegan | CallArguments] = []  # not yet taken by the finder
        self.is_open = False  # whether a call has begun and not ended
        self.num_reported = 0

    @property
    def num_begun(self) -> int:
        return len(self._names)

    @property
    def last_is_whole(self) -> bool:
        return bool(self._whole) and self._whole[-1] == self.num_begun - 1

    @property
    def whole(self) -> list[ParsedCall]:
        return [
            ParsedCall(n, self._names[n], json.loads("".join(self._arguments[n])))
            for n in self._whole
        ]

    def check(self, name: str) -> None:
        """Raise NoCall if no call of this name may begin."""
        if self._parameters:
            if name not in self._parameters:
                raise NoCall
        elif not 1 <= len(name) <= NAME_CHARACTERS_MAX or not name.isprintable():
            raise NoCall
        if len(self._names) == CALLS_MAX:
            raise NoCall

    def type_of(self, name: str, key: str) -> str:
        """Return the type of an argument in the tool's schema, or "" if the schema has no type for it."""
        schema = self._parameters.get(name)
        for part in ("properties", key, "type"):
            schema = schema.get(part) if isinstance(schema, Mapping) else None
        return schema if isinstance(schema, str) else ""

    def begin(self, name: str) -> None:
        assert not self.is_open
        self.check(name)
        self.reports.append(CallBegan(len(self._names), name))
        self._names.append(name)
        self._arguments.append([])
        self.is_open = True
        self.num_reported += 1

    def write(self, text: str) -> None:
        """Add to the arguments."""
        assert self.is_open
        if text:
            self.reports.append(CallArguments(len(self._names) - 1, text))
            self._arguments[-1].append(text)
            self.num_reported += 1

    def end(self) -> None:
        assert self.is_open
        self._whole.append(len(self._names) - 1)
        self.is_open = False
        self.num_reported += 1

    def discard(self) -> None:
        """Note that the characters read so far are not text."""
        self.num_reported += 1

    def break_off(self) -> None:
        """Leave the open call incomplete."""
        self.is_open = False
