"""The compiled kernels, each instruction set that this machine has, against the float32 reference."""

from __future__ import annotations

import random
import warnings

import pytest
import torch

from pensieve.kernels import copy_pages, multi_token_attention, write_kv
from pensieve.kernels.attention import cpu, reference

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 4e-3}
TYPES = list(TOLERANCE)
Slice = tuple[int, int, int]  # turn, start, length


def arena_of(num_pages: int, kv_heads: int, head_size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((num_pages, 2, kv_heads, 32, head_size), float("nan"), dtype=dtype)


def compare(
    slices: list[Slice],
    heads: int,
    kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    seed: int = 0,
    spread: float = 1.0,
) -> None:
    """Pages lie anywhere, and whatever no turn has written is NaN."""
    draw = torch.Generator().manual_seed(seed)
    turns = 1 + max(turn for turn, _, _ in slices)
    ends = [max(start + n for turn, start, n in slices if turn == each) for each in range(turns)]
    per_turn = -(-max(ends) // 32)
    arena = arena_of(turns * per_turn + 5, kv_heads, head_size, dtype)
    table = torch.randperm(len(arena), generator=draw)[: turns * per_turn].view(turns, per_turn)
    for turn, end in enumerate(ends):
        for index in range(-(-end // 32)):
            count = min(32, end - index * 32)
            written = torch.randn((2, kv_heads, count, head_size), generator=draw) * spread
            arena[table[turn, index], :, :, :count] = written.to(dtype)
    tokens = sum(length for _, _, length in slices)
    query = torch.randn((heads, tokens, head_size), generator=draw).to(dtype).transpose(0, 1)
    offsets = torch.tensor([0, *(length for _, _, length in slices)]).cumsum(0).int()
    places = (
        table.int(),
        offsets,
        torch.tensor([turn for turn, _, _ in slices], dtype=torch.int32),
        torch.tensor([start for _, start, _ in slices], dtype=torch.int32),
        head_size**-0.5,
    )
    out = torch.full((tokens, heads, head_size), float("nan"), dtype=dtype)
    done = cpu.multi_token_attention(query, arena[:, 0], arena[:, 1], *places, out)
    assert done, "the compiled kernel did not take it"
    right = torch.empty(out.shape)
    whole = arena.float()
    reference.multi_token_attention(query.float(), whole[:, 0], whole[:, 1], *places, right)
    assert not out.isnan().any()
    assert float((out.float() - right).abs().max()) <= TOLERANCE[dtype] * max(spread, 1.0)


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
    dtype = draw.choice(TYPES)
    compare(slices, heads, kv_heads, draw.choice((32, 64, 128)), dtype, seed)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", TYPES)
def test_a_long_context_is_cut_and_merged(dtype: torch.dtype) -> None:
    """After each 64 pages; what one thread found is merged with what another did."""
    compare([(0, 5000, 3)], 2, 1, 64, dtype)
    compare([(0, 9000, 1), (1, 40, 1)], 4, 1, 64, dtype, seed=1)


@pytest.mark.usefixtures("kernel")
def test_scores_far_from_zero_and_far_apart() -> None:
    compare([(0, 200, 4)], 2, 2, 64, torch.float32, spread=10.0)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_value_that_is_no_number_reaches_its_turn_and_no_other(
    poison: float, dtype: torch.dtype
) -> None:
    arena = arena_of(4, 1, 64, dtype)
    arena[:3] = torch.randn(3, 2, 1, 32, 64).to(dtype)
    arena[1, 0, 0, 5] = poison  # a key of the second turn
    query = torch.randn(2, 2, 64).to(dtype)
    out = torch.empty_like(query)
    index = torch.tensor([[0], [1]], dtype=torch.int32)
    offsets, turns = torch.tensor([0, 1, 2]).int(), torch.tensor([0, 1]).int()
    starts = torch.tensor([20, 20]).int()
    tensors = (query, arena[:, 0], arena[:, 1], index, offsets, turns, starts)
    assert cpu.multi_token_attention(*tensors, 0.125, out)
    assert out[0].isfinite().all()
    assert not out[1].isfinite().all()


@pytest.mark.usefixtures("kernel")
def test_nothing_to_do_is_nothing() -> None:
    arena = arena_of(1, 1, 64, torch.float32)
    empty, none = torch.empty(0, 2, 64), torch.empty(0, dtype=torch.int32)
    table, offsets = torch.empty(0, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    tensors = (empty, arena[:, 0], arena[:, 1], table, offsets, none, none)
    assert cpu.multi_token_attention(*tensors, 1.0, torch.empty(0, 2, 64))


def test_what_it_cannot_do_is_left_to_torch() -> None:
    for head_size, slots, dtype in (
        (40, 16, torch.float32),
        (64, 32, torch.float64),
        (20, 32, torch.float32),
    ):
        arena = torch.randn(2, 2, 1, slots, head_size).to(dtype)
        query = torch.randn(3, 2, head_size).to(dtype)
        index = torch.tensor([[0, 1]], dtype=torch.int32)
        offsets = torch.tensor([0, 3], dtype=torch.int32)
        zero = torch.zeros(1, dtype=torch.int32)
        tensors = (query, arena[:, 0], arena[:, 1], index, offsets, zero, zero)
        out = torch.empty_like(query)
        assert not cpu.multi_token_attention(*tensors, 1.0, out)
        multi_token_attention(*tensors, 1.0, out)
        assert out.isfinite().all()


@pytest.mark.parametrize("dtype", TYPES)
def test_keys_and_values_go_to_their_slots_and_nowhere_else(dtype: torch.dtype) -> None:
    arena = arena_of(4, 3, 64, dtype)
    before = arena.clone()
    key = torch.randn(3, 5, 64).to(dtype).transpose(0, 1)  # strided, as models give it
    value = torch.randn(5, 3, 64).to(dtype)
    slots = torch.tensor([0, 31, 32, 97, 70])
    assert cpu.write_kv(key, value, slots, arena[:, 0], arena[:, 1])
    right = before
    reference.write_kv(key, value, slots, right[:, 0], right[:, 1])
    assert torch.equal(arena.nan_to_num(9.0), right.nan_to_num(9.0))
    assert torch.equal(arena[3, 0, :, 1], key[3])


@pytest.mark.parametrize("dtype", TYPES)
def test_pages_are_copied_as_far_as_they_go(dtype: torch.dtype) -> None:
    source = torch.randn(5, 2, 2, 32, 64).to(dtype)
    target = torch.full_like(source, 7.0)
    right = target.clone()
    move = (torch.tensor([4, 0, 2]), torch.tensor([1, 3, 0]), torch.tensor([32, 1, 17]))
    assert cpu.copy_pages(source, target, *move)
    reference.copy_pages(source, right, *move)
    assert torch.equal(target, right)
    target.fill_(7.0)
    copy_pages(source, target, *move)
    assert torch.equal(target, right)


def test_an_index_outside_the_arena_is_refused_and_nothing_is_touched() -> None:
    arena = torch.zeros(2, 2, 1, 32, 64)
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
        tensors = (row, arena[:, 0], arena[:, 1], table, offsets, zero, zero)
        with pytest.raises(IndexError):
            cpu.multi_token_attention(*tensors, 1.0, out)
    assert float(arena.abs().sum() + out.abs().sum()) == 0.0


def test_a_write_through_the_public_function_uses_it() -> None:
    arena = arena_of(1, 1, 64, torch.float32)
    row = torch.ones(1, 1, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_kv(row, row, torch.tensor([3]), arena[:, 0], arena[:, 1])
    assert float(arena[0, 0, 0, 3].sum()) == 64.0


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
    arena = torch.randn((pages, 2, kv_heads, 32, head_size), generator=draw).to(dtype)
    table = torch.randperm(pages, generator=draw).int()[None]
    query = torch.randn((90, heads, head_size), generator=draw).to(dtype)
    scaling = head_size**-0.5

    def attend(first: int, starts: list[int], lengths: list[int]) -> torch.Tensor:
        tokens = sum(lengths)
        out = torch.full((tokens, heads, head_size), float("nan"), dtype=dtype)
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
    arena = torch.randn((2, 2, 1, 32, 32), generator=draw).to(dtype)
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


@pytest.mark.usefixtures("kernel")
def test_index_columns_of_a_table() -> None:
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
