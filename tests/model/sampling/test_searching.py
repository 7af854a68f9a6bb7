"""The kernel that searches a row draws the same tokens as sorting the row; here on emulated threads."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from pensieve.kernels.sampling import RowOptions, draw_tokens_launch, table_of
from pensieve.model.sampling import draw as draw_module
from pensieve.model.sampling.penalties import Row
from pensieve.sampling import Sampling
from tests.kernels.emulated import needs_x86, run
from tests.model.sampling.world import OPTIONS, make_logits, make_row

pytestmark = needs_x86


def searched(values: torch.Tensor, rows: Sequence[Row], backwards: bool = False) -> list[int]:
    options = draw_module.options_of(rows, values.shape[1])
    return drawn_with(values, options, backwards)


def drawn_with(
    values: torch.Tensor, options: list[RowOptions], backwards: bool = False
) -> list[int]:
    token_ids = torch.full((len(options),), -7)
    bits = draw_module._weight_bits(values.shape[1])
    table = table_of(options)
    run(draw_tokens_launch(values, table, bits, token_ids), backwards=backwards)
    return token_ids.tolist()


def sorted_out(values: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    found: list[int] = draw_module._draw_from_head(values, rows, values.shape[1]).tolist()
    return found


def rows_of(samplings: Sequence[Sampling]) -> list[Row]:
    return [make_row(replace(each, seed=n)) for n, each in enumerate(samplings)]


CUTS = [
    replace(each, temperature=each.temperature or 1.0)
    for each in (
        *OPTIONS.values(),
        Sampling(temperature=1.0, top_k=1),
        Sampling(temperature=3.0, top_k=300),
        Sampling(temperature=3.0, top_k=2**31 - 1, top_p=0.5),
        Sampling(temperature=9.0, top_p=0.999999),
        Sampling(temperature=1.0, top_p=1e-300),
        Sampling(temperature=1.0, min_p=1.0),
        Sampling(temperature=2.0, top_k=30, min_p=0.2),
        Sampling(temperature=2.0, top_p=0.7, min_p=0.05),
        Sampling(temperature=1e-310),
        Sampling(temperature=100.0),
    )
]


@pytest.mark.parametrize("vocab_size", [1, 2, 37, 513, 3000])
@pytest.mark.parametrize("rounded", [False, True])
def test_searching_draws_the_same_tokens_as_sorting(vocab_size: int, rounded: bool) -> None:
    """Every combination of cuts. With `rounded`, many logits are equal, as in bfloat16."""
    values = make_logits(3 * len(CUTS), vocab_size, seed=vocab_size)
    if rounded:
        values = (values / 2).bfloat16().float()
    rows = rows_of(CUTS * 3)
    assert searched(values, rows) == sorted_out(values, rows)


def test_draws_do_not_depend_on_thread_order_or_other_rows() -> None:
    values = make_logits(len(CUTS), 700, seed=4).bfloat16().float()
    rows = rows_of(CUTS)
    together = searched(values, rows)
    assert searched(values, rows, backwards=True) == together
    for n in random.Random(0).sample(range(len(rows)), 4):
        assert searched(values[n : n + 1], rows[n : n + 1]) == together[n : n + 1]


def test_rows_with_equal_masked_or_extreme_logits_draw_like_sorting() -> None:
    """Rows have equal logits (-0 equals 0), few unmasked ids, weights near overflow, or extreme values."""
    values = torch.stack(
        [
            torch.zeros(600),
            torch.cat([-torch.zeros(300), torch.zeros(300)]),
            torch.full((600,), -math.inf).index_fill_(0, torch.tensor([599]), 1.0),
            torch.full((600,), -math.inf).index_fill_(0, torch.tensor([3, 599]), 1.0),
            torch.linspace(-1, 1, 600) * 3e38,
            torch.full((600,), -1e-40),
            torch.linspace(-0.01, 0.0, 600),
        ]
    )
    for sampling in CUTS:
        rows = rows_of([sampling] * len(values))
        assert searched(values, rows) == sorted_out(values, rows), sampling


@pytest.mark.parametrize("draw", [0, 1, 2**31, 2**61, 2**62 - 1])
def test_the_ends_of_the_random_number_draw_the_first_and_the_last(
    draw: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.stack([torch.zeros(63), torch.linspace(0, -0.01, 63), make_logits(1, 63)[0]])
    limbs = (draw >> 31, draw & 0x7FFF_FFFF)
    monkeypatch.setattr(draw_module, "uniform_limbs", lambda seed, position: limbs)
    for sampling in (Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.999)):
        rows = rows_of([sampling] * 3)
        assert searched(values, rows) == sorted_out(values, rows)


def test_the_largest_top_p_below_one_keeps_a_token_of_any_mass() -> None:
    """Weights around every power of two, where rounding to a double adds most."""
    top_p = math.nextafter(1.0, 0.0)
    values = torch.stack([torch.linspace(0.0, -n / 1000, 40 + n)[:40] for n in range(30)])
    rows = rows_of([Sampling(temperature=1.0, top_p=top_p)] * len(values))
    assert searched(values, rows) == sorted_out(values, rows)
    draw = random.Random(0)
    for _ in range(20_000):
        mass = max(1, (1 << draw.randrange(62)) + draw.randrange(-300, 300))
        assert 1 <= math.ceil(top_p * float(mass)) <= mass


def test_rows_may_be_strided() -> None:
    wide = torch.full((4, 50), math.nan)
    wide[:, :40] = make_logits(4, 40)
    rows = rows_of([Sampling(temperature=1.0)] * 4)
    assert searched(wide[:, :40], rows) == sorted_out(wide[:, :40].contiguous(), rows)


def test_tables_and_logits_of_wrong_shape_are_refused() -> None:
    values = make_logits(2, 40)
    options = draw_module.options_of(rows_of([Sampling(temperature=1.0)]), 40)
    with pytest.raises(ValueError, match="2 rows"):
        draw_tokens_launch(values, table_of(options), 50, torch.empty(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="strides"):
        draw_tokens_launch(values.T, table_of(options), 50, torch.empty(40, dtype=torch.int64))
