"""Rows in int8: what is read back, rows at the limits, and copies of their pages."""

from __future__ import annotations

import pytest
import torch

from pensieve.kernels import copy_pages, write_kv
from pensieve.kernels.kv_format import (
    INT8,
    SCALE_MIN,
    dequantised,
    format_of,
    kv_format,
    quantised,
)

NAN, INFINITY = float("nan"), float("inf")


def scales_of(rows: torch.Tensor) -> torch.Tensor:
    return rows[..., -4:].contiguous().view(torch.float32)[..., 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size", [8, 64, 80, 128])
def test_dequantised_rows_are_off_by_half_a_step_at_most(
    dtype: torch.dtype, head_size: int
) -> None:
    draw = torch.Generator().manual_seed(0)
    sizes = torch.randn((50, 3, 1), generator=draw).mul(2).exp()
    rows = (torch.randn((50, 3, head_size), generator=draw) * sizes).to(dtype)
    stored = quantised(rows)
    assert stored.dtype == torch.int8
    assert stored.shape == (50, 3, INT8.row(head_size))
    largest = rows.float().abs().amax(-1)
    assert torch.equal(scales_of(stored), largest / torch.tensor(127.0))
    codes = stored[..., :-4].int()
    assert torch.equal(codes.abs().amax(-1), torch.full((50, 3), 127, dtype=torch.int32))
    back = dequantised(stored)
    assert back.dtype == torch.float32
    assert float(((back - rows.float()).abs().amax(-1) / scales_of(stored)).max()) <= 0.5001


def test_values_half_way_between_two_codes_go_to_the_even_one() -> None:
    rows = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -127.0]])
    assert quantised(rows)[0, :-4].tolist() == [127, 0, 2, 2, 0, -2, 126, -127]


def test_a_row_of_zeros_is_zeros() -> None:
    stored = quantised(torch.zeros(2, 8))
    assert not stored.any()
    assert not dequantised(stored).any()


def test_a_row_below_the_smallest_scale_is_zeros() -> None:
    """With a denormal scale, codes would be coarse, and would differ between processors."""
    rows = torch.full((2, 8), 126 * SCALE_MIN)
    rows[1] = 128 * SCALE_MIN
    stored = quantised(rows)
    assert not stored[0].any()
    assert torch.equal(dequantised(stored)[1], rows[1])


@pytest.mark.parametrize("poison", [NAN, INFINITY, -INFINITY])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_non_finite_row_becomes_nan(poison: float, dtype: torch.dtype) -> None:
    rows = torch.ones(3, 8, dtype=dtype)
    rows[1, 5] = poison
    back = dequantised(quantised(rows))
    assert back[1].isnan().all()
    assert torch.equal(back[[0, 2]], torch.ones(2, 8))


def test_largest_and_smallest_numbers_of_float32() -> None:
    most = 3e38
    rows = torch.tensor([[most, -most, most / 4, 1.0], [1e-30, 4e-31, 0.0, -1e-30]])
    stored = quantised(rows)
    assert stored[:, :-4].tolist() == [[127, -127, 32, 0], [127, 51, 0, -127]]
    assert torch.allclose(dequantised(stored), rows, rtol=0.01, atol=most / 254)


def test_kv_formats_have_names_sizes_and_types() -> None:
    auto = kv_format("auto", torch.bfloat16)
    assert (auto.row(64), auto.row_bytes(64), auto.in_words) == (64, 128, "bfloat16")
    int8 = kv_format("int8", torch.bfloat16)
    assert (int8.row(64), int8.row_bytes(64), int8.in_words) == (68, 68, "int8")
    assert format_of(torch.empty(1, dtype=torch.int8), torch.float32) == int8
    assert format_of(torch.empty(1), torch.float32) == kv_format("auto", torch.float32)
    with pytest.raises(ValueError, match="unknown KV format 'int4'"):
        kv_format("int4", torch.float32)


def test_pages_are_copied_as_bytes_up_to_their_filled_slots() -> None:
    source = torch.randint(-128, 128, (3, 2, 2, 4, 12), dtype=torch.int8)
    target = torch.zeros_like(source)
    moves = (torch.tensor([2, 0]), torch.tensor([1, 2]), torch.tensor([4, 3]))
    copy_pages(source, target, *moves)
    assert torch.equal(target[1], source[2])
    assert torch.equal(target[2, :, :, :3], source[0, :, :, :3])
    assert not target[2, :, :, 3:].any()
    assert not target[0].any()


def test_rows_of_another_size_are_refused() -> None:
    row, slots = torch.zeros(1, 2, 8), torch.zeros(1, dtype=torch.int64)
    pages = torch.zeros((4, 2, 4, 8), dtype=torch.int8)
    message = r"write_kv: key_pages has row = 8, expected 12 \(KV int8\)"
    with pytest.raises(ValueError, match=message):
        write_kv(row, row, slots, pages, pages)
    pages = torch.zeros((4, 2, 4, 12), dtype=torch.int8)
    with pytest.raises(ValueError, match=r"value_pages is torch.float32, expected torch.int8"):
        write_kv(row, row, slots, pages, pages.float())
