"""csrc/cpu compiled with another compiler, and for other systems."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from pensieve.kernels import cpu_library
from tests.kernels.cross import (
    ANYWHERE,
    ARM,
    FLAGS,
    SOURCES,
    X86,
    bare_arm_program,
    compiled,
    needs_clang,
    passed,
)

X86_LINUX = "x86_64-linux-gnu"
# The kernel tests that take less than a second each.
SOME = "63-33-5 or 34-129 or on_other_rows or norms or every_half or largest or far or filled or cut or short"

pytestmark = needs_clang


@pytest.mark.full
@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or not shutil.which("g++"),
    reason="the library is for x86-64, and linked by g++",
)
def test_kernels_compiled_with_clang_pass_their_tests(tmp_path: Path) -> None:
    """Clang compiles all files. For files that use the C++ library, g++ makes the objects for the link."""
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
    passed(library, f"not avx512- and ({SOME})")


@pytest.mark.skipif(
    not find_spec("unicorn") or not Path("/proc/self/maps").exists(),
    reason="ARM is emulated by the package unicorn, in a process of Linux",
)
@pytest.mark.parametrize(
    ("some", "some_of_bf16"),
    [
        pytest.param("63-33-5 or short", "63-33-5 or short", id="few"),
        pytest.param(
            SOME, "64-96-1 or 63-33-5 or 32-48-3 or short", id="many", marks=pytest.mark.full
        ),
    ],
)
def test_kernels_compiled_for_arm_pass_their_tests_in_an_emulator(
    tmp_path: Path, some: str, some_of_bf16: str
) -> None:
    """Only small tests run, because instructions that the emulator lacks are executed in Python."""
    program = bare_arm_program(tmp_path)
    said = passed(
        program,
        f"(neon_bf16 and ({some_of_bf16})) or ((neon- or neon] or plain) and ({some}))",
        *("-p", "tests.kernels.arm"),
    )
    assert "skipped" not in said


@pytest.mark.parametrize(
    "target", ["aarch64-macos", pytest.param("x86_64-macos", marks=pytest.mark.full)]
)
def test_the_library_compiles_for_macos(tmp_path: Path, target: str) -> None:
    sets = ARM if target.startswith("aarch64") else {name: X86[name] for name in ("avx2", "avx512")}
    there = (
        ("-DHAS_NEON=1", "-DHAS_NEON_BF16=1") if sets is ARM else ("-DHAS_AVX2=1", "-DHAS_AVX512=1")
    )
    for name in ANYWHERE:
        compiled(tmp_path, name, target, there)
    for name, flags in sets.items():
        compiled(tmp_path, name, target, flags)
