"""Runs requests by a schedule, iteration by iteration, on a virtual clock.

These are servers of requests: no conversation, no cache between requests.  A schedule decides who is in the
next iteration, and holds KV for them.  Whoever is in it computes all that it lacks (its prompt, whole; or
what was lost, with the tokens that it has already written) and writes one token: iterations are the ones of
these servers, without prompts in pieces.

    arrive → [waits] → plan, plan, … (one token each) → the last of its tokens → gone

An iteration takes what the cost model says of its slices, in one pass, as those of the daemon's own scheduler
do (executor.py), and the figures are the same `Counts`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pensieve.core.iteration_cost import IterationCost
from pensieve.sim.clock import VirtualClock
from pensieve.sim.simulator import STEPS_PER_REPORT, Counts
from pensieve.sim.trace import Arrival


@dataclass(eq=False, slots=True)
class Request:
    number: int  # in the order in which they came
    arrived: float
    prompt_tokens: int
    output_tokens: int  # it ends with so many; no schedule looks at it
    num_outputs: int = 0  # that it has
    computed: int = 0  # positions whose KV is there
    last_token: float | None = None  # when it came

    @property
    def length(self) -> int:
        """With its next iteration, KV of so many positions is there."""
        return self.prompt_tokens + self.num_outputs

    @property
    def has_ended(self) -> bool:
        return self.num_outputs == self.output_tokens


class Schedule(Protocol):
    def arrive(self, request: Request) -> None: ...

    def plan(self, now: float) -> Sequence[Request]:
        """Who is in the next iteration; nobody: all wait, or there are none."""
        ...

    def ran(self, requests: Sequence[Request], begun: float, ended: float) -> None:
        """Their tokens are there; who has ended leaves."""
        ...

    def wakes_at(self) -> float:
        """When it may plan more than now although nobody arrives; inf: never."""
        ...

    def check(self) -> None:
        """That it holds no more KV than there is room for."""
        ...


class ScheduleRun:
    """One schedule and its requests, from the first arrival to the last token."""

    def __init__(self, schedule: Schedule, cost: IterationCost) -> None:
        self.schedule = schedule
        self.clock = VirtualClock()
        self.counts = Counts()
        self._cost = cost

    def finish(
        self,
        arrivals: Iterable[Arrival],
        progress: Callable[[float, Counts], None] | None = None,
    ) -> Counts:
        source = iter(arrivals)
        ahead = next(source, None)
        clock, schedule = self.clock, self.schedule
        while True:
            while ahead is not None and (ahead.at or 0.0) <= clock.now():
                self._arrive(ahead)
                ahead = next(source, None)
            batch = schedule.plan(clock.now())
            if batch:
                self._run(batch)
                if progress is not None and self.counts.iterations % STEPS_PER_REPORT == 0:
                    progress(clock.now(), self.counts)
                continue
            moment = min((ahead.at or 0.0) if ahead is not None else math.inf, schedule.wakes_at())
            if moment == math.inf:
                assert self.counts.turns == self.counts.begun, "somebody waits for nothing"
                return self.counts
            assert moment >= clock.now(), "what it waits for has happened"
            clock.advance_to(moment)

    def _arrive(self, arrival: Arrival) -> None:
        self.counts.begun += 1
        at = arrival.at or 0.0
        self.schedule.arrive(
            Request(self.counts.begun, at, arrival.input_tokens, arrival.output_tokens)
        )

    def _run(self, batch: Sequence[Request]) -> None:
        begun = self.clock.now()
        self.clock.advance(
            self._cost.iteration_seconds((each.computed, each.length) for each in batch)
        )
        now, counts = self.clock.now(), self.counts
        gaps: dict[float, int] = {}
        for request in batch:
            request.computed = request.length
            request.num_outputs += 1
            if request.last_token is None:
                counts.first_tokens.add(now - request.arrived)
            else:
                gap = now - request.last_token
                gaps[gap] = gaps.get(gap, 0) + 1
            request.last_token = now
            if request.has_ended:
                counts.turns += 1
                counts.input_tokens += request.prompt_tokens
                counts.output_tokens += request.num_outputs
                counts.latencies.add((now - request.arrived) / request.num_outputs)
        for gap, times in gaps.items():
            counts.gaps.add(gap, times)
        counts.delivered_tokens += len(batch)
        counts.iterations += 1
        counts.seconds = now
        self.schedule.ran(batch, begun, now)
