"""Cut a reply into pieces as its tokens come: thinking, text, tool calls.

    (text, part) of each token ──push──> Thinking("The user wants …")
                                         Text("I'll look.")
                                         CallBegan(0, "get_weather")  CallArguments(0, '{"city": "Paris"}')

* Thinking has no marks and no white space around it. An empty line separates several runs. Text after
  thinking has no white space before it.
* A call begins once its name is known and its arguments have begun. The arguments are then passed on as
  they come. When the JSON object of the arguments has closed, the call is complete and listed in `calls`.
  White space around calls is dropped.
* A piece that looks like a call is text, exactly as sampled, if its JSON is malformed, its shape unknown,
  or its name not among the tools.
* A call may break off after it began, at a length limit or at a character that JSON does not allow. It
  stays begun and incomplete: it is missing from `calls`, and the rest of the reply is text.

Neighbouring pieces of one kind are joined within a push. All pieces together do not depend on how the text
is cut into tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeAlias

from pensieve.text.parts import THINKING_MARKS, Part
from pensieve.text.tool_calls import CallArguments, CallBegan, CallFinder, CallStyle, ParsedCall

__all__ = ["CallArguments", "CallBegan", "Piece", "ReplyPieces", "Text", "Thinking", "merged"]

WHITE_CHARACTERS_MAX = 1_024


@dataclass(frozen=True, slots=True)
class Thinking:
    """A piece of the model's thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the reply's text."""

    text: str


Piece: TypeAlias = Thinking | Text | CallBegan | CallArguments


class ReplyPieces:
    """Cut one reply into pieces."""

    def __init__(self, style: CallStyle | None, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """`style`: None if calls count as text. `tools`: of the request; if empty, any name may be called."""
        self._finder = None if style is None else CallFinder(style, tools)
        self._thinking = TrimmedThinking()
        self._text = TrimmedText()
        self._is_thinking = False
        self._pieces: list[Piece] = []

    def push(self, text: str, part: Part) -> list[Piece]:
        """Add the text that a token released, and the part of the reply that it belongs to."""
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
        """Return the withheld pieces, at the end of the reply."""
        self._end_thinking()
        if self._finder is not None:
            self._take(self._finder.interrupt())
        self._add(Text(self._text.end()))
        return self._taken()

    def whole(self, parts: Iterable[tuple[Part, str]]) -> list[Piece]:
        """Return the pieces of a whole reply. Nothing was pushed before."""
        found: list[Piece] = []
        for part, text in parts:
            found += self.push(text, part)
        return [*found, *self.end()]

    @property
    def num_calls(self) -> int:
        """The number of calls that have begun."""
        return 0 if self._finder is None else self._finder.calls.num_begun

    @property
    def calls(self) -> list[ParsedCall]:
        """The complete calls, in their order."""
        return [] if self._finder is None else self._finder.calls.whole

    @property
    def ends_with_call(self) -> bool:
        """Whether the reply ends with a complete call and no text after it. Known at the end of the reply."""
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
        """Return the pieces since the last call."""
        pieces, self._pieces = self._pieces, []
        return merged(pieces)


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the pieces with neighbours of the same kind joined."""
    return [_together(list(run)) for _, run in groupby(pieces, _kind)]


def _kind(piece: Piece) -> tuple[type, int]:
    """Return a key that neighbours of one kind share."""
    return type(piece), piece.index if isinstance(piece, CallBegan | CallArguments) else 0


def _together(run: Sequence[Piece]) -> Piece:
    first = run[0]
    if isinstance(first, CallBegan) or len(run) == 1:
        return first
    text = "".join(each.text for each in run if not isinstance(each, CallBegan))
    return replace(first, text=text)


class TrimmedText:
    """Trim the text of a reply beside its thinking and its calls.

    White space is removed

    * before the first text, if thinking or a call came before it;
    * before a call;
    * at the end of the reply, if a call came last or if no text followed the thinking.
    """

    def __init__(self) -> None:
        self._tail = _Tail()
        self._has_begun = False
        self._is_behind = False  # thinking or a call came before
        self.ends_with_call = False  # no text came after the call

    def push(self, text: str) -> str:
        if not self._has_begun and self._is_behind:
            text = (self._tail.withheld + text).lstrip()
            self._tail.withheld = ""
        shown = self._tail.push(text)
        if shown:
            self._has_begun, self.ends_with_call = True, False
        return shown

    def thinking(self) -> None:
        """Note that thinking comes here."""
        self._is_behind = True

    def call(self) -> None:
        """Note that a call comes here."""
        self._tail.withheld = ""
        self._is_behind = self.ends_with_call = True

    def end(self) -> str:
        """Return the white space at the end of the reply, if it stays."""
        white, self._tail.withheld = self._tail.withheld, ""
        is_dropped = self.ends_with_call or (self._is_behind and not self._has_begun)
        return "" if is_dropped else white


class TrimmedThinking:
    """Trim the thinking of a reply: one paragraph for each run, without white space and marks around it."""

    def __init__(self) -> None:
        self._has_begun = False  # an earlier run had text
        self._begin_run()

    def _begin_run(self) -> None:
        self._opening = list(THINKING_MARKS[0])  # marks that may still come before the run's text
        self._before = ""  # text that may be such a mark
        self._is_blank = True  # the run has no text yet
        self._tail = _Tail(THINKING_MARKS[1])

    def push(self, text: str) -> str:
        if self._is_blank:
            text = self._without_opening(text)
        return self._shown(self._tail.push(text)) if text else ""

    def end_run(self) -> str:
        """Return the rest of a run."""
        rest = self._before + self._tail.withheld
        for mark in THINKING_MARKS[1]:
            rest = rest.rstrip().removesuffix(mark)
        shown = self._shown(rest.rstrip())
        self._begin_run()
        return shown

    def _without_opening(self, text: str) -> str:
        """Remove white space and opening marks. The run is blank until a character of it is shown."""
        text = (self._before + self._tail.withheld + text).lstrip()
        self._before = self._tail.withheld = ""
        while text and self._opening:
            mark = self._opening[0]
            if text.startswith(mark):
                text = text.removeprefix(mark).lstrip()
            elif mark.startswith(text):
                self._before = text
                return ""
            del self._opening[0]
        return text

    def _shown(self, text: str) -> str:
        if not text:
            return ""
        if self._is_blank and self._has_begun:
            text = "\n\n" + text
        self._is_blank, self._has_begun = False, True
        return text


class _Tail:
    """Withhold what may be the end of a text that comes in pieces.

    Text that was passed on cannot be taken back. So white space, a closing mark and white space after it are
    withheld until more text follows. A run of white space above `WHITE_CHARACTERS_MAX` characters is text.
    """

    def __init__(self, marks: Sequence[str] = ()) -> None:
        self._marks = marks
        self._is_flowing = False  # the withheld white space continues a run that was too long
        self.withheld = ""

    def push(self, text: str) -> str:
        """Add text; return the text that cannot be the end."""
        text = self.withheld + text
        end = len(text.rstrip())
        length = self._mark_length(text, end)
        mark = end - length if length else len(text)
        white = len(text[:mark].rstrip())
        is_long = mark - white > WHITE_CHARACTERS_MAX or (self._is_flowing and not white)
        start, self._is_flowing = (mark if is_long else white), is_long and mark == len(text)
        if length and len(text) - end > WHITE_CHARACTERS_MAX:
            start, self._is_flowing = len(text), True
        self.withheld = text[start:]
        return text[:start]

    def _mark_length(self, text: str, end: int) -> int:
        """Return the length of a closing mark at the end, or of its beginning if more may come."""
        for mark in self._marks:
            for length in range(len(mark), 0 if end == len(text) else len(mark) - 1, -1):
                if text.endswith(mark[:length], 0, end):
                    return length
        return 0
