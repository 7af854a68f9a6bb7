"""Writes the audit log: JSON objects, one a line, in a thread of its own.

    the loop      `write`: the line waits in a queue of LINES_MAX; a line for which there is no room is lost
    the thread    takes what waits, looks whether the file is still there, and writes it in one piece

So neither a slow disk nor a full one keeps the loop or a call.  What could not be written is counted: the log
of the daemon says so once, and the first line that can be written again is {"event": "lost"} with the number.
Part of a batch is never left in the file.  A file that was moved away (logrotate) is made anew, for nobody
but its owner.  Lines are not synced: a machine that loses power may lose the latest.

A line holds no text of a conversation and no token.  What a client chose is quoted as JSON does it, so it is
always one line, and is cut where it is long.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, Full, Queue

from pensieve.errors import ConfigError

log = logging.getLogger("pensieve")
LINES_MAX = 10_000
BATCH_LINES_MAX = 500
CHARACTERS_MAX = 128  # of one value
CLOSE_SECONDS = 5.0


class AuditLog:
    def __init__(self, path: Path, wall_clock: Callable[[], float] = time.time) -> None:
        """ConfigError if the file cannot be opened now; later, that is only reported."""
        self._path = path
        self._wall_clock = wall_clock
        self._file = -1
        self._num_lost = 0  # since a line could be written; of both threads
        self._lock = threading.Lock()  # of the number
        self._is_late = False  # and the daemon's log says so
        self._lines: Queue[str | None] = Queue(LINES_MAX)
        try:
            self._open()
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
        self._thread.start()

    @property
    def num_lost(self) -> int:
        """Lines that could not be written since the last one that could."""
        return self._num_lost

    def write(self, event: str, **fields: str | float | None) -> None:
        """Put down what happened; returns at once.  Fields without a value are left out."""
        entry: dict[str, str | float] = {"time": round(self._wall_clock(), 3), "event": event}
        for name, value in fields.items():
            if isinstance(value, str):
                value = value[:CHARACTERS_MAX]
            if value is not None and value != "":
                entry[name] = value
        try:
            self._lines.put_nowait(json.dumps(entry))
        except Full:
            self._lose(1)

    def close(self) -> None:
        """Write what waits; not for ever."""
        with contextlib.suppress(Full):
            self._lines.put(None, timeout=CLOSE_SECONDS)
        self._thread.join(CLOSE_SECONDS)

    # -- in the thread --

    def _run(self) -> None:
        is_open = True
        while is_open:
            batch = [self._lines.get()]
            with contextlib.suppress(Empty):
                while len(batch) < BATCH_LINES_MAX:
                    batch.append(self._lines.get_nowait())
            is_open = None not in batch
            self._put_down([line for line in batch if line is not None])
        self._close_file()

    def _put_down(self, lines: list[str]) -> None:
        if not lines:
            return
        lost, report = self._num_lost, []
        if lost:
            report = [
                json.dumps({"time": round(self._wall_clock(), 3), "event": "lost", "lines": lost})
            ]
        try:
            self._append("".join(f"{line}\n" for line in (*report, *lines)).encode())
        except OSError as error:
            self._close_file()
            self._lose(len(lines))
            if not self._is_late:
                log.warning("the audit log cannot be written, and loses lines: %s", error.strerror)
            self._is_late = True
            return
        self._lose(-lost)
        if self._is_late:
            log.warning("the audit log can be written again; %d lines are lost", lost)
        self._is_late = False

    def _append(self, text: bytes) -> None:
        if self._file < 0 or self._was_moved():
            self._close_file()
            self._open()
        before = os.fstat(self._file).st_size
        if os.write(self._file, text) < len(text):
            os.ftruncate(self._file, before)  # the disk is full: no part of a line stays
            raise OSError(0, "the disk is full")

    def _was_moved(self) -> bool:
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return True
        ours = os.fstat(self._file)
        return (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino)

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self._path, flags, 0o600)
        os.fchmod(self._file, 0o600)

    def _close_file(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            with contextlib.suppress(OSError):
                os.close(file)

    def _lose(self, num_lines: int) -> None:
        with self._lock:
            self._num_lost += num_lines
