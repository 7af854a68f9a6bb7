"""Check that the compiled library exists, and what happens without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pensieve.kernels import cpu_library
from tests.kernels.conftest import SETS, runs_here


def test_the_compiled_library_exists_and_is_used() -> None:
    """An installation with a compiler has the library. Without a compiler, the other tests are skipped."""
    assert cpu_library.compiled_library() is not None
    assert cpu_library.instruction_set(torch.bfloat16, 64) in SETS
    assert cpu_library.instruction_set(torch.float64, 64) is None


@pytest.mark.skipif(
    not Path("/proc/cpuinfo").exists(), reason="only Linux names the vendor of the CPU"
)
def test_bfloat16_pair_products_are_used_only_where_they_are_faster() -> None:
    if not runs_here("avx512_bf16") or runs_here("amx"):
        pytest.skip("needs avx512_bf16 without amx")
    intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    expected = "avx512_vnni" if intel else "avx512_bf16"
    assert cpu_library.instruction_set(torch.bfloat16, 64) == expected


def test_without_the_library_torch_computes_after_one_warning() -> None:
    program = (
        "import warnings, torch\n"
        "from pensieve.kernels import write_kv\n"
        "arena = torch.zeros(1, 2, 1, 32, 64)\n"
        "row = torch.ones(1, 1, 64)\n"
        "with warnings.catch_warnings(record=True) as told:\n"
        "    warnings.simplefilter('always')\n"
        "    for slot in (0, 3):\n"
        "        write_kv(row, row, torch.tensor([slot]), arena[:, 0], arena[:, 1])\n"
        "print(int(arena.sum()), [str(each.message) for each in told])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={"PENSIEVE_CPU_LIBRARY": "/nowhere", "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.startswith("256 ['pensieve was installed without its CPU kernels")
    assert result.stdout.count("pensieve was installed") == 1
