"""Pages that several slices share are read once; no bit of any result differs from what it is without."""

from __future__ import annotations

import random
from array import array

import pytest
import torch

from pensieve.kernels import multi_token_attention
from pensieve.kernels.attention import cpu
from pensieve.kernels.attention.shared import SharedPages

TYPES = [torch.float32, torch.bfloat16, torch.float16]
Group = tuple[
    int, list[tuple[int, int]]
]  # pages, and of each slice: own tokens before it, its length


def compare(
    groups: list[Group],
    heads: int,
    kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    seed: int = 0,
) -> None:
    """Slices of all groups in any order, each of its own turn; a group of no pages shares nothing."""
    choose, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    slices = [(g, pages, own, n) for g, (pages, members) in enumerate(groups) for own, n in members]
    choose.shuffle(slices)
    pages_max = max(pages + -(-(own + n) // 32) for _, pages, own, n in slices)
    num_pages = len(slices) * pages_max
    arena = torch.full((num_pages, 2, kv_heads, 32, head_size), float("nan"), dtype=dtype)
    order = torch.randperm(num_pages, generator=draw).tolist()
    fronts = [[order.pop() for _ in range(pages)] for pages, _ in groups]
    table = torch.zeros(len(slices), pages_max, dtype=torch.int32)
    for row, (g, pages, own, n) in enumerate(slices):
        mine = fronts[g] + [order.pop() for _ in range(-(-(own + n) // 32))]
        table[row, : len(mine)] = torch.tensor(mine)
        for index, page in enumerate(mine):
            count = min(32, pages * 32 + own + n - index * 32)
            written = torch.randn((2, kv_heads, count, head_size), generator=draw)
            if index >= pages or arena[page].isnan().any():
                arena[page, :, :, :count] = written.to(dtype)
    lengths = [n for *_, n in slices]
    tokens = sum(lengths)
    query = torch.randn((tokens, heads, head_size), generator=draw).to(dtype)
    places = (
        table,
        torch.tensor([0, *lengths]).cumsum(0).int(),
        torch.arange(len(slices), dtype=torch.int32),
        torch.tensor([pages * 32 + own for _, pages, own, _ in slices], dtype=torch.int32),
        head_size**-0.5,
    )
    shared = SharedPages(
        array("i", [g if pages else -1 for g, pages, _, _ in slices]),
        array("i", [pages for pages, _ in groups]),
    )
    alone, together = (torch.full_like(query, float("nan")) for _ in range(2))
    assert cpu.multi_token_attention(query, arena[:, 0], arena[:, 1], *places, alone)
    assert cpu.multi_token_attention(query, arena[:, 0], arena[:, 1], *places, together, shared)
    assert not alone.isnan().any()
    assert torch.equal(alone, together)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(2, 2, 64), (4, 1, 128), (3, 1, 96)])
@pytest.mark.parametrize("pages", [4, 8, 69])
def test_the_result_is_the_same_to_the_bit(
    dtype: torch.dtype, heads: int, kv_heads: int, head_size: int, pages: int
) -> None:
    members = [(choice * 13, 1 + choice % 3) for choice in range(11)]
    alone: Group = (0, [(40, 1), (0, 70)])
    compare([(pages, members), (33, members[:2]), alone], heads, kv_heads, head_size, dtype)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("seed", range(4))
def test_random_groups(seed: int) -> None:
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
        compare(groups, 4, 2, 64, dtype, seed)


@pytest.mark.usefixtures("kernel")
def test_shared_pages_are_read_once() -> None:
    """A pack's pages are those of its first member: where another's differ, that one's result shows it."""
    draw = torch.Generator().manual_seed(1)
    arena = torch.randn((32, 2, 1, 32, 64), generator=draw)
    table = torch.stack([torch.arange(16), torch.arange(16, 32)]).int()
    query = torch.randn((2, 1, 64), generator=draw)
    ones = torch.tensor([0, 1], dtype=torch.int32)
    starts = torch.full((2,), 13 * 32 + 5, dtype=torch.int32)
    index = (table, torch.tensor([0, 1, 2], dtype=torch.int32), ones, starts, 0.125)
    shared = SharedPages(array("i", [0, 0]), array("i", [13]))
    alone, together = torch.empty_like(query), torch.empty_like(query)
    multi_token_attention(query, arena[:, 0], arena[:, 1], *index, alone)
    multi_token_attention(query, arena[:, 0], arena[:, 1], *index, together, shared=shared)
    assert torch.equal(alone[0], together[0])
    assert not torch.allclose(alone[1], together[1])
