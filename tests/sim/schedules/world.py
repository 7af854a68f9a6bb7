"""Schedules that run requests on a machine whose iterations take a second, and a token 1 s beside."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pensieve.core.iteration_cost import IterationCost
from pensieve.sim.schedules.serving import Request, Schedule, ScheduleRun
from pensieve.sim.simulator import Counts
from pensieve.sim.trace import Arrival

SECOND = IterationCost(0.0, 1.0, 0.0, 0.0, 0.0)  # of an iteration, whatever is in it
TOKENS = IterationCost(1.0, 1.0, 0.0, 0.0, 0.0)  # of each token of an iteration


def requests(*lengths: tuple[float, int, int]) -> list[Arrival]:
    """When each comes, and how long its prompt and its reply are."""
    return [Arrival(f"r{n}", *each) for n, each in enumerate(lengths)]


def drawn(seed: int, num_requests: int, longest: int) -> list[Arrival]:
    draw = random.Random(seed)
    now, found = 0.0, []
    for number in range(num_requests):
        now += draw.expovariate(0.5)
        prompt = draw.randint(1, longest // 2)
        found.append(Arrival(f"d{number}", now, prompt, draw.randint(1, longest // 2)))
    return found


class Watched:
    """A schedule that is checked around each step, and of which is noted who ran when."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.ended: list[int] = []
        self.batches: list[tuple[float, list[int]]] = []  # when they began, and whose

    def arrive(self, request: Request) -> None:
        self.schedule.arrive(request)

    def plan(self, now: float) -> Sequence[Request]:
        batch = list(self.schedule.plan(now))
        self.schedule.check()
        assert len(set(batch)) == len(batch)
        return batch

    def ran(self, requests: Sequence[Request], begun: float, ended: float) -> None:
        self.batches.append((begun, [each.number for each in requests]))
        self.ended += [each.number for each in requests if each.has_ended]
        self.schedule.ran(requests, begun, ended)
        self.schedule.check()

    def wakes_at(self) -> float:
        return self.schedule.wakes_at()

    def check(self) -> None:
        self.schedule.check()


def run(
    schedule: Schedule, arrivals: list[Arrival], cost: IterationCost = SECOND
) -> tuple[Watched, Counts]:
    """To the end: every request has ended with all its tokens."""
    watched = Watched(schedule)
    counts = ScheduleRun(watched, cost).finish(arrivals)
    assert sorted(watched.ended) == list(range(1, len(arrivals) + 1))
    assert counts.turns == counts.begun == len(arrivals)
    assert counts.output_tokens == counts.delivered_tokens == sum(a.output_tokens for a in arrivals)
    assert counts.input_tokens == sum(each.input_tokens for each in arrivals)
    return watched, counts
