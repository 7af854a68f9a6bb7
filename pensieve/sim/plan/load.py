"""How much is said, as a rate that can be turned: conversations that begin per second.

A simulation for planning is short, so it must not begin with an empty house.  `lived_in` supposes that a load
has gone on for a long time: whoever began before the house opens and still has something to say is there, its
log said in one go when its last turn ended.  Until the house opens nothing takes time (replica.py).

A recorded trace has a rate of its own.  For a lower one some of its conversations are left out, by name; for
a higher one several copies of it are played at once, each of other conversations and up to half a minute
later, the last one perhaps in part.  So pauses stay what they were, which they would not if time were
compressed.  Of what is played the second half counts.
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

from pensieve.sim.plan.fleet import APART_SECONDS, Families, home
from pensieve.sim.trace import Habits, Visit, drawn

LIVES = 6.0  # means of a conversation's life that have passed when the house opens
RESTS = 5.0  # means of a reaction time: whoever rests for longer rests since the clock began
PARTS = 1 << 16  # of names, to leave some out


class Window(NamedTuple):
    """Times of a simulation."""

    opens: float  # before it nothing takes time
    counts: float  # what begins before it is played and not counted
    ends: float

    @property
    def seconds(self) -> float:
        return self.ends - self.counts


class Typical(NamedTuple):
    """Of a conversation and its turns: enough for a first guess."""

    turns: float
    input_tokens: float
    output_tokens: float


class Load(Protocol):
    @property
    def typical(self) -> Typical: ...

    def visits(self, rate: float) -> Iterator[Visit]:
        """In the order of their times."""

    def window(self, rate: float) -> Window: ...

    def living(self, rate: float) -> float:
        """How many conversations go on at a time, about."""

    def how(self, rate: float) -> str:
        """What was done to get that rate."""


@dataclass(frozen=True)
class Drawn:
    habits: Habits
    reaction_seconds: float | None = None
    seconds: float | None = None  # that count; None: two reaction times, a minute or more
    seed: int = 0
    seconds_per_token: float = 0.03  # of a reply: only to tell who is in the house

    @property
    def _reaction(self) -> float:
        given = self.reaction_seconds
        return self.habits.reaction_seconds if given is None else given

    @property
    def _life_seconds(self) -> float:
        reply = self.seconds_per_token * self.habits.output_tokens
        return self.habits.turns_mean * (self._reaction + reply)

    def window(self, rate: float) -> Window:
        opens = RESTS * self._reaction
        counts = opens + max(self._reaction / 2, 30.0)
        seconds = max(2 * self._reaction, 60.0) if self.seconds is None else self.seconds
        return Window(opens, counts, counts + seconds)

    def living(self, rate: float) -> float:
        return rate * self._life_seconds

    def how(self, rate: float) -> str:
        return "drawn"

    @property
    def typical(self) -> Typical:
        habits = self.habits
        return Typical(habits.turns_mean, habits.input_tokens, habits.output_tokens)

    def visits(self, rate: float) -> Iterator[Visit]:
        opens, _, ends = self.window(rate)
        before = LIVES * self._life_seconds
        seconds = before + ends - opens
        visits = drawn(self.habits, rate, seconds, self.seed, reaction_seconds=self._reaction)
        return lived_in(visits, before, opens, self.seconds_per_token)


def lived_in(
    visits: Iterable[Visit], before: float, opens: float, seconds_per_token: float
) -> Iterator[Visit]:
    """A load of conversations one after another, which has gone on for `before` seconds when the clock
    shows `opens`."""
    there: list[tuple[float, int, list[Visit]]] = []  # what is said at a time, and what follows it
    groups = groupby(visits, key=lambda visit: visit.conversation)
    for number, (name, group) in enumerate(groups):
        turns = list(group)
        begin, length, ended = (turns[0].at or 0.0) - before + opens, 0, 0.0
        while there and begin >= opens and there[0][0] <= begin:
            yield from heapq.heappop(there)[2]
        while turns and begin < opens:
            turn = turns.pop(0)
            length += turn.input_tokens + turn.output_tokens
            ended = begin + seconds_per_token * turn.output_tokens
            begin = ended + (turns[0].after if turns else 0.0)
        if turns and length:
            before_opening = min(max(ended, 0.0), math.nextafter(opens, 0.0))
            said = [Visit(name, before_opening, length - 1, 1)]
            heapq.heappush(there, (said[0].at or 0.0, 2 * number, said))
        if turns:
            said = [replace(turns[0], at=begin, after=0.0), *turns[1:]]
            heapq.heappush(there, (begin, 2 * number + 1, said))
    while there:
        yield from heapq.heappop(there)[2]


class Recorded:
    """A trace that was read."""

    def __init__(self, visits: Iterable[Visit], seconds: float | None = None) -> None:
        self._visits = list(visits)
        self._seconds = seconds
        times = [visit.at for visit in self._visits if visit.at is not None]
        if len(times) < 2 or times[-1] <= times[0]:
            raise ValueError("a trace of visits at two times or more is needed")
        self._first, self._length = times[0], times[-1] - times[0]
        names = {visit.conversation for visit in self._visits}
        self.rate = len(names) / self._length
        inputs = median(visit.input_tokens for visit in self._visits)
        outputs = mean(visit.output_tokens for visit in self._visits)
        ends: dict[str, float] = {}
        for visit in self._visits:
            ends[visit.conversation] = visit.at or ends.get(visit.conversation, 0.0) + visit.after
        lives = [ends[visit.conversation] - (visit.at or 0.0) for visit in self._visits]
        self._life_seconds = max(mean(lives), 1.0)
        self.typical = Typical(len(self._visits) / len(names), inputs, outputs)

    def window(self, rate: float) -> Window:
        length = self._length
        if self._seconds is not None:
            length = min(length, 2 * self._seconds)
        return Window(0.0, length / 2, length)

    def living(self, rate: float) -> float:
        return rate * self._life_seconds

    def how(self, rate: float) -> str:
        factor = rate / self.rate
        if factor <= 1:
            return f"{factor:.0%} of its conversations, by name"
        return f"{factor:.2f} copies of the trace at once, up to {APART_SECONDS:g} s apart"

    def visits(self, rate: float) -> Iterator[Visit]:
        copies, part = divmod(rate / self.rate, 1.0)
        families, draw = Families(), random.Random(0)
        later = [0.0, *(draw.uniform(0, APART_SECONDS) for _ in range(int(copies)))]
        pending: list[tuple[float, int, Visit]] = []
        number, at = 0, 0.0
        for visit in self._visits:
            at = at if visit.at is None else visit.at - self._first
            while pending and pending[0][0] <= at:
                yield heapq.heappop(pending)[2]
            root = families.root(visit)
            for copy, apart in enumerate(later):
                if copy == copies and home(f"part of {root}", PARTS) >= part * PARTS:
                    continue
                number += 1
                begin = None if visit.at is None else at + apart
                other = replace(visit, at=begin)
                if copy:
                    source = f"{visit.fork_of}+{copy}" if visit.fork_of else ""
                    name = f"{visit.conversation}+{copy}"
                    other = replace(other, conversation=name, fork_of=source)
                heapq.heappush(pending, (at + apart, number, other))
        while pending:
            yield heapq.heappop(pending)[2]
