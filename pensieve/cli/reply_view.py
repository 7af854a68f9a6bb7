"""Show a streamed reply on a terminal as Markdown, with the model's thinking reduced to one line.

Finished blocks are printed once. The last block is written again when it grows, at most every SHOW_SECONDS.
While the model thinks, the latest words of its thinking are shown dim. Afterwards, one line replaces them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from os import terminal_size

from pensieve.cli.markdown import dim_rows, rows_of, without_control
from pensieve.cli.reply_blocks import Block, Blocks

SHOW_SECONDS = 0.05
THINKING_ROWS = 3
COLUMNS_MIN = 20  # narrower terminals show plain text


class ReplyView:
    """The view of one reply."""

    def __init__(
        self,
        write: Callable[[str], None],
        size: Callable[[], terminal_size],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._size = size
        self._now = now
        self._rows = LiveRows(write, lambda: size().lines)
        self._blocks = Blocks()
        self._shown_at = float("-inf")
        self._note = ""
        self._thinking_pieces: list[str] = []
        self._has_text = False
        self.is_empty = True

    def push(self, text: str, kind: str) -> None:
        """Add a piece of the reply."""
        text = without_control(text)
        if kind == "thinking":
            self._think(text)
            return
        self._fold()
        if not self._has_text:
            text = text.lstrip("\n")
        if text:
            self._has_text = True
            self._keep(self._blocks.push(text))
        if self._now() - self._shown_at >= SHOW_SECONDS:
            self._show()

    def note(self, line: str) -> None:
        """Show a line below the reply until the next `note`, `cut` or `end`. An empty text removes it."""
        self._note = line
        self._show()

    def cut(self) -> None:
        """Finish all rows. Later text appears below them."""
        self._note = ""
        self._fold()
        self._keep(self._blocks.cut())
        self._rows.keep()

    def end(self) -> None:
        self._note = ""
        self._fold()
        self._keep(self._blocks.end())
        self._rows.keep()

    # -- inside --

    @property
    def _width(self) -> int:
        return (
            self._size().columns - 1
        )  # one less, because the cursor position after a full row depends on the terminal

    def _think(self, text: str) -> None:
        self._keep(self._blocks.cut())
        self._thinking_pieces.append(text)
        if self._now() - self._shown_at >= SHOW_SECONDS:
            self._show()

    def _fold(self) -> None:
        """Replace the shown thinking by one line."""
        if not self._thinking_pieces:
            return
        num_words = len("".join(self._thinking_pieces).split())
        self._thinking_pieces = []
        self._rows.show(dim_rows(f"[thought: {num_words} words]", self._width))
        self._rows.keep()
        self.is_empty = False

    def _keep(self, blocks: list[Block]) -> None:
        for block in blocks:
            self._rows.show(rows_of(block, self._width))
            self._rows.keep()
            self.is_empty = False

    def _show(self) -> None:
        self._shown_at = self._now()
        rows: list[str] = []
        if self._thinking_pieces:
            latest = "".join(self._thinking_pieces[-THINKING_ROWS * self._width :])
            words = " ".join(latest[-THINKING_ROWS * self._width :].split())
            rows = dim_rows(words, self._width)[-THINKING_ROWS:]
        elif (block := self._blocks.open) is not None:
            rows = rows_of(block, self._width)
        if self._note:
            rows = [*rows, *dim_rows(self._note, self._width)[:1]]
        self._rows.show(rows)


class LiveRows:
    """The last rows of a terminal. They can be written again until `keep`.

    Each row contains its colour codes and is narrower than the terminal. The cursor is at the end of the last
    row. `show` writes only the difference, which for growing text is the new text. Rows that have scrolled
    off the screen are never changed.
    """

    def __init__(self, write: Callable[[str], None], height: Callable[[], int]) -> None:
        self._write = write
        self._height = height
        self._shown: list[str] = []

    def show(self, rows: Sequence[str]) -> None:
        """Replace the current rows by `rows`."""
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
        """Make the rows final. The cursor moves to the beginning of the next line."""
        if self._shown:
            self._write("\n")
            self._shown = []
