"""Compiled files are kept, and compiled again when any of their sources has changed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import compiled

COMMAND = ("gcc", "-shared", "-fPIC")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Use a new cache, and return the list of compilers that are run."""
    if shutil.which("gcc") is None:
        pytest.skip("needs a compiler")
    run, seen = subprocess.run, []

    def noted(command: Sequence[str], **options: Any) -> Any:
        if "-o" in command:
            seen.append(command[0])
        return run(command, **options)

    monkeypatch.setattr(compiled, "FOLDER", tmp_path / "cache")
    monkeypatch.setattr(subprocess, "run", noted)
    compiled._content.cache_clear()
    return seen


def test_a_library_is_compiled_once(runs: list[str]) -> None:
    first = compiled.compiled(COMMAND, "int one;", ".c")
    assert first.read_bytes()[:4] == b"\x7fELF"
    assert compiled.compiled(COMMAND, "int one;", ".c") == first
    assert len(runs) == 1
    assert compiled.compiled((*COMMAND, "-DX"), "int one;", ".c") != first
    assert compiled.compiled(COMMAND, "int two;", ".c") != first
    assert len(runs) == 3


def test_a_changed_header_compiles_again(runs: list[str], tmp_path: Path) -> None:
    headers = tmp_path / "headers"
    headers.mkdir()
    (headers / "value.h").write_text("#define VALUE 1\n")
    text = '#include "value.h"\nint value = VALUE;'
    first = compiled.compiled(COMMAND, text, ".c", [headers])
    (headers / "value.h").write_text("#define VALUE 2\n")
    compiled._content.cache_clear()  # like a new test run
    assert compiled.compiled(COMMAND, text, ".c", [headers]) != first
    assert len(runs) == 2


def test_a_failed_compilation_leaves_nothing(runs: list[str], tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        compiled.compiled((*COMMAND, "-w"), "int one", ".c")
    assert [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"] == []


def test_the_least_recently_used_file_is_removed(
    runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (compiled.compiled(COMMAND, f"int {name};", ".c") for name in ("a", "b"))
    compiled.compiled(COMMAND, "int a;", ".c")  # so that this file is recently used
    monkeypatch.setattr(compiled, "BYTES_MAX", int(2.5 * first.stat().st_size))
    third = compiled.compiled(COMMAND, "int c;", ".c")
    assert (first.exists(), second.exists(), third.exists()) == (True, False, True)
