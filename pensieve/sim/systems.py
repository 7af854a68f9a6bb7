"""One load through the daemon's own engine, and through the schedules of other servers.

The load is single requests that come at random (the first rounds of conversations), as in the evaluation of
FluidInfer, whose figures these are in shape: the normalized latency over the rate (the mean over requests of
the time from arrival to end, over the tokens of the reply), and the latency bound (the longest time between
two tokens of one reply).  All requests are served to their end and counted.

    resident    the daemon's own scheduler, all running turns on the device
    streamed    the same, which streams turns that the device has no room for (core/streaming.py)
    vllm        paged KV, prompts first, preemption by recomputing
    orca        KV reserved for the longest context, first come first served
    fastserve   a multi-level feedback queue; KV reserved, and swapped

They have the same costs, clock and tiers, and the same limit on how many run at once.  The daemon's is told
to forget a conversation when its turn has ended, so that it has no cache that the others lack.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from pensieve.core.cache import CacheConfig
from pensieve.core.policies.registry import DEFAULT, policy_named
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.sim.cost import CHUNK_TOKENS, CostModel
from pensieve.sim.schedules.fastserve import FastServeSchedule
from pensieve.sim.schedules.orca import OrcaSchedule
from pensieve.sim.schedules.serving import Schedule, ScheduleRun
from pensieve.sim.schedules.vllm import VllmSchedule
from pensieve.sim.simulator import Counts, Simulator
from pensieve.sim.trace import Arrival
from pensieve.sim.workload import HABITS, drawn

WORKLOAD = "first-rounds"
PROMPT_TOKENS, OUTPUT_TOKENS = 161, 338  # means of it
MEAN_CONTEXT = 465  # of a running request, over time: long replies take more of it
OURS = ("resident", "streamed")
STAGING_SHARE = 0.1  # of the device tier, that the arenas take of its memory
OTHERS = ("vllm", "orca", "fastserve")
SYSTEMS = (*OURS, *OTHERS)
FACTORS = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.5, 2.5)  # of the rate that memory carries
LIMIT_FACTOR = 1.5  # of an iteration of as many as the device holds
REQUESTS_MIN, REQUESTS_MAX = 500, 3000  # of a run, where nobody says
Progress = Callable[[float, Counts], None]


@dataclass(frozen=True)
class ServingSetting:
    """What all systems have."""

    cost: CostModel
    device_tokens: int
    host_tokens: int
    turns_max: int
    context_max: int = HABITS[WORKLOAD].context_max
    # Of the daemon's scheduler alone:
    batch_tokens_max: int = 2048
    prompt_seconds: float = 0.0
    tbt_seconds: float = 0.0

    @property
    def unloaded_seconds(self) -> float:
        """The normalized latency of a mean request that is alone."""
        prompt = self.cost.iteration_seconds([(0, PROMPT_TOKENS)])
        decode = self.cost.decode_seconds(1, MEAN_CONTEXT)
        return prompt / OUTPUT_TOKENS + decode

    @property
    def turns_held(self) -> int:
        """How many requests the device holds, with contexts of the mean length."""
        return max(min(self.device_tokens // MEAN_CONTEXT, self.turns_max), 1)

    @property
    def num_requests(self) -> int:
        """Of a run, so that the device is filled several times, as far as that takes not too long.

        In a shorter one a queue cannot become long, and every rate seems to be carried.
        """
        return min(max(10 * self.turns_held, REQUESTS_MIN), REQUESTS_MAX)

    @property
    def limit_seconds(self) -> float:
        """A normalized latency at which memory is full and not much waits."""
        return LIMIT_FACTOR * self.cost.decode_seconds(self.turns_held, MEAN_CONTEXT)

    @property
    def rate_held(self) -> float:
        """Requests a second that it carries with so many, were they all mean ones."""
        decodes = OUTPUT_TOKENS * self.cost.decode_seconds(self.turns_held, MEAN_CONTEXT)
        return 1 / (decodes / self.turns_held + self.cost.piece_seconds(0, PROMPT_TOKENS))

    @property
    def turns_linked(self) -> float:
        """How many more have KV that the link brings while those that are held generate a token each.

        So many could be streamed before an iteration takes longer for its copies.
        """
        iteration = self.cost.decode_seconds(self.turns_held, MEAN_CONTEXT)
        copying = self.cost.copy_seconds(MEAN_CONTEXT)
        return iteration / copying if copying else math.inf

    def rates(self) -> list[float]:
        """Some around it."""
        return [float(f"{factor * self.rate_held:.2g}") for factor in FACTORS]


def requests_of(rate: float, num_requests: int, seed: int) -> Iterator[Arrival]:
    return islice(drawn(HABITS[WORKLOAD], rate, math.inf, seed), num_requests)


def counts_of(
    system: str,
    setting: ServingSetting,
    arrivals: Iterator[Arrival],
    progress: Progress | None = None,
) -> Counts:
    """The figures of one system under that load."""
    if system in OURS:
        return _ours(setting, system == "streamed").run(arrivals, progress)
    return ScheduleRun(_schedule(system, setting), setting.cost).finish(arrivals, progress)


def _ours(setting: ServingSetting, streams: bool) -> Simulator:
    """The daemon's own."""
    cost, device_pages, staging_pages = setting.cost, setting.device_tokens // CHUNK_TOKENS, 0
    if streams:
        device_pages = int(device_pages / (1 + STAGING_SHARE))
        staging_pages = int(STAGING_SHARE * device_pages * cost.layers / 2)
    cache = CacheConfig(
        device_pages, setting.host_tokens // CHUNK_TOKENS, staging_pages=staging_pages
    )
    scheduler = SchedulerConfig(
        setting.batch_tokens_max,
        setting.turns_max,
        setting.prompt_seconds,
        setting.tbt_seconds,
        cost.computing,
        stream="auto" if streams else "off",
        copy_seconds=cost.copy_seconds(CHUNK_TOKENS),
        group_seconds=0.0,  # simulated groups take none
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
        return VllmSchedule(device, context, setting.batch_tokens_max, turns)
    assert system == "fastserve", system
    cost = setting.cost
    return FastServeSchedule(cost, cost.copy_seconds, device, setting.host_tokens, context, turns)


def sustained(points: Sequence[tuple[float, float]], limit: float) -> float:
    """The highest rate whose latency is at most the limit, of (rate, latency) by rate.

    On the straight line between two; 0: no rate's is, inf: every rate's is.
    """
    if points[0][1] > limit:
        return 0.0
    for (low, low_value), (high, high_value) in pairwise(points):
        if high_value > limit:
            return low + (high - low) * (limit - low_value) / (high_value - low_value)
    return math.inf
