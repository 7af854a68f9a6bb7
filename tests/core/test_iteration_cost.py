"""What is predicted of an iteration, and how long a piece fits into a time."""

from __future__ import annotations

import random

import pytest

from pensieve.core.iteration_cost import IterationCost, work_of

COST = IterationCost(0.001, 0.02, 1e-6, 1e-5, 0.005)


def test_the_slower_of_reading_and_computing_counts_for_each_part() -> None:
    assert COST.iteration_seconds([]) == 0.0
    assert COST.iteration_seconds([(0, 1)]) == pytest.approx(0.02 + 1e-5 + 0.005)
    assert work_of([(1000, 1100)]) == (100, 105_050, 1100)
    assert COST.iteration_seconds([(1000, 1100)]) == pytest.approx(0.1 + 0.10505 + 0.005)


def test_a_piece_adds_its_tokens_and_its_attention() -> None:
    assert COST.piece_seconds(0, 16) == pytest.approx(0.016 + 0.00016)  # reading takes longer
    assert COST.piece_seconds(1000, 1100) == pytest.approx(0.1 + 0.10505)


def test_a_piece_beside_other_work_is_one_more_slice() -> None:
    spans = [(5, 6), (0, 40), (100, 164)]
    assert work_of(spans[:1]).and_piece(*spans[1]).and_piece(*spans[2]) == work_of(spans)


def test_the_longest_piece_that_fits_is_found() -> None:
    draw = random.Random(1)
    found_some = 0
    for _ in range(300):
        start, most = draw.randint(0, 20_000), draw.randint(1, 600)
        seconds = draw.choice((0.0, 0.03, 0.1, 0.4, 2.0)) * draw.random()
        found = COST.tokens_within(seconds, start, most, 16)
        lengths = [*range(16, most, 16), most]
        fitting = [each for each in lengths if COST.piece_seconds(start, start + each) <= seconds]
        assert found == max(fitting, default=0)
        found_some += 0 < found < most
    assert found_some > 50
