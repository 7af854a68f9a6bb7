"""Tells programs that wait for it where a process listens."""

from __future__ import annotations

from pathlib import Path

from pensieve.errors import ConfigError


def write_ready(path: Path, address: str) -> None:
    """Whole or not at all: a program that waits for the file may read it at once."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(address + "\n", encoding="ascii")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
