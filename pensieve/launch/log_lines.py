"""Write a daemon's log to standard error, as lines of text or JSON.

A thread writes the lines, so a paused terminal or a full pipe does not delay turns. Up to LINES_MAX lines are
queued. Further lines are dropped, and the next line says how many. Logging never raises. If a line cannot be
formatted, an error line is written instead.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import select
import sys
import threading
from collections.abc import Iterator
from typing import Any

# attributes of a record that both formats show
ID_ATTRIBUTES = ("turn_id", "conversation_id", "tenant")
FIGURES = "figures"  # attribute of a record: a dict of further values by name
LINES_MAX = 10_000
END_SECONDS = 2.0  # how long to write the queued lines after the daemon has stopped


@contextlib.contextmanager
def log_to_stderr(form: str, *, turns: bool) -> Iterator[None]:
    """Log to standard error during the block. `form` is text, json or auto. `turns` adds a line per turn."""
    plain = form == "text" or (form == "auto" and sys.stderr.isatty())
    handler = _ThreadedHandler(sys.stderr.fileno())
    handler.setFormatter(_TextLines() if plain else _JsonLines())
    root = logging.getLogger("pensieve")
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.propagate = False
    logging.getLogger("pensieve.turns").setLevel(logging.INFO if turns else logging.WARNING)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()


class _ThreadedHandler(logging.Handler):
    """A handler that writes in a separate thread, directly to the file descriptor.

    It does not use sys.stderr, because Python waits for the lock of sys.stderr at exit.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._num_lost = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._lines.qsize() >= LINES_MAX:
            self._num_lost += 1
            return
        if self._num_lost:
            lost, self._num_lost = self._num_lost, 0
            text = f"{lost} log lines were dropped, because standard error was not read"
            self._lines.put(self.format(_warning(text)))
        try:
            line = self.format(record)
        except Exception as error:  # do not call handleError, which may block on standard error
            place = f"{record.pathname}:{record.lineno}"
            line = self.format(_warning(f"cannot format a log line from {place}: {error}"))
        self._lines.put(line)

    def close(self) -> None:
        self._lines.put(None)
        self._thread.join(END_SECONDS)
        super().close()

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            left = memoryview((line + "\n").encode(errors="backslashreplace"))
            with contextlib.suppress(OSError):  # the descriptor may be closed
                while left:
                    left = left[self._write_some(left) :]

    def _write_some(self, line: memoryview) -> int:
        try:
            return os.write(self._descriptor, line)
        except BlockingIOError:  # another process has made the descriptor non-blocking
            select.select([], [self._descriptor], [])
            return 0


def _warning(text: str) -> logging.LogRecord:
    return logging.LogRecord("pensieve", logging.WARNING, __file__, 0, text, (), None)


def _details(record: logging.LogRecord) -> dict[str, Any]:
    ids = {name: getattr(record, name) for name in ID_ATTRIBUTES if hasattr(record, name)}
    return ids | getattr(record, FIGURES, {})


class _TextLines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        details = "".join(f" {name}={value}" for name, value in _details(record).items())
        return super().formatMessage(record) + details


class _JsonLines(logging.Formatter):
    """Format one JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **_details(record),
        }
        if record.exc_info:
            entry["trace"] = self.formatException(record.exc_info)
        return json.dumps(entry)
