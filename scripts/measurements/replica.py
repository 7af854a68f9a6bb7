"""Simulate one engine under a load that has lasted for long: the daemon's scheduler on a virtual clock.

A short simulation must not begin with an empty system. `steady_load` assumes that the load has lasted for a
long time: every conversation that began earlier and still has turns to come is in progress. Its log arrives
in one turn, at the time when its last turn ended. Until `Window.free_until` nothing takes time, so these logs
are in the cache when the actual simulation begins.

Turns that still wait when the simulation stops count with the time waited so far. Without this, an overloaded
replica would look good, because most of its turns never began.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from pensieve.bench.capacity_search import Impossible, Row, Slo
from pensieve.core.cache import CacheConfig
from pensieve.core.iteration import Iteration, Outcome
from pensieve.core.policies.registry import DEFAULT, policy_named
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.core.turn import Usage
from pensieve.engine.messages import EngineEvent, EngineMessage, TurnEnded
from pensieve.sim.cost import CHUNK_TOKENS, CostModel
from pensieve.sim.series import Distribution
from pensieve.sim.simulator import Simulator
from pensieve.sim.trace import Arrival
from pensieve.sim.workload import WorkloadPreset, drawn

LIFETIMES_BEFORE = 6.0  # time that the load has lasted, in mean durations of a conversation
REACTION_TIMES_FREE = 5.0  # mean reaction times until `free_until`; longer pauses are cut
REFUSED_SHARE = 0.01  # allowed part of refused turns; more would change the load


class Window(NamedTuple):
    """The times of a simulation."""

    free_until: float  # nothing takes time before
    counted_from: float  # earlier turns are simulated and not counted
    ends: float

    @property
    def seconds(self) -> float:
        return self.ends - self.counted_from


@dataclass(frozen=True)
class Load:
    """Random conversations with the given preset, at an adjustable rate."""

    preset: WorkloadPreset
    reaction_seconds: float | None = None
    seconds: float | None = None  # counted time; None: two reaction times, at least a minute
    warm_seconds: float | None = None  # not counted; None: half a reaction time, at least 30
    turns_min: int = 1  # shorter conversations are left out
    seed: int = 0
    seconds_per_token: float = 0.03  # speed of replies before the start

    @property
    def reaction(self) -> float:
        given = self.reaction_seconds
        return self.preset.reaction_seconds if given is None else given

    @property
    def mean_seconds(self) -> float:
        """Return the mean duration of a conversation."""
        reply = self.seconds_per_token * self.preset.output_tokens
        return self.preset.turns_from(self.turns_min) * (self.reaction + reply)

    @property
    def window(self) -> Window:
        free_until = REACTION_TIMES_FREE * self.reaction
        warm = max(self.reaction / 2, 30.0) if self.warm_seconds is None else self.warm_seconds
        seconds = max(2 * self.reaction, 60.0) if self.seconds is None else self.seconds
        return Window(free_until, free_until + warm, free_until + warm + seconds)

    def arrivals(self, rate: float) -> Iterator[Arrival]:
        """Yield the arrivals in the order of their times."""
        free_until, _, ends = self.window
        before = LIFETIMES_BEFORE * self.mean_seconds
        arrivals = drawn(
            self.preset,
            rate,
            before + ends - free_until,
            self.seed,
            reaction_seconds=self.reaction,
            turns_min=self.turns_min,
        )
        return steady_load(arrivals, before, free_until, self.seconds_per_token)


def steady_load(
    arrivals: Iterable[Arrival], before: float, free_until: float, seconds_per_token: float
) -> Iterator[Arrival]:
    """Yield a load that has lasted for `before` seconds at `free_until`.

    `arrivals` are whole conversations, one after another, in the order of their first turns.
    """
    pending: list[tuple[float, int, list[Arrival]]] = []  # time, number, arrivals of that time
    groups = groupby(arrivals, key=lambda arrival: arrival.conversation)
    for number, (name, group) in enumerate(groups):
        turns = list(group)
        begin, length, ended = (turns[0].at or 0.0) - before + free_until, 0, 0.0
        while pending and begin >= free_until and pending[0][0] <= begin:
            yield from heapq.heappop(pending)[2]
        while turns and begin < free_until:
            turn = turns.pop(0)
            length += turn.input_tokens + turn.output_tokens
            ended = begin + seconds_per_token * turn.output_tokens
            begin = ended + (turns[0].after if turns else 0.0)
        if turns and length:
            log_at = min(max(ended, 0.0), math.nextafter(free_until, 0.0))
            heapq.heappush(pending, (log_at, 2 * number, [Arrival(name, log_at, length - 1, 1)]))
        if turns:
            rest = [replace(turns[0], at=begin, after=0.0), *turns[1:]]
            heapq.heappush(pending, (begin, 2 * number + 1, rest))
    while pending:
        yield from heapq.heappop(pending)[2]


@dataclass(frozen=True)
class Replica:
    """One engine: its costs, memory and scheduler settings."""

    cost: CostModel
    device_tokens: int
    host_tokens: int
    policy: str = DEFAULT
    token_budget: int = 2048
    turns_max: int = 256
    tbt_seconds: float = 0.0  # objective of the scheduler; 0: none
    phases: str = "unified"
    stages: int = 1  # pipeline stages; `cost` is the cost of one stage
    first_come: bool = False  # prompts in the order of arrival
    stateless: bool = False  # each turn computes its whole history again

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
                first_come=self.first_come,
            ),
            keep_gaps=True,
            count_from=window.counted_from,
            until=window.ends,
            free_until=window.free_until,
            stateless=self.stateless,
            phases=self.phases,
        )

    def check(self, slo: Slo, input_tokens: float) -> None:
        """Raise Impossible with the reason if even a lone turn is too slow."""
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
        """Raise Impossible if so many turns were refused that the figures mislead.

        A single refusal may be chance.
        """
        if row["refused"] > max(REFUSED_SHARE * row["asked"], 1):
            raise Impossible(
                f"{row['refused'] / row['asked']:.1%} of the turns are longer than the device tier of "
                f"{self.device_tokens:,} tokens can hold"
            )


class AdmissionObserver:
    """An engine observer: the queueing times of turns, and the tiers where their histories were found."""

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

    def received(self, message: EngineMessage, now: float) -> None:
        return

    def planned(self, iteration: Iteration | None, now: float) -> None:
        return

    def committed(self, iteration: Iteration, outcome: Outcome, now: float) -> None:
        return

    def published(self, events: Sequence[EngineEvent]) -> None:
        for event in events:
            if isinstance(event, TurnEnded):
                self.add(event.usage)


def run_replica(replica: Replica, arrivals: Iterable[Arrival], window: Window) -> Row:
    """Return the figures of one replica under these arrivals."""
    simulator = replica.simulator(window)
    admitted = AdmissionObserver(window.counted_from)
    simulator.engine.observe(admitted)
    simulator.run(arrivals)
    return row_of([simulator], admitted, window)


def row_of(simulators: Sequence[Simulator], admitted: AdmissionObserver, window: Window) -> Row:
    """Return the figures of engines that share their counts, usually of one engine."""
    counts = simulators[0].counts
    for simulator in simulators:
        now = simulator.clock.now()
        for turn in simulator.scheduler.turns():  # waiting turns count as if they ended now
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
        "asked": counts.num_submitted,
        "refused": counts.refused,
    }
