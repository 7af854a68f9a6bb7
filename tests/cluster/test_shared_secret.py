"""The owner and the mode of a secret file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pensieve.config import read_secret
from pensieve.errors import ConfigError

SECRET = "0123456789abcdef"


def file(folder: Path, mode: int, owner: int) -> Path:
    path = folder / "secret"
    path.write_text(SECRET + "\n")
    path.chmod(mode)
    if os.stat(path).st_uid != owner:
        if os.geteuid():
            pytest.skip("only root may give files away")
        os.chown(path, owner, -1)
    return path


@pytest.mark.parametrize(("mode", "owner"), [(0o600, 0), (0o440, 0), (0o400, 1000), (0o600, 1000)])
def test_a_secret_file_may_belong_to_the_user_or_to_root_with_a_group(
    tmp_path: Path, mode: int, owner: int
) -> None:
    assert read_secret(file(tmp_path, mode, owner)) == SECRET


@pytest.mark.parametrize(("mode", "owner"), [(0o444, 0), (0o460, 0), (0o440, 1000), (0o604, 1000)])
def test_a_secret_file_that_others_can_read_is_refused(
    tmp_path: Path, mode: int, owner: int
) -> None:
    with pytest.raises(ConfigError, match="can be read by others: run `chmod 600"):
        read_secret(file(tmp_path, mode, owner))


def test_a_missing_or_short_secret_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_secret(tmp_path / "secret")
    path = file(tmp_path, 0o600, os.geteuid())
    path.write_text("short")
    with pytest.raises(ConfigError, match="has no secret of at least 16 characters"):
        read_secret(path)
