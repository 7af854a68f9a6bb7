"""Find the calls in a streamed reply. Everything else is the reply's text.

    text ─push─> "I'll look. "  CallBegan(0, "get_weather")  CallArguments(0, '{"city"')  …  "Done."

A scanner starts where a call may begin (styles.py). It gets one character after the other, and reports to
`ParsedCalls` (calls.py) what it has recognized. It ends with one of these events:

    it returns               The calls are complete. The closing mark is not text.
    it raises NoCall         The characters that it read since its last report are text, exactly as sampled.
                             A call that has begun stays incomplete.
    WITHHELD_MAX             The scanner read that many characters without a report. Handled like NoCall.
    the reply ends           Handled like NoCall.

After NoCall, the text that the scanner read is not scanned again, except a mark (or the start of a mark) at
the end of that text, because a call may begin there. So each character is read only a few times, and at most
WITHHELD_MAX characters are withheld.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from pensieve.text.tool_calls.calls import CallArguments, CallBegan, ParsedCalls
from pensieve.text.tool_calls.scan import NoCall, Scan
from pensieve.text.tool_calls.styles import CallStyle

WITHHELD_MAX = 65_536  # characters

Found: TypeAlias = str | CallBegan | CallArguments


class CallFinder:
    """Finds the calls of one reply."""

    def __init__(self, style: CallStyle, tools: Sequence[Mapping[str, Any]]) -> None:
        self.calls = ParsedCalls(tools)
        self._style = style
        self._scan: Scan[None] | None = None
        self._withheld: list[str] = []  # characters that the scanner has read since its last report
        self._num_reported = 0
        self._in_part = False
        self._may_open = style.opens_reply  # the next character may begin a call without a mark
        self._is_blank = True  # the reply has only white space so far
        self._found: list[Found] = []

    def push(self, text: str, in_part: bool) -> list[Found]:
        """Add text of the reply.

        `in_part`: this text is in a section that a tool-call control token opened.
        """
        if in_part != self._in_part:
            self._in_part = in_part
            self._may_open = in_part or (self._is_blank and self._style.opens_reply)
        position = 0
        while position < len(text):
            if self._scan is None:
                position = self._look(text, position)
            elif self._send(text[position]):
                position += 1
        return self._pop_found()

    def end_text(self) -> list[Found]:
        """End the text, because the reply ends or another part of it (thinking) begins."""
        if self._scan is not None:
            self._stop()
        return self._pop_found()

    def _look(self, text: str, position: int) -> int:
        """Start a scanner at the next position where a call may begin. Return the position to continue at."""
        style, start = self._style, position
        if self._may_open:
            while start < len(text) and text[start].isspace():
                start += 1
            if start < len(text):
                self._may_open = self._is_blank = False
                if text[start] in style.openers:
                    self._found.append(text[position:start])
                    self._start(text[start], needs_mark=False)
                    return start + 1
        if not self._may_open and self._mark_counts:
            start = text.find(style.mark[0], position)
            if start >= 0:
                self._found.append(text[position:start])
                self._start(text[start], needs_mark=True)
                return start + 1
        self._found.append(text[position:])
        return len(text)

    def _start(self, character: str, *, needs_mark: bool) -> None:
        """Start a scanner with its first character, which it always accepts."""
        self._scan = self._style.scan(self.calls, needs_mark)
        next(self._scan)
        self._scan.send(character)
        self._withheld.append(character)

    def _send(self, character: str) -> bool:
        """Send a character to the scanner. Return whether the scanner accepted it."""
        assert self._scan is not None
        try:
            self._scan.send(character)
        except StopIteration:
            self._withheld.clear()
            self._collect()
            self._scan, self._may_open = None, self._in_part
            return True
        except NoCall:
            self._stop(rescan_mark=True)
            return False
        self._withheld.append(character)
        if self.calls.num_reported != self._num_reported:
            self._withheld.clear()
            self._collect()
        elif len(self._withheld) > WITHHELD_MAX:
            self._stop()
        return True

    def _stop(self, *, rescan_mark: bool = False) -> None:
        """Stop the scanner, and turn the withheld characters into text.

        With `rescan_mark`, a mark (or the start of a mark) at the end of the withheld text goes to a new
        scanner.
        """
        self._collect()
        self.calls.break_off()
        text = "".join(self._withheld)
        self._withheld.clear()
        self._scan = None
        if rescan_mark and self.calls.last_is_whole and not text.strip():
            self._may_open = self._in_part
        length = self._mark_length(text) if rescan_mark else 0
        self._found.append(text[: len(text) - length])
        if length:
            self._start(text[-length], needs_mark=True)
            for each in text[len(text) - length + 1 :]:
                self._send(each)

    @property
    def _mark_counts(self) -> bool:
        return bool(self._style.mark) and (self._in_part or not self._style.mark_is_token)

    def _mark_length(self, text: str) -> int:
        """Return the length of the mark, or of the start of the mark, at the end of `text`.

        0 if there is none. The first character of `text` never counts.
        """
        mark = self._style.mark if self._mark_counts else ""
        lengths = range(min(len(mark), len(text) - 1), 0, -1)
        return next((each for each in lengths if text.endswith(mark[:each])), 0)

    def _collect(self) -> None:
        self._found += self.calls.reports
        self.calls.reports.clear()
        self._num_reported = self.calls.num_reported

    def _pop_found(self) -> list[Found]:
        found, self._found = self._found, []
        return found
