"""What `pensieve chat` shows beside replies: notices that stay, and one that goes away again.

A reply goes to standard output as it comes, alone.  Notices go to standard error, dim on a terminal, each
on a line of its own; the reply goes on below.  `passing` shows a line until there is something else to
show: then it is gone, and the reply goes on where it was.
"""

from __future__ import annotations

import shutil
import sys

DIM, PLAIN, CLEAR_LINE, UP = "\x1b[2m", "\x1b[0m", "\r\x1b[K", "\x1b[A"


class Screen:
    """Standard output and standard error, of the main thread alone."""

    def __init__(self) -> None:
        self._tail = ""  # of the reply: what stands in the cursor's line
        self._passing = ""  # the line that goes away again

    def reply(self, text: str) -> None:
        """A piece of the reply."""
        self.clear()
        sys.stdout.write(text)
        sys.stdout.flush()
        self._tail = (self._tail + text).rpartition("\n")[2]

    def reply_ended(self) -> None:
        """The cursor goes to the beginning of a line."""
        self.clear()
        print(flush=True)
        self._tail = ""

    def line(self, text: str) -> None:
        """Lines for standard output that are no reply."""
        self.clear()
        lead = "\n" if self._tail else ""
        self._tail = ""
        print(lead + text, flush=True)

    def notice(self, line: str) -> None:
        """A line that stays."""
        self.clear()
        lead = "\n" if self._tail else ""
        self._tail = ""
        sys.stdout.flush()
        print(
            lead + (f"{DIM}{line}{PLAIN}" if sys.stderr.isatty() else line),
            file=sys.stderr,
            flush=True,
        )

    def passing(self, line: str) -> None:
        """A line that stays until `clear`; in a log it is written once, and stays."""
        if line == self._passing:
            return
        self.clear()
        self._passing = line
        if not sys.stderr.isatty():
            print(line, file=sys.stderr, flush=True)
            return
        lead = "\n" if self._tail else ""
        shown = line[: shutil.get_terminal_size().columns - 1]  # one row, so that it can go away
        sys.stderr.write(f"{lead}{DIM}{shown}{PLAIN}")
        sys.stderr.flush()

    def clear(self) -> None:
        """Take the passing line away."""
        if not self._passing:
            return
        self._passing = ""
        if sys.stderr.isatty():
            # The reply's line is written again, unless it may take several rows.
            fits = 2 * len(self._tail) < shutil.get_terminal_size().columns
            again = f"{UP}\r{self._tail}" if self._tail and fits else ""
            sys.stderr.write(CLEAR_LINE + again)
            sys.stderr.flush()
