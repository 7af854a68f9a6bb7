"""What is predicted of an iteration, and how long a piece fits into a time."""

from __future__ import annotations

import random

from pensieve.core.iteration_cost import IterationCost, Work, work_of

COST = IterationCost(0.001, 0.02, 1e-6, 1e-5, 0.005)


def test_the_slower_of_reading_and_computing_counts_for_each_part() -> None:
    assert COST.iteration_seconds([]) == 0.0
    assert abs(COST.iteration_seconds([(0, 1)]) - (0.02 + 1e-5 + 0.005)) < 1e-12
    tokens, pairs, keys = work_of([(1000, 1100)])
    assert (tokens, pairs, keys) == (100, 105_050, 1100)
    assert abs(COST.iteration_seconds([(1000, 1100)]) - (0.1 + 0.10505 + 0.005)) < 1e-12


def test_a_piece_beside_other_work_is_one_more_slice() -> None:
    spans = [(5, 6), (0, 40), (100, 164)]
    work = Work()
    for start, stop in spans:
        work = work.and_piece(start, stop)
    assert work == work_of(spans)


def test_the_longest_piece_that_fits_is_found() -> None:
    draw = random.Random(1)
    for _ in range(300):
        others = [(at, at + draw.randint(1, 3)) for at in (draw.randint(0, 5000),)]
        start, most = draw.randint(0, 20_000), draw.randint(1, 600)
        seconds = draw.choice((0.0, 0.03, 0.1, 0.4, 2.0)) * draw.random()
        found = COST.tokens_within(seconds, work_of(others), start, most, 16)

        def fits(
            length: int,
            others: list[tuple[int, int]] = others,
            start: int = start,
            seconds: float = seconds,
        ) -> bool:
            return COST.iteration_seconds([*others, (start, start + length)]) <= seconds

        lengths = [*range(0, most, 16), most]
        assert found == max((each for each in lengths if each == 0 or fits(each)), default=0)
