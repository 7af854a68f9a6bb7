"""AMX products on a machine without AMX: the same source, with its eight tiles in plain C++."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pensieve.kernels import cpu_library
from tests.kernels.conftest import runs_here

ROOT = Path(__file__).parents[3]
SOURCES = (
    *("instruction_sets", "multi_token_attention", "pages", "experts", "layer", "threads"),
    *("amx", "avx512bf16", "avx512", "plain"),
)
FLAGS = (
    *(
        "-std=c++17",
        "-O2",
        "-fPIC",
        "-shared",
        "-pthread",
        "-fvisibility=hidden",
        "-fno-math-errno",
    ),
    *(
        "-mavx512f",
        "-mavx512bw",
        "-mavx512vl",
        "-mavx512dq",
        "-mavx512bf16",
        "-mavx512vnni",
        "-mfma",
    ),
    *("-DHAS_AMX=1", "-DHAS_AVX512_BF16=1", "-DHAS_AVX512=1", "-DEMULATED_TILES=1"),
)


def test_products_with_emulated_tiles(tmp_path: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if not compiler or not runs_here("avx512_bf16"):
        pytest.skip("it takes a compiler and AVX-512 with BF16")
    sources = [str(ROOT / "csrc" / "cpu" / f"{name}.cpp") for name in SOURCES]
    subprocess.run([compiler, *FLAGS, *sources, "-o", str(tmp_path / cpu_library.NAME)], check=True)
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "amx"),
            *("tests/kernels/layer/test_cpu.py", "tests/kernels/attention/test_cpu.py"),
            "tests/kernels/layer/test_experts.py",
            "tests/kernels/layer/test_blocks.py",
        ],
        cwd=ROOT,
        env={**os.environ, "PENSIEVE_CPU_LIBRARY": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-2000:]
    assert " passed" in ran.stdout
    assert "skipped" not in ran.stdout
