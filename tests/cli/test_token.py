"""`pensieve token`: the secret is printed for the user, and the entry is written to the file."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pensieve.cli.main import main
from pensieve.guard.callers import read_tokens


def sha256_of(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def test_redirected_output_is_the_entry_and_stderr_shows_the_secret(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tokens.toml"
    with file.open("ab") as out:
        told = subprocess.run(
            [sys.executable, "-m", "pensieve", "token", "--tenant", "a"],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            check=True,
        ).stderr
    file.chmod(0o600)
    secret = told.split()[-1]
    assert "shown once" in told
    assert secret not in file.read_text()
    (token,) = read_tokens(file)
    assert (token.sha256, token.tenant) == (sha256_of(secret), "a")


def test_with_a_file_the_entry_is_appended_and_only_the_secret_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tokens.toml"
    before = os.umask(0o000)
    try:
        secrets = []
        for tenant in ("a", "b"):
            assert main(["token", "--tenant", tenant, "--turns-max", "2", "--file", str(file)]) == 0
            secrets.append(capsys.readouterr().out.removesuffix("\n"))
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [token.sha256 for token in read_tokens(file)] == [sha256_of(each) for each in secrets]
    assert [token.tenant for token in read_tokens(file)] == ["a", "b"]


def test_an_entry_is_appended_after_a_missing_line_break(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text("# tokens of this machine")
    file.chmod(0o600)
    assert main(["token", "--file", str(file)]) == 0
    assert file.read_text().startswith("# tokens of this machine\n[[token]]\n")
    assert len(tomllib.loads(file.read_text())["token"]) == 1


@pytest.mark.parametrize(
    ("text", "mode", "flags", "problem"),
    [
        ("", 0o666, [], "chmod 644"),
        ("token = ", 0o600, [], "not valid TOML"),
        (f'[[token]]\nsha256 = "{"0" * 64}"\n', 0o600, ["--turns-max", "3"], "different limits"),
    ],
)
def test_a_file_that_the_daemon_would_refuse_is_not_changed(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    mode: int,
    flags: list[str],
    problem: str,
) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text(text)
    file.chmod(mode)
    assert main(["token", *flags, "--file", str(file)]) == 3
    told = capsys.readouterr()
    assert problem in told.err
    assert told.out == ""
    assert file.read_text() == text
