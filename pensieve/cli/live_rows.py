"""The last rows of a terminal, which can be written again until they are kept.

The cursor is at the end of the last row, or at the beginning of a line where there is none.  `show` writes
what differs from what is there: for text that only grows, the new text alone.  Rows that have left the
screen at its top cannot be reached; they stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class LiveRows:
    """Rows, each with its colours and narrower than the terminal."""

    def __init__(self, write: Callable[[str], None], height: Callable[[], int]) -> None:
        self._write = write
        self._height = height
        self._shown: list[str] = []

    def show(self, rows: Sequence[str]) -> None:
        """Have these rows there, in the place of those before."""
        shown, rows = self._shown, list(rows)
        num_same = 0
        while num_same < min(len(shown), len(rows)) and shown[num_same] == rows[num_same]:
            num_same += 1
        if num_same == len(shown) == len(rows):
            return
        self._shown = rows
        if num_same == len(shown):
            self._write(("\n" if shown else "") + "\n".join(rows[num_same:]))
            return
        first = num_same - 1 if num_same and num_same == len(rows) else num_same
        first = max(first, len(shown) - self._height(), 0)
        if first == len(shown) - 1 and rows[first:] and rows[first].startswith(shown[first]):
            more = "\n".join([rows[first].removeprefix(shown[first]), *rows[first + 1 :]])
            self._write(more)
            return
        above = len(shown) - 1 - first
        up = f"\x1b[{above}A" if above else ""
        self._write(f"{up}\r\x1b[J" + "\n".join(rows[first:]))

    def keep(self) -> None:
        """They stay for good; the cursor goes to the beginning of the line below."""
        if self._shown:
            self._write("\n")
            self._shown = []
