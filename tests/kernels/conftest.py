"""Run kernel tests once for each instruction set of this machine."""

from __future__ import annotations

import pytest

from pensieve.kernels import cpu_library
from tests.selection import leave_out

SETS = ("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "neon_bf16", "neon", "plain")


def runs_here(name: str) -> bool:
    """Return whether this machine has the instruction set, even if another set is in use."""
    library = cpu_library.compiled_library()
    return library is not None and library.pensieve_kernel(64, name.encode()) is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    absent = {name for name in SETS if not runs_here(name)}
    why = f"for instruction sets that are not here ({', '.join(sorted(absent))})"
    leave_out(config, items, lambda item: why if _instruction_set(item) in absent else None)


def _instruction_set(item: pytest.Item) -> str:
    """Return the value of the fixture `kernel` in this test."""
    callspec = getattr(item, "callspec", None)
    kernel = callspec.params.get("kernel") if callspec else None
    return kernel if isinstance(kernel, str) else ""


@pytest.fixture(params=SETS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    monkeypatch.setattr(cpu_library, "only_instruction_set", name.encode())
    return name
