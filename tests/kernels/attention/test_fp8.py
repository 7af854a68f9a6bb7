"""KV in fp8 on a GPU: the kernels on emulated threads, compared with torch's float8."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pensieve.kernels.attention import cuda
from pensieve.kernels.attention.input import AttentionInput, AttentionKind, PageIndex
from pensieve.kernels.attention.plan import BlocksAtOnce, DevicePlan
from pensieve.kernels.kv_format import FP8, to_fp8
from tests.kernels.attention.cases import poisoned
from tests.kernels.attention.test_emulated import MIXED, attend
from tests.kernels.emulated import needs_x86, run

pytestmark = needs_x86
EVERY_BYTE = torch.arange(256).to(torch.uint8).view(FP8.element)


@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
def test_any_mix_of_slices_over_fp8_pages(head_size: int) -> None:
    """A batch has decodes, pieces of prefill, and two slices of one turn."""
    attend(MIXED, 6, 2, head_size, kv_format="fp8")


def test_half_precision_with_blocks_and_threads_in_reverse_order_and_early_copies() -> None:
    order: dict[str, Any] = {"backwards": True, "early": True, "kv_format": "fp8"}
    slices = [(0, 700, 40), (1, 500, 1), (2, 97, 128), (3, 1500, 1)]
    assert attend(slices, 2, 1, 128, torch.float16, blocks_at_once=12, **order).merges


def test_slices_with_few_rows_over_fp8_pages() -> None:
    slices = [(0, 0, 1), (1, 31, 4), (2, 900, 1), (3, 63, 2)]
    assert attend(slices, 4, 1, 128, blocks_at_once=6, kv_format="fp8").merges


def same_bytes(found: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether the bytes are equal; all NaN count as equal."""
    return torch.equal(found.float().nan_to_num(999.0), right.float().nan_to_num(999.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_and_values_are_rounded_like_in_torch(dtype: torch.dtype) -> None:
    """Inputs are fp8 numbers, midpoints of two of them, neighbours of these numbers, extremes and NaN."""
    bytes_ = EVERY_BYTE.float()
    between = (bytes_[:-1] + bytes_[1:]) / 2
    rows = torch.cat([bytes_, between, between * 1.01, between * 0.99, torch.randn(2048) * 3])
    rows = torch.cat([rows, torch.tensor([460.0, 470.0, 1e4, -500.0, float("inf"), -float("inf")])])
    tokens = -(-len(rows) // (2 * 64))
    rows = torch.nn.functional.pad(rows, (0, tokens * 2 * 64 - len(rows)))
    key = rows.view(2, tokens, 64).to(dtype).transpose(0, 1)  # strided, like the keys of models
    value = key.flip(0).contiguous()
    scales = torch.tensor([[0.25, 1.0], [4.0, 2.0**-7]])
    arena = torch.zeros(-(-tokens // 32) + 1, 2, 2, 32, 64).to(FP8.element)
    slots = torch.randperm(len(arena) * 32)[:tokens]
    run(cuda.write_kv_launch(key, value, slots, arena[:, 0], arena[:, 1], scales))
    by_slot = arena.transpose(2, 3).transpose(1, 2).flatten(0, 1)  # (slots, 2, heads, head_size)
    for side, written in enumerate((key, value)):
        assert same_bytes(by_slot[slots, side], to_fp8(written, scales[side]))
    others = torch.ones(len(by_slot), dtype=torch.bool)
    others[slots] = False
    assert not by_slot[others].float().any(), "another slot was written"


@pytest.mark.parametrize("kernel", ["write_kv", "rotate_and_write_kv"])
def test_finite_values_that_overflow_when_scaled_are_clamped_and_not_nan(
    kernel: str,
) -> None:
    """Dividing by a scale far below one makes a finite bfloat16 number overflow float32."""
    inf, nan = float("inf"), float("nan")
    extremes = torch.tensor([3e38, -3e38, 2.0**70, -(2.0**-70), inf, -inf, nan, 0.0])
    key = extremes.repeat(3, 2, 8).to(torch.bfloat16)
    value = key.flip(2).contiguous()
    scales = torch.exp2(torch.tensor([[-60.0, 60.0], [-3.0, 0.0]]))
    slots, arena = torch.tensor([1, 2, 31]), torch.zeros(1, 2, 2, 32, 64).to(FP8.element)
    pages = (arena[:, 0], arena[:, 1])
    if kernel == "write_kv":
        run(cuda.write_kv_launch(key, value, slots, *pages, scales))
    else:  # the kernel rotates four values of each key, by an angle of zero
        cosine, sine = (torch.full((3, 4), each, dtype=torch.bfloat16) for each in (1.0, 0.0))
        key[:, :, :4] = extremes[:4]
        out = torch.empty_like(key)
        given = (key, key, value, cosine, sine, slots, out, *pages)
        run(cuda.rotate_and_write_kv_launch(*given, scales))
    for side, written in enumerate((key, value)):
        assert same_bytes(arena[0, side, :, slots].transpose(0, 1), to_fp8(written, scales[side]))
    assert (arena[0, 1, 0, 1].float().abs() == 448.0).any(), "nothing was cut off"


@pytest.mark.parametrize(("head_size", "rotated"), [(64, 64), (96, 20)])
def test_rotated_keys_are_rounded_once(head_size: int, rotated: int) -> None:
    tokens, heads, kv_heads, dtype = 5, 4, 2, torch.bfloat16
    rows = torch.randn(tokens, heads + 2 * kv_heads, head_size).to(dtype)
    query, key, value = rows.split([heads, kv_heads, kv_heads], dim=1)
    angles = torch.rand(tokens, rotated // 2) * 6
    cosine, sine = (torch.cat([each, each], -1).to(dtype) for each in (angles.cos(), angles.sin()))
    slots = torch.tensor([3, 32, 33, 95, 64])
    scales = torch.tensor([[0.125, 2.0], [1.0, 0.5]])
    fp8_arena, plain_arena = (
        poisoned(3, kv_heads, head_size, dtype, each) for each in ("fp8", "auto")
    )
    rotated_query = torch.empty(2, tokens, heads, head_size, dtype=dtype)
    for arena, out in zip((fp8_arena, plain_arena), rotated_query, strict=True):
        given = (query, key, value, cosine, sine, slots, out, arena[:, 0], arena[:, 1])
        run(cuda.rotate_and_write_kv_launch(*given, scales))
    assert torch.equal(*rotated_query)
    for token, slot in enumerate(slots.tolist()):
        keys, values = (fp8_arena[slot // 32, side, :, slot % 32].float() for side in (0, 1))
        near = plain_arena[slot // 32, 0, :, slot % 32].float()
        torch.testing.assert_close(keys * scales[0, :, None], near, rtol=2**-4, atol=2**-9)
        assert torch.equal(values, to_fp8(value[token], scales[1]).float())
    assert int(fp8_arena[:, 0, 0, :, 0].float().isfinite().sum()) == tokens, (
        "another slot was written"
    )


def test_fp8_pages_need_scales_and_have_no_hopper_kernel() -> None:
    arena = poisoned(3, 1, 64, torch.bfloat16, "fp8")
    pages = (arena[:, 0], arena[:, 1])
    rows = torch.zeros(1, 1, 64).to(torch.bfloat16)
    with pytest.raises(ValueError, match="need a scale"):
        cuda.write_kv_launch(rows, rows, torch.tensor([0]), *pages)
    with pytest.raises(ValueError, match="need a scale"):
        cuda.write_kv_launch(rows, rows, torch.tensor([0]), *pages, torch.ones(2, 2))
    plan = cuda.plan([200], [0], 1, 1, 64, BlocksAtOnce(8, 8))
    work = DevicePlan.of(plan, 1, 64, "cpu")
    table, each = torch.zeros(1, 9).int(), torch.zeros(2).int()
    page_index = PageIndex(table, each, each, each)
    inputs = AttentionInput(rows, *pages, page_index, AttentionKind(0.1), torch.ones(2, 1))
    with pytest.raises(ValueError, match="does not support fp8"):
        cuda.attention_launches(inputs, rows.clone(), work, int)
