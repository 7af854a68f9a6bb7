"""One system under one kind of load, and the load at which it is as slow as another.

A `Scenario` is everything that a simulation of drawn conversations needs but their rate.  It begins in a load
that has gone on for long (load.py: in an empty house it takes an hour until the late turns of long
conversations are as many as they will be), settles for `warm_seconds`, and the clock stops while it still
goes on.

`at_latency` finds where the P90 of normalized latency (a turn's seconds over its output tokens) reaches a
limit: it raises or lowers the rate until the limit lies between two, narrows that down, and interpolates the
rest.  The same conversations arrive at each rate, only faster, so a curve is smooth enough for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from pensieve.core.cache import CacheConfig
from pensieve.core.policies.registry import policy_named
from pensieve.core.scheduler import SchedulerConfig
from pensieve.sim import report
from pensieve.sim.cost import CostModel
from pensieve.sim.plan.load import LIVES, RESTS, lived_in
from pensieve.sim.simulator import Counts, Simulator
from pensieve.sim.trace import Habits, Visit, drawn

CHUNK_TOKENS = 32
STEP = 1.5  # from rate to rate, until the limit lies between two
SECONDS_PER_TOKEN = 0.04  # of a reply before the clock begins: only to tell who is in the house

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
    warm_seconds: float = 100.0  # of what is played in real time and not counted
    seconds: float = 300.0  # of what is counted
    seed: int = 0
    keep_gaps: bool = False
    lived_in: bool = True  # False: the house is empty at first

    @property
    def opens(self) -> float:
        """Before, whoever is in the house says their log, which takes no time."""
        if not self.lived_in or self.habits.turns_mean <= 1:
            return 0.0
        return RESTS * self._reaction

    @property
    def _reaction(self) -> float:
        given = self.reaction_seconds
        return self.habits.reaction_seconds if given is None else given

    def simulator(self) -> Simulator:
        counts = self.opens + self.warm_seconds
        return Simulator(
            self.cost,
            policy_named(self.policy, self.cost.recompute(CHUNK_TOKENS), CHUNK_TOKENS),
            CacheConfig(self.device_tokens // CHUNK_TOKENS, self.host_tokens // CHUNK_TOKENS),
            SchedulerConfig(self.token_budget, self.turns_max),
            context_max=self.habits.context_max + 1,
            keep_gaps=self.keep_gaps,
            count_from=counts,
            until=counts + self.seconds,
            opens=self.opens,
            stateless=self.stateless,
            phases=self.phases,
        )

    def play(self, conversations_per_second: float, told: Told | None = None) -> Row:
        """The figures of one rate."""
        counts = self.simulator().run(self._visits(conversations_per_second), told)
        return {**report.figures(self.policy, counts), "rate": conversations_per_second}

    def _visits(self, rate: float) -> Iterator[Visit]:
        before = 0.0
        if self.opens:
            life = self._reaction + SECONDS_PER_TOKEN * self.habits.output_tokens
            before = LIVES * self.habits.turns_from(self.turns_min) * life
        visits = drawn(
            self.habits,
            rate,
            before + self.warm_seconds + self.seconds,
            self.seed,
            reaction_seconds=self._reaction,
            turns_min=self.turns_min,
        )
        if not self.opens:
            return visits
        return lived_in(visits, before, self.opens, SECONDS_PER_TOKEN)


class AtLatency(NamedTuple):
    """Where a system's P90 reaches a limit."""

    rate: float  # conversations per second
    tokens_per_second: float
    rows: tuple[Row, ...]  # what was played, by rate
    reached: bool  # False: the limit is beyond what was played, and this is the end nearer to it


def at_latency(
    play: Callable[[float], Row],
    limit_ms: float,
    rate: float,
    narrowings: int = 3,
    steps_max: int = 24,
) -> AtLatency:
    """The search begins at `rate`."""
    rows: dict[float, Row] = {}

    def p90(rate: float) -> float:
        if rate not in rows:
            rows[rate] = play(rate)
        found = rows[rate]["normalized_p90"]
        return math.inf if found is None else float(found)

    low = high = rate
    for _ in range(steps_max):
        if p90(low) > limit_ms:
            low, high = low / STEP, low
        elif p90(high) <= limit_ms:
            low, high = high, high * STEP
        else:
            break
    reached = p90(low) <= limit_ms < p90(high)
    for _ in range(narrowings if reached else 0):
        middle = math.sqrt(low * high)
        if p90(middle) <= limit_ms:
            low = middle
        else:
            high = middle
    share = 0.0 if reached or p90(low) > limit_ms else 1.0
    if reached and math.isfinite(p90(high)) and p90(low) > 0:
        share = math.log(limit_ms / p90(low)) / math.log(p90(high) / p90(low))

    def between(key: str) -> float:
        first, last = rows[low][key] or 0.0, rows[high][key] or 0.0
        return float(first + share * (last - first))

    ordered = tuple(rows[each] for each in sorted(rows))
    return AtLatency(between("rate"), between("tokens_per_second"), ordered, reached)
