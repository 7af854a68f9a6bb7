"""csrc/cpu with another compiler, and for other systems than this one."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pensieve.kernels import cpu_library
from tests.kernels.cross import ANYWHERE, FLAGS, SOURCES, X86, compiled, needs_clang

ROOT = Path(__file__).parents[2]
X86_LINUX = "x86_64-linux-gnu"

pytestmark = needs_clang


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or not shutil.which("g++"),
    reason="the library is for x86-64, and linked by g++",
)
def test_what_clang_makes_of_the_kernels_passes_their_tests(tmp_path: Path) -> None:
    """Of files that use the library of C++ the objects are g++'s, which links; clang compiles them too."""
    others = [SOURCES / f"{name}.cpp" for name in ANYWHERE if name != "plain"]
    for each in others:
        compiled(tmp_path, each.stem, X86_LINUX)
    plain = compiled(tmp_path, "plain", X86_LINUX, ("-O1",))
    sets = [compiled(tmp_path, name, X86_LINUX, ("-O1", *X86[name])) for name in X86]
    there = [f"-DHAS_{name}=1" for name in ("AVX2", "AVX512", "AVX512_BF16", "AMX")]
    library = tmp_path / cpu_library.NAME
    subprocess.run(
        ["g++", "-shared", "-pthread", *FLAGS, *there, *others, plain, *sets, "-o", library],
        check=True,
    )
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("tests/kernels/layer/test_cpu.py", "tests/kernels/attention/test_cpu.py"),
            *("-k", "64 or company or batch or norms or far_from"),
        ],
        cwd=ROOT,
        env={**os.environ, "PENSIEVE_CPU_LIBRARY": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-2000:]
    assert " passed" in ran.stdout


@pytest.mark.parametrize("target", ["aarch64-macos", "x86_64-macos"])
def test_the_library_compiles_for_macos(tmp_path: Path, target: str) -> None:
    sets = {} if target.startswith("aarch64") else {"avx2": X86["avx2"], "avx512": X86["avx512"]}
    for name in ANYWHERE:
        compiled(tmp_path, name, target)
    for name, flags in sets.items():
        compiled(tmp_path, name, target, flags)
