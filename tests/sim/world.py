"""Simulators of a machine that computes a token per millisecond."""

from __future__ import annotations

from array import array
from typing import Any

from pensieve.core.cache import CacheConfig
from pensieve.core.iteration import Slice, TurnStart
from pensieve.core.policies.registry import policy_named
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.sampling import Sampling
from pensieve.sim.cost import CostModel, instant
from pensieve.sim.simulator import SimulationFigures, Simulator
from pensieve.sim.trace import Arrival

SLOW = CostModel(0.001, 0.01, 0.0, 0.0, 0.0, 10, 1000, 1e6, "made up")  # 1 ms per token


def simulator(
    cost: CostModel | None = None,
    policy: str = "lru",
    device_tokens: int = 3200,
    host_tokens: int = 0,
    *,
    budget: int = 512,
    **options: Any,
) -> Simulator:
    free, recompute = instant(32)
    return Simulator(
        cost or free,
        policy_named(policy, recompute, 32),
        CacheConfig(device_tokens // 32, host_tokens // 32),
        SchedulerConfig(budget, 16),
        **options,
    )


def run_trace(*arrivals: Arrival, **options: object) -> SimulationFigures:
    one = simulator(**options)  # type: ignore[arg-type]
    counts = one.run(arrivals)
    one.scheduler.check(one.clock.now())
    assert not one.scheduler.running
    return counts


def a_prompt(num_tokens: int) -> tuple[TurnStart, Slice]:
    """Return a turn without history, and a slice with its whole prompt."""
    tokens = array("I", bytes(4 * num_tokens))
    return TurnStart(1, tokens, Sampling()), Slice(1, 0, num_tokens, tokens, array("i"), True)
