"""The CUDA kernels, run on emulated threads."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from pensieve.kernels.attention import cuda, reference
from pensieve.kernels.attention.input import AttentionInput, AttentionKind, PageIndex, SharedPages
from pensieve.kernels.attention.plan import BlocksAtOnce, DevicePlan, Plan
from pensieve.kernels.cuda_launch import Launch
from pensieve.kernels.nvrtc import Kernel
from tests.kernels.attention.cases import NAN, Case, Front, Slice, poisoned
from tests.kernels.emulated import map_of, needs_x86, run, shared_bytes

pytestmark = needs_x86
MIXED = [(0, 0, 1), (1, 0, 33), (2, 31, 1), (3, 32, 8), (3, 60, 5), (4, 150, 70), (5, 63, 1)]


def launched(
    case: Case,
    blocks: BlocksAtOnce,
    *,
    shared: SharedPages | None = None,
    backwards: bool = False,
    early: bool = False,
) -> DevicePlan:
    """Plan and run the case. Partial results are NaN before the run."""
    head_size = case.query.shape[-1]
    sizes = (case.heads, case.kv_heads, head_size)
    plan = cuda.plan(case.lengths, case.starts, *sizes, blocks, shared=shared)
    work = DevicePlan.of(plan, case.kv_heads, head_size, "cpu")
    work.part_values.fill_(NAN)
    work.part_sums.fill_(NAN)
    rows = torch.full((len(case.query) + 2, case.heads * head_size + 8), NAN).to(case.out.dtype)
    query = rows[1:-1, 8:].view(case.query.shape)  # a token's heads are contiguous, between NaN
    query.copy_(case.query)
    inputs = case.inputs._replace(query=query)
    for launch in cuda.attention_launches(inputs, case.out, work, map_of):
        run(launch, backwards=backwards, early=early)
    return work


def attend(
    slices: list[Slice],
    heads: int,
    kv_heads: int,
    head_size: int,
    dtype: torch.dtype = torch.bfloat16,
    kv_format: str = "auto",
    *,
    blocks_at_once: int = 1,
    hopper: bool = False,
    backwards: bool = False,
    early: bool = False,
    fronts: list[Front] | None = None,
    **more: Any,
) -> Plan:
    """Run and check a case, and return its plan."""
    shape = (heads, kv_heads, head_size, dtype, kv_format)
    case = Case(slices, *shape, fronts=fronts or (), **more)
    blocks = BlocksAtOnce(blocks_at_once, blocks_at_once if hopper else None)
    shared = None if fronts is None else case.shared
    work = launched(case, blocks, shared=shared, backwards=backwards, early=early)
    assert bool(len(work.wide_items)) == hopper
    case.check()
    return cuda.plan(case.lengths, case.starts, heads, kv_heads, head_size, blocks, shared=shared)


@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 1), (6, 2)])
def test_any_mix_of_slices_over_scattered_pages(head_size: int, heads: int, kv_heads: int) -> None:
    """A batch has decodes, pieces of prefill, and two slices of one turn."""
    attend(MIXED, heads, kv_heads, head_size)


def test_half_precision() -> None:
    attend([(0, 0, 40), (1, 95, 1)], 4, 2, 128, torch.float16)


@pytest.mark.parametrize("length", [1, 20])
def test_long_contexts_are_cut_and_merged(length: int) -> None:
    assert len(attend([(0, 1500, length), (1, 40, 1)], 2, 1, 64, blocks_at_once=8).merges) == 1
    assert len(attend([(0, 700, length)], 4, 2, 96, blocks_at_once=12).merges) == 1


def test_wide_tiles_are_cut_and_merged() -> None:
    """Rows of the first part see all its keys. Rows of the last part see no later row's key."""
    assert attend([(0, 300, 80)], 2, 1, 64, blocks_at_once=6).merges


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 1), (6, 2)])
def test_wide_tiles_on_hopper(head_size: int, heads: int, kv_heads: int) -> None:
    """The last stage is full, almost empty, or begins with a page that no turn has."""
    slices = [(0, 0, 1), (1, 0, 150), (2, 190, 66), (3, 380, 70), (4, 5, 1)]
    attend(slices, heads, kv_heads, head_size, hopper=True)


def test_hopper_in_half_precision_backwards_and_cut() -> None:
    slices = [(0, 100, 40), (1, 97, 128)]
    attend(slices, 2, 1, 128, torch.float16, hopper=True)
    attend(slices, 2, 1, 64, blocks_at_once=2, backwards=True, hopper=True)
    assert len(attend([(0, 900, 40)], 2, 1, 64, blocks_at_once=8, hopper=True).merges) == 1


@pytest.mark.parametrize("hopper", [False, True])
def test_launches_reused_for_another_layer_equal_its_own_launches(hopper: bool) -> None:
    """If a layer's launches are reused for another layer, only the addresses change."""
    lengths, starts = [1, 40], [900, 700]
    blocks = BlocksAtOnce(8, 8 if hopper else None)
    work = DevicePlan.of(cuda.plan(lengths, starts, 4, 2, 64, blocks), 2, 64, "cpu")
    row = torch.zeros(3)
    page_index = PageIndex(torch.zeros(3, 30, dtype=torch.int32), row, row, row)
    layers = []
    for _ in range(2):
        rows, out = torch.zeros(2, 41, 4, 64).half().unbind()
        keys, values = torch.zeros(30, 2, 2, 32, 64).half().unbind(1)
        layers.append((AttentionInput(rows, keys, values, page_index, AttentionKind(0.1)), out))

    def address(pages: torch.Tensor) -> int:
        return pages.data_ptr() + 1

    made = [cuda.attention_launches(*layer, work, address) for layer in layers]
    assert len(made[0]) == (3 if hopper else 2)
    assert cuda.attention_launches_again(made[0], *layers[1], address) == made[1]
    inputs, out = layers[0]
    elsewhere = inputs._replace(query=inputs.query.view(-1)[1:])
    with pytest.raises(ValueError, match="16 bytes"):
        cuda.attention_launches_again(made[0], elsewhere, out, address)


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize(("backwards", "early"), [(False, False), (True, True)])
def test_slices_with_few_rows(head_size: int, backwards: bool, early: bool) -> None:
    """Decodes and short pieces have one to sixteen rows. One of them is cut. A prompt has a wide tile."""
    slices = [(0, 0, 1), (1, 31, 4), (2, 900, 1), (3, 63, 2)]
    order: dict[str, Any] = {"backwards": backwards, "early": early}
    assert attend(slices, 4, 1, head_size, blocks_at_once=6, **order).merges
    attend([*slices, (4, 30, 35)], 4, 1, head_size, hopper=True, **order)


@pytest.mark.parametrize(("last", "num_items"), [(144, 12), (160, 14), (272, 16), (288, 18)])
def test_hoppers_kernel_processes_every_item(last: int, num_items: int) -> None:
    """Each block takes items in alternating order: three full rounds, then parts of a fourth and a fifth."""
    lengths, starts = [144, 144, last], [10, 40, 0]
    planned = cuda.plan(lengths, starts, 4, 2, 64, BlocksAtOnce(1, 1))
    assert len(planned.wide_items) * 2 == num_items, "for each of two KV heads"
    attend([(0, 10, 144), (1, 40, 144), (2, 0, last)], 4, 2, 64, hopper=True)


@pytest.mark.parametrize("heads", [2, 8, 14])
def test_merges_of_few_and_of_many_rows_share_a_list(heads: int) -> None:
    """A decode of one to seven rows runs beside a wide tile. Surplus rows of a merge belong to no turn."""
    assert len(attend([(0, 1500, 1), (1, 900, 64)], heads, 2, 64, blocks_at_once=24).merges) >= 2


@pytest.mark.parametrize("seed", range(4))
def test_random_slices_over_random_shapes(seed: int) -> None:
    draw = random.Random(seed)
    slices = [
        (turn, draw.choice((0, 1, 31, 32, 95, 300)), draw.choice((1, 2, 8, 31, 65)))
        for turn in range(draw.randint(1, 4))
    ]
    kv_heads = draw.choice((1, 2))
    heads = kv_heads * draw.choice((1, 2, 3, 5, 8))
    attend(
        slices,
        heads,
        kv_heads,
        draw.choice((64, 128)),
        blocks_at_once=draw.choice((1, 16)),
        seed=seed,
    )


def test_the_order_of_threads_and_blocks_does_not_matter() -> None:
    attend([(0, 200, 3), (1, 10, 50)], 4, 2, 64, blocks_at_once=9, backwards=True)


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("backwards", [False, True])
def test_nothing_is_overwritten_before_it_was_read(hopper: bool, backwards: bool) -> None:
    """Copies arrive as early as possible."""
    slices = [(0, 700, 40), (1, 500, 1), (2, 97, 128)]
    attend(slices, 2, 1, 64, early=True, hopper=hopper, backwards=backwards)
    attend(slices, 2, 2, 128, early=True, hopper=hopper, backwards=backwards)


def test_scores_far_from_zero_and_far_apart() -> None:
    attend([(0, 200, 4)], 2, 2, 64, spread=10.0)


@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
def test_a_block_uses_the_shared_memory_that_plans_assume(head_size: int) -> None:
    defines = (f"HEAD_SIZE={head_size}", "ELEMENT=Bf16")
    kernel = Kernel("multi_token_attention.cu", "multi_token_attention", defines)
    needed = shared_bytes(Launch(kernel, 1, 128, (), "multi_token_attention_shared_bytes"))
    assert needed <= cuda.BLOCK_KIB[head_size] * 1024 < needed + 4096


@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
def test_with_kv_in_fp8_a_block_uses_no_more_shared_memory(head_size: int) -> None:
    defines = (f"HEAD_SIZE={head_size}", "ELEMENT=Bf16", "STORED=E4m3")
    kernel = Kernel("multi_token_attention.cu", "multi_token_attention", defines)
    needed = shared_bytes(Launch(kernel, 1, 128, (), "multi_token_attention_shared_bytes"))
    assert needed <= cuda.BLOCK_KIB[head_size] * 1024


def test_empty_slices_and_items_are_accepted() -> None:
    """The batch has a slice without tokens, and an item without rows that only fills a list."""
    attend([(0, 10, 2), (0, 12, 0), (1, 0, 1)], 2, 1, 64)


@pytest.mark.parametrize(
    ("kv_format", "poison"), [("auto", NAN), ("auto", float("inf")), ("fp8", NAN)]
)
@pytest.mark.parametrize("length", [1, 12, 40])
@pytest.mark.parametrize("side", [0, 1])
def test_nan_affects_only_its_own_turn(
    kv_format: str, poison: float, length: int, side: int
) -> None:
    """Rows of all kinds of items get a NaN. If a NaN byte were read as a plain number, it would be 480."""
    case = Case([(0, 20, length), (1, 20, length)], 2, 1, 64, torch.bfloat16, kv_format)
    case.poison(1, 5, side, poison)
    case.query[:, :, 5] = 1.0  # so that no weight becomes zero
    launched(case, BlocksAtOnce(4))
    assert case.out[:length].isfinite().all()
    assert not case.out[length:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_and_values_are_written_only_to_their_slots(dtype: torch.dtype) -> None:
    arena = poisoned(4, 3, 96, dtype)
    right = arena.clone()
    key = torch.randn(3, 5, 96).to(dtype).transpose(0, 1)  # strided, like the keys of models
    value = torch.randn(5, 3, 96).to(dtype)
    slots = torch.tensor([0, 31, 32, 97, 70])
    run(cuda.write_kv_launch(key, value, slots, arena[:, 0], arena[:, 1]))
    reference.write_kv(key, value, slots, right[:, 0], right[:, 1])
    assert torch.equal(arena.nan_to_num(9.0), right.nan_to_num(9.0))


@pytest.mark.parametrize(("head_size", "rotated"), [(64, 64), (128, 128), (96, 32)])
def test_queries_and_keys_are_rotated_while_keys_are_written(head_size: int, rotated: int) -> None:
    tokens, heads, kv_heads, dtype = 5, 4, 2, torch.bfloat16
    rows = torch.randn(tokens, heads + 2 * kv_heads, head_size).to(dtype)
    query, key, value = rows.split([heads, kv_heads, kv_heads], dim=1)
    angles = torch.rand(tokens, rotated // 2) * 6
    cosine, sine = (torch.cat([each, each], -1).to(dtype) for each in (angles.cos(), angles.sin()))
    slots = torch.tensor([3, 32, 33, 95, 64])
    arena = poisoned(3, kv_heads, head_size, dtype)
    rotated_query = torch.empty(tokens, heads, head_size, dtype=dtype)
    run(
        cuda.rotate_and_write_kv_launch(
            query, key, value, cosine, sine, slots, rotated_query, arena[:, 0], arena[:, 1]
        )
    )

    def rotate(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.float()
        part, rest = rows[..., :rotated], rows[..., rotated:]
        half = rotated // 2
        swapped = torch.cat([-part[..., half:], part[..., :half]], -1)
        part = part * cosine.float()[:, None] + swapped * sine.float()[:, None]
        return torch.cat([part, rest], -1).to(dtype)

    torch.testing.assert_close(rotated_query, rotate(query), rtol=1e-2, atol=1e-2)
    keys = rotate(key)
    for token, slot in enumerate(slots.tolist()):
        found = arena[slot // 32, :, :, slot % 32]
        torch.testing.assert_close(found[0], keys[token], rtol=1e-2, atol=1e-2)
        assert torch.equal(found[1], value[token])
    assert int(arena[:, 0, 0, :, 0].isfinite().sum()) == tokens, "another slot was written"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_only_the_filled_slots_of_pages_are_copied(dtype: torch.dtype) -> None:
    source = torch.randn(40, 2, 2, 32, 64).to(dtype)
    target = torch.full_like(source, 7.0)
    right = target.clone()
    move = (torch.randperm(40)[:35], torch.randperm(40)[:35], torch.randint(1, 33, (35,)))
    reference.copy_pages(source, right, *move)
    launch = cuda.copy_pages_launch(source, target, *move)
    assert (launch.num_blocks, launch.num_threads) == (32, 1024)
    elsewhere = torch.empty_like(source, device="meta")
    assert cuda.copy_pages_launch(elsewhere, target, *move).num_blocks == 4, "over the bus"
    run(launch)
    assert torch.equal(target, right)
