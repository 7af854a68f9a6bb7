"""A full disk: how it is detected, and the space that is reserved for deletions."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path
from types import SimpleNamespace

import pytest

from pensieve.errors import DiskFull, StoreCorrupt, StoreUnavailable
from pensieve.store.connection import pensieve_error
from pensieve.store.sqlite_backend import Reserve

pytestmark = pytest.mark.sqlite


@pytest.mark.parametrize("as_on_macos", [False, True])
def test_disk_space_is_reserved_and_released(
    as_on_macos: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if as_on_macos:
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    file = tmp_path / "reserve"
    reserve = Reserve(file, num_bytes=1 << 20)
    assert reserve.refill()
    assert reserve.is_kept
    assert file.stat().st_blocks * 512 >= 1 << 20
    assert reserve.release()
    assert not file.exists()
    assert not reserve.release()


@pytest.mark.parametrize(
    ("code", "free", "kind"),
    [(13, 9, DiskFull), (10, 0, DiskFull), (10, 9, StoreUnavailable), (11, 0, StoreCorrupt)],
)
def test_an_io_error_on_a_full_disk_is_reported_as_a_full_disk(
    code: int, free: int, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite reports an I/O error if its -shm file cannot grow."""
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=free))
    error = sqlite3.OperationalError("of the driver")
    error.sqlite_errorcode = code
    assert type(pensieve_error(error, tmp_path / "history.db")) is kind


def test_a_reserve_that_cannot_be_fully_allocated_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(descriptor: int, start: int, num_bytes: int) -> None:
        os.write(descriptor, b"part")
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "posix_fallocate", fill, raising=False)
    reserve = Reserve(tmp_path / "reserve", num_bytes=1 << 20)
    assert not reserve.refill()
    assert not reserve.is_kept
