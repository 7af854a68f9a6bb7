'''Read messages of one or several lines from a terminal, with readline.

* Pasted text is one message ("bracketed paste"). Alt-Enter adds a line.
* A typed line that ends with a backslash continues in the next line.
* A line that begins with """ opens a message that ends with """ at the end of a line. This also works without
  a terminal, but not in pasted text.
* Ctrl-R searches the history.
* The history file has one entry per line. Each entry is written immediately, so a killed program loses none.
  Several programs may append to the file. At least the newest HISTORY_ENTRIES_MAX entries are kept.

Without readline, or with libedit, each pasted line is a separate message.
'''

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from pensieve.cli.ctrl_c import CtrlC

HISTORY_ENTRIES_MAX = 1000
QUOTES = '"""'
Complete = Callable[[str], list[str]]  # takes the line up to the cursor; returns completions


class LineEditor:
    """The input of a chat: a terminal, or lines from a pipe."""

    def __init__(self, ctrl_c: CtrlC, history: Path, complete: Complete) -> None:
        self._ctrl_c = ctrl_c
        self._history = history
        self._complete = complete
        self._matches: list[str] = []
        self.is_terminal = sys.stdin.isatty()  # if not, show no prompts
        self._readline = _import_readline() if self.is_terminal and sys.stdout.isatty() else None
        if self._readline is not None:
            self._prepare(self._readline)

    @property
    def can_prefill(self) -> bool:
        """Whether `message` supports `begin_with`."""
        return self._readline is not None

    def message(self, begin_with: str = "") -> str | None:
        """Return the entered message, or None after Ctrl-C. Raises EOFError at the end of input.

        `begin_with` is text that the user can edit.
        """
        readline = self._readline
        if readline is not None and begin_with:
            readline.set_startup_hook(lambda: readline.insert_text(begin_with))
        try:
            text = self._ctrl_c.line("> " if self.is_terminal else "")
        finally:
            if readline is not None:
                readline.set_startup_hook()
        if text is not None and "\n" not in text:
            if text.lstrip().startswith(QUOTES):
                text = self._read_quoted(text.lstrip().removeprefix(QUOTES))
            elif self.is_terminal and text.endswith("\\"):
                text = self._read_continuation(text)
        text = text if text is None else text.strip()
        if text and self._readline is not None:
            self._remember(self._readline, text)
        return text

    def _read_continuation(self, text: str) -> str | None:
        while text.endswith("\\"):
            try:
                line = self._ctrl_c.line("... ")
            except EOFError:
                break
            if line is None:
                return None
            text = f"{text[:-1]}\n{line}"
        return text.removesuffix("\\")

    def _read_quoted(self, text: str) -> str | None:
        while not text.rstrip().endswith(QUOTES):
            try:
                line = self._ctrl_c.line("... " if self.is_terminal else "")
            except EOFError:
                return text
            if line is None:
                return None
            text = f"{text}\n{line}"
        return text.rstrip().removesuffix(QUOTES)

    # -- readline --

    def _prepare(self, readline: ModuleType) -> None:
        if "libedit" in (readline.__doc__ or ""):
            readline.parse_and_bind("bind ^I rl_complete")
        else:
            readline.parse_and_bind("tab: complete")
            readline.parse_and_bind("set enable-bracketed-paste on")
            readline.parse_and_bind(r'"\e\C-m": "\C-v\C-j"')  # Alt-Enter
        readline.set_completer_delims(" \n")
        readline.set_completer(self._completion)
        readline.set_auto_history(False)
        readline.clear_history()
        for entry in _read_history(self._history):
            readline.add_history(entry)

    def _completion(self, word: str, index: int) -> str | None:
        if index == 0:
            assert self._readline is not None
            line = self._readline.get_line_buffer()[: self._readline.get_endidx()]
            self._matches = [each for each in self._complete(line) if each.startswith(word)]
        return self._matches[index] if index < len(self._matches) else None

    def _remember(self, readline: ModuleType, text: str) -> None:
        readline.add_history(text)
        line = text.replace("\\", "\\\\").replace("\n", "\\n") + "\n"
        with contextlib.suppress(OSError):
            descriptor = os.open(self._history, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with open(descriptor, "a", encoding="utf-8", errors="surrogateescape") as file:
                file.write(line)


def _import_readline() -> ModuleType | None:
    try:
        import readline
    except ImportError:  # Python may be built without readline
        return None
    return readline


def _read_history(path: Path) -> list[str]:
    """Return the newest HISTORY_ENTRIES_MAX entries.

    If the file has more than twice as many entries, keep only the newest HISTORY_ENTRIES_MAX in it.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        if len(lines) > 2 * HISTORY_ENTRIES_MAX:
            kept = "\n".join(lines[-HISTORY_ENTRIES_MAX:]) + "\n"
            path.write_text(kept, encoding="utf-8", errors="surrogateescape")
        path.chmod(0o600)
    except OSError:
        return []
    escapes = {r"\n": "\n", r"\\": "\\"}
    return [
        re.sub(r"\\[n\\]", lambda found: escapes[found[0]], line)
        for line in lines[-HISTORY_ENTRIES_MAX:]
    ]
