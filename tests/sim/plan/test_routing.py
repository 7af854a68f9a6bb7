"""Turns routed to replicas: by affinity, or at random."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from pensieve.core.cache import CacheConfig
from pensieve.core.policies.registry import policy_named
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.sim.cost import instant
from pensieve.sim.plan.routing import (
    Families,
    at_random_of_few,
    at_random_of_many,
    fullest_over_mean,
    replica_of,
    with_affinity,
    with_times,
)
from pensieve.sim.simulator import Counts, Simulator
from pensieve.sim.trace import Arrival
from tests.sim.plan.world import LOAD


def test_another_replica_takes_its_share_of_names_and_moves_no_others() -> None:
    names = [f"conversation {i}" for i in range(4000)]
    before, after = ([replica_of(name, count) for name in names] for count in (7, 8))
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {7}
    assert len(moved) == pytest.approx(len(names) / 8, rel=0.15)
    assert min(Counter(before).values()) > 0.85 * len(names) / 7


def test_a_fork_of_a_fork_stays_with_the_first() -> None:
    families = Families()
    arrivals = [
        Arrival("a", 0.0, 1, 1),
        Arrival("b", 1.0, 1, 1, 0.0, 1, "a"),
        Arrival("c", 2.0, 1, 1, 0.0, 1, "b"),
    ]
    assert [families.root(arrival) for arrival in arrivals] == ["a", "a", "a"]
    for count in (2, 5):
        served = [list(with_affinity(arrivals, index, count)) for index in range(count)]
        assert sorted(map(len, served)) == [0] * (count - 1) + [3]


def test_times_and_logs_of_turns_that_were_not_simulated() -> None:
    arrivals = [
        Arrival("a", 0.0, 100, 10),
        Arrival("a", None, 5, 10, 3.0),
        Arrival("b", 1.0, 7, 1),
        Arrival("a", 9.0, 5, 1, 0.0, 60),
        Arrival("c", 9.5, 5, 1, 0.0, 66, "a"),
    ]
    found = [(v.conversation, v.at, v.log_tokens) for v in with_times(arrivals, 0.1)]
    assert found == [("a", 0.0, 0), ("b", 1.0, 0), ("a", 4.0, 110), ("a", 9.0, 60), ("c", 9.5, 66)]


def test_every_turn_has_one_replica() -> None:
    arrivals = list(with_times(LOAD.arrivals(0.5), 0.05))
    served = [list(at_random_of_few(arrivals, index, 3)) for index in range(3)]
    assert sum(map(len, served)) == len(arrivals)
    assert min(map(len, served)) > len(arrivals) / 4
    again = sorted(
        (arrival for part in served for arrival in part), key=lambda arrival: arrival.at or 0.0
    )
    assert [v.log_tokens for v in again] == [v.log_tokens for v in arrivals]


@pytest.mark.parametrize(("count", "met_again"), [(1, 1.0), (4, 0.25), (1000, 0.001)])
def test_one_of_many_serves_as_much_and_holds_little(count: int, met_again: float) -> None:
    arrivals = list(with_times(LOAD.arrivals(3.0), 0.05))
    served = list(at_random_of_many(arrivals, count))
    assert [v.at for v in served] == sorted(v.at for v in served if v.at is not None)
    assert len(served) == pytest.approx(len(arrivals), rel=0.08)
    if count == 1:
        assert [(v.at, v.log_tokens) for v in served] == [(v.at, v.log_tokens) for v in arrivals]
    met: set[str] = set()
    later = again = 0
    for arrival in served:
        if arrival.log_tokens:
            later += 1
            again += arrival.conversation in met
        met.add(arrival.conversation)
    if count > 1:  # of the turns before, each was here with probability 1 / count
        lengths = Counter(v.conversation for v in arrivals)
        mean = sum(n * (n - 1) / 2 for n in lengths.values()) / sum(n - 1 for n in lengths.values())
        assert again / later < 1.5 * (1 - (1 - met_again) ** mean) + 0.02
    else:
        assert again == later


def simulated(arrivals: list[Arrival]) -> Counts:
    free, recompute = instant(32)
    cache, scheduler = CacheConfig(400, 0), SchedulerConfig(512, 16)
    one = Simulator(free, policy_named("lru", recompute, 32), cache, scheduler)
    counts = one.run(arrivals)
    one.scheduler.check(one.clock.now())
    return counts


def test_what_another_replica_served_is_computed_again() -> None:
    counts = simulated([Arrival("a", 0.0, 100, 5), Arrival("a", 10.0, 7, 2, log_tokens=300)])
    assert counts.history_tokens == 300
    assert counts.device_tokens == 104
    assert counts.recomputed_tokens == 300 - 1 - 104


def test_what_another_replica_cut_is_not_taken_for_the_log() -> None:
    arrivals = [
        Arrival("a", 0.0, 100, 5),
        Arrival("a", 5.0, 10, 5, 0.0, 64),  # served elsewhere
        Arrival("a", 9.0, 200, 5),  # as well
        Arrival("a", 10.0, 7, 2),
    ]
    wheres = {tuple(routed_to(seed)): seed for seed in range(64)}
    served = list(at_random_of_few(with_times(arrivals, 0.0), 0, 2, wheres[(0, 1, 1, 0)]))
    assert [(v.history_tokens, v.log_tokens) for v in served] == [(None, 0), (64, 284)]
    counts = simulated(served)
    assert counts.device_tokens == 64
    assert counts.recomputed_tokens == 284 - 1 - 64


def routed_to(seed: int) -> Iterator[int]:
    import random

    draw = random.Random(seed)
    return (draw.randrange(2) for _ in range(4))


def test_the_fullest_replica_has_more_than_the_mean() -> None:
    assert fullest_over_mean(100.0, 1) == 1.0
    for each in (20.0, 500.0):
        assert fullest_over_mean(each, 50) == pytest.approx(1 + 2.33 / each**0.5, rel=0.12)
    assert fullest_over_mean(50.0, 1000) == pytest.approx(fullest_over_mean(50.0, 400), rel=0.1)
