"""The replicas of a simulated cluster, and who talks to them.

**Conversations** are drawn from habits as if the load had gone on for long: those that began before the
clock's start and have turns to come are in progress, with a log of what was said so far, whose last turn
ended when it would have if a token of a reply took `seconds_per_token`. A share of the new conversations are
forks: such a one begins with the whole log of one that talked lately.

A **simulated replica** is an engine as every other (engine/engine.py) with a modelled executor and a clock
of its own. The cluster steps the one whose clock is furthest behind, after everything has been delivered that
happens until then. So no message is late by more than the iteration that runs when it comes, which a daemon's
is, too.

A **counted replica** has no scheduler: a turn takes what turns of simulated replicas have taken of late
(`Pace`), and what is computed again takes what the cost model says, alone on the machine.

KV that came over the network (`Submitted.received`) is computed like any that is missing, and takes no time:
`Receiving` charges nothing for positions below that. It takes the place of other prompts in an iteration's
token budget, which it would not in a daemon; hand-overs are rare enough.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import NamedTuple

from pensieve.core.cache import CacheConfig
from pensieve.core.iteration import Iteration, SampledToken, Slice
from pensieve.core.policies.registry import DEFAULT, policy_named
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.core.turn import TurnOptions
from pensieve.engine.engine import Engine, EngineConfigs
from pensieve.engine.mailbox import Mailbox
from pensieve.engine.messages import (
    DeleteConversation,
    Event,
    ForkConversation,
    SubmitTurn,
    TurnEnded,
)
from pensieve.engine.ports import Ports
from pensieve.sampling import Sampling
from pensieve.sim.clock import VirtualClock
from pensieve.sim.cost import CHUNK_TOKENS, CostModel, instant
from pensieve.sim.executor import ModelledExecutor
from pensieve.sim.trace import Arrival
from pensieve.sim.workload import Habits, drawn
from scripts.measurements.machine_options import Machine

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
    counted: bool = False  # in the loads
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


PACE_WEIGHT = 0.01  # of the last turn, in the mean of turns of late
MESSAGES_MAX = 1 << 20
CLASS_TOKENS = 256  # lengths that take the same time to compute again
TOKEN_BUDGET, TURNS_MAX = 2048, 256


def recompute_seconds(machine: Machine, tokens: int) -> float:
    """A log of so many tokens, alone on the machine."""
    return _recompute_seconds(machine, -(-tokens // CLASS_TOKENS))


@cache
def _recompute_seconds(machine: Machine, classes: int) -> float:
    seconds, start, tokens = 0.0, 0, classes * CLASS_TOKENS
    while start < tokens:
        stop = min(start + TOKEN_BUDGET, tokens)
        seconds += machine.cost.iteration_seconds([(start, stop)])
        start = stop
    return seconds


class Submitted(NamedTuple):
    """A turn at a replica."""

    conversation: Conversation
    recomputed: int  # tokens of its log that the move to here has it compute again
    received: int  # tokens of its log whose KV came over the network


class Ended(NamedTuple):
    """A turn's end, at a replica's time."""

    at: float
    turn: Submitted
    first_token_at: float | None  # None: it was refused
    history_tokens: int = 0
    recomputed_tokens: int = 0  # as the engine found it; those that were received are none


@dataclass
class Pace:
    """What turns of simulated replicas took of late, for those that are counted."""

    first_seconds: float
    seconds_per_token: float

    def learn(self, first_seconds: float, seconds_per_token: float) -> None:
        self.first_seconds += PACE_WEIGHT * (first_seconds - self.first_seconds)
        self.seconds_per_token += PACE_WEIGHT * (seconds_per_token - self.seconds_per_token)


class Receiving(ModelledExecutor):
    """Charges nothing for positions whose KV came over the network."""

    def __init__(self, cost: CostModel, clock: VirtualClock) -> None:
        super().__init__(cost, clock)
        self.received: dict[int, int] = {}  # by turn: so many positions

    def _compute_seconds(self, slices: Sequence[Slice]) -> float:
        if self.received:
            slices = [each for each in map(self._charged, slices) if each.start < each.stop]
        return super()._compute_seconds(slices)

    def _charged(self, piece: Slice) -> Slice:
        start = max(piece.start, min(self.received.get(piece.turn_id, 0), piece.stop))
        return piece._replace(start=start) if start != piece.start else piece

    def launch(self, iteration: Iteration) -> None:
        super().launch(iteration)
        for turn_id in iteration.ended:
            self.received.pop(turn_id, None)


@dataclass(eq=False)
class Replica:
    """As far as the cluster sees it: a name, its state, and the turns that run here."""

    name: str
    incarnation: int = 0
    returned_from: str = ""  # the cause of the end of the one before it
    gone: bool = False
    found_gone_at: float = 0.0  # until then nobody knows
    answers_until: float = 0.0  # that drains: so long its KV can be had
    cause: str = ""  # of its end
    running: dict[str, Submitted] = field(default_factory=dict)  # by conversation

    def counted_end(self, turn: Submitted, now: float, machine: Machine, pace: Pace) -> Ended:
        """When a turn that begins now will have ended, of a counted replica."""
        first = pace.first_seconds
        if turn.recomputed:
            first += recompute_seconds(machine, turn.recomputed)
        outputs = turn.conversation.messages[0].output_tokens
        return Ended(now + first + pace.seconds_per_token * outputs, turn, now + first)


class SimulatedReplica(Replica):
    """With an engine."""

    def __init__(
        self, name: str, incarnation: int, returned_from: str, machine: Machine, now: float
    ) -> None:
        super().__init__(name, incarnation, returned_from)
        cost = machine.cost
        self.clock = VirtualClock(now)
        self._machine = machine
        self._executor = Receiving(cost, self.clock)
        self._mailbox = Mailbox(MESSAGES_MAX)
        configs = EngineConfigs.fitted(
            CacheConfig(machine.device_tokens // CHUNK_TOKENS, machine.host_tokens // CHUNK_TOKENS),
            SchedulerConfig(TOKEN_BUDGET, TURNS_MAX, cost=cost.computing),
            None,
            MESSAGES_MAX,
        )
        policy = policy_named(DEFAULT, cost.recompute(CHUNK_TOKENS), CHUNK_TOKENS)
        ports = Ports(self.clock, self._mailbox, self)
        self._engine = Engine(configs, policy, self._executor, ports)
        self._turns: dict[int, Submitted] = {}
        self._num_turns = 0
        self.is_busy = False  # the cluster steps it
        self._ended: list[Ended] = []

    def fill(self, conversations: Iterable[Conversation]) -> None:
        """Computes their turns so far in no time, each when it ended: so the policy knows who returns."""
        self._executor.use_costs(instant(CHUNK_TOKENS)[0])
        options = TurnOptions(Sampling(max_tokens=1))
        turns = []
        for conversation in conversations:
            before = 0
            for at, length in conversation.past:
                turns.append((at, length, before, conversation.name))
                before = length
        for at, length, before, name in sorted(turns):
            self.clock.advance_to(at)
            self._submit(name, length - 1, before, options)
            while self._engine.step():
                pass
        self._executor.use_costs(self._machine.cost)

    def submit(self, turn: Submitted, now: float, fork_of: str, fresh: bool) -> None:
        """`fresh`: it was at home elsewhere since it was here, so what is here is of an earlier epoch."""
        conversation = turn.conversation
        self.clock.advance_to(now)
        if fresh:
            self._mailbox.put(DeleteConversation(conversation.name))
        if fork_of:
            self._mailbox.put(ForkConversation(fork_of, conversation.length, conversation.name))
        message = conversation.messages[0]
        options = TurnOptions(Sampling(max_tokens=message.output_tokens))
        number = self._num_turns + 1
        self._turns[number] = turn
        if turn.received:
            self._executor.received[number] = turn.received
        tokens = conversation.length + message.input_tokens
        self._submit(conversation.name, tokens, conversation.length, options)

    def _submit(self, name: str, tokens: int, history: int, options: TurnOptions) -> None:
        self._num_turns += 1
        self._mailbox.put(SubmitTurn(self._num_turns, name, bytes(4 * tokens), history, options))

    def step(self) -> tuple[bool, list[Ended]]:
        """Whether there was anything to do, and the turns that it ended."""
        busy = self._engine.step()
        ended, self._ended = self._ended, []
        return busy, ended

    def waiting(self) -> list[Submitted]:
        """Turns whose first token is not there yet."""
        scheduler = self._engine.scheduler
        found = []
        for number, turn in self._turns.items():
            known = scheduler.turn(number)
            if known is None or known.usage.first_token_at is None:
                found.append(turn)
        return found

    def publish(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, SampledToken) or not isinstance(event, TurnEnded):
                continue
            turn = self._turns.pop(event.turn_id, None)
            if turn is None:
                continue  # of `fill`
            usage, now = event.usage, self.clock.now()
            if event.failure is not None:
                self._ended.append(Ended(now, turn, None))
                continue
            recomputed = max(usage.recomputed_tokens - turn.received, 0)
            known = usage.device_tokens + usage.host_tokens + usage.recomputed_tokens
            self._ended.append(Ended(now, turn, usage.first_token_at, known, recomputed))


def slowest_pace(machine: Machine) -> Pace:
    """Before anything was learned: of a replica with 32 turns of a thousand tokens."""
    each = machine.cost.iteration_seconds([(1000, 1001)] * 32)
    return Pace(2 * each, each)
