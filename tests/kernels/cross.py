"""Compile csrc/cpu with clang, for this machine and for others.

Clang comes with the package ziglang, which also has the headers of other systems. Callers compile only
object files, or programs without the C++ library. Otherwise ziglang would first compile that library for the
other system, which takes a minute.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from pensieve.kernels import cpu_library

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "csrc" / "cpu"
TESTS = (
    "tests/kernels/layer/test_cpu.py",
    "tests/kernels/attention/test_cpu.py",
)
# The same flags as in csrc/CMakeLists.txt. All warnings are errors.
FLAGS = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno")
STRICT = ("-Wall", "-Wextra", "-Werror")
WIDE = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512")
BFLOAT16 = (*WIDE, "-mavx512bf16", "-mavx512vnni")
X86 = {
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": WIDE,
    "avx512vnni": (*WIDE, "-mavx512vnni"),
    "avx512bf16": BFLOAT16,
    "amx": (*BFLOAT16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
}
ARM = {  # in ziglang's clang, this replaces -march=armv8.2-a+dotprod
    "neon": ("-mcpu=generic+dotprod",),
    "neonbf16": ("-mcpu=generic+dotprod+bf16+i8mm",),
}
ANYWHERE = (
    "experts",
    "instruction_sets",
    "layer",
    "multi_token_attention",
    "pages",
    "plain",
    "threads",
)

needs_clang = pytest.mark.skipif(
    importlib.util.find_spec("ziglang") is None, reason="the package ziglang is not installed"
)


def clang(target: str, *arguments: str | Path) -> None:
    """Run clang for a target such as x86_64-linux-gnu. A failure raises with clang's output."""
    command = [sys.executable, "-m", "ziglang", "c++", "-target", target, *FLAGS, *STRICT]
    ran = subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]


def compiled(folder: Path, name: str, target: str, flags: Sequence[str] = ()) -> Path:
    """Compile csrc/cpu/NAME.cpp and return the object file."""
    made = folder / f"{name}-{target}.o"
    clang(target, *flags, "-c", SOURCES / f"{name}.cpp", "-o", made)
    return made


def bare_arm_program(folder: Path) -> Path:
    """Compile the library as a program that needs no operating system. arm/bare.cpp replaces libc."""
    target = "aarch64-linux-musl"
    flags: tuple[str, ...] = ("-O1", "-DHAS_NEON=1", "-DHAS_NEON_BF16=1", "-ftls-model=local-exec")
    flags += ("-fno-exceptions", "-Dtry=if(true)", "-Dcatch(error)=else")
    objects = [compiled(folder, name, target, flags) for name in ANYWHERE if name != "threads"]
    objects += [compiled(folder, name, target, (*flags, *ARM[name])) for name in ARM]
    rest = folder / "bare.o"
    clang(
        target, *flags, "-fno-builtin", "-c", Path(__file__).parent / "arm" / "bare.cpp", "-o", rest
    )
    made = folder / cpu_library.NAME
    where = "-Wl,--image-base=0x1000000000"  # an address range that this process does not use
    entry = "-Wl,-e,pensieve_kernel"
    clang(target, "-nostdlib", "-static", where, entry, *objects, rest, "-o", made)
    return made


def passed(library: Path, wanted: str, *options: str) -> str:
    """Run the kernels' tests with this library. They must pass; return pytest's output."""
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *options,
            *TESTS,
            "-k",
            wanted,
        ],
        cwd=ROOT,
        env={**os.environ, "PENSIEVE_CPU_LIBRARY": str(library.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-1000:]
    assert " passed" in ran.stdout
    return ran.stdout
