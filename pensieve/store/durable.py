"""Write files that exist completely or not at all, whatever happens to the process or the machine."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedRandom
from pathlib import Path


@contextmanager
def new_file(path: Path, mode: int = 0o600, *, shared: bool = False) -> Iterator[BufferedRandom]:
    """Write a file under another name, sync it, and rename it durably when the block ends."""
    partial = path.with_name(f"{path.name}.partial")
    if shared:  # another process may write the same file at the same time
        partial = path.with_name(f".{path.name[:200]}.{secrets.token_hex(6)}.partial")
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync(path.parent)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def sync(path: Path) -> None:
    """Sync a file's content, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
