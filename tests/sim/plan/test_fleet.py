"""How many replicas a load needs, however its turns are routed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pensieve.sim.plan.capacity import (
    capacity,
)
from pensieve.sim.plan.fleet import (
    AFFINITY,
    RANDOM,
    RandomRouting,
    fleet,
    needed_at_random,
    needed_with_affinity,
)
from pensieve.sim.plan.replica import Row
from tests.sim.plan.world import LOAD, SLO, SMALL, trial


def test_affinity_recomputes_no_more_and_more_replicas_at_random_know_less() -> None:
    replica = replace(SMALL, host_tokens=30_000)
    shares = []
    for count in (2, 16):
        together, apart = (
            fleet(replica, LOAD, 0.6, count, routing, 0.03) for routing in (AFFINITY, RANDOM)
        )
        assert together["scaled"] == apart["scaled"] == (count > 4)
        assert together["recomputed_share"] <= apart["recomputed_share"]
        assert together["rate"] == pytest.approx(0.6 * count)
        shares.append(apart["recomputed_share"])
    assert shares == sorted(shares)
    assert shares[0] > 0.1
    assert shares[-1] > 0.6


def test_random_routing_needs_more_replicas(carried: tuple[float, Row]) -> None:
    replica = replace(SMALL, host_tokens=30_000)
    rate, row = capacity(lambda rate: trial(rate, replica), SLO, carried[0])
    pace = row["seconds_per_token"]

    carries = RandomRouting(replica, LOAD, SLO, rate, pace).carries
    together = needed_with_affinity(rate, 12.0)
    apart = needed_at_random(carries, rate, 12.0)
    assert apart is not None
    assert together.num_replicas * together.rate_each >= 12.0
    assert apart.num_replicas > together.num_replicas
    assert apart.num_replicas * apart.rate_each >= 12.0 * 0.96
    assert carries(1, rate) == rate


def test_one_replica_is_one_however_turns_are_routed() -> None:
    assert needed_with_affinity(5.0, 4.0).num_replicas == 1
    assert needed_at_random(lambda count, guess: guess, 5.0, 4.0) == (1, 5.0)
    assert needed_at_random(lambda count, guess: 0.0, 5.0, 40.0) is None
    assert needed_at_random(lambda count, guess: 5.0 / count, 5.0, 40.0) is None
