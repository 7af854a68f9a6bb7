"""A converted model is stored completely or not at all, however its conversion ends, and only once."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pensieve.errors import ModelError
from pensieve.launch import model_cache
from pensieve.launch.model_cache import cached_folder, find_or_make, models_folder

HALF_MADE = """
import os, sys, time
from pensieve.launch.model_cache import find_or_make

def make(folder):
    (folder / "model.safetensors").write_bytes(b"half")
    print("begun", flush=True)
    time.sleep(60)

find_or_make("m", make, print, lambda: None)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pensieve" / "models"


@contextlib.contextmanager
def unfinished_conversion() -> Iterator[subprocess.Popen[str]]:
    """A process that has converted half of a model."""
    command = [sys.executable, "-c", HALF_MADE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        try:
            yield process
        finally:
            process.kill()


def whole(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def nothing(line: str = "") -> None:
    pass


def refuse(folder: Path) -> None:
    raise AssertionError("it is there already")


def test_a_model_is_converted_once_into_a_private_folder(cache: Path) -> None:
    assert cached_folder("m") is None
    folder = find_or_make("m", whole, nothing, nothing)
    assert folder == cached_folder("m") == cache / "m" == models_folder() / "m"
    assert [each.name for each in folder.iterdir()] == ["config.json"]
    assert cache.stat().st_mode & 0o077 == 0
    assert find_or_make("m", refuse, nothing, nothing) == folder


def test_a_failed_conversion_leaves_nothing_and_can_be_repeated(cache: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "config.json").write_text("{")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find_or_make("m", fail, nothing, nothing)
    assert cached_folder("m") is None
    assert [each.name for each in cache.iterdir()] == ["m.lock"]
    assert (find_or_make("m", whole, nothing, nothing) / "config.json").read_text() == "{}"


def test_a_partial_model_of_a_killed_process_is_never_used(cache: Path) -> None:
    with unfinished_conversion():
        assert cached_folder("m") is None
    assert list(cache.glob("m.partial-*/model.safetensors"))
    folder = find_or_make("m", whole, nothing, nothing)
    assert [each.name for each in folder.iterdir()] == ["config.json"]
    assert sorted(each.name for each in cache.iterdir()) == ["m", "m.lock"]


def test_a_second_simultaneous_conversion_waits_for_the_first(cache: Path) -> None:
    begun, may_end = threading.Event(), threading.Event()
    lines: list[str] = []
    others: list[Path] = []

    def slow(folder: Path) -> None:
        begun.set()
        assert may_end.wait(30)
        whole(folder)

    first = threading.Thread(target=find_or_make, args=("m", slow, nothing, nothing))
    second = threading.Thread(
        target=lambda: others.append(find_or_make("m", refuse, lines.append, nothing))
    )
    first.start()
    assert begun.wait(30)
    second.start()
    while not lines and second.is_alive():
        time.sleep(0.01)
    may_end.set()
    first.join(30)
    second.join(30)
    assert others == [cache / "m"]
    assert lines == ["waiting for another process that prepares the same model"]


def test_waiting_for_another_conversion_can_be_interrupted(cache: Path) -> None:

    def check() -> None:
        raise KeyboardInterrupt

    with unfinished_conversion(), pytest.raises(KeyboardInterrupt):
        find_or_make("m", refuse, nothing, check)


def test_an_unwritable_cache_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot keep a model in .*, set XDG_CACHE_HOME"):
        find_or_make("m", whole, nothing, nothing)


def test_too_little_disk_space_is_an_error_before_anything_is_written(cache: Path) -> None:
    cache.mkdir(parents=True)
    with pytest.raises(
        ModelError, match=r"it needs 1000000000.0 GB in .*, but only .* GB are free"
    ):
        model_cache.check_room(10**18, "it")
