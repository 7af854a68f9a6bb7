"""Stage times that are inferred from commits, and the longest iteration that meets the objective."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pensieve.core.pipeline_stages import MicroBatches, StageTimes
from pensieve.core.scheduler_config import SchedulerConfig


def pipeline(
    num_stages: int, count: int, seconds_of: Callable[[StageTimes, float, float], float]
) -> tuple[list[float], list[float], list[float]]:
    """Simulate a pipeline with `num_stages` iterations in flight.

    Return three lists: the real time of each iteration, the inferred times, and the time between two
    tokens of a turn.
    """
    times, free = StageTimes(num_stages), [0.0] * num_stages
    ends: list[float] = [0.0] * num_stages
    taken: list[float] = []
    found: list[float] = []
    for number in range(count):
        now = ends[number]  # turns of this iteration got their last token at this time
        if number >= num_stages:
            found.append(times.committed(now))
        seconds = seconds_of(times, now, now)
        times.planned(now, seconds)
        taken.append(seconds)
        at = now
        for index, each in enumerate(free):
            at = free[index] = max(at, each) + seconds
        ends.append(at)
    return taken, found, [ends[i + num_stages] - ends[i] for i in range(count)]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_iteration_times_are_inferred_despite_pipeline_bubbles(num_stages: int) -> None:
    choose = random.Random(num_stages)
    taken, found, _ = pipeline(num_stages, 200, lambda *_: choose.choice((1.0, 1.5, 4.0, 9.0)))
    assert found == pytest.approx(taken[: len(found)])


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_iterations_use_their_part_of_the_limit_and_no_token_exceeds_it(
    num_stages: int,
) -> None:
    """Prompts never end, but every tenth iteration has no prompt."""
    limit, number = 12.0, 0

    def fill(times: StageTimes, now: float, since: float) -> float:
        nonlocal number
        number += 1
        if number <= num_stages or number % 10 == 0:
            return 1.0
        return max(times.longest(now, since, limit), 1.0)

    taken, _, waits = pipeline(num_stages, 200, fill)
    assert max(waits) <= limit + 1e-9
    assert sum(taken) / len(taken) > 0.75 * limit / num_stages
    assert max(taken) > 0.95 * limit / num_stages


def test_a_first_long_iteration_leaves_time_for_the_next_one() -> None:
    allowed: list[float] = []

    def fill(times: StageTimes, now: float, since: float) -> float:
        if now < 4.0:
            return 1.0
        allowed.append(times.longest(now, since, 10.0))
        return allowed[-1]

    taken, _, waits = pipeline(2, 12, fill)
    assert allowed[0] == pytest.approx((10.0 + 1.0) / 3)
    assert max(waits) <= 10.0 + 1e-9
    half = pipeline(2, 12, lambda times, now, since: 1.0 if now < 4.0 else 5.0)
    assert max(half[2]) == pytest.approx(14.0), (
        "each iteration is within its half, and a turn waits for 3c - d"
    )
    assert taken[-1] > 4.9


def test_a_single_turn_may_use_the_whole_limit() -> None:
    times = StageTimes(2)
    assert times.longest(3.0, 3.0, 10.0) == 5.0  # seconds per stage
    times.planned(3.0, 5.0)
    assert times.committed(13.0) == 5.0


def test_the_turns_that_waited_longest_are_in_the_next_micro_batch() -> None:
    """All tokens are known in time, so only the order of waiting decides. No turn misses two rounds."""
    batches = MicroBatches(SchedulerConfig(16, 8, stages=2))
    turns: list[Any] = [
        SimpleNamespace(
            attempt_id=number, is_background=False, pending_tokens=0, is_prefill=False, tokens=[1]
        )
        for number in range(6)
    ]
    builder: Any = SimpleNamespace(others_generate=False)
    rounds = [
        {turn.attempt_id for turn in batches.choose(turns, turns, builder, background=False)}
        for _ in range(8)
    ]
    assert all(len(each) == 3 for each in rounds)
    for before, after in itertools.pairwise(rounds):
        assert before | after == set(range(6))
