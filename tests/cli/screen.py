"""Emulate the screen of a terminal.

It knows the few sequences that `pensieve chat` writes, and refuses any other.
"""

from __future__ import annotations

import re

TOKEN = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|[^\x1b]")


class TerminalScreen:
    """The rows of a screen, and the rows that have scrolled off its top."""

    def __init__(self, columns: int, lines: int) -> None:
        self._columns, self._lines = columns, lines
        self.rows: list[str] = [""]
        self._row = self._column = 0

    def write(self, text: str) -> None:
        end = 0
        for found in TOKEN.finditer(text):
            assert found.start() == end, f"an unknown sequence: {text[end : end + 20]!r}"
            end = found.end()
            if found[2] is None:
                self._put(found[0])
            elif found[2] == "A":
                top = max(len(self.rows) - self._lines, 0)
                self._row = max(self._row - int(found[1]), top)
            elif found[2] == "J":
                self.rows[self._row :] = [self.rows[self._row][: self._column]]
            elif found[2] == "K":
                self.rows[self._row] = self.rows[self._row][: self._column]
            else:
                assert found[2] == "m", f"an unknown sequence: {found[0]!r}"
        assert end == len(text)

    def _put(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._row, self._column = self._row + 1, 0
            if self._row == len(self.rows):
                self.rows.append("")
        else:
            assert character.isprintable(), f"{character!r} has an effect"
            assert self._column < self._columns - 1, "a row is too wide"
            row = self.rows[self._row].ljust(self._column)
            self.rows[self._row] = row[: self._column] + character + row[self._column + 1 :]
            self._column += 1

    @property
    def text(self) -> str:
        return "\n".join(row.rstrip() for row in self.rows).strip("\n")
