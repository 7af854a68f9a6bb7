"""FastServe's schedule: levels, quanta, and KV that goes to the host and back."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pensieve.core.iteration_cost import IterationCost
from pensieve.sim.schedules.fastserve import STARVING_SECONDS, FastServeSchedule
from pensieve.sim.schedules.serving import Request
from tests.sim.schedules.world import SECOND, TOKENS, drawn, requests, run


def a_schedule(
    places: int = 1,
    host_tokens: int = 10_000,
    cost: IterationCost = SECOND,
    copying: float = 0.0,  # a token's
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


def test_who_used_up_a_quantum_is_demoted() -> None:
    """One iteration in level 0, two in level 1, four in level 2."""
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


def test_who_comes_takes_the_place_of_one_that_had_its_time() -> None:
    """The first has run for 3 s; the second's reply of one token is out before it goes on."""
    watched, _ = run(a_schedule(), requests((0.0, 5, 6), (2.5, 5, 1)))
    assert [batch for _, batch in watched.batches] == [[1], [1], [1], [2], [1], [1], [1]]


def test_copies_take_their_time_and_nobody_runs_meanwhile() -> None:
    """Seven tokens go out from 3 to 6.5 and come back from 7.5 to 11; the place is free at 6.5."""
    schedule = a_schedule(copying=0.5)
    watched, _ = run(schedule, requests((0.0, 5, 6), (2.5, 5, 1)))
    assert watched.batches[3:5] == [(6.5, [2]), (11.0, [1])]
    assert schedule.num_preemptions == 1


def test_who_finds_no_room_on_the_host_keeps_its_place() -> None:
    watched, _ = run(a_schedule(host_tokens=6), requests((0.0, 5, 6), (2.5, 5, 1)))
    assert [batch for _, batch in watched.batches] == [[1]] * 6 + [[2]]


def test_who_has_not_run_for_long_is_promoted() -> None:
    """One request a second would always go before the long one, which uses a second of theirs each time.

    So whoever is promoted waits 10 s for it, then for the one that runs, and for as many as wait by then.
    """
    short = [(0.5 + second, 5, 1) for second in range(60)]
    watched, counts = run(a_schedule(), requests((0.0, 5, 5), *short))
    ran = [begun for begun, batch in watched.batches if 1 in batch]
    gaps = [later - earlier for earlier, later in pairwise(ran)]
    assert STARVING_SECONDS == 10.0
    assert gaps == [12.0, 13.0, 14.0, 15.0]
    assert counts.gaps.quantile(1.0) == pytest.approx(15.0, rel=0.003)


def test_a_few_places_are_kept_free_for_who_comes() -> None:
    """Of 20, two: 18 of 19 requests run, and the last in the order gives its place to the 19th.

    So there is a place for the next one at once, although no copy is through yet.
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


def test_everybody_ends_whatever_the_room() -> None:
    """`check` looks at places, copies and the host's room in each step."""
    preempted = 0
    for seed in range(20):
        schedule = a_schedule(2 + seed % 3, (0, 150, 10_000)[seed % 3], copying=0.02)
        run(schedule, drawn(seed, 40, 98))
        preempted += schedule.num_preemptions
    assert preempted > 100
