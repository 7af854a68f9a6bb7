"""Each instruction set that this machine has, by turns."""

from __future__ import annotations

import pytest

from pensieve.kernels import cpu_library

SETS = ("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "neon_bf16", "neon", "plain")


def runs_here(name: str) -> bool:
    """Whether this machine has it, and not whether it is the one that is used."""
    library = cpu_library.compiled_library()
    return library is not None and library.pensieve_kernel(64, name.encode()) is not None


@pytest.fixture(params=SETS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    monkeypatch.setattr(cpu_library, "only_instruction_set", name.encode())
    if not runs_here(name):
        pytest.skip(f"this machine has no {name}")
    return name
