"""vLLM's schedule: blocks, prompts first, and the latest is preempted."""

from __future__ import annotations

import pytest

from pensieve.sim.schedules.vllm import VllmSchedule
from tests.sim.schedules.world import TOKENS, drawn, requests, run


def test_prompts_go_first_and_alone() -> None:
    watched, _ = run(VllmSchedule(640, 64, 64, 8), requests((0.0, 4, 3), (0.5, 4, 2)))
    assert watched.batches == [(0.0, [1]), (1.0, [2]), (2.0, [1, 2]), (3.0, [1])]


def test_prompts_of_an_iteration_are_limited() -> None:
    watched, _ = run(VllmSchedule(640, 64, 64, 8), requests(*[(0.0, 30, 1)] * 5))
    assert [batch for _, batch in watched.batches] == [[1, 2], [3, 4], [5]]


def test_the_latest_gives_up_its_blocks_and_computes_all_again() -> None:
    """Four blocks: two prompts of 32 fill them.  Both lack one then, and only the first gets it.

    When it has ended, the second computes its prompt and its one token: 33 tokens take 33 s.
    """
    schedule = VllmSchedule(64, 64, 64, 8)
    watched, counts = run(schedule, requests((0.0, 32, 3), (0.0, 32, 3)), cost=TOKENS)
    assert watched.batches == [
        (0.0, [1, 2]),
        (64.0, [1]),
        (65.0, [1]),
        (66.0, [2]),
        (99.0, [2]),
    ]
    assert schedule.num_preemptions == 1
    assert counts.gaps.quantile(1.0) == pytest.approx(35.0, rel=0.003)


def test_first_come_first_served_in_few_blocks() -> None:
    """`check` looks at blocks and order in each step."""
    preempted = 0
    for seed in range(20):
        schedule = VllmSchedule(256, 128, 128, 8)
        watched, _ = run(schedule, drawn(seed, 40, 128))
        preempted += schedule.num_preemptions
        first = [min(i for i, (_, b) in enumerate(watched.batches) if n in b) for n in range(1, 41)]
        assert first == sorted(first)
    assert preempted > 20
