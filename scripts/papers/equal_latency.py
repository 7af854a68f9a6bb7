"""The throughput that a system reaches within a P90 latency, under conversations like ShareGPT's.

The Pensieve paper compares throughputs at equal P90 normalized latency (a turn's seconds over its output
tokens), but names no latency. Here it is `LIMIT_MS`, which is above the flat part of every curve. Memory is
as in the paper: 40 GB of KV and 220 GB of host memory per A100-80GB. A simulation begins in the middle of a
load that has lasted for a long time (measurements/replica.py), and stops while the load still continues.

As the rate of conversations rises, the P90 may cross the limit several times. The result of a usual search
then depends on where it starts. This search does not:

1. Rates lie on one grid, the powers of `GRID_RATIO`, the same for all systems and seeds.
2. The grid is scanned from `confirming` consecutive rates within the limit to as many beyond it.
3. The interval of the first upward crossing is halved a few times. The result is its lower end: a simulated
   rate whose P90 is within the limit. Nothing is interpolated, because the P90 rises steeply at the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

from pensieve.sim import report
from pensieve.sim.cost import HARDWARE, MODELS, CostModel
from pensieve.sim.workload import WORKLOAD_PRESETS
from scripts.measurements.replica import Load, Replica
from scripts.papers.rows import Extent

LIMIT_MS = 200.0
KV_BYTES, HOST_BYTES = 40e9, 220e9  # per GPU, in the paper
GPU = "a100-80gb"
SECONDS_PER_TOKEN = 0.04  # speed of replies before the start
GRID_RATIO = 1.25
BEGIN = 0.7  # the first scanned rate, divided by the guess
SCANNED_MAX = 40  # rates of the grid

Figures = dict[str, Any]  # of pensieve.sim.report


class Crossing(NamedTuple):
    """The highest rate below the first crossing of the limit, or the nearest that was scanned."""

    rate: float  # conversations per second
    figures: Figures  # at this rate

    @property
    def tokens_per_second(self) -> float:
        return self.figures["tokens_per_second"] or 0.0


def first_crossing(
    simulate: Callable[[float], Figures],
    limit_ms: float,
    guess: float,
    halvings: int = 2,
    confirming: int = 3,
    scanned_max: int = SCANNED_MAX,
) -> Crossing:
    """Return the first crossing. `guess` sets where the scan begins and hardly affects the result."""
    found: dict[float, Figures] = {}

    def is_within(rate: float) -> bool:
        if rate not in found:
            found[rate] = simulate(rate)
        p90 = found[rate]["normalized_p90"]
        return p90 is not None and p90 <= limit_ms

    grid = _scan(is_within, guess, confirming, scanned_max)
    upward = [(low, high) for low, high in pairwise(grid) if is_within(low) and not is_within(high)]
    if upward:
        low, high = upward[0]
        for _ in range(halvings):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if is_within(middle) else (low, middle)
    else:
        low = grid[-1] if is_within(grid[-1]) else grid[0]
    return Crossing(low, found[low])


def _scan(
    is_within: Callable[[float], bool], guess: float, confirming: int, scanned_max: int
) -> list[float]:
    """Return the grid rates that were tried, in order."""
    least = most = math.floor(math.log(BEGIN * guess) / math.log(GRID_RATIO))
    within: list[bool] = [is_within(GRID_RATIO**least)]
    while len(within) < scanned_max:
        if not all(within[:confirming]) or (all(within) and len(within) < confirming):
            least -= 1
            within.insert(0, is_within(GRID_RATIO**least))
        elif any(within[-confirming:]):
            most += 1
            within.append(is_within(GRID_RATIO**most))
        else:
            break
    return [GRID_RATIO**power for power in range(least, most + 1)]


def system(model: str, num_gpus: int = 1, **options: Any) -> Replica:
    """Return the daemon's engine with the paper's memory; `options` are fields of Replica."""
    preset = MODELS[model]
    cost = CostModel.of(preset, replace(HARDWARE[GPU], devices=num_gpus))
    tokens = {
        "device_tokens": int(num_gpus * KV_BYTES / preset.kv_bytes_per_token),
        "host_tokens": int(num_gpus * HOST_BYTES / preset.kv_bytes_per_token),
    }
    return Replica(cost, **{**tokens, "policy": "value", **options})


@dataclass
class Search:
    """Simulations of one model's systems; their results are kept, because several rows share them."""

    model: str
    extent: Extent
    load_options: dict[str, Any] = field(default_factory=dict)  # fields of Load
    _figures: dict[tuple[Replica, float, int], Figures] = field(default_factory=dict)
    _crossings: dict[tuple[Replica, int], Crossing] = field(default_factory=dict)

    @property
    def load(self) -> Load:
        # Models whose query heads share KV have more turns in the same time.
        shares = MODELS[self.model].kv_heads < MODELS[self.model].heads
        options: dict[str, Any] = {
            "seconds": self.extent.seconds / (2 if shares else 1),
            "warm_seconds": self.extent.warm_seconds,
            "seconds_per_token": SECONDS_PER_TOKEN,
            **self.load_options,
        }
        return Load(WORKLOAD_PRESETS["sharegpt"], **options)

    def simulate(self, system: Replica, rate: float, seed: int) -> Figures:
        key = system, rate, seed
        if key not in self._figures:
            load = replace(self.load, seed=seed)
            counts = system.simulator(load.window).run(load.arrivals(rate))
            self._figures[key] = report.figures(system.policy, counts)
        return self._figures[key]

    def at_limit(self, system: Replica, guess: float) -> list[Crossing]:
        """Return where each seed's P90 reaches the limit."""
        found = []
        for seed in range(self.extent.seeds):
            if (system, seed) not in self._crossings:
                self._crossings[system, seed] = first_crossing(
                    lambda rate, seed=seed: self.simulate(system, rate, seed),  # type: ignore[misc]
                    LIMIT_MS,
                    guess,
                    confirming=self.extent.confirming,
                )
            found.append(self._crossings[system, seed])
            guess = found[-1].rate
        return found

    def throughputs(self, system: Replica, guess: float) -> list[float]:
        return [each.tokens_per_second for each in self.at_limit(system, guess)]
