"""The parts of a GPU layer that are torch operations (products and norms), here on a CPU."""

from __future__ import annotations

import pytest
import torch

from pensieve.kernels.layer import cuda
from pensieve.kernels.layer.protocol import NormWeights


def test_norms_of_whole_rows_and_parts_with_weights_that_round() -> None:
    rows = torch.randn(5, 12).to(torch.bfloat16)
    for width in (12, 4):
        for weight in (torch.ones(width) * 0.5, torch.rand(width) + 1):
            norm = cuda.CudaNorm(NormWeights(weight, 1e-6))
            wide = rows.float().view(5, -1, width)
            right = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight
            torch.testing.assert_close(norm(rows).float(), right.view(5, 12), rtol=1e-2, atol=1e-2)


def test_a_layer_norm() -> None:
    rows, weight, bias = torch.randn(5, 12).to(torch.bfloat16), torch.rand(12), torch.randn(12)
    norm = cuda.CudaNorm(NormWeights(weight, 1e-6, bias, centred=True))
    right = torch.nn.functional.layer_norm(rows.float(), (12,), weight, bias, 1e-6)
    torch.testing.assert_close(norm(rows).float(), right, rtol=1e-2, atol=1e-2)


def test_a_layer_norm_of_a_sum_does_not_use_the_fused_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel that adds and normalizes in one launch has no mean and no bias, so it must not be used."""
    monkeypatch.setattr(cuda, "takes_fused", lambda rows, width: True)
    residual, added, bias = torch.randn(5, 12), torch.randn(5, 12), torch.randn(12)
    norm = cuda.CudaNorm(NormWeights(torch.ones(12), 1e-6, bias, centred=True))
    whole, normed = norm.with_sum(residual, added)
    assert torch.equal(whole, residual + added)
    torch.testing.assert_close(
        normed, torch.nn.functional.layer_norm(whole, (12,), None, bias, 1e-6)
    )


def test_a_gated_product_multiplies_activated_gate_and_up() -> None:
    gate, up, bias = torch.randn(6, 4), torch.randn(6, 4), torch.randn(6)
    packed = cuda.CudaPackedWeights([gate, up], [None, bias], "silu")
    rows, out = torch.randn(3, 4), torch.empty(3, 6)
    packed.multiply(rows, out)
    right = torch.nn.functional.silu(rows @ gate.T) * (rows @ up.T + bias)
    torch.testing.assert_close(out, right)
    assert (packed.inputs, packed.outputs) == (4, 6)
