"""Who talks to a simulated cluster: conversations in progress when its clock starts, new ones, and forks.

Conversations are drawn from habits (workload.py) as if the load had gone on for long (as in plan/load.py):
those that began before the clock's start and have turns to come are in progress, with a log of what was said
so far, whose last turn ended when it would have if a token of a reply took `seconds_per_token`.

A share of the new conversations are forks: such a one begins with the whole log of one that talked lately.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from pensieve.sim.trace import Arrival
from pensieve.sim.workload import Habits, drawn

LIFETIMES_BEFORE = 4.0  # mean durations of a conversation that the load has gone on for
RECENT = 4096  # conversations of which one is forked


class Message(NamedTuple):
    """One turn to come."""

    input_tokens: int
    output_tokens: int
    after: float  # seconds from the end of the turn before


@dataclass(slots=True, eq=False)
class Conversation:
    """One conversation and where it is at home."""

    name: str
    messages: deque[Message]  # to come, the next first
    begins: float  # when the next one comes
    length: int = 0  # of its log
    past: list[tuple[float, int]] = field(
        default_factory=list
    )  # ends of turns, and its length then
    active_at: float = 0.0  # when a turn of it last began, or before the clock's start ended
    owner: str = ""
    incarnation: int = 0  # of the owner, which may have come back by the same name
    epoch: int = 0  # so often it was given a home
    arrives: float = 0.0  # when its KV, sent ahead of its next turn, is there
    counted: bool = False  # in the loads
    plain: str = ""  # its home by hash alone
    plain_counted: str = ""  # the one whose count it is in
    parent: Conversation | None = None  # whose log it begins with
    came_at: float = 0.0  # when the message of the turn that runs came
    moved_by: str = ""  # why the turn that runs is at a new home


@dataclass(frozen=True)
class Talk:
    """The load of a cluster."""

    habits: Habits
    rate: float  # conversations that begin per second, in the whole cluster
    seed: int = 0
    reaction_seconds: float | None = None
    forks: float = 0.0  # share of the new conversations
    seconds_per_token: float = 0.03  # of a reply: decides which conversations are in progress

    @property
    def reaction(self) -> float:
        given = self.reaction_seconds
        return self.habits.reaction_seconds if given is None else given

    @property
    def mean_seconds(self) -> float:
        """Of a conversation."""
        reply = self.seconds_per_token * self.habits.output_tokens
        return self.habits.turns_mean * (self.reaction + reply)

    @property
    def before_seconds(self) -> float:
        """How long the load has gone on for at the clock's start."""
        return LIFETIMES_BEFORE * self.mean_seconds

    def conversations(
        self, starts: float, ends: float, active_seconds: float
    ) -> Iterator[Conversation]:
        """Those in progress at `starts` and those that begin until `ends`, in the order of their begins.

        Also those that are over by then and were active so many seconds before; they have no more messages.
        """
        before = self.before_seconds
        seconds = before + ends - starts
        arrivals = drawn(self.habits, self.rate, seconds, self.seed, reaction_seconds=self.reaction)
        draw = random.Random(self.seed + 1)
        recent: deque[Conversation] = deque(maxlen=RECENT)
        for name, group in groupby(arrivals, key=lambda arrival: arrival.conversation):
            found = self._begun(name, list(group), before, starts)
            if not found.messages and found.active_at < starts - active_seconds:
                continue
            is_new = not found.length
            if is_new and self.forks and recent and draw.random() < self.forks:
                found.parent = recent[draw.randrange(len(recent))]
            if found.messages:
                recent.append(found)
            yield found

    def _begun(self, name: str, turns: list[Arrival], before: float, starts: float) -> Conversation:
        """As it is when the clock starts."""
        begin, length, number = (turns[0].at or 0.0) - before + starts, 0, 0
        past: list[tuple[float, int]] = []
        while number < len(turns) and begin < starts:
            turn = turns[number]
            length += turn.input_tokens + turn.output_tokens
            ended = begin + self.seconds_per_token * turn.output_tokens
            past.append((min(ended, starts), length))
            number += 1
            if number < len(turns):
                begin = ended + turns[number].after
        messages = deque(
            Message(turn.input_tokens, turn.output_tokens, turn.after) for turn in turns[number:]
        )
        return Conversation(name, messages, begin, length, past, past[-1][0] if past else begin)
