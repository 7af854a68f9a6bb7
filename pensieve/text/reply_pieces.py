"""Cut a streaming reply into pieces: thinking, text, tool calls.

    (text, part) of each token ──push──> Thinking("The user wants …")
                                         Text("I'll look.")
                                         CallBegan(0, "get_weather")  CallArguments(0, '{"city": "Paris"}')

* The marks and white space around thinking are dropped. If a reply has several passages of thinking (runs),
  an empty line separates them. White space between thinking and the text after it is dropped.
* A call begins when its name is known and its arguments have begun. From then on, the arguments are streamed.
  When the JSON object of the arguments is closed, the call is complete and listed in `calls`. White space
  around calls is dropped.
* Something that looks like a call is text, exactly as sampled, if its JSON is malformed, its form is unknown,
  or its name is not among the tools.
* A call may be cut off after it began, by a length limit or a character that JSON does not allow. This call
  stays incomplete and is missing from `calls`. The rest of the reply is text.

Within a push, adjacent pieces of the same kind are joined. The pieces of a whole reply do not depend on how
the text is cut into tokens.
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
    """Cuts one reply into pieces."""

    def __init__(self, style: CallStyle | None, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """`style`: None if calls count as text. `tools`: the request's tools; if empty, all names count."""
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
                self._add_found(self._finder.push(text, part is Part.TOOL_CALL))
        return self._pop_pieces()

    def end(self) -> list[Piece]:
        """End the reply and return the withheld pieces."""
        self._end_thinking()
        if self._finder is not None:
            self._add_found(self._finder.end_text())
        self._add(Text(self._text.end()))
        return self._pop_pieces()

    def whole(self, parts: Iterable[tuple[Part, str]]) -> list[Piece]:
        """Return the pieces of a whole reply. Must not be combined with `push`."""
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
        """The complete calls, in order."""
        return [] if self._finder is None else self._finder.calls.whole

    @property
    def ends_with_call(self) -> bool:
        """Whether the reply ends with a complete call. Valid only after `end`."""
        finder = self._finder
        return self._text.ends_with_call and finder is not None and finder.calls.last_is_whole

    def _begin_thinking(self) -> None:
        if not self._is_thinking:
            if self._finder is not None:
                self._add_found(self._finder.end_text())
            self._text.note_thinking()
            self._is_thinking = True

    def _end_thinking(self) -> None:
        if self._is_thinking:
            self._add(Thinking(self._thinking.end_run()))
            self._is_thinking = False

    def _add_found(self, found: Iterable[str | CallBegan | CallArguments]) -> None:
        for each in found:
            if isinstance(each, str):
                self._add(Text(self._text.push(each)))
            else:
                if isinstance(each, CallBegan):
                    self._text.note_call()
                self._add(each)

    def _add(self, piece: Piece) -> None:
        if isinstance(piece, CallBegan) or piece.text:
            self._pieces.append(piece)

    def _pop_pieces(self) -> list[Piece]:
        """Return and remove the collected pieces."""
        pieces, self._pieces = self._pieces, []
        return merged(pieces)


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the pieces, with adjacent pieces of the same kind joined."""
    return [_join(list(run)) for _, run in groupby(pieces, _kind)]


def _kind(piece: Piece) -> tuple[type, int]:
    """Return a key that is equal for pieces that can be joined."""
    return type(piece), piece.index if isinstance(piece, CallBegan | CallArguments) else 0


def _join(run: Sequence[Piece]) -> Piece:
    first = run[0]
    if isinstance(first, CallBegan) or len(run) == 1:
        return first
    text = "".join(each.text for each in run if not isinstance(each, CallBegan))
    return replace(first, text=text)


class TrimmedText:
    """Trims the text of a reply next to its thinking and its calls.

    White space is removed

    * before the first text, if thinking or a call came before it;
    * before a call;
    * at the end of the reply, if a call came last or if no text followed the thinking.
    """

    def __init__(self) -> None:
        self._tail = _Tail()
        self._has_begun = False
        self._follows_other_piece = False  # thinking or a call came before the next text
        self.ends_with_call = False  # no text came after the call

    def push(self, text: str) -> str:
        if not self._has_begun and self._follows_other_piece:
            text = (self._tail.withheld + text).lstrip()
            self._tail.withheld = ""
        shown = self._tail.push(text)
        if shown:
            self._has_begun, self.ends_with_call = True, False
        return shown

    def note_thinking(self) -> None:
        """Note that thinking follows."""
        self._follows_other_piece = True

    def note_call(self) -> None:
        """Note that a call follows."""
        self._tail.withheld = ""
        self._follows_other_piece = self.ends_with_call = True

    def end(self) -> str:
        """Return the white space at the end of the reply, or an empty string if it is to be removed."""
        white, self._tail.withheld = self._tail.withheld, ""
        is_dropped = self.ends_with_call or (self._follows_other_piece and not self._has_begun)
        return "" if is_dropped else white


class TrimmedThinking:
    """Trims the thinking of a reply: one paragraph per run, without the marks and white space around it."""

    def __init__(self) -> None:
        self._has_begun = False  # an earlier run had text
        self._begin_run()

    def _begin_run(self) -> None:
        self._opening = list(THINKING_MARKS[0])  # opening marks that may precede the run's text
        self._before = ""  # text that may be an opening mark
        self._is_blank = True  # the run has no text yet
        self._tail = _Tail(THINKING_MARKS[1])

    def push(self, text: str) -> str:
        if self._is_blank:
            text = self._without_opening(text)
        return self._with_separator(self._tail.push(text)) if text else ""

    def end_run(self) -> str:
        """End the run and return its withheld text."""
        rest = self._before + self._tail.withheld
        for mark in THINKING_MARKS[1]:
            rest = rest.rstrip().removesuffix(mark)
        shown = self._with_separator(rest.rstrip())
        self._begin_run()
        return shown

    def _without_opening(self, text: str) -> str:
        """Remove white space and opening marks from the start of a run."""
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

    def _with_separator(self, text: str) -> str:
        if not text:
            return ""
        if self._is_blank and self._has_begun:
            text = "\n\n" + text
        self._is_blank, self._has_begun = False, True
        return text


class _Tail:
    """Withholds the possible end of a streamed text: white space, a closing mark, and more white space.

    Text that was sent cannot be taken back. So the possible end is withheld until more text follows. More
    than `WHITE_CHARACTERS_MAX` characters of white space count as text.
    """

    def __init__(self, marks: Sequence[str] = ()) -> None:
        self._marks = marks
        # The text so far ends with too much white space. White space directly after it counts as text, too.
        self._is_flowing = False
        self.withheld = ""

    def push(self, text: str) -> str:
        """Add text. Return the text that cannot belong to the end."""
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
        """Return the length of a closing mark at the end of `text`, or of the start of a mark there."""
        for mark in self._marks:
            for length in range(len(mark), 0 if end == len(text) else len(mark) - 1, -1):
                if text.endswith(mark[:length], 0, end):
                    return length
        return 0
