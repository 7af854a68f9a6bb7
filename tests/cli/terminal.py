"""Run `pensieve chat` in a pseudo-terminal, for tests that type, press Ctrl-C and read the screen.

Only `read_until`, `shows` and `rest` read from the screen. So, like a slow terminal, the screen may hold
kilobytes that are not shown yet when a key is pressed.
"""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).parent.parent.parent
CTRL_C = "\x03"
PROMPT, ENTERED = "\x1b[?2004h> ", "\x1b[?2004l"  # readline's output around the editing of a line
WITH_CONTROLLING_TERMINAL = "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
COMMAND = "from pensieve.cli.main import main; sys.exit(main(sys.argv[1:]))"
WITH_ECHO = (  # `pensieve chat`, with the echo engine in its daemon; a reply has about 24 tokens
    "from pensieve.launch import programs;"
    "programs.ENGINE = (*programs.ECHO_ENGINE, '--seconds={seconds}');"
)


def text_of(screen: str) -> str:
    """Return the text that a user reads: no echo of Ctrl-C, no colours or bells, plain line ends."""
    text = re.sub(r"\^C|[\x03\x07]|\x1b\[[?0-9;]*[A-Za-z]", "", screen)
    return re.sub(r"[\r\n]+", "\n", text).strip()


class Terminal:
    """A terminal that runs one program. Leaving the context ends the program."""

    def __init__(
        self,
        data: Path,
        *arguments: str,  # arguments of `pensieve`
        echo_seconds: float | None = None,  # per iteration; None: a model, or another daemon
        program: str = COMMAND,  # Python code to run instead
    ) -> None:
        lead = WITH_CONTROLLING_TERMINAL
        if echo_seconds is not None:
            lead += WITH_ECHO.format(seconds=echo_seconds)
        self._master, terminal = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", lead + program, *arguments],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            cwd=ROOT,
            env={**os.environ, "PENSIEVE_DATA": str(data), "TERM": "xterm"},
            start_new_session=True,
        )
        os.close(terminal)
        self._unread = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def read_until(self, wanted: str, seconds: float = 60.0) -> str:
        """Return the output up to `wanted`. The rest stays unread."""
        self.shows(wanted, seconds)
        before, found, after = self._unread.partition(wanted.encode())
        assert found, f"{wanted!r} does not appear: {self._unread.decode(errors='replace')!r}"
        self._unread = after
        return before.decode(errors="replace")

    def shows(self, wanted: str, seconds: float) -> bool:
        """Return whether `wanted` appears within this time. The output stays unread."""
        end = time.monotonic() + seconds
        while wanted.encode() not in self._unread and time.monotonic() < end:
            if select.select([self._master], [], [], 0.2)[0]:
                try:
                    self._unread += os.read(self._master, 1 << 16)
                except OSError:  # no process has the terminal open
                    break
        return wanted.encode() in self._unread

    def rest(self, seconds: float = 60.0) -> str:
        """Return the output until the program has ended."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                if select.select([self._master], [], [], 0.2)[0]:
                    self._unread += os.read(self._master, 1 << 16)
            except OSError:
                break
        left, self._unread = self._unread, b""
        return left.decode(errors="replace")

    def wait(self, seconds: float = 60.0) -> int:
        return self.process.wait(seconds)
