"""Compile csrc/cpu/amx.cpp for a machine without AMX, unchanged or with planted mistakes.

With `EMULATED`, the tiles are plain C++. With `COMPILED`, they are the real instructions. A signal handler
executes the instructions that the processor refuses (see trapped.h).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.kernels.conftest import runs_here

ROOT = Path(__file__).parents[3]
FLAGS = (
    *("-std=c++17", "-fno-math-errno"),
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mavx512vnni"),
    "-mfma",
)
EMULATED = ("-DEMULATED_TILES=1",)
COMPILED = (
    *("-O3", "-ffp-contract=fast", "-mprefer-vector-width=512"),
    *("-mamx-tile", "-mamx-bf16", "-mamx-int8"),
)


class Mistake(NamedTuple):
    file: str  # a file of csrc/cpu
    old: str
    new: str


def program(
    folder: Path, source: str, *mistakes: Mistake, flags: tuple[str, ...] = EMULATED
) -> Path:
    """Compile `source`, a file in this folder, against a copy of csrc/cpu with these mistakes."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if not compiler or not runs_here("avx512_bf16"):
        pytest.skip("it takes a compiler and AVX-512 with BF16")
    copy = folder / "csrc"
    shutil.copytree(ROOT / "csrc" / "cpu", copy)
    for mistake in mistakes:
        text = (copy / mistake.file).read_text()
        assert text.count(mistake.old) == 1, f"{mistake.file}: {mistake.old}"
        (copy / mistake.file).write_text(text.replace(mistake.old, mistake.new))
    built = folder / "program"
    subprocess.run(
        [compiler, *FLAGS, *flags, f"-I{copy}", str(Path(__file__).parent / source), "-o", built],
        check=True,
    )
    return built
