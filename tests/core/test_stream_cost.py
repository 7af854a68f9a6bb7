"""What the cost model learns from iterations with and without streamed turns."""

from __future__ import annotations

import random

import pytest

from pensieve.core.cost import IterationCost
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.core.streaming import StreamCost, StreamLoad, solve

COST = IterationCost(1e-3, 2e-2, 0.0, 1e-6, 0.0)
CONFIG = SchedulerConfig(cost=COST, copy_seconds=1e-4, group_seconds=1e-3)


def learn(seconds_of: object, loads: list[StreamLoad], late: float = 0.0) -> StreamCost:
    draw, cost = random.Random(1), StreamCost(CONFIG, 100)
    for load in loads:
        seconds = seconds_of(load)  # type: ignore[operator]
        cost.learn(load, seconds * (20.0 if draw.random() < late else draw.uniform(0.95, 1.05)))
    return cost


def random_loads(num_turns_max: int, num_pages_max: int, count: int = 60) -> list[StreamLoad]:
    draw = random.Random(7)
    return [
        StreamLoad(turns, 200 * turns, draw.choice((0, draw.randint(1, num_pages_max))))
        for turns in (draw.randint(1, num_turns_max) for _ in range(count))
    ]


def test_before_any_measurement_the_model_has_the_configured_costs() -> None:
    cost = StreamCost(CONFIG, 100)
    assert cost.seconds(StreamLoad(4, 800, 0)) == pytest.approx(COST.pass_seconds(4, 800, 800, 4))
    more = cost.seconds(StreamLoad(4, 800, 150)) - cost.seconds(StreamLoad(4, 800, 0))
    assert more == pytest.approx(150 * 1e-4 + 2 * 1e-3)
    assert cost.seconds(StreamLoad(0, 0, 0)) == 0.0


@pytest.mark.parametrize("late", [0.0, 0.05])
@pytest.mark.parametrize(
    "seconds_of",
    [
        lambda load: 3 * COST.pass_seconds(load.num_turns, 0, load.num_positions),
        lambda load: 0.02 + 0.003 * load.num_turns,  # each turn is expensive
        lambda load: 0.02 + 0.01 * (load.num_pages > 0),  # streaming at all is expensive
        lambda load: 0.02 + 0.0005 * load.num_pages,  # each page is expensive
        lambda load: 0.02,  # copies take no longer than the compute
    ],
    ids=["slower", "rows", "any", "pages", "hidden"],
)
def test_the_model_learns_the_times_of_iterations(seconds_of: object, late: float) -> None:
    cost = learn(seconds_of, random_loads(20, 90), late)
    for load in random_loads(20, 90, 20):
        expected = seconds_of(load)  # type: ignore[operator]
        assert cost.seconds(load) == pytest.approx(expected, rel=0.25 if late else 0.15)


def test_old_iterations_fade() -> None:
    loads = random_loads(10, 50, 200)
    cost = learn(lambda load: 0.05, loads)
    for load in loads[:120]:
        cost.learn(load, 0.02)
    assert cost.seconds(StreamLoad(5, 1000, 0)) == pytest.approx(0.02, rel=0.1)


def test_no_term_of_the_cost_is_negative() -> None:
    """An iteration with more pages is faster, because the machine was busy in the earlier one."""
    cost = StreamCost(CONFIG, 100)
    for pages in range(0, 90, 3):
        cost.learn(StreamLoad(5, 1000, pages), 0.1 - 0.001 * pages)
    assert cost.seconds(StreamLoad(5, 1000, 500)) >= cost.seconds(StreamLoad(5, 1000, 50))


def test_a_system_of_equations_is_solved() -> None:
    matrix, wanted = [[4.0, 1.0, 0.5], [1.0, 3.0, 0.0], [0.5, 0.0, 2.0]], [1.0, -2.0, 3.0]
    right_side = [sum(a * b for a, b in zip(row, wanted, strict=True)) for row in matrix]
    assert solve(matrix, right_side) == pytest.approx(wanted)
