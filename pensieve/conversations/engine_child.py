"""Start the engine process, if possible before the service is ready.

Most of the start-up time is the import of torch. With `EarlyEngine`, the engine process imports torch while
the service imports its own modules and opens the history.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

from pensieve.config import without_secrets


class EngineChild(NamedTuple):
    process: subprocess.Popen[bytes]
    pipe: socket.socket  # the service's end


def start_child(command: Sequence[str]) -> EngineChild:
    """Run the command and pass it the descriptor of its end of a new pipe. Raises OSError if that fails.

    The process starts with SIGINT blocked, because only the service handles Ctrl-C.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**without_secrets(os.environ), "PYTHONUNBUFFERED": "1"},
            )
        except BaseException:
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return EngineChild(process, ours)


class EarlyEngine:
    """A context manager that starts a process and kills it at the end, unless `take` was called."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._child: EngineChild | None = None

    def __enter__(self) -> EarlyEngine:
        with contextlib.suppress(OSError):  # the service tries again, and reports the error
            self._child = start_child(self._command)
        return self

    def take(self) -> EngineChild | None:
        """Hand the process over to the caller, once."""
        child, self._child = self._child, None
        return child

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if (child := self.take()) is not None:
            child.pipe.close()
            child.process.kill()
            child.process.wait()
