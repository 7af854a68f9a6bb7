"""Takes white space and marks from around texts that come in pieces.

Thinking comes with white space around it, between the marks that open and close it; text beside calls of
tools and behind thinking has white space that belongs to neither.  What was passed on cannot be taken back,
so what may be the end of a text is withheld until it is known what follows: white space, a closing mark,
white space.  Of each run of white space at most `WHITE_CHARACTERS_MAX` characters are withheld.  One that
is longer is text.
"""

from __future__ import annotations

from collections.abc import Sequence

from pensieve.text.parts import THINKING_MARKS

WHITE_CHARACTERS_MAX = 1_024


class _Tail:
    """What may be the end of a text."""

    def __init__(self, marks: Sequence[str] = ()) -> None:
        self._marks = marks
        self._is_flowing = False  # what is withheld goes on a run of white space that was too long
        self.withheld = ""

    def push(self, text: str) -> str:
        """The text that can be no end."""
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
        """Of a closing mark at the end, or of its beginning if more of it may come."""
        for mark in self._marks:
            for length in range(len(mark), 0 if end == len(text) else len(mark) - 1, -1):
                if text.endswith(mark[:length], 0, end):
                    return length
        return 0


class TrimmedText:
    """The text of a reply, beside its thinking and its calls.

    The first text has no white space before it if thinking or a call came before; there is none before a
    call, and none at the end behind one.
    """

    def __init__(self) -> None:
        self._tail = _Tail()
        self._has_begun = False
        self._is_behind = False  # thinking or a call has come
        self.ends_with_call = False  # no text has come behind it

    def push(self, text: str) -> str:
        if not self._has_begun and self._is_behind:
            text = (self._tail.withheld + text).lstrip()
            self._tail.withheld = ""
        shown = self._tail.push(text)
        if shown:
            self._has_begun, self.ends_with_call = True, False
        return shown

    def thinking(self) -> None:
        """Thinking comes here."""
        self._is_behind = True

    def call(self) -> None:
        """A call comes here."""
        self._tail.withheld = ""
        self._is_behind = self.ends_with_call = True

    def end(self) -> str:
        """The white space at the end of the reply."""
        white, self._tail.withheld = self._tail.withheld, ""
        is_dropped = self.ends_with_call or (self._is_behind and not self._has_begun)
        return "" if is_dropped else white


class TrimmedThinking:
    """The thinking of a reply: its runs, each without white space and marks around it, one to a paragraph."""

    def __init__(self) -> None:
        self._has_begun = False  # an earlier run had text
        self._begin_run()

    def _begin_run(self) -> None:
        self._opening = list(THINKING_MARKS[0])  # that may still come before the run's text
        self._before = ""  # what may be one of them
        self._is_blank = True  # the run has no text yet
        self._tail = _Tail(THINKING_MARKS[1])

    def push(self, text: str) -> str:
        if self._is_blank:
            text = self._without_opening(text)
        return self._shown(self._tail.push(text)) if text else ""

    def end_run(self) -> str:
        """The rest of a run."""
        rest = self._before + self._tail.withheld
        for mark in THINKING_MARKS[1]:
            rest = rest.rstrip().removesuffix(mark)
        shown = self._shown(rest.rstrip())
        self._begin_run()
        return shown

    def _without_opening(self, text: str) -> str:
        """The text from where it can be no mark; it is blank until a character of it is shown."""
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
