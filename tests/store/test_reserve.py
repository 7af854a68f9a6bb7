"""The space that is kept for deletions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pensieve.store.reserve import Reserve

pytestmark = pytest.mark.sqlite


@pytest.mark.parametrize("as_on_macos", [False, True])
def test_space_is_kept_and_given_up(
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
