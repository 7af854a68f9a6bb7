"""One system under one kind of load, and the load at which it is as slow as another.

A `Scenario` is everything that a simulation of drawn conversations needs but their rate.  What is counted
begins when the load has settled, and the clock stops while it still goes on, so a throughput is one under
load.

`at_latency` finds where the P90 of normalized latency (a turn's seconds over its output tokens) reaches a
limit: it raises or lowers the rate until the limit lies between two, narrows that down, and interpolates the
rest.  The same conversations arrive at each rate, only faster, so a curve is smooth enough for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from pensieve.core.cache import CacheConfig
from pensieve.core.retention import policy_named
from pensieve.core.scheduler import SchedulerConfig
from pensieve.sim import report
from pensieve.sim.model import CostModel
from pensieve.sim.simulator import Counts, Simulator
from pensieve.sim.trace import Habits, drawn

CHUNK_TOKENS = 32
RATE_MAX = 1e4

Row = dict[str, Any]
Told = Callable[[float, Counts], None]


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
    warm_seconds: float = 600.0
    seconds: float = 600.0  # of what is counted
    seed: int = 0
    keep_gaps: bool = False

    def simulator(self) -> Simulator:
        recompute = self.cost.recompute(CHUNK_TOKENS)
        return Simulator(
            self.cost,
            policy_named(self.policy, recompute, CHUNK_TOKENS),
            CacheConfig(self.device_tokens // CHUNK_TOKENS, self.host_tokens // CHUNK_TOKENS),
            SchedulerConfig(self.token_budget, self.turns_max),
            context_max=self.habits.context_max + 1,
            keep_gaps=self.keep_gaps,
            count_from=self.warm_seconds,
            until=self.warm_seconds + self.seconds,
            stateless=self.stateless,
            phases=self.phases,
        )

    def play(self, conversations_per_second: float, told: Told | None = None) -> Row:
        """The figures of one rate."""
        visits = drawn(
            self.habits,
            conversations_per_second,
            self.warm_seconds + self.seconds,
            self.seed,
            reaction_seconds=self.reaction_seconds,
            turns_min=self.turns_min,
        )
        simulator = self.simulator()
        row = report.figures(self.policy, simulator.run(visits, told))
        row["rate"] = conversations_per_second
        return row


class AtLatency(NamedTuple):
    """Where a system's P90 reaches a limit."""

    rate: float  # conversations per second
    tokens_per_second: float
    rows: tuple[Row, ...]  # what was played, by rate


def at_latency(
    play: Callable[[float], Row], limit_ms: float, rate: float, narrowings: int = 3
) -> AtLatency:
    """ValueError if the limit is not reached however high the rate is, or not kept however low."""
    rows: dict[float, Row] = {}

    def p90(rate: float) -> float:
        if rate not in rows:
            rows[rate] = play(rate)
        found = rows[rate]["normalized_p90"]
        return math.inf if found is None else float(found)

    low = high = rate
    while p90(low) > limit_ms:
        low /= 2
        if low < 1 / RATE_MAX:
            raise ValueError(f"{limit_ms:g} ms per token are exceeded at every rate")
    while p90(high) <= limit_ms:
        low, high = high, high * 2
        if high > RATE_MAX:
            raise ValueError(f"{limit_ms:g} ms per token are kept at every rate")
    high = min((each for each in rows if each > low), default=high)
    for _ in range(narrowings):
        middle = math.sqrt(low * high)
        if p90(middle) <= limit_ms:
            low = middle
        else:
            high = middle
    share = 1.0
    if math.isfinite(p90(high)) and p90(high) > p90(low) > 0:
        share = math.log(limit_ms / p90(low)) / math.log(p90(high) / p90(low))

    def between(key: str) -> float:
        return float(rows[low][key] + share * (rows[high][key] - rows[low][key]))

    ordered = tuple(rows[each] for each in sorted(rows))
    return AtLatency(between("rate"), between("tokens_per_second"), ordered)
