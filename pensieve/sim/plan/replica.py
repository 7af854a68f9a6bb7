"""One engine under a load, and whether it serves it within limits.

A rate of conversations is *carried* if, after the warm-up,

* the P99 of the time between the tokens of a reply,
* the median time to the first token, and
* the median time in the queue

are within the `Slo`.  The daemon's own scheduler and cache run, with nothing taking time until
`Window.free_until` (load.py).  Turns that still wait when the simulation stops count with the time waited
so far, so that an overloaded replica does not look well because most turns never began.  Nor do refused
turns make it look well: where more than `REFUSED_SHARE` of them are too long for the device tier, nothing
is carried.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pensieve.core.cache import CacheConfig
from pensieve.core.iteration import Iteration, Outcome
from pensieve.core.policies.registry import DEFAULT, policy_named
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.core.turn import Usage
from pensieve.engine.messages import Event, Message, TurnEnded
from pensieve.sim.cost import CHUNK_TOKENS, CostModel
from pensieve.sim.plan.load import Window
from pensieve.sim.series import Distribution
from pensieve.sim.simulator import Simulator
from pensieve.sim.trace import Arrival

QUEUE_P50_SECONDS = 2.0
REFUSED_SHARE = (
    0.01  # of the turns that begin; with more, the load is not the one that was planned for
)

Row = dict[str, Any]


@dataclass(frozen=True)
class Slo:
    """Limits of what counts as served."""

    tbt_p99_seconds: float
    ttft_p50_seconds: float
    queue_p50_seconds: float = QUEUE_P50_SECONDS

    def violations(self, row: Row) -> list[str]:
        """The limits that these figures exceed; a figure without a value exceeds none."""
        limits = (
            ("tbt_p99", self.tbt_p99_seconds, "P99 between tokens"),
            ("ttft_p50", self.ttft_p50_seconds, "median first token"),
            ("queue_p50", self.queue_p50_seconds, "median in the queue"),
        )
        return [
            f"{name} {row[key]:.3g} s"
            for key, limit, name in limits
            if row[key] is not None and row[key] > limit
        ]


class Impossible(ValueError):
    """No rate is low enough for the limits."""


@dataclass(frozen=True)
class Replica:
    """One engine: what it costs and holds."""

    cost: CostModel
    device_tokens: int
    host_tokens: int
    policy: str = DEFAULT
    token_budget: int = 2048
    turns_max: int = 256
    tbt_seconds: float = 0.0  # objective of the scheduler's; 0: none
    phases: str = "unified"
    stages: int = 1  # of a pipeline, with an iteration in each; the cost is that of one

    def simulator(self, window: Window) -> Simulator:
        return Simulator(
            self.cost,
            policy_named(self.policy, self.cost.recompute(CHUNK_TOKENS), CHUNK_TOKENS),
            CacheConfig(self.device_tokens // CHUNK_TOKENS, self.host_tokens // CHUNK_TOKENS),
            SchedulerConfig(
                self.token_budget,
                self.turns_max,
                tbt_seconds=self.tbt_seconds,
                cost=self.cost.computing,
                stages=self.stages,
            ),
            keep_gaps=True,
            count_from=window.counted_from,
            until=window.ends,
            free_until=window.free_until,
            phases=self.phases,
        )

    def check(self, slo: Slo, input_tokens: float) -> None:
        """Raises Impossible, with the reason, if a turn alone on the machine is too slow."""
        lone = self.cost.iteration_seconds([(0, 1)])
        if lone > slo.tbt_p99_seconds:
            raise Impossible(
                f"a token takes {lone * 1000:.4g} ms even without other turns, more than "
                f"{slo.tbt_p99_seconds * 1000:g} ms between tokens: no load is low enough"
            )
        left, alone = max(round(input_tokens), 1), 0.0
        while left > 0:
            alone += self.cost.iteration_seconds([(0, min(left, self.token_budget))])
            left -= self.token_budget
        if alone > slo.ttft_p50_seconds:
            raise Impossible(
                f"the first token after {round(input_tokens):,} new ones takes {alone:.3g} s even "
                f"without other turns, more than {slo.ttft_p50_seconds:g} s: no load is low enough"
            )

    def check_served(self, row: Row) -> None:
        """Raises Impossible if figures are good only because turns were refused (one may be chance)."""
        if row["refused"] > max(REFUSED_SHARE * row["asked"], 1):
            raise Impossible(
                f"{row['refused'] / row['asked']:.1%} of the turns are longer than what the device tier of "
                f"{self.device_tokens:,} tokens can hold"
            )


class Admitted:
    """An observer of the engine: how long turns were queued, and in which tier their histories were found."""

    def __init__(self, since: float) -> None:
        self.queued = Distribution()
        self.history_tokens = 0
        self.host_tokens = 0
        self.recomputed_tokens = 0
        self._since = since

    def add(self, usage: Usage) -> None:
        if usage.admitted_at is None or usage.admitted_at < self._since:
            return
        self.queued.add(usage.admitted_at - usage.submitted_at)
        known = usage.device_tokens + usage.host_tokens + usage.recomputed_tokens
        self.history_tokens += known
        self.host_tokens += usage.host_tokens
        self.recomputed_tokens += usage.recomputed_tokens

    def received(self, message: Message, now: float) -> None:
        return

    def planned(self, iteration: Iteration | None, now: float) -> None:
        return

    def committed(self, iteration: Iteration, outcome: Outcome, now: float) -> None:
        return

    def published(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, TurnEnded):
                self.add(event.usage)


def run_replica(replica: Replica, arrivals: Iterable[Arrival], window: Window) -> Row:
    """The figures of one replica under these arrivals."""
    simulator = replica.simulator(window)
    admitted = Admitted(window.counted_from)
    simulator.engine.observe(admitted)
    simulator.run(arrivals)
    return row_of([simulator], admitted, window)


def row_of(simulators: Sequence[Simulator], admitted: Admitted, window: Window) -> Row:
    """The figures of engines that share their counts; those of one engine, as a rule."""
    counts = simulators[0].counts
    for simulator in simulators:
        now = simulator.clock.now()
        for turn in simulator.scheduler.turns():  # those that wait count as if they ended now
            usage = turn.usage
            admitted.add(usage)
            if usage.first_token_at is None and usage.submitted_at >= window.counted_from:
                counts.first_tokens.add(now - usage.submitted_at)
            if usage.admitted_at is None:
                admitted.queued.add(now - usage.submitted_at)
    hosts = [simulator.scheduler.cache.host for simulator in simulators]
    history = admitted.history_tokens
    return {
        "turns_per_second": counts.turns / window.seconds,
        "tokens_per_second": counts.delivered_tokens / window.seconds,
        "tbt_p99": counts.gaps.quantile(0.99),
        "ttft_p50": counts.first_tokens.quantile(0.5),
        "queue_p50": admitted.queued.quantile(0.5),
        "seconds_per_token": counts.latencies.quantile(0.5),
        "history_tokens": history,
        "recomputed_tokens": admitted.recomputed_tokens,
        "recomputed_share": admitted.recomputed_tokens / history if history else 0.0,
        "host_share": admitted.host_tokens / history if history else 0.0,
        "host_full": all(
            host.num_pages > 0 and host.num_empty < host.num_pages * 0.02 for host in hosts
        ),
        "asked": counts.begun,
        "refused": counts.refused,
    }
