"""Simulations whose engine writes a journal, and the observations in the journal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from pensieve.core.cache import CacheConfig
from pensieve.core.policies.registry import policy_named
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.engine.journal import (
    Journal,
    Replay,
    opened,
)
from pensieve.sim.cost import HARDWARE, MODELS, CostModel
from pensieve.sim.executor import ModelledExecutor
from pensieve.sim.observed import Observations
from pensieve.sim.simulator import Simulator
from pensieve.sim.trace import Arrival

A100 = CostModel.of(MODELS["llama3-8b"], HARDWARE["a100-80gb"])
SLOWER = replace(  # three times slower, except for the link
    A100,
    **{
        name: 3 * seconds
        for name, seconds in vars(A100).items()
        if "seconds" in name and "link" not in name
    },
)


def simulated(
    path: Path,
    arrivals: Iterable[Arrival],
    cost: CostModel = A100,
    policy: str = "value",
    *,
    device_tokens: int = 12_800,
    host_tokens: int = 25_600,
    budget: int = 512,
    executor: type[ModelledExecutor] | None = None,
) -> Simulator:
    """Run a simulation whose engine writes a journal."""
    recompute = A100.recompute(32)
    cache = CacheConfig(device_tokens // 32, host_tokens // 32)
    scheduler = SchedulerConfig(budget, 64)
    one = Simulator(cost, policy_named(policy, recompute, 32), cache, scheduler)
    if executor is not None:
        one.engine.executor = executor(cost, one.clock)
    with opened(path) as file:
        one.engine.observe(Journal(file, one.config, cache, scheduler, policy, recompute))
        one.run(arrivals)
    return one


def journal_of(tmp_path: Path) -> list[str]:
    simulated(tmp_path / "j", [Arrival("a", 0.0, 100, 5), Arrival("b", 0.0, 700, 5)])
    return (tmp_path / "j").read_text().splitlines()


def seen_in(path: Path) -> Observations:
    seen = Observations()
    for replayed in Replay(path.read_text().splitlines()):
        seen.add(replayed)
    return seen
