"""The predicted time of an iteration, and the length of a piece that fits into a given time."""

from __future__ import annotations

import json
import random
from dataclasses import asdict

import pytest

from pensieve.core.cost import IterationCost, between, work_of

COST = IterationCost(0.001, 0.02, 1e-6, 1e-5, 0.005)
MEASURED = IterationCost(
    *(0.001, 0.02, 1e-6, 1e-5, 0.0),
    dense_points=((2, 0.02), (16, 0.02), (64, 0.08)),
    decode_points=((0, 0.0), (1, 0.004), (8, 0.011)),
)


def test_each_part_takes_the_longer_of_reading_and_computing() -> None:
    assert COST.iteration_seconds([]) == 0.0
    assert COST.iteration_seconds([(0, 1)]) == pytest.approx(0.02 + 1e-5 + 0.005)
    assert work_of([(1000, 1100)]) == (100, 105_050, 1100, 0)
    assert COST.iteration_seconds([(1000, 1100)]) == pytest.approx(0.1 + 0.10505 + 0.005)


def test_more_tokens_than_a_tile_are_computed_in_whole_tiles() -> None:
    tiles = IterationCost(0.001, 0.02, 0.0, 0.0, 0.0, tile_tokens=128)
    found = [tiles.pass_seconds(tokens, 0, 0) for tokens in (1, 100, 128, 129, 256, 257)]
    assert found == pytest.approx([0.02, 0.1, 0.128, 0.256, 0.256, 0.384])


def test_unhidden_share_adds_a_part_of_the_shorter_dense_step() -> None:
    cost = IterationCost(0.001, 0.02, 0.0, 0.0, 0.0, unhidden_share=0.5)
    assert cost.pass_seconds(10, 0, 0) == pytest.approx(0.02 + 0.005)
    assert cost.pass_seconds(100, 0, 0) == pytest.approx(0.1 + 0.01)


def test_a_prompt_piece_costs_its_tokens_and_its_attention() -> None:
    assert COST.piece_seconds(0, 16) == pytest.approx(0.016 + 0.00016)  # reading keys takes longer
    assert COST.piece_seconds(1000, 1100) == pytest.approx(0.1 + 0.10505)


def test_measured_costs_are_interpolated_linearly() -> None:
    points = ((2, 0.02), (16, 0.02), (64, 0.08))
    found = [between(points, count) for count in (1, 2, 9, 16, 40, 64, 128)]
    assert found == pytest.approx([0.02, 0.02, 0.02, 0.02, 0.05, 0.08, 0.16])
    assert between(((0, 3.0), (1, 1.0)), 9) == 0.0  # a predicted time is never negative


def test_measured_costs_add_reading_to_computing_and_price_decodes_separately() -> None:
    """Eight decodes with 1,000 tokens of context each, beside 32 tokens of a prompt."""
    assert MEASURED.iteration_seconds([]) == 0.0
    decodes = MEASURED.iteration_seconds([(999, 1000)] * 8)
    assert decodes == pytest.approx(0.02 + 0.011 + 8000 * 1.1e-5)
    assert MEASURED.decode_seconds(8, 1000) == decodes
    mixed = MEASURED.iteration_seconds([*[(999, 1000)] * 8, (0, 32)])
    assert mixed == pytest.approx(0.05 + 0.011 + 8032 * 1e-5 + (8000 + 528) * 1e-6)
    assert MEASURED.piece_seconds(0, 32) == pytest.approx(0.032 + 32 * 1e-5 + 528 * 1e-6)


def test_a_journal_keeps_the_measured_costs() -> None:
    assert IterationCost(**json.loads(json.dumps(asdict(MEASURED)))) == MEASURED


@pytest.mark.parametrize(
    ("dense", "decoding", "problem"),
    [
        (((1, 0.1),), ((0, 0.0), (1, 0.1)), "two or more"),
        (((4, 0.1), (2, 0.2)), ((0, 0.0), (1, 0.1)), "ascending"),
        (((2, -0.1), (4, 0.2)), ((0, 0.0), (1, 0.1)), "at least 0"),
        (((2, 0.1), (4, 0.2)), (), "measured together"),
    ],
)
def test_invalid_measured_points_are_refused(
    dense: tuple[tuple[int, float], ...], decoding: tuple[tuple[int, float], ...], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        IterationCost(0.001, 0.02, 0, 0, 0, dense_points=dense, decode_points=decoding)


def test_a_piece_adds_as_much_work_as_a_slice() -> None:
    spans = [(5, 6), (0, 40), (100, 164)]
    assert work_of(spans[:1]).plus_slice(*spans[1]).plus_slice(*spans[2]) == work_of(spans)


def test_the_longest_piece_that_fits_is_found() -> None:
    draw = random.Random(1)
    num_partial = 0
    for _ in range(300):
        start, most = draw.randint(0, 20_000), draw.randint(1, 600)
        seconds = draw.choice((0.0, 0.03, 0.1, 0.4, 2.0)) * draw.random()
        found = COST.tokens_within(seconds, start, most, 16)
        lengths = [*range(16, most, 16), most]
        fitting = [each for each in lengths if COST.piece_seconds(start, start + each) <= seconds]
        assert found == max(fitting, default=0)
        num_partial += 0 < found < most
    assert num_partial > 50
