"""The fused operation between two products: on emulated threads, compared with torch's two operations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pensieve.kernels.layer import cuda
from tests.kernels.emulated import needs_x86, run

pytestmark = needs_x86
# One unit in the last place, for values of about one.
TOLERANCE = {torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 256), (2, 4104)])
def test_the_fused_sum_and_norm_match_torch(rows: int, width: int, dtype: torch.dtype) -> None:
    residual, added = (torch.randn(rows, width).to(dtype) for _ in range(2))
    weight = (torch.rand(width) + 0.5).to(dtype)
    whole, normed = (torch.full_like(residual, float("nan")) for _ in range(2))
    run(cuda.add_and_norm_launch(residual, added, weight, 1e-5, whole, normed))
    assert torch.equal(whole, residual + added)
    right = F.rms_norm(whole, (width,), weight, 1e-5)
    torch.testing.assert_close(normed, right, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    alone, of_one = torch.empty_like(whole[:1]), torch.empty_like(whole[:1])
    run(
        cuda.add_and_norm_launch(residual[-1:], added[-1:], weight, 1e-5, alone, of_one),
        backwards=True,
    )
    assert torch.equal(of_one, normed[-1:]), "a row must not depend on other rows"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 264), (5, 1000)])
def test_the_fused_gate_and_product_match_torch(rows: int, width: int, dtype: torch.dtype) -> None:
    product = (torch.randn(rows, 2 * width) * 3).to(dtype)
    product[0, 0], product[0, 1] = -100.0, 100.0
    out = torch.full((rows, width), float("nan"), dtype=dtype)
    run(cuda.gate_and_multiply_launch(product, out))
    right = F.silu(product[:, :width]) * product[:, width:]
    torch.testing.assert_close(out, right, rtol=2 * TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_rows_of_other_shapes_are_refused() -> None:
    rows, weight = torch.zeros(2, 16).half(), torch.ones(16).half()
    with pytest.raises(ValueError, match="added is"):
        cuda.add_and_norm_launch(rows, rows[:1], weight, 1e-5, rows, rows)
    with pytest.raises(ValueError, match="into"):
        cuda.gate_and_multiply_launch(rows, torch.zeros(2, 16).half())
