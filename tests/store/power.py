"""Record a process's writes, and construct the files that a power loss at any moment may leave.

A write is certain only after a later sync of its file. Before that, each of its 512-byte sectors may be
present or not, in any order. The same holds for a truncation. A removed file is always gone.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.compiled import compiled

SOURCE = Path(__file__).with_name("recorder.cpp")
HEADER = struct.Struct("=cBQQ")
SECTOR_BYTES = 512
WRITE, TRUNCATE, SYNC, UNLINK, NOTE = b"w", b"t", b"s", b"u", b"n"


class Event(NamedTuple):
    """A call on a file, or a note of the process about something that it has done."""

    what: bytes
    name: str
    position: int  # write: the offset; truncation: the new length
    content: bytes = b""


def recorder() -> Path | None:
    """Return the recorder library, or None without a compiler."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None or sys.platform != "linux" or sys.maxsize < 2**32:
        return None
    flags = ("-std=c++17", "-O1", "-shared", "-fPIC", "-D_GNU_SOURCE", "-D_LARGEFILE64_SOURCE")
    return compiled([compiler, *flags], SOURCE.read_text(encoding="utf-8"), SOURCE.suffix)


def note(content: bytes) -> None:
    """Record a promise that the recorded process makes, such as an acknowledgement."""
    log = os.open(os.environ["RECORDER_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(log, HEADER.pack(NOTE, 0, 0, len(content)) + content)
    os.close(log)


def run_recorded(library: Path, folder: Path, program: Sequence[str]) -> list[Event]:
    """Run a program. Return its calls on the files of a folder, and its notes, in order."""
    log = folder.with_name(f"{folder.name}.log")
    environment = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "RECORDER_FOLDER": str(folder.resolve()),
        "RECORDER_LOG": str(log),
    }
    subprocess.run([sys.executable, *program], env=environment, check=True)
    return _events(log.read_bytes())


def _events(log: bytes) -> list[Event]:
    events, at = [], 0
    while at < len(log):
        what, name_bytes, first, second = HEADER.unpack_from(log, at)
        at += HEADER.size
        name = log[at : at + name_bytes].decode()
        at += name_bytes
        content = log[at : at + second]
        at += len(content) if what in (WRITE, NOTE) else 0
        events.append(Event(what, name, first, content if what in (WRITE, NOTE) else b""))
    return events


def files_after(events: Sequence[Event], rng: random.Random) -> Mapping[str, bytes]:
    """Return files that a power loss right after these events may leave."""
    durable: dict[str, bytearray] = {}
    pending: dict[str, list[Event]] = {}
    for event in events:
        if event.what == NOTE:
            continue
        if event.what == UNLINK:
            del durable[event.name], pending[event.name]
            continue
        waiting = pending.setdefault(event.name, [])
        file = durable.setdefault(event.name, bytearray())
        if event.what == SYNC:
            for each in waiting:
                _apply(file, each)
            waiting.clear()
        else:
            waiting.append(event)
    chance = rng.choice((0.0, 0.3, 0.7, 1.0))
    for name, waiting in pending.items():
        for each in waiting:
            for part in _sectors(each):
                if rng.random() < chance:
                    _apply(durable[name], part)
    return {name: bytes(file) for name, file in durable.items()}


def _apply(file: bytearray, event: Event) -> None:
    end = event.position + len(event.content)
    if event.what == TRUNCATE:
        del file[end:]
    if len(file) < end:
        file.extend(bytes(end - len(file)))
    file[event.position : end] = event.content


def _sectors(event: Event) -> list[Event]:
    if event.what == TRUNCATE:
        return [event]
    parts, at = [], 0
    while at < len(event.content):
        length = SECTOR_BYTES - (event.position + at) % SECTOR_BYTES
        content = event.content[at : at + length]
        parts.append(event._replace(position=event.position + at, content=content))
        at += length
    return parts
