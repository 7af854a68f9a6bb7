"""Orca's schedule: places for the longest context, first come first served."""

from __future__ import annotations

import pytest

from pensieve.sim.schedules.orca import OrcaSchedule
from tests.sim.schedules.world import TOKENS, drawn, requests, run


def test_a_request_waits_for_a_place_of_a_whole_context() -> None:
    """250 tokens are two places of 100, however short the requests are; the third has the first's."""
    watched, counts = run(
        OrcaSchedule(250, 100, 8), requests((0.0, 5, 2), (0.0, 5, 4), (0.5, 5, 1))
    )
    assert watched.batches == [
        (0.0, [1, 2]),
        (1.0, [1, 2]),
        (2.0, [2, 3]),
        (3.0, [2]),
    ]
    assert counts.latencies.total == pytest.approx(2 / 2 + 4 / 4 + 2.5 / 1)


def test_prompts_join_those_who_generate_and_hold_them_up() -> None:
    """Two tokens of the first, then its third in one iteration with a prompt of 7."""
    watched, counts = run(
        OrcaSchedule(200, 100, 8), requests((0.0, 3, 3), (3.5, 7, 1)), cost=TOKENS
    )
    assert watched.batches == [(0.0, [1]), (3.0, [1]), (4.0, [1, 2])]
    assert counts.gaps.quantile(1.0) == pytest.approx(8.0, rel=0.003)


def test_nobody_overtakes_and_nobody_is_interrupted() -> None:
    for seed in range(20):
        watched, _ = run(OrcaSchedule(300, 100, 2 + seed % 2), drawn(seed, 30, 100))
        begun: list[int] = []
        for _, batch in watched.batches:
            begun += [number for number in batch if number not in begun]
            assert len(batch) <= 2 + seed % 2
        assert begun == list(range(1, 31))
        for number in begun:
            ran = [index for index, (_, batch) in enumerate(watched.batches) if number in batch]
            assert ran == list(range(ran[0], ran[-1] + 1))
