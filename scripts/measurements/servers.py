"""Simulate one load through the daemon's own engine, and through the schedules of other servers.

The load is single requests that arrive at random (the first rounds of conversations), as in the evaluation of
the paper FluidInfer (scripts/papers/fluidinfer.py). The same quantities are measured. The latency bound is
the longest time between two tokens of one reply. All requests are served to their end and counted.

    resident    the daemon's own scheduler, with all running turns on the device
    streamed    the same, but turns that do not fit on the device are streamed (core/streaming.py)
    vllm        paged KV, prompts first, preemption by recomputing
    orca        KV reserved for the longest context, first come first served
    fastserve   a multi-level feedback queue; KV reserved, and swapped

All systems have the same costs, clock, tiers and limit on concurrent requests. The daemon's scheduler forgets
a conversation when its turn has ended, so it has no cache that the others lack.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from pensieve.core.cache import CacheConfig
from pensieve.core.policies.registry import DEFAULT, policy_named
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.sim.cost import CHUNK_TOKENS, CostModel
from pensieve.sim.simulator import SimulationFigures, Simulator
from pensieve.sim.trace import Arrival
from pensieve.sim.workload import WORKLOAD_PRESETS, drawn
from scripts.measurements.schedules import (
    FastServeSchedule,
    OrcaSchedule,
    Schedule,
    ScheduleRun,
    VllmSchedule,
)

WORKLOAD = "first-rounds"
BATCH_TOKENS_MAX = 2048  # per iteration
PROMPT_SECONDS = 0.05  # the daemon's default
PROMPT_TOKENS, OUTPUT_TOKENS = 161, 338  # means of the workload
MEAN_CONTEXT = 465  # mean context of a running request over time
OURS = ("resident", "streamed")
STAGING_SHARE = 0.1  # memory of the staging arenas, relative to the device tier
OTHERS = ("vllm", "orca", "fastserve")
SYSTEMS = (*OURS, *OTHERS)


@dataclass(frozen=True)
class ServingSetting:
    """The costs, memory and limits that all systems share."""

    cost: CostModel
    device_tokens: int
    host_tokens: int
    turns_max: int = BATCH_TOKENS_MAX
    context_max: int = WORKLOAD_PRESETS[WORKLOAD].context_max

    @property
    def unloaded_seconds(self) -> float:
        """Return the seconds from arrival to end of a lone average request, for each token of its reply."""
        prompt = self.cost.iteration_seconds([(0, PROMPT_TOKENS)])
        decode = self.cost.decode_seconds(1, MEAN_CONTEXT)
        return prompt / OUTPUT_TOKENS + decode

    @property
    def turns_held(self) -> int:
        """Return how many requests of average context the device holds."""
        return max(min(self.device_tokens // MEAN_CONTEXT, self.turns_max), 1)

    @property
    def rate_held(self) -> float:
        """Return the rate in requests/s at which `turns_held` average requests run."""
        decodes = OUTPUT_TOKENS * self.cost.decode_seconds(self.turns_held, MEAN_CONTEXT)
        return 1 / (decodes / self.turns_held + self.cost.piece_seconds(0, PROMPT_TOKENS))


def requests_of(rate: float, num_requests: int, seed: int) -> Iterator[Arrival]:
    return islice(drawn(WORKLOAD_PRESETS[WORKLOAD], rate, math.inf, seed), num_requests)


def simulated_figures(
    system: str,
    setting: ServingSetting,
    arrivals: Iterator[Arrival],
) -> SimulationFigures:
    """Return the figures of one system under this load."""
    if system in OURS:
        return _daemon_simulator(setting, system == "streamed").run(arrivals)
    return ScheduleRun(_schedule(system, setting), setting.cost).finish(arrivals)


def streamed_run(
    setting: ServingSetting, arrivals: Iterator[Arrival]
) -> tuple[SimulationFigures, bool]:
    """Return the figures of `streamed`, and whether KV was copied. If not, the link makes no difference."""
    simulator = _daemon_simulator(setting, streams=True)
    figures, copies = simulator.run(arrivals), simulator.scheduler.cache.counters
    streamed = simulator.scheduler.counters.streamed
    return figures, bool(streamed or copies.swapped_out or copies.swapped_in)


def _daemon_simulator(setting: ServingSetting, streams: bool) -> Simulator:
    """Return a simulator of the daemon's own scheduler."""
    cost, device_pages, staging_pages = setting.cost, setting.device_tokens // CHUNK_TOKENS, 0
    if streams:
        device_pages = int(device_pages / (1 + STAGING_SHARE))
        staging_pages = int(STAGING_SHARE * device_pages * cost.layers / 2)
    cache = CacheConfig(
        device_pages, setting.host_tokens // CHUNK_TOKENS, staging_pages=staging_pages
    )
    scheduler = SchedulerConfig(
        BATCH_TOKENS_MAX,
        setting.turns_max,
        PROMPT_SECONDS,
        cost=cost.computing,
        stream="auto" if streams else "off",
        copy_seconds=cost.copy_seconds(CHUNK_TOKENS),
        group_seconds=0.0,  # simulated groups take no time
    )
    return Simulator(
        cost,
        policy_named(DEFAULT, cost.recompute(CHUNK_TOKENS), CHUNK_TOKENS),
        cache,
        scheduler,
        context_max=setting.context_max,
        keep_gaps=True,
        stateless=True,
    )


def _schedule(system: str, setting: ServingSetting) -> Schedule:
    device, context, turns = setting.device_tokens, setting.context_max, setting.turns_max
    if system == "orca":
        return OrcaSchedule(device, context, turns)
    if system == "vllm":
        return VllmSchedule(device, context, BATCH_TOKENS_MAX, turns)
    assert system == "fastserve", system
    cost = setting.cost
    return FastServeSchedule(cost, cost.copy_seconds, device, setting.host_tokens, context, turns)


class Figures(NamedTuple):
    bound: float  # ms, the longest time between two tokens of a reply
    tokens_per_second: float


def figures_of(counts: SimulationFigures) -> Figures:
    return Figures(
        1000 * (counts.gaps.quantile(1.0) or 0.0),
        counts.delivered_tokens / counts.seconds,
    )
