"""The compiled kernels over pages of int8 rows, each instruction set that this machine has.

What they read is what torch would read (`kernels.kv_format`), so results are held against attention in
float32 over rows as they come back; codes and scales against torch's, byte for byte.
"""

from __future__ import annotations

import random

import pytest
import torch

from pensieve.kernels import copy_pages
from pensieve.kernels.attention import cpu, reference
from pensieve.kernels.kv_format import INT8, dequantised, quantised
from pensieve.kernels.layer import cpu as layer_cpu
from tests.kernels.attention.test_cpu import TOLERANCE, TYPES, Slice

NAN = float("nan")


def poisoned(num_pages: int, kv_heads: int, head_size: int) -> torch.Tensor:
    """No row was written: each has a scale of NaN."""
    sizes = (num_pages, 2, kv_heads, 32, INT8.row(head_size))
    return torch.full(sizes, -1, dtype=torch.int8)


def compare(
    slices: list[Slice],
    heads: int,
    kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    seed: int = 0,
    spread: float = 1.0,
) -> None:
    """Pages lie anywhere, rows are of very different sizes, and whatever no turn has written is NaN."""
    draw = torch.Generator().manual_seed(seed)
    turns = 1 + max(turn for turn, _, _ in slices)
    ends = [max(start + n for turn, start, n in slices if turn == each) for each in range(turns)]
    per_turn = -(-max(ends) // 32)
    arena = poisoned(turns * per_turn + 5, kv_heads, head_size)
    table = torch.randperm(len(arena), generator=draw)[: turns * per_turn].view(turns, per_turn)
    for turn, end in enumerate(ends):
        slots = torch.tensor([int(table[turn, i // 32]) * 32 + i % 32 for i in range(end)])
        rows = torch.randn((2, end, kv_heads, head_size), generator=draw) * spread
        sizes = torch.rand((2, end, kv_heads, 1), generator=draw) + 0.5
        key, value = (rows * sizes).to(dtype).unbind()
        assert cpu.write_kv(key, value, slots, arena[:, 0], arena[:, 1])
    tokens = sum(length for _, _, length in slices)
    query = torch.randn((heads, tokens, head_size), generator=draw).to(dtype).transpose(0, 1)
    offsets = torch.tensor([0, *(length for _, _, length in slices)]).cumsum(0).int()
    index = (
        *(table.int(), offsets),
        torch.tensor([turn for turn, _, _ in slices], dtype=torch.int32),
        torch.tensor([start for _, start, _ in slices], dtype=torch.int32),
        head_size**-0.5,
    )
    out = torch.full((tokens, heads, head_size), NAN, dtype=dtype)
    done = cpu.multi_token_attention(query, arena[:, 0], arena[:, 1], *index, out)
    assert done, "the compiled kernel did not take it"
    right = torch.empty(out.shape)
    whole = dequantised(arena)
    reference.multi_token_attention(query.float(), whole[:, 0], whole[:, 1], *index, right)
    assert not out.isnan().any()
    assert float((out.float() - right).abs().max()) <= TOLERANCE[dtype] * 1.5 * max(spread, 1.0)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("head_size", [32, 64, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (6, 2), (16, 1)])
def test_any_mix_of_slices_over_scattered_pages(
    dtype: torch.dtype, head_size: int, heads: int, kv_heads: int
) -> None:
    slices = [(0, 0, 1), (1, 0, 33), (2, 31, 1), (3, 32, 8), (3, 60, 5), (4, 500, 70), (5, 63, 1)]
    compare(slices, heads, kv_heads, head_size, dtype)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("seed", range(6))
def test_random_slices_over_random_shapes(seed: int) -> None:
    draw = random.Random(seed)
    slices = [
        (turn, draw.choice((0, 1, 31, 32, 95, 700)), draw.choice((1, 2, 8, 31, 65)))
        for turn in range(draw.randint(1, 6))
    ]
    kv_heads = draw.choice((1, 2, 3))
    heads = kv_heads * draw.choice((1, 2, 3, 5, 8))
    compare(slices, heads, kv_heads, draw.choice((32, 64, 128)), draw.choice(TYPES), seed)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("head_size", [16, 80])
def test_head_sizes_that_only_narrower_vectors_take(dtype: torch.dtype, head_size: int) -> None:
    compare([(0, 40, 3), (1, 0, 2)], 4, 2, head_size, dtype)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", TYPES)
def test_a_long_context_is_cut_and_merged(dtype: torch.dtype) -> None:
    compare([(0, 5000, 3), (1, 40, 1)], 2, 1, 64, dtype)


@pytest.mark.usefixtures("kernel")
def test_scores_far_from_zero_and_far_apart() -> None:
    compare([(0, 200, 4)], 2, 2, 64, torch.float32, spread=10.0)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("head_size", [32, 64, 96, 128, 256])
def test_rows_are_rounded_to_the_bytes_that_torch_gives(
    dtype: torch.dtype, head_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also rows of zeros, of denormal numbers, with NaN or infinity, and of values half way between codes."""
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
        arena = poisoned(10, 2, head_size)
        right = arena.clone()
        strided = key.transpose(0, 1).contiguous().transpose(0, 1)  # as models give it
        assert cpu.write_kv(strided, value, slots, arena[:, 0], arena[:, 1])
        reference.write_kv(key, value, slots, right[:, 0], right[:, 1])
        assert torch.equal(arena, right)
    page, slot = int(slots[9]) // 32, int(slots[9]) % 32
    assert torch.equal(arena[page, 1, :, slot], quantised(value[9]))


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("position", [4, 20])
def test_a_row_that_is_no_number_reaches_its_turn_and_no_other(
    which: int, position: int, dtype: torch.dtype
) -> None:
    arena = poisoned(4, 1, 64)
    rows = torch.randn(2, 96, 1, 64).to(dtype)
    rows[which, 32 + position, 0, 5] = NAN  # of the second turn
    slots = torch.arange(96)
    assert cpu.write_kv(rows[0], rows[1], slots, arena[:, 0], arena[:, 1])
    query = torch.randn(2, 2, 64).to(dtype)
    out = torch.empty_like(query)
    index = torch.tensor([[0], [1]], dtype=torch.int32)
    offsets, turns = torch.tensor([0, 1, 2]).int(), torch.tensor([0, 1]).int()
    starts = torch.tensor([20, 20]).int()
    tensors = (query, arena[:, 0], arena[:, 1], index, offsets, turns, starts)
    assert cpu.multi_token_attention(*tensors, 0.125, out)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(4, 2, 32), (2, 2, 64), (9, 3, 96)])
def test_a_row_is_the_same_in_any_batch_slice_and_number_of_threads(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Contexts that are cut, and such that are cut for some rows of a slice only."""
    pages = 150
    draw = torch.Generator().manual_seed(5)
    arena = quantised(torch.randn((pages, 2, kv_heads, 32, head_size), generator=draw))
    table = torch.randperm(pages, generator=draw).int()[None]
    query = torch.randn((90, heads, head_size), generator=draw).to(dtype)
    scaling = head_size**-0.5

    def attend(first: int, starts: list[int], lengths: list[int]) -> torch.Tensor:
        tokens = sum(lengths)
        out = torch.full((tokens, heads, head_size), NAN, dtype=dtype)
        assert cpu.multi_token_attention(
            query[first : first + tokens],
            *(arena[:, 0], arena[:, 1], table),
            torch.tensor([0, *lengths]).cumsum(0).int(),
            torch.zeros(len(lengths), dtype=torch.int32),
            torch.tensor(starts, dtype=torch.int32),
            scaling,
            out,
        )
        return out

    for start in (2048 - 40, 4096 - 1, 4600):  # a part ends after 64 pages
        whole = attend(0, [start], [90])
        for row in (0, 39, 40, 41, 89):
            assert torch.equal(attend(row, [start + row], [1]), whole[row : row + 1]), row
        pieces = attend(0, [start, start + 7, start + 60], [7, 53, 30])
        assert torch.equal(pieces, whole)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
        assert torch.equal(attend(0, [start], [90]), whole)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", TYPES)
def test_a_short_context_is_right_and_a_row_of_it_the_same_alone(dtype: torch.dtype) -> None:
    """So little work that an emulated processor does it, too."""
    compare([(0, 31, 3)], 2, 1, 32, dtype)
    draw = torch.Generator().manual_seed(0)
    arena = quantised(torch.randn((2, 2, 1, 32, 32), generator=draw))
    query = torch.randn((3, 2, 32), generator=draw).to(dtype)
    index = torch.tensor([[1, 0]], dtype=torch.int32)

    def attend(first: int, count: int) -> torch.Tensor:
        out = torch.empty((count, 2, 32), dtype=dtype)
        offsets, starts = torch.tensor([0, count]).int(), torch.tensor([31 + first]).int()
        zero = torch.zeros(1, dtype=torch.int32)
        tensors = (arena[:, 0], arena[:, 1], index, offsets, zero, starts)
        assert cpu.multi_token_attention(query[first : first + count], *tensors, 0.2, out)
        return out

    whole = attend(0, 3)
    for row in range(3):
        assert torch.equal(attend(row, 1), whole[row : row + 1])


def test_pages_are_copied_as_far_as_they_go() -> None:
    draw = torch.Generator().manual_seed(0)
    source = torch.randint(-128, 128, (5, 2, 2, 32, 68), generator=draw).to(torch.int8)
    target = torch.full_like(source, 7)
    right = target.clone()
    move = (torch.tensor([4, 0, 2]), torch.tensor([1, 3, 0]), torch.tensor([32, 1, 17]))
    assert cpu.copy_pages(source, target, *move)
    reference.copy_pages(source, right, *move)
    assert torch.equal(target, right)
    copy_pages(source, target, *move)
    assert torch.equal(target, right)


def test_an_index_outside_the_arena_is_refused_and_nothing_is_touched() -> None:
    arena = torch.zeros((2, 2, 1, 32, 68), dtype=torch.int8)
    row, out = torch.ones(1, 1, 64), torch.zeros(1, 1, 64)
    offsets, zero = torch.tensor([0, 1]).int(), torch.zeros(1).int()
    for page in (2, -1):
        with pytest.raises(IndexError):
            cpu.write_kv(row, row, torch.tensor([page * 32]), arena[:, 0], arena[:, 1])
        table = torch.tensor([[page]]).int()
        tensors = (row, arena[:, 0], arena[:, 1], table, offsets, zero, zero)
        with pytest.raises(IndexError):
            cpu.multi_token_attention(*tensors, 1.0, out)
    assert not arena.any()
    assert not out.any()


def test_what_it_cannot_do_is_left_to_torch() -> None:
    """A type or a head size that no instruction set has; torch then writes and reads the same rows."""
    for head_size, dtype in ((64, torch.float64), (20, torch.float32)):
        arena = poisoned(1, 1, head_size)
        row, slots = torch.randn(1, 1, head_size).to(dtype), torch.tensor([3])
        assert not cpu.write_kv(row, row, slots, arena[:, 0], arena[:, 1])
        assert not layer_cpu.available(torch.float64)
        reference.write_kv(row, row, slots, arena[:, 0], arena[:, 1])
        assert torch.equal(arena[0, 0, 0, 3], quantised(row)[0, 0])
