"""The kernels against attention written out by hand in float64, over scattered and poisoned pages."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from pensieve.kernels import copy_pages, multi_token_attention, write_kv
from pensieve.kernels.attention import reference
from pensieve.kernels.shapes import Shapes

NAN = float("nan")


class World:
    """Turns with known keys and values, written to scattered pages of a poisoned arena."""

    def __init__(
        self,
        contexts: list[int],
        *,
        heads: int = 4,
        kv_heads: int = 2,
        head_size: int = 8,
        slots: int = 4,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        counts = [-(-context // slots) for context in contexts]
        self.heads, self.kv_heads, self.head_size, self.dtype = heads, kv_heads, head_size, dtype
        self.generator = generator
        pages = list(range(sum(counts) + 3))
        rng.shuffle(pages)
        self.arena = torch.full((len(pages), 2, kv_heads, slots, head_size), NAN, dtype=dtype)
        self.page_table = torch.zeros(len(contexts), max(counts), dtype=torch.int32)
        self.keys, self.values = [], []
        self.unwritten = torch.ones(len(pages) * slots, dtype=torch.bool)
        for turn, (context, count) in enumerate(zip(contexts, counts, strict=True)):
            table = [pages.pop() for _ in range(count)]
            self.page_table[turn, :count] = torch.tensor(table)
            key, value = (self.randn(context, kv_heads, head_size) for _ in range(2))
            mapping = torch.tensor([table[i // slots] * slots + i % slots for i in range(context)])
            write_kv(key, value, mapping, self.arena[:, 0], self.arena[:, 1])
            self.unwritten[mapping] = False
            self.keys.append(key)
            self.values.append(value)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def attend(self, slices: list[tuple[int, int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """(turn, start, stop) slices through the kernel, and by hand in float64."""
        lengths = [stop - start for _, start, stop in slices]
        offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()
        query = self.randn(sum(lengths), self.heads, self.head_size)
        out = torch.full_like(query, NAN)
        multi_token_attention(
            query,
            self.arena[:, 0],
            self.arena[:, 1],
            self.page_table,
            offsets,
            torch.tensor([turn for turn, _, _ in slices], dtype=torch.int32),
            torch.tensor([start for _, start, _ in slices], dtype=torch.int32),
            0.3,
            out,
        )
        expected = torch.empty(query.shape, dtype=torch.float64)
        row = 0
        for turn, start, stop in slices:
            for position in range(start, stop):
                for head in range(self.heads):
                    group = head * self.kv_heads // self.heads
                    keys = self.keys[turn][: position + 1, group].double()
                    weights = (keys @ query[row, head].double() * 0.3).softmax(0)
                    values = self.values[turn][: position + 1, group].double()
                    expected[row, head] = weights @ values
                row += 1
        return out, expected


def assert_close(out: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert (out.double() - expected).abs().max().item() <= tolerance


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 2), (4, 1), (1, 1)])
def test_any_mix_of_slices_attends_to_exactly_its_own_past(heads: int, kv_heads: int) -> None:
    world = World([9, 1, 16, 5], heads=heads, kv_heads=kv_heads)
    slices = [(0, 8, 9), (2, 0, 16), (1, 0, 1), (3, 2, 5), (0, 3, 6)]
    assert_close(*world.attend(slices), 1e-5)


def test_a_batch_of_decodes_with_very_different_contexts() -> None:
    contexts = [1, 2, 3, 4, 5, 8, 9, 31, 33, 64]
    world = World(contexts, slots=8)
    slices = [(turn, context - 1, context) for turn, context in enumerate(contexts)]
    assert_close(*world.attend(slices), 1e-5)


def test_one_turn_may_have_several_slices_in_one_call() -> None:
    world = World([12])
    assert_close(*world.attend([(0, 0, 2), (0, 5, 7), (0, 9, 12)]), 1e-5)


@pytest.mark.parametrize("seed", range(8))
def test_random_slices_over_random_shapes(seed: int) -> None:
    rng = random.Random(seed)
    kv_heads = rng.choice([1, 2, 3])
    contexts = [rng.randint(1, 40) for _ in range(rng.randint(1, 6))]
    world = World(
        contexts,
        heads=kv_heads * rng.choice([1, 2, 4]),
        kv_heads=kv_heads,
        head_size=rng.choice([2, 8, 20]),
        slots=rng.choice([1, 3, 8, 32]),
        seed=seed,
    )
    slices = []
    for turn, context in enumerate(contexts):
        stop = rng.randint(1, context)
        slices.append((turn, rng.randint(0, stop - 1), stop))
    rng.shuffle(slices)
    print("seed", seed, "slices", slices)
    assert_close(*world.attend(slices), 1e-5)


def test_bfloat16_is_accumulated_in_float32() -> None:
    """300 equal weights of 1/300 lose nothing: the result is as near as bfloat16 can say."""
    world = World([300, 300], heads=2, kv_heads=1, slots=32, dtype=torch.bfloat16)
    assert_close(*world.attend([(0, 0, 300), (1, 299, 300)]), 2e-2)
    world.values[0][:] = 1.0
    world.arena[:, 1] = 1.0
    out, _ = world.attend([(0, 290, 300)])
    assert torch.equal(out, torch.ones_like(out))


def test_rows_of_a_long_slice_go_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_MASK_ELEMENTS_MAX", 4 * 21 * 3)
    world = World([21, 20])
    assert_close(*world.attend([(0, 0, 21), (1, 0, 20)]), 1e-5)


def test_a_slice_without_tokens_is_nothing() -> None:
    world = World([4, 3])
    assert_close(*world.attend([(0, 4, 4), (1, 2, 3)]), 1e-5)


def test_write_kv_changes_no_other_slot() -> None:
    world = World([7, 3], slots=4)
    slots = world.arena.transpose(2, 3).reshape(-1, 2, 4, 2, 8).transpose(1, 2).reshape(-1, 2, 2, 8)
    assert bool(slots[world.unwritten].isnan().all())
    assert not bool(slots[~world.unwritten].isnan().any())


def test_query_may_be_strided() -> None:
    """Models hand over transposed views."""
    world = World([5])
    query = world.randn(4, 5, 8).transpose(0, 1)
    outs = []
    for given in (query, query.contiguous()):
        out = torch.empty(5, 4, 8)
        multi_token_attention(
            given,
            world.arena[:, 0],
            world.arena[:, 1],
            world.page_table,
            torch.tensor([0, 5], dtype=torch.int32),
            torch.tensor([0], dtype=torch.int32),
            torch.tensor([0], dtype=torch.int32),
            1.0,
            out,
        )
        outs.append(out)
    assert torch.equal(*outs)


@pytest.mark.parametrize("same_arena", [True, False])
def test_copy_pages_copies_the_first_slots_bit_for_bit(same_arena: bool) -> None:
    source = torch.randn(6, 2, 3, 4, 8)
    source[2, 1, 0, 0, 0] = -0.0
    target = source if same_arena else torch.full((5, 2, 3, 4, 8), 7.0)
    before = target.clone()
    copy_pages(source, target, torch.tensor([2, 1]), torch.tensor([0, 4]), torch.tensor([4, 3]))
    assert torch.equal(target[0].view(torch.int32), source[2].view(torch.int32))
    assert torch.equal(target[4, :, :, :3], source[1, :, :, :3])
    assert torch.equal(target[4, :, :, 3:], before[4, :, :, 3:])
    assert torch.equal(target[[1, 2, 3]], before[[1, 2, 3]])


def test_a_wrong_shape_names_the_tensor_and_the_symbol() -> None:
    key, value = torch.zeros(3, 2, 8), torch.zeros(3, 2, 7)
    pages = torch.zeros(4, 2, 4, 8)
    with pytest.raises(
        ValueError, match=r"write_kv: value has head_size = 7, but key has head_size"
    ):
        write_kv(key, value, torch.zeros(3, dtype=torch.int64), pages, pages)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("query", torch.zeros(3, 3, 8), "query has heads = 3, not a multiple of"),
        ("key_pages", torch.zeros(4, 2, 4), "key_pages has shape"),
        ("value_pages", torch.zeros(5, 2, 4, 8), "value_pages has pages = 5, but key_pages"),
        ("page_table", torch.zeros(1, 2, dtype=torch.int64), "page_table is torch.int64"),
        ("slice_offsets", torch.zeros(3, dtype=torch.int32), "slice_turns has slices = 1"),
        ("slice_starts", torch.zeros(2, dtype=torch.int32), "slice_starts has slices = 2"),
        ("out", torch.zeros(2, 4, 8), "out has tokens = 2, but query has tokens = 3"),
        ("out", torch.zeros(3, 4, 8, dtype=torch.float64), "out is torch.float64"),
        ("out", torch.zeros(3, 4, 8, device="meta"), "out is on meta, but query is on cpu"),
    ],
)
def test_multi_token_attention_checks_every_tensor(
    name: str, tensor: torch.Tensor, message: str
) -> None:
    arguments: dict[str, Any] = {
        "query": torch.zeros(3, 4, 8),
        "key_pages": torch.zeros(4, 2, 4, 8),
        "value_pages": torch.zeros(4, 2, 4, 8),
        "page_table": torch.zeros(1, 2, dtype=torch.int32),
        "slice_offsets": torch.tensor([0, 3], dtype=torch.int32),
        "slice_turns": torch.zeros(1, dtype=torch.int32),
        "slice_starts": torch.zeros(1, dtype=torch.int32),
        "out": torch.zeros(3, 4, 8),
    }
    if name == "query":
        arguments["out"] = torch.zeros(3, 3, 8)
    arguments[name] = tensor
    with pytest.raises(ValueError, match=message):
        multi_token_attention(**arguments, scaling=1.0)


def test_out_may_not_be_the_query() -> None:
    world = World([3])
    query = world.randn(3, 4, 8)
    offsets, turns, starts = (torch.tensor(each, dtype=torch.int32) for each in ([0, 3], [0], [0]))
    arena, table = world.arena, world.page_table
    with pytest.raises(ValueError, match="out aliases query"):
        multi_token_attention(
            query, arena[:, 0], arena[:, 1], table, offsets, turns, starts, 1.0, query
        )


def test_a_symbol_may_be_one_more_than_another() -> None:
    shapes = Shapes("kernel")
    shapes.unify("offsets", torch.zeros(4), ("slices+1",))
    assert shapes["slices"] == 3
    with pytest.raises(ValueError, match="turns has slices = 4, but offsets has slices = 3"):
        shapes.unify("turns", torch.zeros(4), ("slices",))


def test_scores_far_from_zero_do_not_overflow() -> None:
    world = World([6], heads=2, kv_heads=2)
    world.keys[0] *= 1e4
    world.arena[:, 0] *= 1e4
    out, expected = world.attend([(0, 0, 6)])
    assert math.isfinite(out.sum().item())
    assert_close(out, expected, 1e-3)


def test_padding_at_most_doubles_a_context() -> None:
    """One long context beside many short ones must not make all of them long."""
    slices = [reference._Slice(i, 1, context, i) for i, context in enumerate([2000, 3, 4, 6, 7, 9])]
    groups = [[piece.context for piece in group] for group in reference._groups(slices, 10**6)]
    assert groups == [[3, 4, 6], [7, 9], [2000]]


def test_what_one_call_gathers_is_bounded() -> None:
    """Many turns over one shared prefix gather it once each."""
    slices = [reference._Slice(i, 1, 100, i) for i in range(10)]
    sizes = [len(group) for group in reference._groups(slices, 350)]
    assert sizes == [3, 3, 3, 1]
    assert [len(group) for group in reference._groups(slices, 50)] == [1] * 10


def test_bounded_groups_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World([40, 40, 40, 40], heads=4, kv_heads=2)
    slices = [(turn, 39, 40) for turn in range(4)]
    monkeypatch.setattr(reference, "_GATHERED_ELEMENTS_MAX", 1)
    out, expected = world.attend(slices)
    assert_close(out, expected, 1e-5)
