"""Cuts a reply into pieces as its tokens come: thinking, text, calls of tools.

    (text, part) of each token ──push──> Thinking("The user wants …")
                                         Text("I'll look.")
                                         CallBegan(0, "get_weather")  CallArguments(0, '{"city": "Paris"}')

* Thinking comes without the marks around it and without white space there (`trimming`); several runs of it
  are parted by an empty line.  Text behind thinking has no white space before it.
* A call begins once its name is known and its arguments have begun; from then on they are passed on as they
  come.  It is whole, and one of `calls`, when their object has closed.  White space around calls is no text.
* What looks like a call and is none, because its JSON is malformed, its shape unknown, or its name not among
  the tools, is text, exactly as it was sampled.
* A call that breaks off after it began, at a limit of length or at a character that no JSON allows there,
  stays as it is: begun, not whole, its arguments a beginning.  A reader knows it by its absence from `calls`.
  What follows in the reply is text.

Pieces of one push that follow each other and are alike are one.  However the text is cut into tokens, all
pieces together are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeAlias

from pensieve.text.parts import Part
from pensieve.text.tool_calls import Call, CallArguments, CallBegan, CallFinder, CallStyle
from pensieve.text.trimming import TrimmedText, TrimmedThinking

__all__ = ["CallArguments", "CallBegan", "Piece", "ReplyPieces", "Text", "Thinking"]


@dataclass(frozen=True, slots=True)
class Thinking:
    """A piece of what the model thought."""

    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of what it says."""

    text: str


Piece: TypeAlias = Thinking | Text | CallBegan | CallArguments


class ReplyPieces:
    """The state of one reply."""

    def __init__(self, style: CallStyle | None, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """`style`: None if calls are not looked for; `tools`: the request's, none: any name may be called."""
        self._finder = None if style is None else CallFinder(style, tools)
        self._thinking = TrimmedThinking()
        self._text = TrimmedText()
        self._is_thinking = False
        self._pieces: list[Piece] = []

    def push(self, text: str, part: Part) -> list[Piece]:
        """What a token released, and the part of the reply that it belongs to."""
        if part is Part.THINKING:
            self._begin_thinking()
            self._add(Thinking(self._thinking.push(text)))
        else:
            self._end_thinking()
            if self._finder is None:
                self._add(Text(self._text.push(text)))
            else:
                self._take(self._finder.push(text, part is Part.TOOL_CALL))
        return self._taken()

    def end(self) -> list[Piece]:
        """What was withheld, at the end of the reply."""
        self._end_thinking()
        if self._finder is not None:
            self._take(self._finder.interrupt())
        self._add(Text(self._text.end()))
        return self._taken()

    @property
    def num_calls(self) -> int:
        """How many calls have begun."""
        return 0 if self._finder is None else self._finder.calls.num_begun

    @property
    def calls(self) -> list[Call]:
        """The whole ones, in their order."""
        return [] if self._finder is None else self._finder.calls.whole

    @property
    def ends_with_call(self) -> bool:
        """Whether the reply ends with a whole call and no text behind it; known at its end."""
        finder = self._finder
        return self._text.ends_with_call and finder is not None and finder.calls.last_is_whole

    def _begin_thinking(self) -> None:
        if not self._is_thinking:
            if self._finder is not None:
                self._take(self._finder.interrupt())
            self._text.thinking()
            self._is_thinking = True

    def _end_thinking(self) -> None:
        if self._is_thinking:
            self._add(Thinking(self._thinking.end_run()))
            self._is_thinking = False

    def _take(self, found: Iterable[str | CallBegan | CallArguments]) -> None:
        for each in found:
            if isinstance(each, str):
                self._add(Text(self._text.push(each)))
            else:
                if isinstance(each, CallBegan):
                    self._text.call()
                self._add(each)

    def _add(self, piece: Piece) -> None:
        if isinstance(piece, CallBegan) or piece.text:
            self._pieces.append(piece)

    def _taken(self) -> list[Piece]:
        """The pieces since the last time."""
        pieces, self._pieces = self._pieces, []
        return [_together(list(run)) for _, run in groupby(pieces, _kind)]


def _kind(piece: Piece) -> tuple[type, int]:
    """What pieces that are alike have in common."""
    return type(piece), piece.index if isinstance(piece, CallBegan | CallArguments) else 0


def _together(run: Sequence[Piece]) -> Piece:
    first = run[0]
    if isinstance(first, CallBegan):
        return first
    text = "".join(each.text for each in run if not isinstance(each, CallBegan))
    return replace(first, text=text)
