"""Pages that several slices share are read once, and every result has the same bits as without sharing."""

from __future__ import annotations

import random
from array import array

import pytest
import torch

from pensieve.kernels import multi_token_attention
from pensieve.kernels.attention import cpu
from pensieve.kernels.attention.input import (
    AttentionInput,
    AttentionKind,
    PageIndex,
    SharedPages,
)
from tests.kernels.attention.cases import NAN, TYPES, Case

# Number of shared pages, and for each slice: number of own tokens before the slice, length of the slice.
Group = tuple[int, list[tuple[int, int]]]


def check(
    groups: list[Group],
    heads: int,
    kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    seed: int = 0,
) -> None:
    """Run the slices of all groups in random order. Each slice belongs to a different turn.

    A group with 0 pages shares nothing.
    """
    members = [
        (turn, group, pages * 32 + own, n)
        for turn, (group, pages, own, n) in enumerate(
            (group, pages, own, n)
            for group, (pages, slices) in enumerate(groups)
            for own, n in slices
        )
    ]
    fronts = [
        (pages, [turn for turn, group, _, _ in members if group == each])
        for each, (pages, _) in enumerate(groups)
        if pages
    ]
    random.Random(seed).shuffle(members)
    slices = [(turn, start, n) for turn, _, start, n in members]
    case = Case(slices, heads, kv_heads, head_size, dtype, seed=seed, fronts=fronts)
    together = torch.full_like(case.out, NAN)
    assert cpu.multi_token_attention(case.inputs, case.out)
    case.page_index = case.page_index._replace(shared=case.shared)
    assert cpu.multi_token_attention(case.inputs, together)
    case.check()
    assert torch.equal(case.out, together)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(2, 2, 64), (4, 1, 128), (3, 1, 96)])
@pytest.mark.parametrize("pages", [4, 8, 69])
def test_sharing_pages_changes_no_bit_of_the_result(
    dtype: torch.dtype, heads: int, kv_heads: int, head_size: int, pages: int
) -> None:
    members = [(choice * 13, 1 + choice % 3) for choice in range(11)]
    alone: Group = (0, [(40, 1), (0, 70)])
    check([(pages, members), (33, members[:2]), alone], heads, kv_heads, head_size, dtype)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("seed", range(4))
def test_random_groups_have_the_same_result_as_unshared_pages(seed: int) -> None:
    choose = random.Random(seed)
    groups: list[Group] = [
        (
            choose.choice((0, 1, 5, 17, 63, 65)),
            [
                (choose.choice((0, 1, 31, 32, 200)), choose.choice((1, 1, 1, 2, 9, 40)))
                for _ in range(choose.randint(1, 12))
            ],
        )
        for _ in range(choose.randint(1, 5))
    ]
    for dtype in TYPES:
        check(groups, 4, 2, 64, dtype, seed)


@pytest.mark.usefixtures("kernel")
def test_shared_pages_are_read_once() -> None:
    """The test declares different pages as shared.

    A pack reads only its first member's pages, so the second member's result must change.
    """
    draw = torch.Generator().manual_seed(1)
    arena = torch.randn((32, 2, 1, 32, 64), generator=draw)
    table = torch.stack([torch.arange(16), torch.arange(16, 32)]).int()
    query = torch.randn((2, 1, 64), generator=draw)
    slice_turns = torch.tensor([0, 1], dtype=torch.int32)
    starts = torch.full((2,), 13 * 32 + 5, dtype=torch.int32)
    page_index = PageIndex(table, torch.tensor([0, 1, 2], dtype=torch.int32), slice_turns, starts)
    shared = SharedPages(array("i", [0, 0]), array("i", [13]))
    alone, together = torch.empty_like(query), torch.empty_like(query)
    inputs = AttentionInput(query, arena[:, 0], arena[:, 1], page_index, AttentionKind(0.125))
    multi_token_attention(inputs, alone)
    sharing = inputs._replace(page_index=page_index._replace(shared=shared))
    multi_token_attention(sharing, together)
    assert torch.equal(alone[0], together[0])
    assert not torch.allclose(alone[1], together[1])
