"""Show replies, notices, and a temporary line.

Replies are streamed to standard output: rendered as Markdown on a terminal (reply_view.py), as plain text
elsewhere or with `--plain`. Notices go to standard error, each on its own line. The reply continues below a
notice. A temporary line (`show_temporary`) disappears when anything else is shown, and the reply continues
where it stopped.

On a terminal, control characters in texts from models and clients are replaced, so they cannot move the
cursor.
"""

from __future__ import annotations

import os
import shutil
import sys

from pensieve.cli.markdown import without_control
from pensieve.cli.reply_view import COLUMNS_MIN, ReplyView

DIM, PLAIN, CLEAR_LINE, UP = "\x1b[2m", "\x1b[0m", "\r\x1b[K", "\x1b[A"


class Screen:
    """Standard output and standard error. Used only in the main thread."""

    def __init__(self, plain: bool = False) -> None:
        """`plain`: show replies without rendering Markdown."""
        self._is_terminal = sys.stdout.isatty()
        can_move_cursor = os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")
        self._renders = self._is_terminal and can_move_cursor and not plain
        self._view: ReplyView | None = None  # view of the current reply
        self._tail = ""  # for a plain reply: the text in the cursor's line
        self._temporary_line = ""
        self._is_in_view = False  # the temporary line is below a rendered reply

    def reply(self, text: str, kind: str = "text") -> None:
        """Show the next piece of the reply."""
        self.clear()
        if self._view is None and not self._tail and self._renders_now():
            self._view = ReplyView(_write, shutil.get_terminal_size)
        if self._view is not None:
            self._view.push(text, kind)
            return
        shown = without_control(text) if self._is_terminal else text
        _write(shown)
        self._tail = (self._tail + shown).rpartition("\n")[2]

    def reply_ended(self) -> None:
        """End the reply. The cursor moves to the beginning of a line."""
        self.clear()
        view, self._view = self._view, None
        if view is not None:
            view.end()
        if view is None or view.is_empty:
            print(flush=True)
        self._tail = ""

    def begin_again(self, line: str) -> None:
        """Show a notice. The text that follows begins the reply again, below the notice."""
        self.notice(line)
        self._view = None

    def line(self, text: str) -> None:
        """Print a text other than a reply, on standard output."""
        lead = self._below()
        print(lead + (without_control(text) if self._is_terminal else text), flush=True)

    def notice(self, line: str) -> None:
        """Print a notice to standard error."""
        lead = self._below()
        sys.stdout.flush()
        if sys.stderr.isatty():
            line = without_control(line)
        print(
            lead + (f"{DIM}{line}{PLAIN}" if sys.stderr.isatty() else line),
            file=sys.stderr,
            flush=True,
        )

    def show_temporary(self, line: str) -> None:
        """Show a temporary line until `clear`. If standard error is not a terminal, the line stays."""
        if line == self._temporary_line:
            return
        self.clear()
        self._temporary_line = line
        if not sys.stderr.isatty():
            print(line, file=sys.stderr, flush=True)
            return
        if self._view is not None:
            self._is_in_view = True
            self._view.note(line)
            return
        lead = "\n" if self._tail else ""
        shown = line[: shutil.get_terminal_size().columns - 1]  # one row, so that it can be cleared
        sys.stderr.write(f"{lead}{DIM}{shown}{PLAIN}")
        sys.stderr.flush()

    def clear(self) -> None:
        """Remove the temporary line."""
        if not self._temporary_line:
            return
        self._temporary_line = ""
        if self._is_in_view and self._view is not None:
            self._is_in_view = False
            self._view.note("")
        elif sys.stderr.isatty():
            # Write the line of the reply again, unless it may need several rows.
            fits = 2 * len(self._tail) < shutil.get_terminal_size().columns
            restored_line = f"{UP}\r{self._tail}" if self._tail and fits else ""
            sys.stderr.write(CLEAR_LINE + restored_line)
            sys.stderr.flush()

    def _renders_now(self) -> bool:
        return self._renders and shutil.get_terminal_size().columns >= COLUMNS_MIN

    def _below(self) -> str:
        """Make room below the reply. Return the text that moves the cursor there."""
        self.clear()
        if self._view is not None:
            self._view.cut()
        lead = "\n" if self._tail else ""
        self._tail = ""
        return lead


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
