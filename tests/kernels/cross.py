"""Compiles csrc/cpu with clang, for this machine and for others.

Clang comes with the package ziglang, which has the headers of other systems, too.  It is asked for an object
or a bare program each time: a library of C++ for another system would be compiled first, for a minute.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "csrc" / "cpu"
# As in csrc/CMakeLists.txt, and nothing may be warned of.
FLAGS = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno")
STRICT = ("-Wall", "-Wextra", "-Werror")
WIDE = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512")
BFLOAT16 = (*WIDE, "-mavx512bf16", "-mavx512vnni")
X86 = {
    "avx2": ("-mavx2", "-mfma"),
    "avx512": WIDE,
    "avx512bf16": BFLOAT16,
    "amx": (*BFLOAT16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
}
ANYWHERE = ("experts", "kernels", "layer", "plain", "threads")

needs_clang = pytest.mark.skipif(
    importlib.util.find_spec("ziglang") is None, reason="the package ziglang is not installed"
)


def clang(target: str, *arguments: str | Path) -> None:
    """Runs it for a target such as x86_64-linux-gnu; what it says is the error of a failure."""
    command = [sys.executable, "-m", "ziglang", "c++", "-target", target, *FLAGS, *STRICT]
    ran = subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]


def compiled(folder: Path, name: str, target: str, flags: Sequence[str] = ()) -> Path:
    """The object of csrc/cpu/NAME.cpp."""
    made = folder / f"{name}-{target}.o"
    clang(target, *flags, "-c", SOURCES / f"{name}.cpp", "-o", made)
    return made
