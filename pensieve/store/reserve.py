"""A file that keeps a few MiB of the disk, so that conversations can be deleted when the disk is full.

A deletion needs space before it gives any back: it writes to the write-ahead log.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

RESERVE_BYTES = 8 * 2**20


class Reserve:
    """Used by the store thread."""

    def __init__(self, path: Path, num_bytes: int = RESERVE_BYTES) -> None:
        self._path = path
        self._num_bytes = num_bytes

    @property
    def is_kept(self) -> bool:
        return self._path.exists()

    def release(self) -> bool:
        """Give the space up; returns whether there was any."""
        try:
            self._path.unlink()
        except OSError:
            return False
        return True

    def refill(self) -> bool:
        """Keep the space if a quarter more stays free; returns whether there is room."""
        try:
            disk = os.statvfs(self._path.parent)
            free = disk.f_bavail * disk.f_frsize
            needed = self._num_bytes // 4 + (0 if self.is_kept else self._num_bytes)
            if free < needed:
                return False
            if not self.is_kept:
                self._allocate()
        except OSError:
            return False
        return True

    def _allocate(self) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, self._num_bytes)
            else:  # macOS
                os.write(descriptor, bytes(self._num_bytes))
        except OSError:
            with contextlib.suppress(OSError):
                self._path.unlink()
            raise
        finally:
            os.close(descriptor)
