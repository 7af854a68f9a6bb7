"""The data folder: private to its owner, held by one process at a time, and it knows how it ended.

One file, `lock`, says both things.  Holding it is an advisory lock of the operating system, so it
goes with its process, however that dies.  Its text is the holder ("123 pensieve chat"), written when
the folder is opened and emptied when it is closed in order; whoever takes the lock and finds text
knows that the last holder did not close.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from pensieve.errors import StoreError, StoreLocked, StoreUnavailable

DATABASE_NAME = "conversations.db"
LOCK_NAME = "lock"
HOLDER_BYTES_MAX = 256


class DataFolder:
    """Open it with `DataFolder.open`; it must be closed by the process that opened it."""

    def __init__(self, path: Path, lock: int, stopped_unclean: bool) -> None:
        self.path = path
        self.stopped_unclean = stopped_unclean  # the holder before us did not close
        self._lock: int | None = lock

    @classmethod
    def open(cls, path: Path, holder: str) -> DataFolder:
        """Take the folder, making it if it is missing; `holder` is told to whoever comes next."""
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(f"the data folder {path} cannot be used: {error.strerror}") from error
        try:
            _take(lock, path)
            stopped_unclean = bool(os.pread(lock, HOLDER_BYTES_MAX, 0))
            _write(lock, f"{os.getpid()} {holder}\n".encode()[:HOLDER_BYTES_MAX])
            # Other users must not read what people wrote; SQLite gives its side files the same mode.
            database = os.open(path / DATABASE_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.close(database)
        except OSError as error:
            os.close(lock)
            raise StoreUnavailable(
                f"the data folder {path} cannot be written: {error.strerror}"
            ) from error
        except StoreLocked:
            os.close(lock)
            raise
        return cls(path, lock, stopped_unclean)

    @property
    def database_path(self) -> Path:
        return self.path / DATABASE_NAME

    def close(self, clean: bool) -> None:
        """Let go of the folder; `clean` promises that the database was closed without an error."""
        if self._lock is None:
            return
        if clean:
            # A disk that refuses even this costs one integrity check at the next start.
            with contextlib.suppress(OSError):
                _write(self._lock, b"")
        os.close(self._lock)
        self._lock = None


def _take(lock: int, path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StoreLocked(f"the data folder {path} is in use by {_holder(lock)}") from None


def _holder(lock: int) -> str:
    text = os.pread(lock, HOLDER_BYTES_MAX, 0).decode(errors="replace")
    pid, _, command = text.strip().partition(" ")
    if not pid.isdecimal():
        return "another process"
    printable = "".join(letter if letter.isprintable() else "?" for letter in command)
    return f"{printable or 'a process'}, pid {pid}"


def _write(lock: int, text: bytes) -> None:
    os.pwrite(lock, text, 0)  # first: a full disk must not leave the file empty, which means clean
    os.ftruncate(lock, len(text))
    os.fsync(lock)
