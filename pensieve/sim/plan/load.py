"""The load of a simulation, as a rate that can be set: conversations that begin per second.

A simulation for planning is short, so it must not begin with an empty system.  `steady_load` supposes that
the load has gone on for a long time: every conversation that began before the simulation, and still has
turns to come, is in progress.  Its log so far arrives in one turn, at the time when its last turn ended.
Until `Window.free_until` nothing takes time, so these logs are in the cache when the simulation proper
begins.

A recorded trace has a rate of its own.  For a lower rate some of its conversations are left out, chosen by
name; for a higher rate several copies of it run at once, each of other conversations and up to half a minute
later, the last copy perhaps in part.  So pauses stay what they were, which they would not if time were
compressed.  Figures count in the second half of the trace.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import mean, median
from typing import NamedTuple, Protocol

from pensieve.sim.plan.routing import APART_SECONDS, Families, replica_of
from pensieve.sim.trace import Arrival
from pensieve.sim.workload import Habits, drawn

LIFETIMES_BEFORE = 6.0  # mean durations of a conversation that the load has gone on for
REACTION_TIMES_FREE = 5.0  # mean reaction times until `free_until`; longer pauses are cut to that
PARTS = 1 << 16  # of the names, to leave some conversations out


class Window(NamedTuple):
    """Times of a simulation."""

    free_until: float  # before it nothing takes time
    counted_from: float  # turns that begin before it are simulated and do not count
    ends: float

    @property
    def seconds(self) -> float:
        return self.ends - self.counted_from


class Typical(NamedTuple):
    """Means of a conversation and its turns: enough for a first guess."""

    turns: float
    input_tokens: float
    output_tokens: float


class Load(Protocol):
    @property
    def typical(self) -> Typical: ...

    def arrivals(self, rate: float) -> Iterator[Arrival]:
        """In the order of their times."""

    def window(self, rate: float) -> Window: ...

    def conversations_at_once(self, rate: float) -> float:
        """How many conversations are in progress at a time, about."""

    def description(self, rate: float) -> str:
        """How that rate is made, for people."""


@dataclass(frozen=True)
class Drawn:
    """Conversations drawn from habits."""

    habits: Habits
    reaction_seconds: float | None = None
    seconds: float | None = None  # that count; None: two reaction times, a minute or more
    seed: int = 0
    seconds_per_token: float = 0.03  # of a reply: decides which conversations are in progress

    @property
    def _reaction(self) -> float:
        given = self.reaction_seconds
        return self.habits.reaction_seconds if given is None else given

    @property
    def _mean_seconds(self) -> float:
        reply = self.seconds_per_token * self.habits.output_tokens
        return self.habits.turns_mean * (self._reaction + reply)

    def window(self, rate: float) -> Window:
        free_until = REACTION_TIMES_FREE * self._reaction
        counted_from = free_until + max(self._reaction / 2, 30.0)
        seconds = max(2 * self._reaction, 60.0) if self.seconds is None else self.seconds
        return Window(free_until, counted_from, counted_from + seconds)

    def conversations_at_once(self, rate: float) -> float:
        return rate * self._mean_seconds

    def description(self, rate: float) -> str:
        return "drawn"

    @property
    def typical(self) -> Typical:
        habits = self.habits
        return Typical(habits.turns_mean, habits.input_tokens, habits.output_tokens)

    def arrivals(self, rate: float) -> Iterator[Arrival]:
        free_until, _, ends = self.window(rate)
        before = LIFETIMES_BEFORE * self._mean_seconds
        seconds = before + ends - free_until
        arrivals = drawn(self.habits, rate, seconds, self.seed, reaction_seconds=self._reaction)
        return steady_load(arrivals, before, free_until, self.seconds_per_token)


def steady_load(
    arrivals: Iterable[Arrival], before: float, free_until: float, seconds_per_token: float
) -> Iterator[Arrival]:
    """A load that has gone on for `before` seconds when the clock shows `free_until`.

    `arrivals` are whole conversations, one after another, in the order of their first turns.
    """
    pending: list[tuple[float, int, list[Arrival]]] = []  # a time, and the arrivals of it
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


class Recorded:
    """The load of a trace."""

    def __init__(self, arrivals: Iterable[Arrival], seconds: float | None = None) -> None:
        self._arrivals = list(arrivals)
        self._seconds = seconds
        times = [arrival.at for arrival in self._arrivals if arrival.at is not None]
        if len(times) < 2 or times[-1] <= times[0]:
            raise ValueError("a trace of arrivals at two times or more is needed")
        self._first, self._length = times[0], times[-1] - times[0]
        names = {arrival.conversation for arrival in self._arrivals}
        self.rate = len(names) / self._length
        inputs = median(arrival.input_tokens for arrival in self._arrivals)
        outputs = mean(arrival.output_tokens for arrival in self._arrivals)
        ends: dict[str, float] = {}
        for arrival in self._arrivals:
            ends[arrival.conversation] = (
                arrival.at or ends.get(arrival.conversation, 0.0) + arrival.after
            )
        durations = [ends[arrival.conversation] - (arrival.at or 0.0) for arrival in self._arrivals]
        self._mean_seconds = max(mean(durations), 1.0)
        self.typical = Typical(len(self._arrivals) / len(names), inputs, outputs)

    def window(self, rate: float) -> Window:
        length = self._length
        if self._seconds is not None:
            length = min(length, 2 * self._seconds)
        return Window(0.0, length / 2, length)

    def conversations_at_once(self, rate: float) -> float:
        return rate * self._mean_seconds

    def description(self, rate: float) -> str:
        factor = rate / self.rate
        if factor <= 1:
            return f"{factor:.0%} of its conversations, by name"
        return f"{factor:.2f} copies of the trace at once, up to {APART_SECONDS:g} s apart"

    def arrivals(self, rate: float) -> Iterator[Arrival]:
        copies, part = divmod(rate / self.rate, 1.0)
        families, draw = Families(), random.Random(0)
        later = [0.0, *(draw.uniform(0, APART_SECONDS) for _ in range(int(copies)))]
        pending: list[tuple[float, int, Arrival]] = []
        number, at = 0, 0.0
        for arrival in self._arrivals:
            at = at if arrival.at is None else arrival.at - self._first
            while pending and pending[0][0] <= at:
                yield heapq.heappop(pending)[2]
            root = families.root(arrival)
            for copy, apart in enumerate(later):
                if copy == copies and replica_of(f"part of {root}", PARTS) >= part * PARTS:
                    continue
                number += 1
                begin = None if arrival.at is None else at + apart
                other = replace(arrival, at=begin)
                if copy:
                    source = f"{arrival.fork_of}+{copy}" if arrival.fork_of else ""
                    name = f"{arrival.conversation}+{copy}"
                    other = replace(other, conversation=name, fork_of=source)
                heapq.heappush(pending, (at + apart, number, other))
        while pending:
            yield heapq.heappop(pending)[2]
