"""A policy that knows the trace keeps the conversations that are used next."""

from __future__ import annotations

from pensieve.core.cache import CacheConfig
from pensieve.core.policies.protocol import EndedTurn
from pensieve.core.policies.registry import policy_named
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.sim.clairvoyant import ClairvoyantPolicy
from pensieve.sim.cost import instant
from pensieve.sim.simulator import Simulator
from pensieve.sim.trace import Arrival


def test_the_clairvoyant_policy_keeps_the_conversations_used_next() -> None:
    """Three conversations fit. LRU evicts `a`, which returns. The clairvoyant policy evicts `b` instead."""
    arrivals = [Arrival(name, at, 900, 1) for name, at in (("a", 0.0), ("b", 100.0), ("c", 200.0))]
    arrivals += [Arrival("d", 300.0, 900, 1), Arrival("a", 400.0, 1, 1), Arrival("c", 500.0, 1, 1)]
    found = {}
    for policy in (policy_named("lru", instant(32)[1], 32), ClairvoyantPolicy(arrivals)):
        one = Simulator(
            instant(32)[0], policy, CacheConfig(110, 0, 32, 0.0, 0.0), SchedulerConfig(2000, 16)
        )
        found[policy.name] = one.run(arrivals).recomputed_tokens
        one.scheduler.check(one.clock.now())
    assert found["clairvoyant"] == 0 < found["lru"]


def test_the_clairvoyant_policy_counts_forks_as_use_and_skips_refused_turns() -> None:
    arrivals = [
        Arrival("a", 0.0, 10, 1),
        Arrival("f", 50.0, 10, 1, 0.0, 11, "a"),
        Arrival("b", 5.0, 10, 1),
    ]
    policy = ClairvoyantPolicy([*arrivals, Arrival("b", 10.0, 10, 1), Arrival("b", 900.0, 10, 1)])
    policy.turn_began("a", 0.0)
    policy.turn_ended("a", EndedTurn(10, 1), 1.0)
    policy.turn_began("b", 5.0)
    policy.turn_ended("b", EndedTurn(10, 1), 6.0)
    assert policy._next == {"a": 50.0, "b": 10.0}
    policy.turn_ended("a", EndedTurn(10, 1), 60.0)
    policy.turn_ended("b", EndedTurn(10, 1), 700.0)
    assert policy._next == {"a": float("inf"), "b": 900.0}
