"""Products of so many rows that the cache cannot keep them while the weights are read."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pensieve.kernels.layer import cpu


def drawn(*shape: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=draw) * shape[-1] ** -0.5).to(torch.bfloat16)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("inputs", [2752, 4096])
def test_a_row_among_many_is_the_same_as_alone(int8: bool, inputs: int) -> None:
    """The inputs need two steps. Rows of the second step are 8 KiB apart and are copied first."""
    weights = [drawn(70, inputs, seed=seed) for seed in (1, 2)]
    packed = cpu.CpuPackedWeights(weights, activation="silu", int8=int8)
    given = drawn(270, inputs, seed=3) * inputs**0.5
    whole = torch.full((270, 70), float("nan"), dtype=torch.bfloat16)
    packed.multiply(given, whole)
    for first, end in ((0, 1), (31, 50), (150, 153), (255, 270)):
        out = torch.empty(end - first, 70, dtype=torch.bfloat16)
        packed.multiply(given[first:end], out)
        assert torch.equal(out, whole[first:end])
    left, right = (given.double() @ weight.double().T for weight in weights)
    error = (whole.double() - F.silu(left) * right).abs().max()
    assert float(error) <= (5e-2 if int8 else 1e-2) * float(right.abs().max())
