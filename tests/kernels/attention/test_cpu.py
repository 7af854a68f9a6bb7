"""The compiled kernels, with each instruction set of this machine, over native and int8 pages."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch

from pensieve.kernels import copy_pages, multi_token_attention, write_kv
from pensieve.kernels.attention import cpu, reference
from pensieve.kernels.attention.input import AttentionInput, AttentionKind, PageIndex
from pensieve.kernels.kv_format import INT8, quantised
from pensieve.kernels.layer import cpu as layer_cpu
from tests.kernels.attention.cases import MIXED, NAN, TYPES, Case, Slice, poisoned

FORMATS = ("auto", "int8")
every_type = pytest.mark.parametrize("dtype", TYPES)
every_format = pytest.mark.parametrize("kv_format", FORMATS)
every_set = pytest.mark.usefixtures("kernel")


def attend(case: Case) -> torch.Tensor:
    done = cpu.multi_token_attention(case.inputs, case.out)
    assert done, "the compiled kernel did not accept the inputs"
    return case.out


def check(slices: list[Slice], *shape: Any, **more: Any) -> None:
    case = Case(slices, *shape, **more)
    attend(case)
    case.check()


@every_set
@every_format
@every_type
@pytest.mark.parametrize("head_size", [32, 64, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (6, 2), (16, 1)])
def test_any_mix_of_slices_over_scattered_pages(
    kv_format: str, dtype: torch.dtype, head_size: int, heads: int, kv_heads: int
) -> None:
    check(MIXED, heads, kv_heads, head_size, dtype, kv_format)


@every_set
@every_format
@pytest.mark.parametrize("seed", range(6))
def test_random_slices_over_random_shapes(kv_format: str, seed: int) -> None:
    draw = random.Random(seed)
    slices = [
        (turn, draw.choice((0, 1, 31, 32, 95, 700)), draw.choice((1, 2, 8, 31, 65)))
        for turn in range(draw.randint(1, 6))
    ]
    kv_heads = draw.choice((1, 2, 3))
    heads = kv_heads * draw.choice((1, 2, 3, 5, 8))
    shape = (heads, kv_heads, draw.choice((32, 64, 128)), draw.choice(TYPES), kv_format)
    check(slices, *shape, seed=seed)


@every_type
@pytest.mark.parametrize("head_size", [16, 80])
def test_head_sizes_that_only_narrower_vectors_take(dtype: torch.dtype, head_size: int) -> None:
    check([(0, 40, 3), (1, 0, 2)], 4, 2, head_size, dtype, "int8")


@every_set
@every_format
@every_type
def test_a_long_context_is_cut_and_merged(kv_format: str, dtype: torch.dtype) -> None:
    """Contexts are cut every 64 pages. The partial results of several threads are merged."""
    check([(0, 5000, 3), (1, 40, 1)], 2, 1, 64, dtype, kv_format)
    check([(0, 9000, 1), (1, 40, 1)], 4, 1, 64, dtype, kv_format, seed=1)


@every_set
@every_format
def test_scores_far_from_zero_and_far_apart(kv_format: str) -> None:
    check([(0, 200, 4)], 2, 2, 64, torch.float32, kv_format, spread=10.0)


@every_set
@every_format
@every_type
@pytest.mark.parametrize(
    ("poison", "position", "side"),
    [(NAN, 4, 0), (NAN, 20, 1), (float("inf"), 20, 0), (float("inf"), 4, 1)],
)
def test_nan_affects_only_its_own_turn(
    poison: float, position: int, side: int, dtype: torch.dtype, kv_format: str
) -> None:
    case = Case([(0, 20, 1), (1, 20, 1)], 2, 1, 64, dtype, kv_format)
    case.poison(1, position, side, poison)
    case.query[:, :, 5] = 1.0  # so that no weight becomes zero
    out = attend(case)
    assert out[0].isfinite().all()
    assert not out[1].isfinite().all()
    if kv_format == "int8":
        assert out[1].isnan().all()


@every_set
def test_an_empty_batch_is_accepted() -> None:
    arena = poisoned(1, 1, 64, torch.float32)
    empty, none = torch.empty(0, 2, 64), torch.empty(0, dtype=torch.int32)
    table, offsets = torch.empty(0, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    page_index = PageIndex(table, offsets, none, none)
    inputs = AttentionInput(empty, arena[:, 0], arena[:, 1], page_index, AttentionKind(1.0))
    assert cpu.multi_token_attention(inputs, torch.empty(0, 2, 64))


@pytest.mark.parametrize(
    ("head_size", "slots", "dtype"),
    [(40, 16, torch.float32), (64, 32, torch.float64), (20, 32, torch.float32)],
)
def test_unsupported_shapes_and_types_are_left_to_torch(
    head_size: int, slots: int, dtype: torch.dtype
) -> None:
    arena = torch.randn(2, 2, 1, slots, head_size).to(dtype)
    query = torch.randn(3, 2, head_size).to(dtype)
    table = torch.tensor([[0, 1]], dtype=torch.int32)
    offsets = torch.tensor([0, 3], dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int32)
    page_index = PageIndex(table, offsets, zero, zero)
    inputs = AttentionInput(query, arena[:, 0], arena[:, 1], page_index, AttentionKind(1.0))
    out = torch.empty_like(query)
    assert not cpu.multi_token_attention(inputs, out)
    multi_token_attention(inputs, out)
    assert out.isfinite().all()


@pytest.mark.parametrize(("head_size", "dtype"), [(64, torch.float64), (20, torch.float32)])
def test_rows_that_the_kernel_cannot_round_are_left_to_torch(
    head_size: int, dtype: torch.dtype
) -> None:
    arena = poisoned(1, 1, head_size, dtype, "int8")
    row, slots = torch.randn(1, 1, head_size).to(dtype), torch.tensor([3])
    assert not cpu.write_kv(row, row, slots, arena[:, 0], arena[:, 1])
    assert not layer_cpu.available(torch.float64)
    reference.write_kv(row, row, slots, arena[:, 0], arena[:, 1])
    assert torch.equal(arena[0, 0, 0, 3], quantised(row)[0, 0])


@every_type
def test_keys_and_values_are_written_only_to_their_slots(dtype: torch.dtype) -> None:
    arena = poisoned(4, 3, 64, dtype)
    right = arena.clone()
    key = torch.randn(3, 5, 64).to(dtype).transpose(0, 1)  # strided, like the keys of models
    value = torch.randn(5, 3, 64).to(dtype)
    slots = torch.tensor([0, 31, 32, 97, 70])
    assert cpu.write_kv(key, value, slots, arena[:, 0], arena[:, 1])
    reference.write_kv(key, value, slots, right[:, 0], right[:, 1])
    assert torch.equal(arena.nan_to_num(9.0), right.nan_to_num(9.0))
    assert torch.equal(arena[3, 0, :, 1], key[3])


@every_set
@every_type
@pytest.mark.parametrize("head_size", [32, 64, 96, 128, 256])
def test_rows_are_rounded_to_the_same_bytes_as_in_torch(
    dtype: torch.dtype, head_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows include zeros, denormal numbers, NaN, infinity, and values half way between two codes."""
    draw = torch.Generator().manual_seed(head_size)
    exponents = torch.randn((2, 200, 2, 1), generator=draw) * (1 if dtype == torch.float16 else 6)
    key, value = (torch.randn((2, 200, 2, head_size), generator=draw) * exponents.exp()).unbind()
    key[0] = 0.0
    key[1] = 1e-37
    key[2] = torch.linspace(-1, 1, head_size) * 1e-36
    key[3, :, 5], key[4, :, -1], key[5, 1, 0] = NAN, float("inf"), -float("inf")
    key[6] = torch.arange(head_size) % 255 - 127 + 0.5
    key[6, :, 0] = 127.0
    key[7] = torch.randn(head_size, generator=draw) * 1e-40
    key, value = key.to(dtype), value.to(dtype)
    slots = torch.randperm(10 * 32, generator=draw)[:200]
    for num_threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=num_threads: count)
        arena = poisoned(10, 2, head_size, dtype, "int8")
        right = arena.clone()
        strided = key.transpose(0, 1).contiguous().transpose(0, 1)  # like the keys of models
        assert cpu.write_kv(strided, value, slots, arena[:, 0], arena[:, 1])
        reference.write_kv(key, value, slots, right[:, 0], right[:, 1])
        assert torch.equal(arena, right)
    page, slot = int(slots[9]) // 32, int(slots[9]) % 32
    assert torch.equal(arena[page, 1, :, slot], quantised(value[9]))


@pytest.mark.parametrize("dtype", [*TYPES, torch.int8])
def test_only_the_filled_slots_of_pages_are_copied(dtype: torch.dtype) -> None:
    source = (torch.randn(5, 2, 2, 32, INT8.row(64)) * 40).to(dtype)
    target = torch.full_like(source, 7)
    right = target.clone()
    move = (torch.tensor([4, 0, 2]), torch.tensor([1, 3, 0]), torch.tensor([32, 1, 17]))
    assert cpu.copy_pages(source, target, *move)
    reference.copy_pages(source, right, *move)
    assert torch.equal(target, right)
    target.fill_(7)
    copy_pages(source, target, *move)
    assert torch.equal(target, right)


@every_format
def test_an_index_outside_the_arena_is_refused_and_nothing_is_touched(kv_format: str) -> None:
    arena = torch.zeros_like(poisoned(2, 1, 64, torch.float32, kv_format))
    row, out = torch.ones(1, 1, 64), torch.zeros(1, 1, 64)
    offsets, zero = torch.tensor([0, 1]).int(), torch.zeros(1).int()
    for page in (2, -1):
        with pytest.raises(IndexError):
            cpu.write_kv(row, row, torch.tensor([page * 32]), arena[:, 0], arena[:, 1])
        with pytest.raises(IndexError):
            cpu.copy_pages(
                arena, arena, torch.tensor([0]), torch.tensor([page]), torch.tensor([32])
            )
        table = torch.tensor([[page]]).int()
        page_index = PageIndex(table, offsets, zero, zero)
        inputs = AttentionInput(row, arena[:, 0], arena[:, 1], page_index, AttentionKind(1.0))
        with pytest.raises(IndexError):
            cpu.multi_token_attention(inputs, out)
    assert not arena.any()
    assert not out.any()


def test_the_public_write_kv_uses_the_compiled_kernel() -> None:
    arena = poisoned(1, 1, 64, torch.float32)
    row = torch.ones(1, 1, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_kv(row, row, torch.tensor([3]), arena[:, 0], arena[:, 1])
    assert float(arena[0, 0, 0, 3].sum()) == 64.0


@every_set
@every_format
@every_type
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(4, 2, 32), (2, 2, 64), (9, 3, 96)])
def test_a_row_is_the_same_in_any_batch_slice_and_number_of_threads(
    kv_format: str,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some contexts are cut for all rows of a slice, and some for only a part of its rows."""
    draw = torch.Generator().manual_seed(5)
    rows = torch.randn((150, 2, kv_heads, 32, head_size), generator=draw).to(dtype)
    arena = quantised(rows) if kv_format == "int8" else rows
    table = torch.randperm(150, generator=draw).int()[None]
    query = torch.randn((90, heads, head_size), generator=draw).to(dtype)

    def attend(first: int, starts: list[int], lengths: list[int]) -> torch.Tensor:
        tokens = sum(lengths)
        out = torch.full((tokens, heads, head_size), NAN, dtype=dtype)
        page_index = PageIndex(
            table,
            torch.tensor([0, *lengths]).cumsum(0).int(),
            torch.zeros(len(lengths), dtype=torch.int32),
            torch.tensor(starts, dtype=torch.int32),
        )
        inputs = AttentionInput(
            *(query[first : first + tokens], arena[:, 0], arena[:, 1]),
            page_index,
            AttentionKind.plain(head_size),
        )
        assert cpu.multi_token_attention(inputs, out)
        return out

    for start in (2048 - 40, 4096 - 1, 4600):  # contexts are cut every 64 pages
        whole = attend(0, [start], [90])
        for row in (0, 39, 40, 41, 89):
            assert torch.equal(attend(row, [start + row], [1]), whole[row : row + 1]), row
        pieces = attend(0, [start, start + 7, start + 60], [7, 53, 30])
        assert torch.equal(pieces, whole)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
        assert torch.equal(attend(0, [start], [90]), whole)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


@every_set
@every_format
@every_type
def test_a_short_context_is_correct_and_its_rows_are_the_same_alone(
    kv_format: str, dtype: torch.dtype
) -> None:
    """The work is small enough for an emulated processor."""
    whole = Case([(0, 31, 3)], 2, 1, 32, dtype, kv_format)
    attend(whole)
    whole.check()
    for row in range(3):
        alone = Case([(0, 31 + row, 1)], 2, 1, 32, dtype, kv_format)
        alone.arena, alone.query = whole.arena, whole.query[row : row + 1]
        alone.page_index = alone.page_index._replace(page_table=whole.page_index.page_table)
        assert torch.equal(attend(alone), whole.out[row : row + 1])


@every_set
def test_indexes_may_be_columns_of_a_table() -> None:
    source = torch.randn(6, 2, 1, 32, 32)
    target = torch.zeros_like(source)
    moves = torch.tensor([[0, 3, 32], [5, 1, 32], [2, 2, 32]])
    assert cpu.copy_pages(source, target, moves[:, 0], moves[:, 1], moves[:, 2])
    assert torch.equal(target[[3, 1, 2]], source[[0, 5, 2]])
    slots = torch.stack([torch.arange(4) * 7, torch.zeros(4, dtype=torch.int64)], 1)[:, 0]
    key, value = torch.randn(2, 4, 1, 32)
    pages = torch.zeros(6, 2, 1, 32, 32)
    assert cpu.write_kv(key, value, slots, pages[:, 0], pages[:, 1])
    assert torch.equal(pages[0, 0, 0, [0, 7, 14, 21]], key[:, 0])
