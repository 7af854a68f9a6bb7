"""A system under a load of random conversations, and the throughput that it reaches within a latency.

The paper compares throughputs at equal P90 normalized latency, but names no latency. Here it is `LIMIT_MS`,
which is above the flat part of every curve. Conversations are like ShareGPT's. Memory is as in the Pensieve
paper: 40 GB of KV and 220 GB of host memory per A100-80GB.

A simulation begins in the middle of a load that has lasted for a long time (measurements/replica.py). An
empty system would need an hour until late turns of long conversations are as frequent as in a steady load.
The simulation then warms up for `warm_seconds`. It stops while the load still continues.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from pensieve.core.cache import CacheConfig
from pensieve.core.cost import CostProfile
from pensieve.core.policies.registry import policy_named
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.sim import report
from pensieve.sim.cost import CHUNK_TOKENS, HARDWARE, MODELS, CostModel
from pensieve.sim.simulator import Simulator
from pensieve.sim.trace import Arrival
from pensieve.sim.workload import WORKLOAD_PRESETS, WorkloadPreset, drawn
from scripts.measurements.replica import LIFETIMES_BEFORE, REACTION_TIMES_FREE, steady_load
from scripts.papers.equal_latency import Crossing, Row, first_crossing
from scripts.papers.rows import Extent

LIMIT_MS = 200.0
KV_BYTES, HOST_BYTES = 40e9, 220e9  # per GPU, in the paper
GPU = "a100-80gb"
SECONDS_PER_TOKEN = 0.04  # speed of replies before the start


@dataclass(frozen=True)
class Scenario:
    cost: CostModel
    device_tokens: int
    host_tokens: int
    preset: WorkloadPreset
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
    reads_keys: bool = False  # a chunk's cost has the time to read its context, see `_recompute`

    @property
    def free_until(self) -> float:
        """Return the time at which all conversations in progress are loaded; nothing takes time before."""
        return REACTION_TIMES_FREE * self._reaction

    @property
    def _reaction(self) -> float:
        given = self.reaction_seconds
        return self.preset.reaction_seconds if given is None else given

    def simulator(self) -> Simulator:
        counts = self.free_until + self.warm_seconds
        return Simulator(
            self.cost,
            policy_named(self.policy, self._recompute(), CHUNK_TOKENS),
            CacheConfig(self.device_tokens // CHUNK_TOKENS, self.host_tokens // CHUNK_TOKENS),
            SchedulerConfig(self.token_budget, self.turns_max),
            context_max=self.preset.context_max + 1,
            count_from=counts,
            until=counts + self.seconds,
            free_until=self.free_until,
            stateless=self.stateless,
            phases=self.phases,
        )

    def simulate(self, conversations_per_second: float) -> Row:
        """Return the figures at one rate."""
        counts = self.simulator().run(self._arrivals(conversations_per_second))
        return {**report.figures(self.policy, counts), "rate": conversations_per_second}

    def _recompute(self) -> CostProfile:
        """Return the cost of recomputing a chunk.

        In a full batch, attention computes its pairs and reads the context once for all queries. A chunk
        that is measured alone reads its context for a few queries, which takes longer than computing.
        """
        profile, cost = self.cost.recompute(CHUNK_TOKENS), self.cost
        if not self.reads_keys:
            return profile
        points = tuple(
            (1 << power, cost.attention_seconds_per_key * (1 << power)) for power in range(18)
        )
        return replace(profile, attention_seconds=points)

    def _arrivals(self, rate: float) -> Iterator[Arrival]:
        turn = self._reaction + SECONDS_PER_TOKEN * self.preset.output_tokens
        before = LIFETIMES_BEFORE * self.preset.turns_from(self.turns_min) * turn
        arrivals = drawn(
            self.preset,
            rate,
            before + self.warm_seconds + self.seconds,
            self.seed,
            reaction_seconds=self._reaction,
            turns_min=self.turns_min,
        )
        return steady_load(arrivals, before, self.free_until, SECONDS_PER_TOKEN)


@dataclass
class Search:
    """Simulations of scenarios; their results are kept, because several rows share them."""

    extent: Extent
    _rows: dict[tuple[Scenario, float], Row] = field(default_factory=dict)
    _crossings: dict[Scenario, Crossing] = field(default_factory=dict)

    def scenario(self, model: str, num_gpus: int = 1, **options: Any) -> Scenario:
        """Return a scenario with the first seed."""
        preset = MODELS[model]
        per_token = preset.kv_bytes_per_token
        # Models whose query heads share KV have more turns in the same time.
        seconds = self.extent.seconds / (1 if preset.kv_heads == preset.heads else 2)
        return Scenario(
            **{
                "cost": CostModel.of(preset, replace(HARDWARE[GPU], devices=num_gpus)),
                "device_tokens": int(num_gpus * KV_BYTES / per_token),
                "host_tokens": int(num_gpus * HOST_BYTES / per_token),
                "preset": WORKLOAD_PRESETS["sharegpt"],
                "warm_seconds": self.extent.warm_seconds,
                "seconds": seconds,
                **options,
            }
        )

    def seeded(self, scenario: Scenario) -> Iterator[Scenario]:
        return (replace(scenario, seed=seed) for seed in range(self.extent.seeds))

    def simulate(self, scenario: Scenario, rate: float) -> Row:
        if (scenario, rate) not in self._rows:
            self._rows[scenario, rate] = scenario.simulate(rate)
        return self._rows[scenario, rate]

    def at_limit(self, scenario: Scenario, guess: float) -> list[Crossing]:
        """Return where each seed's P90 reaches the limit."""
        for seeded in self.seeded(scenario):
            if seeded not in self._crossings:
                found = first_crossing(
                    lambda rate, seeded=seeded: self.simulate(seeded, rate),  # type: ignore[misc]
                    LIMIT_MS,
                    guess,
                    self.extent.halvings,
                    self.extent.confirming,
                )
                self._crossings[seeded] = found
            guess = self._crossings[seeded].rate
        return [self._crossings[seeded] for seeded in self.seeded(scenario)]

    def throughputs(self, scenario: Scenario, guess: float) -> list[float]:
        return [each.tokens_per_second for each in self.at_limit(scenario, guess)]
