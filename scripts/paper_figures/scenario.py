"""A system under a load of random conversations: everything that a simulation needs except the rate.

A simulation begins in the middle of a load that has lasted for a long time (measurements/replica.py). An
empty system would need an hour until late turns of long conversations are as frequent as in a steady load.
The simulation then warms up for `warm_seconds`. It stops while the load still continues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pensieve.core.cache import CacheConfig
from pensieve.core.policies.registry import policy_named
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.sim import report
from pensieve.sim.cost import CHUNK_TOKENS, CostModel
from pensieve.sim.simulator import SimulationFigures, Simulator
from pensieve.sim.trace import Arrival
from pensieve.sim.workload import Habits, drawn
from scripts.measurements.replica import LIFETIMES_BEFORE, REACTION_TIMES_FREE, steady_load

SECONDS_PER_TOKEN = 0.04  # speed of replies before the start

Row = dict[str, Any]
Progress = Callable[[float, SimulationFigures], None]


@dataclass(frozen=True)
class Scenario:
    cost: CostModel
    device_tokens: int
    host_tokens: int
    habits: Habits
    policy: str = "value"
    stateless: bool = False
    phases: str = "unified"
    token_budget: int = 2048
    turns_max: int = 256
    reaction_seconds: float | None = None
    turns_min: int = 1
    warm_seconds: float = 100.0  # simulated before figures count
    seconds: float = 300.0  # counted
    seed: int = 0
    keep_gaps: bool = False
    steady: bool = True  # False: no conversations at the start

    @property
    def free_until(self) -> float:
        """Return the time at which all conversations in progress are loaded; nothing takes time before."""
        if not self.steady or self.habits.turns_mean <= 1:
            return 0.0
        return REACTION_TIMES_FREE * self._reaction

    @property
    def _reaction(self) -> float:
        given = self.reaction_seconds
        return self.habits.reaction_seconds if given is None else given

    def simulator(self) -> Simulator:
        counts = self.free_until + self.warm_seconds
        return Simulator(
            self.cost,
            policy_named(self.policy, self.cost.recompute(CHUNK_TOKENS), CHUNK_TOKENS),
            CacheConfig(self.device_tokens // CHUNK_TOKENS, self.host_tokens // CHUNK_TOKENS),
            SchedulerConfig(self.token_budget, self.turns_max),
            context_max=self.habits.context_max + 1,
            keep_gaps=self.keep_gaps,
            count_from=counts,
            until=counts + self.seconds,
            free_until=self.free_until,
            stateless=self.stateless,
            phases=self.phases,
        )

    def simulate(self, conversations_per_second: float, progress: Progress | None = None) -> Row:
        """Return the figures at one rate."""
        counts = self.simulator().run(self._arrivals(conversations_per_second), progress)
        return {**report.figures(self.policy, counts), "rate": conversations_per_second}

    def _arrivals(self, rate: float) -> Iterator[Arrival]:
        before = 0.0
        if self.free_until:
            turn = self._reaction + SECONDS_PER_TOKEN * self.habits.output_tokens
            before = LIFETIMES_BEFORE * self.habits.turns_from(self.turns_min) * turn
        arrivals = drawn(
            self.habits,
            rate,
            before + self.warm_seconds + self.seconds,
            self.seed,
            reaction_seconds=self._reaction,
            turns_min=self.turns_min,
        )
        if not self.free_until:
            return arrivals
        return steady_load(arrivals, before, self.free_until, SECONDS_PER_TOKEN)
