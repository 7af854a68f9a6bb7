"""The attention kernels in torch, and the arguments that every implementation refuses."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from pensieve.kernels import copy_pages, multi_token_attention, write_kv
from pensieve.kernels.attention import cpu, cuda, reference
from pensieve.kernels.attention.input import AttentionInput, AttentionKind, PageIndex
from pensieve.kernels.kv_format import quantised
from pensieve.kernels.shapes import Shapes
from tests.kernels.attention.cases import Case, Slice, poisoned

SMALL: dict[str, Any] = {"head_size": 8, "slots": 4, "scaling": 0.3}


def attend(case: Case) -> torch.Tensor:
    multi_token_attention(case.inputs, case.out)
    return case.out


def check(slices: list[Slice], **shape: Any) -> None:
    case = Case(slices, **SMALL | shape)
    attend(case)
    case.check()


@pytest.mark.parametrize("kv_format", ["auto", "int8"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 2), (4, 1), (1, 1)])
def test_any_mix_of_slices_attends_to_exactly_its_own_past(
    heads: int, kv_heads: int, kv_format: str
) -> None:
    slices = [(0, 8, 1), (2, 0, 16), (1, 0, 1), (3, 2, 3), (0, 3, 3)]
    check(slices, heads=heads, kv_heads=kv_heads, kv_format=kv_format)


def test_a_batch_of_decodes_with_very_different_contexts() -> None:
    contexts = [1, 2, 3, 4, 5, 8, 9, 31, 33, 64]
    check([(turn, context - 1, 1) for turn, context in enumerate(contexts)], slots=8)


def test_one_turn_may_have_several_slices_in_one_call() -> None:
    check([(0, 0, 2), (0, 5, 2), (0, 9, 3)])


@pytest.mark.parametrize("seed", range(8))
def test_random_slices_over_random_shapes(seed: int) -> None:
    rng = random.Random(seed)
    kv_heads = rng.choice([1, 2, 3])
    slices = []
    for turn in range(rng.randint(1, 6)):
        stop = rng.randint(1, 40)
        start = rng.randint(0, stop - 1)
        slices.append((turn, start, stop - start))
    rng.shuffle(slices)
    check(
        slices,
        heads=kv_heads * rng.choice([1, 2, 4]),
        kv_heads=kv_heads,
        head_size=rng.choice([2, 8, 20]),
        slots=rng.choice([1, 3, 8, 32]),
        seed=seed,
    )


def test_bfloat16_is_accumulated_in_float32() -> None:
    """300 equal weights of 1/300 lose nothing: the result is exact up to bfloat16 rounding."""
    shape: dict[str, Any] = {"heads": 2, "kv_heads": 1, "slots": 32, "dtype": torch.bfloat16}
    check([(0, 0, 300), (1, 299, 1)], **shape)
    case = Case([(0, 290, 10)], **SMALL | shape)
    case.arena[:, 1] = 1.0
    assert torch.equal(attend(case), torch.ones_like(case.out))


def test_rows_of_a_long_slice_go_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_MASK_ELEMENTS_MAX", 4 * 21 * 3)
    check([(0, 0, 21), (1, 0, 20)])


def test_a_slice_without_tokens_is_accepted() -> None:
    check([(0, 4, 0), (1, 2, 1)])


@pytest.mark.parametrize("kv_format", ["auto", "int8"])
def test_write_kv_changes_no_other_slot(kv_format: str) -> None:
    arena = poisoned(4, 2, 8, torch.float32, kv_format, slots=5)
    before = arena.clone()
    rows, written = torch.randn(2, 10, 2, 8), torch.randperm(20)[:10]
    write_kv(rows[0], rows[1], written, arena[:, 0], arena[:, 1])
    right = quantised(rows) if kv_format == "int8" else rows
    by_slot = arena.transpose(2, 3).transpose(1, 2).flatten(0, 1)  # (slots, 2, heads, row)
    assert torch.equal(by_slot[written], right.transpose(0, 1))
    arena[written // 5, :, :, written % 5] = before[written // 5, :, :, written % 5]
    assert torch.equal(arena.float().nan_to_num(9.0), before.float().nan_to_num(9.0))


def test_query_may_be_strided() -> None:
    """Models pass transposed views."""
    case = Case([(0, 0, 5)], **SMALL)
    strided = attend(case).clone()
    assert not case.query.is_contiguous()
    case.query = case.query.contiguous()
    assert torch.equal(attend(case), strided)


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
    tensors: dict[str, Any] = {
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
        tensors["out"] = torch.zeros(3, 3, 8)
    tensors[name] = tensor
    out = tensors.pop("out")
    page_index = PageIndex(**{each: tensors.pop(each) for each in PageIndex._fields[:4]})
    inputs = AttentionInput(**tensors, page_index=page_index, kind=AttentionKind(1.0))
    with pytest.raises(ValueError, match=message):
        multi_token_attention(inputs, out)


def test_kernels_leave_unknown_attention_kinds_to_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case([(0, 40, 3)])
    assert cpu.multi_token_attention(case.inputs, case.out)
    assert cuda.takes_inputs(Case([(0, 40, 3)], dtype=torch.bfloat16).inputs)
    monkeypatch.setattr(cpu, "KIND_FIELDS", frozenset())
    monkeypatch.setattr(cuda, "KIND_FIELDS", frozenset())
    assert not cpu.multi_token_attention(case.inputs, case.out)
    assert not cuda.takes_inputs(Case([(0, 40, 3)], dtype=torch.bfloat16).inputs)
    attend(case)
    case.check()


def test_out_may_not_be_the_query() -> None:
    case = Case([(0, 0, 3)], **SMALL)
    case.out = case.query = case.query.contiguous()
    with pytest.raises(ValueError, match="out aliases query"):
        attend(case)


def test_a_shape_symbol_may_be_another_symbol_plus_one() -> None:
    shapes = Shapes("kernel")
    shapes.unify("offsets", torch.zeros(4), ("slices+1",))
    assert shapes["slices"] == 3
    with pytest.raises(ValueError, match="turns has slices = 4, but offsets has slices = 3"):
        shapes.unify("turns", torch.zeros(4), ("slices",))


def test_scores_far_from_zero_do_not_overflow() -> None:
    check([(0, 0, 6)], heads=2, kv_heads=2, spread=1e3)


def test_padding_at_most_doubles_a_context() -> None:
    """One long context beside many short ones must not make all of them long."""
    slices = [reference._Slice(i, 1, context, i) for i, context in enumerate([2000, 3, 4, 6, 7, 9])]
    groups = [[piece.context for piece in group] for group in reference._groups(slices, 10**6)]
    assert groups == [[3, 4, 6], [7, 9], [2000]]


def test_the_memory_that_one_call_gathers_is_bounded() -> None:
    """Each of many turns gathers the prefix that they share."""
    slices = [reference._Slice(i, 1, 100, i) for i in range(10)]
    sizes = [len(group) for group in reference._groups(slices, 350)]
    assert sizes == [3, 3, 3, 1]
    assert [len(group) for group in reference._groups(slices, 50)] == [1] * 10


def test_bounded_groups_give_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_GATHERED_ELEMENTS_MAX", 1)
    check([(turn, 39, 1) for turn in range(4)])
