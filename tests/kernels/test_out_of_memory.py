"""Compiled kernels that get no memory for copies of rows raise an error, and the process continues."""

from __future__ import annotations

import subprocess
import sys

import pytest

BEGIN = """
import resource
import torch
from pensieve.kernels.attention.input import AttentionKind
from pensieve.kernels.layer import cpu
from pensieve.kernels.layer.protocol import (
    ExpertWeights, HeadShape, LayerWeights, MlpWeights, ProductWeights,
)

torch.set_num_threads(1)

def without_memory(act, room):
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + room, resource.RLIM_INFINITY))
    try:
        act()
    except MemoryError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    act()
    print("then it did")
"""
PRODUCT = """
packed = cpu.CpuPackedWeights([torch.ones(8, 4096, dtype={dtype})], int8={int8})
rows = torch.ones(3000, 4096, dtype={dtype})
out = torch.empty(3000, 8)
without_memory(lambda: packed.multiply(rows, out), 4 << 20)
assert bool((out == 4096).all())
"""
EXPERTS = """
one = MlpWeights(
    ProductWeights([torch.zeros(4, 1024, dtype={dtype})], [None], "silu"),
    ProductWeights([torch.zeros(1024, 2, dtype={dtype})], [None]),
)
experts = ExpertWeights(
    router=torch.eye(8, 1024, dtype={dtype}), experts=[one] * 8, num_chosen=8, normalized=True, rounded=False
)
heads_in = ProductWeights([torch.zeros(64, 1024, dtype={dtype})], [None])
heads_out = ProductWeights([torch.zeros(1024, 32, dtype={dtype})], [None])
weights = LayerWeights(0, HeadShape(2, 1, 16), AttentionKind(1.0), heads_in, heads_out, experts, {{}})
layer = cpu.CpuLayerKernels().layer(weights, int8={int8})
rows, attended = torch.ones(512, 1024, dtype={dtype}), torch.zeros(512, 32, dtype={dtype})
layer._workspace.reserve(512, layer.widths, rows.dtype)  # so that only the kernel asks for more
without_memory(lambda: layer.after_attention(rows, attended), 3 << 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited as Linux does it")
@pytest.mark.parametrize(
    ("dtype", "int8"), [("torch.bfloat16", True), ("torch.float16", False)], ids=["int8", "fp16"]
)
@pytest.mark.parametrize("part", [PRODUCT, EXPERTS], ids=["a product", "experts"])
def test_too_little_memory_for_copies_of_rows_is_an_error(
    part: str, dtype: str, int8: bool
) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", BEGIN + part.format(dtype=dtype, int8=int8)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, (ran.returncode, ran.stderr)
    assert ran.stdout.splitlines() == [
        "not enough memory for the buffers of the compiled kernels",
        "then it did",
    ]
