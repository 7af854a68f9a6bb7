"""Each instruction set that this machine has, by turns."""

from __future__ import annotations

import pytest
import torch

from pensieve.kernels import cpu_library

SETS = ("amx", "avx512_bf16", "avx512", "avx2", "neon_bf16", "neon", "plain")


@pytest.fixture(params=SETS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    monkeypatch.setattr(cpu_library, "only_instruction_set", name.encode())
    if cpu_library.instruction_set(torch.float32, 64) != name:
        pytest.skip(f"this machine has no {name}")
    return name
