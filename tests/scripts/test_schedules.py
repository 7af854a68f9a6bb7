"""The schedules of Orca, vLLM and FastServe, on machines whose times can be computed by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from pensieve.core.cost import IterationCost
from pensieve.sim.simulator import SimulationFigures
from pensieve.sim.trace import Arrival
from scripts.measurements.schedules import (
    STARVING_SECONDS,
    FastServeSchedule,
    OrcaSchedule,
    Request,
    Schedule,
    ScheduleRun,
    VllmSchedule,
)

SECOND = IterationCost(0.0, 1.0, 0.0, 0.0, 0.0)  # every iteration takes a second
TOKENS = IterationCost(1.0, 1.0, 0.0, 0.0, 0.0)  # every token takes a second


def requests(*lengths: tuple[float, int, int]) -> list[Arrival]:
    """Return requests. Each has an arrival time, and lengths of its prompt and reply."""
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
    """Checks a schedule around each step, and records which requests ran when."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.ended: list[int] = []
        self.batches: list[tuple[float, list[int]]] = []  # start time, numbers of the requests

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
) -> tuple[Watched, SimulationFigures]:
    """Run until every request has ended, and check that each has all its tokens."""
    watched = Watched(schedule)
    counts = ScheduleRun(watched, cost).finish(arrivals)
    assert sorted(watched.ended) == list(range(1, len(arrivals) + 1))
    assert counts.turns == counts.num_submitted == len(arrivals)
    assert counts.output_tokens == counts.delivered_tokens == sum(a.output_tokens for a in arrivals)
    assert counts.input_tokens == sum(each.input_tokens for each in arrivals)
    return watched, counts


def test_a_request_waits_for_a_place_of_a_whole_context() -> None:
    """250 tokens of memory are two places of 100. The third request gets the place of the first."""
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


def test_prompts_join_generating_requests_and_delay_them() -> None:
    """The first request gets two tokens alone. Its third token comes in an iteration with a prompt of 7."""
    watched, counts = run(
        OrcaSchedule(200, 100, 8), requests((0.0, 3, 3), (3.5, 7, 1)), cost=TOKENS
    )
    assert watched.batches == [(0.0, [1]), (3.0, [1]), (4.0, [1, 2])]
    assert counts.gaps.quantile(1.0) == pytest.approx(8.0, rel=0.003)


def test_no_request_overtakes_or_is_interrupted() -> None:
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


def test_prompts_go_first_and_alone() -> None:
    watched, _ = run(VllmSchedule(640, 64, 64, 8), requests((0.0, 4, 3), (0.5, 4, 2)))
    assert watched.batches == [(0.0, [1]), (1.0, [2]), (2.0, [1, 2]), (3.0, [1])]


def test_prompts_of_an_iteration_are_limited() -> None:
    watched, _ = run(VllmSchedule(640, 64, 64, 8), requests(*[(0.0, 30, 1)] * 5))
    assert [batch for _, batch in watched.batches] == [[1, 2], [3, 4], [5]]


def test_the_latest_request_gives_up_its_blocks_and_recomputes_all_its_tokens() -> None:
    """There are four blocks, and two prompts of 32 tokens fill them. Then both requests need another block.

    The first request gets a block. When it has ended, the second request computes its 33 tokens again.
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


def test_requests_are_served_first_come_first_served_with_few_blocks() -> None:
    """`check` verifies the blocks and the order in each step."""
    preempted = 0
    for seed in range(20):
        schedule = VllmSchedule(256, 128, 128, 8)
        watched, _ = run(schedule, drawn(seed, 40, 128))
        preempted += schedule.num_preemptions
        first = [min(i for i, (_, b) in enumerate(watched.batches) if n in b) for n in range(1, 41)]
        assert first == sorted(first)
    assert preempted > 20


def a_schedule(
    places: int = 1,
    host_tokens: int = 10_000,
    cost: IterationCost = SECOND,
    copying: float = 0.0,  # seconds to copy a token
) -> FastServeSchedule:
    return FastServeSchedule(
        cost, lambda tokens: copying * tokens, places * 100, host_tokens, 100, 64
    )


def test_quanta_double_from_one_iteration() -> None:
    assert a_schedule(cost=TOKENS).quanta == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0]


def test_a_long_prompt_joins_below_the_levels_that_it_would_use_up() -> None:
    schedule = a_schedule(cost=TOKENS)
    levels = []
    for number, prompt in enumerate((1, 2, 3, 9, 90)):
        request = Request(number, 0.0, prompt, 5)
        schedule.arrive(request)
        levels.append(schedule.level_of(request))
    assert levels == [0, 1, 2, 4, 7]


def test_a_request_that_used_up_its_quantum_is_demoted() -> None:
    """A request runs one iteration in level 0, two in level 1, and four in level 2."""
    schedule = a_schedule()
    request = Request(1, 0.0, 5, 90)
    schedule.arrive(request)
    levels = []
    for second in range(8):
        assert schedule.plan(second) == [request]
        levels.append(schedule.level_of(request))
        request.computed, request.num_outputs = request.length, request.num_outputs + 1
        schedule.ran([request], second, second + 1)
    assert levels == [0, 1, 1, 2, 2, 2, 2, 3]


def test_a_new_request_preempts_one_that_used_up_its_quantum() -> None:
    """The first request has run for 3 s. The second's reply of one token comes before it continues."""
    watched, _ = run(a_schedule(), requests((0.0, 5, 6), (2.5, 5, 1)))
    assert [batch for _, batch in watched.batches] == [[1], [1], [1], [2], [1], [1], [1]]


def test_copies_take_time_in_which_no_request_runs() -> None:
    """Seven tokens are copied out from 3 s to 6.5 s, which frees the place, and back from 7.5 s to 11 s."""
    schedule = a_schedule(copying=0.5)
    watched, _ = run(schedule, requests((0.0, 5, 6), (2.5, 5, 1)))
    assert watched.batches[3:5] == [(6.5, [2]), (11.0, [1])]
    assert schedule.num_preemptions == 1


def test_a_request_that_does_not_fit_on_the_host_keeps_its_place() -> None:
    watched, _ = run(a_schedule(host_tokens=6), requests((0.0, 5, 6), (2.5, 5, 1)))
    assert [batch for _, batch in watched.batches] == [[1]] * 6 + [[2]]


def test_a_starved_request_is_promoted() -> None:
    """Short requests, one per second, would always go before the long request, and use every second.

    A promoted request waits 10 s, then for the running request, and for all requests that wait by then.
    """
    short = [(0.5 + second, 5, 1) for second in range(60)]
    watched, counts = run(a_schedule(), requests((0.0, 5, 5), *short))
    ran = [begun for begun, batch in watched.batches if 1 in batch]
    gaps = [later - earlier for earlier, later in pairwise(ran)]
    assert STARVING_SECONDS == 10.0
    assert gaps == [12.0, 13.0, 14.0, 15.0]
    assert counts.gaps.quantile(1.0) == pytest.approx(15.0, rel=0.003)


def test_a_few_places_are_kept_free_for_new_requests() -> None:
    """Two of 20 places are kept free. 18 of 19 requests run, and the last of the 18 gives way to the 19th.

    So the next request gets a place at once, although no copy has finished.
    """
    schedule = a_schedule(places=20, copying=10.0)
    many = [Request(number, 0.0, 5, 50) for number in range(1, 21)]
    for request in many[:19]:
        schedule.arrive(request)
    batches = []
    for second in range(3):
        if second == 2:
            schedule.arrive(many[19])
        batch = list(schedule.plan(second))
        schedule.check()
        batches.append({each.number for each in batch})
        for request in batch:
            request.computed, request.num_outputs = request.length, request.num_outputs + 1
        schedule.ran(batch, second, second + 1)
    assert batches[0] == set(range(1, 19))
    assert batches[1] == {*range(1, 18), 19}
    assert batches[2] >= {20}


def test_every_request_ends_at_any_number_of_places() -> None:
    """`check` verifies places, copies and the host's room in each step."""
    preempted = 0
    for seed in range(20):
        schedule = a_schedule(2 + seed % 3, (0, 150, 10_000)[seed % 3], copying=0.02)
        run(schedule, drawn(seed, 40, 98))
        preempted += schedule.num_preemptions
    assert preempted > 100
