"""Cut the Markdown of a streamed reply into blocks that are rendered separately.

A block is a heading, a paragraph, a list item, or code. Only the last block is open. Finished blocks never
change and are printed once, so the cost is proportional to the length of the reply. A long paragraph is cut
after BLOCK_CHARACTERS_MAX characters, and long code after CODE_LINES_MAX lines. The rest is the next block.

The meaning of the last line may depend on the text after it ("-" begins a rule, an item or the underline of a
heading). Such a line is withheld until more text arrives or the reply ends.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

BLOCK_CHARACTERS_MAX = 4000
CODE_LINES_MAX = 40

FENCE = re.compile(r" *(`{3,}|~{3,})[ \t]*([^`]*)$")
HEADING = re.compile(r" {0,3}#{1,6}( |$)")
ITEM = re.compile(r" ?([-*+]|\d{1,9}[.)])( |$)")
UNDERLINE = re.compile(r" {0,3}(=+|-+)[ \t]*$")
UNDECIDED = re.compile(r"[ \t]*(([-=*_`~#>|+:]+|\d{1,9}[.)]?)[ \t]*|(```|~~~)[^`]*)$")


@dataclass(frozen=True)
class Block:
    """A part of a reply. `gap`: show an empty row before the block."""

    text: str
    gap: bool = False
    is_code: bool = False
    language: str = ""
    opens: bool = True  # for code: it begins in this block
    closes: bool = False  # for code: it ends in this block


class Blocks:
    """The blocks of one reply."""

    def __init__(self) -> None:
        self._partial = ""  # the last line, which is incomplete
        self._lines: list[str] = []  # complete lines of the open block
        self._num_characters = 0  # number of characters in `_lines`
        self._gap = False  # `gap` of the open block
        self._has_earlier_block = False
        self._is_item = False  # the open block is a list item
        self._is_waiting = False  # the list item ends with an empty line, and may continue
        self._fence = ""  # the fence that began the open code
        self._language = ""
        self._opens = False

    def push(self, text: str) -> list[Block]:
        """Add text. Return the blocks that are now finished."""
        finished: list[Block] = []
        *lines, self._partial = (self._partial + text).split("\n")
        for line in lines:
            self._line(line, finished)
        while len(self._partial) > BLOCK_CHARACTERS_MAX:
            end = self._partial.rfind(" ", 1, BLOCK_CHARACTERS_MAX) + 1 or BLOCK_CHARACTERS_MAX
            line, self._partial = self._partial[:end], self._partial[end:]
            self._add(line, finished)
            self._finish(finished)
        return finished

    @property
    def open(self) -> Block | None:
        """The unfinished last block, or None."""
        is_undecided = UNDECIDED.fullmatch(self._partial) is not None
        lines = self._lines if is_undecided or not self._partial else [*self._lines, self._partial]
        return self._block(lines, False) if lines or self._fence else None

    def cut(self) -> list[Block]:
        """Finish the open block. Later text begins another block."""
        finished: list[Block] = []
        if self._partial:
            line, self._partial = self._partial, ""
            self._line(line, finished)
        self._finish(finished)
        return finished

    def end(self) -> list[Block]:
        """Return the last blocks. Unclosed code is closed."""
        finished = self.cut()
        if self._fence:
            self._close(finished)
        return finished

    # -- inside --

    def _line(self, line: str, finished: list[Block]) -> None:
        if self._fence:
            if line.strip() and not line.strip().strip(self._fence[0]) and self._fence in line:
                self._close(finished)
            else:
                self._add(line, finished)
                if len(self._lines) == CODE_LINES_MAX:
                    self._finish(finished)
            return
        if not line.strip():
            if self._is_item and self._lines:
                self._is_waiting = True
            else:
                self._finish(finished)
                self._gap = True
            return
        if self._is_waiting:
            self._is_waiting = False
            if line.startswith("  ") and not FENCE.match(line):
                self._add("", finished)
            else:
                self._finish(finished)
                self._gap = True
        if (fence := FENCE.match(line)) is not None:
            self._finish(finished)
            self._fence, self._language, self._opens = fence[1], fence[2].strip(), True
        elif HEADING.match(line):
            self._finish(finished)
            self._gap = True
            self._add(line, finished)
            self._finish(finished)
        elif ITEM.match(line) and not UNDERLINE.match(line):
            self._finish(finished)
            self._is_item = True
            self._add(line, finished)
        else:
            self._add(line, finished)
            if UNDERLINE.match(line):
                self._finish(finished)

    def _add(self, line: str, finished: list[Block]) -> None:
        if self._num_characters + len(line) > BLOCK_CHARACTERS_MAX:
            self._finish(finished)
        self._lines.append(line)
        self._num_characters += len(line)

    def _close(self, finished: list[Block]) -> None:
        finished.append(self._block(self._lines, True))
        self._fence = ""
        self._begin_block()

    def _finish(self, finished: list[Block]) -> None:
        if self._lines or (self._fence and self._opens):
            finished.append(self._block(self._lines, False))
            self._begin_block()

    def _begin_block(self) -> None:
        self._lines, self._num_characters = [], 0
        self._has_earlier_block, self._gap, self._opens = True, False, False
        self._is_item = self._is_waiting = False

    def _block(self, lines: list[str], closes: bool) -> Block:
        gap, text = self._gap and self._has_earlier_block, "\n".join(lines)
        if not self._fence:
            return Block(text, gap)
        return Block(text, gap, True, self._language, self._opens, closes)
