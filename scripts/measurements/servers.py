"""Simulate one load through the daemon's own engine, and through the schedules of other servers.

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

import argparse
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import NamedTuple

from pensieve.core.cache import CacheConfig
from pensieve.core.policies.registry import DEFAULT, policy_named
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.errors import InvalidArgument
from pensieve.sim.cost import CHUNK_TOKENS, CostModel
from pensieve.sim.simulator import SimulationFigures, Simulator
from pensieve.sim.trace import Arrival
from pensieve.sim.workload import HABITS, drawn
from scripts.measurements.machine_options import Progress, add_machine, machine_of
from scripts.measurements.schedules import (
    FastServeSchedule,
    OrcaSchedule,
    Schedule,
    ScheduleRun,
    VllmSchedule,
)

WORKLOAD = "first-rounds"
BATCH_TOKENS_MAX = 2048  # of an iteration
PROMPT_SECONDS = 0.05  # a daemon's default
PROMPT_TOKENS, OUTPUT_TOKENS = 161, 338  # means of it
MEAN_CONTEXT = 465  # of a running request, over time: long replies take more of it
OURS = ("resident", "streamed")
STAGING_SHARE = 0.1  # of the device tier, that the arenas take of its memory
OTHERS = ("vllm", "orca", "fastserve")
SYSTEMS = (*OURS, *OTHERS)
FACTORS = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.5, 2.5)  # of the rate that memory carries
LIMIT_FACTOR = 1.5  # of an iteration of as many as the device holds
REQUESTS_MIN, REQUESTS_MAX = 500, 3000  # of a run, where nobody says


@dataclass(frozen=True)
class ServingSetting:
    """What all systems have."""

    cost: CostModel
    device_tokens: int
    host_tokens: int
    turns_max: int = BATCH_TOKENS_MAX
    context_max: int = HABITS[WORKLOAD].context_max

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

    def rates(self) -> list[float]:
        """Some around it."""
        return [float(f"{factor * self.rate_held:.2g}") for factor in FACTORS]


def requests_of(rate: float, num_requests: int, seed: int) -> Iterator[Arrival]:
    return islice(drawn(HABITS[WORKLOAD], rate, math.inf, seed), num_requests)


def counts_of(
    system: str,
    setting: ServingSetting,
    arrivals: Iterator[Arrival],
) -> SimulationFigures:
    """The figures of one system under that load."""
    if system in OURS:
        return _ours(setting, system == "streamed").run(arrivals)
    return ScheduleRun(_schedule(system, setting), setting.cost).finish(arrivals)


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
        BATCH_TOKENS_MAX,
        setting.turns_max,
        PROMPT_SECONDS,
        cost=cost.computing,
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
        return VllmSchedule(device, context, BATCH_TOKENS_MAX, turns)
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


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="scripts/measure servers", description=__doc__)
    add_machine(parser)
    parser.add_argument(
        "--rate", type=float, action="append", help="requests a second (default: some)"
    )
    parser.add_argument("--seeds", type=int, default=3, help="(default: 3)")
    parser.add_argument("--requests", type=int, help="of each run")
    parser.add_argument(
        "--link", type=float, help="GB/s of all links between devices and host, each way"
    )
    arguments = parser.parse_args(given)
    machine = machine_of(arguments)
    cost = machine.cost
    if arguments.link is not None:
        cost = replace(cost, link_bytes_per_second=1e9 * arguments.link)
    setting = ServingSetting(cost, machine.device_tokens, machine.host_tokens)
    if setting.device_tokens < 2 * setting.context_max:
        raise InvalidArgument("device-tokens", "schedules that reserve KV need two whole contexts")
    rates = sorted(arguments.rate or setting.rates())
    num_requests = arguments.requests or setting.num_requests
    limit = 1000 * setting.limit_seconds
    print(
        f"{cost.source}; link {cost.link_bytes_per_second / 1e9:.0f} GB/s; {setting.device_tokens:,} tokens "
        f"of KV on the device; {num_requests:,} requests a run; alone, a request takes "
        f"{1000 * setting.unloaded_seconds:.1f} ms/token; the device holds {setting.turns_held} at once"
    )
    rows: dict[tuple[str, float], list[Figures]] = {}  # by seed
    progress = Progress()
    for rate in rates:
        for system in SYSTEMS:
            progress(f"{rate:g} requests/s, {system}")
            rows[system, rate] = [
                figures_of(counts_of(system, setting, requests_of(rate, num_requests, seed)))
                for seed in range(arguments.seeds)
            ]
    print("\n".join(tables(rows, limit)))


class Figures(NamedTuple):
    normalized: float  # ms a token
    bound: float  # ms, the longest time between two tokens of a reply
    tokens_per_second: float


def figures_of(counts: SimulationFigures) -> Figures:
    return Figures(
        1000 * counts.latencies.total / counts.latencies.count,
        1000 * (counts.gaps.quantile(1.0) or 0.0),
        counts.delivered_tokens / counts.seconds,
    )


def tables(rows: dict[tuple[str, float], list[Figures]], limit: float) -> Iterator[str]:
    """Medians over the seeds, with the least and the most."""
    systems, rates = (list(dict.fromkeys(each)) for each in zip(*rows, strict=True))
    for index, title in enumerate(
        ("normalized latency, ms/token", "latency bound, ms", "tokens/s")
    ):
        yield f"{title:<30}" + "".join(f"{system:>24}" for system in systems)
        for rate in rates:
            cells = (spread([each[index] for each in rows[system, rate]]) for system in systems)
            yield f"{rate:>30g}" + "".join(f"{cell:>24}" for cell in cells)
    carried = (
        spread(
            [
                sustained([(rate, rows[system, rate][seed].normalized) for rate in rates], limit)
                for seed in range(len(rows[system, rates[0]]))
            ]
        )
        for system in systems
    )
    yield f"carried within {limit:.3g} ms/token".ljust(30) + "".join(
        f"{cell:>24}" for cell in carried
    )


def spread(values: Sequence[float]) -> str:
    shown = [f"{each:.3g}" for each in (statistics.median(values), min(values), max(values))]
    return shown[0] if len(set(shown)) == 1 else "{} ({} to {})".format(*shown)


if __name__ == "__main__":
    main()
