"""Plays a trace to an engine: the daemon's own, on a virtual clock.

A visit waits for its time, and for the turn before it in its conversation to end (whoever types has seen the
reply).  Then it is a message in the mailbox like any other: after a fork where it begins with another
conversation's past, after a rewind where it keeps only a part of its own.

With `stateless` a conversation is forgotten when its turn has ended, and a fork brings nothing: each turn
computes its whole history again, in the same batches, by the same scheduler.  That is the server without a
memory to compare with.

What is in memory is what is due, and the length of each conversation that may go on; a trace is read as it is
played, and figures are kept in a fixed room (series.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pensieve.core.cache import CacheConfig
from pensieve.core.iteration import Iteration, SampledToken
from pensieve.core.policies.protocol import RetentionPolicy
from pensieve.core.sampling import Sampling
from pensieve.core.scheduler import SchedulerConfig
from pensieve.core.turn import TurnOptions
from pensieve.engine.assembly import EngineConfigs, Ports, assemble
from pensieve.engine.mailbox import Mailbox
from pensieve.engine.messages import (
    Event,
    ForkConversation,
    RewindConversation,
    SubmitTurn,
    TurnEnded,
)
from pensieve.sim.clock import VirtualClock
from pensieve.sim.cost import CostModel, instant
from pensieve.sim.executor import ModelledExecutor
from pensieve.sim.series import Distribution, Series
from pensieve.sim.trace import Visit

COST_CONTEXT = 32_000  # cost(l) / c = 1 + l / this, in reports
WATCHED = (
    "running",
    "queued",
    "tokens",
    "device",
    "clean",
    "host",
)  # shares of a tier for the last three
STEPS_TOLD = 2000  # of the engine, from one call of `told` to the next


@dataclass
class Counts:
    """What came of a trace."""

    asked: int = 0  # turns that were begun, counted or not
    turns: int = 0
    refused: int = 0  # of those asked: larger than what can be served
    history_tokens: int = 0  # of earlier turns, that turns began with
    recomputed_tokens: int = 0  # of them, whose KV was gone
    recompute_cost: float = 0.0  # of those, in costs of a chunk without context
    device_tokens: int = 0
    host_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0  # of turns that were counted
    said_tokens: int = 0  # of any turn, since counting began
    iterations: int = 0
    seconds: float = 0.0  # from where counting began to the last token, or to `until`
    latencies: Distribution = field(default_factory=Distribution)  # of a turn, over its tokens
    first_tokens: Distribution = field(default_factory=Distribution)  # to each turn's first token
    gaps: Distribution = field(default_factory=Distribution)  # in a reply, if they are kept


@dataclass(slots=True)
class _Person:
    """A conversation that may go on."""

    length: int = 0  # of its log
    running: bool = False
    waiting: list[Visit] = field(default_factory=list)


class Simulator:
    def __init__(
        self,
        cost: CostModel,
        policy: RetentionPolicy,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        *,
        context_max: int | None = None,
        keep_gaps: bool = False,
        count_from: float = 0.0,  # turns that begin before are played and not counted
        until: float | None = None,  # the clock stops here, whatever is left
        opens: float = 0.0,  # before it nothing takes time: what is there already is prepared
        stateless: bool = False,
        phases: str = "unified",
        keep_series: bool = False,
    ) -> None:
        self.clock = VirtualClock()
        free = instant(cache.chunk_tokens)[0]
        self.executor = ModelledExecutor(free if opens else cost, self.clock, self._watch, phases)
        self.mailbox = Mailbox(1 << 20)
        configs = EngineConfigs.fitted(cache, scheduler, context_max or None, 1 << 20)
        self.config = configs.engine
        ports = Ports(self.clock, self.mailbox, self)
        self.engine = assemble(configs, policy, self.executor, ports)
        self.scheduler = self.engine.scheduler
        self.counts = Counts()
        self._chunk_tokens = cache.chunk_tokens
        self._keep_gaps = keep_gaps
        self._count_from = count_from
        self._until = until
        self._opens, self._cost = opens, cost
        self._stateless = stateless
        self.series = Series(WATCHED) if keep_series else None
        self._people: dict[str, _Person] = {}
        self._due: list[tuple[float, int, Visit]] = []
        self._num_due = 0
        self._turns: dict[int, tuple[str, Visit, float]] = {}  # conversation, visit, submitted at
        self._last_token: dict[int, float] = {}
        self._num_turns = 0

    def run(
        self, visits: Iterable[Visit], told: Callable[[float, Counts], None] | None = None
    ) -> Counts:
        """To the end of the trace, and of every turn; `told` hears now and then how far it is."""
        source = iter(visits)
        ahead = next(source, None)
        num_steps = 0
        while True:
            now = self.clock.now()
            if self._until is not None and now >= self._until:
                break
            if self._opens and now >= self._opens:
                self.executor.become(self._cost)
                self._opens = 0.0
            num_steps += 1
            if told is not None and num_steps % STEPS_TOLD == 0:
                told(now, self.counts)
            while ahead is not None and (ahead.at is None or ahead.at <= now):
                self._arrive(ahead)
                ahead = next(source, None)
            while self._due and self._due[0][0] <= now:
                due, _, visit = heapq.heappop(self._due)
                self._begin(visit, due)
            if self.engine.step():
                continue
            moments = [self._due[0][0]] if self._due else []
            if ahead is not None and ahead.at is not None:
                moments.append(ahead.at)
            if not moments:
                break
            moments += [each for each in (self._until, self._opens) if each]
            self.clock.advance_to(min(moments))
        if self._until is not None and self.clock.now() >= self._until:
            self.counts.seconds = self._until - self._count_from
        self.counts.iterations = self.scheduler.counters.iterations
        return self.counts

    # -- who speaks --

    def _arrive(self, visit: Visit) -> None:
        person = self._people.setdefault(visit.conversation, _Person())
        if person.running or person.waiting or visit.at is None:
            person.waiting.append(visit)
            self._call(visit.conversation)
        else:
            person.running = True
            self._begin(visit, visit.at)

    def _call(self, name: str) -> None:
        """Whoever waits for the end of a turn speaks, after a while."""
        person = self._people[name]
        if person.running or not person.waiting:
            return
        visit = person.waiting.pop(0)
        person.running = True
        first = self.clock.now() + visit.after
        self._num_due += 1
        heapq.heappush(self._due, (max(first, visit.at or 0.0), self._num_due, visit))

    def _begin(self, visit: Visit, since: float) -> None:
        """The message is said at `since`; an iteration that runs by then ends before it is read."""
        name = visit.conversation
        person = self._people[name]
        self.counts.asked += 1
        if visit.fork_of:
            source = self._people.get(visit.fork_of)
            person.length = min(visit.history_tokens or 0, source.length if source else 0)
            if visit.history_tokens is None and source is not None:
                person.length = source.length
            if not self._stateless:
                self.mailbox.put(ForkConversation(visit.fork_of, person.length, name))
        elif visit.history_tokens is not None and visit.history_tokens < person.length:
            person.length = visit.history_tokens
            self.mailbox.put(RewindConversation(name, person.length))
        if visit.log_tokens is not None:
            person.length = visit.log_tokens
        history = person.length
        tokens = history + visit.input_tokens
        if tokens + visit.output_tokens >= self.config.context_max:
            self.counts.refused += 1
            person.running = False
            self._call(name)
            return
        self._num_turns += 1
        self._turns[self._num_turns] = (name, visit, since)
        options = TurnOptions(Sampling(max_tokens=visit.output_tokens))
        self.mailbox.put(SubmitTurn(self._num_turns, name, bytes(4 * tokens), history, options))

    # -- what the engine says --

    def publish(self, events: Sequence[Event]) -> None:
        now = self.clock.now()
        counted = now >= self._count_from
        since = self._last_token
        gaps: dict[float, int] = {}  # most turns said their last token in the same iteration
        num_said = 0
        for event in events:
            if isinstance(event, SampledToken):
                num_said += 1
                if self._keep_gaps:
                    turn_id = event.turn_id
                    if counted and turn_id in since:
                        gap = now - since[turn_id]
                        gaps[gap] = gaps.get(gap, 0) + 1
                    since[turn_id] = now
            elif isinstance(event, TurnEnded):
                self._ended(event, now)
        if counted:
            self.counts.said_tokens += num_said
            self.counts.seconds = now - self._count_from
            for gap, times in gaps.items():
                self.counts.gaps.add(gap, times)

    def _ended(self, event: TurnEnded, now: float) -> None:
        name, visit, since = self._turns.pop(event.turn_id)
        self._last_token.pop(event.turn_id, None)
        person, counts, usage = self._people[name], self.counts, event.usage
        person.running = False
        if event.failure is not None:
            counts.refused += 1
        else:
            history = person.length
            person.length += visit.input_tokens + usage.output_tokens
            if since >= self._count_from:
                counts.turns += 1
                counts.history_tokens += history
                counts.recomputed_tokens += usage.recomputed_tokens
                counts.device_tokens += usage.device_tokens
                counts.host_tokens += usage.host_tokens
                counts.input_tokens += visit.input_tokens
                counts.output_tokens += usage.output_tokens
                counts.latencies.add((now - since) / max(usage.output_tokens, 1))
                if usage.first_token_at is not None:
                    counts.first_tokens.add(usage.first_token_at - since)
        if self._stateless:
            self.mailbox.put(RewindConversation(name, 0))
        self._call(name)

    def _watch(self, iteration: Iteration, begun: float, ended: float) -> None:
        """What is computed again of earlier turns' KV costs more the longer its context is."""
        for piece in iteration.slices:
            turn, start = self.scheduler.turn(piece.turn_id), piece.start
            if turn is None or start >= turn.history_tokens - 1:
                continue
            stop = min(piece.stop, turn.history_tokens - 1, turn.computed_to)
            if start < stop and self._turns[turn.turn_id][2] >= self._count_from:
                tokens = stop - start
                middle = (start + stop) / 2
                self.counts.recompute_cost += (
                    tokens / self._chunk_tokens * (1 + middle / COST_CONTEXT)
                )
        if self.series is not None:
            self.series.add(ended, self._watched(iteration))

    def _watched(self, iteration: Iteration) -> tuple[float, ...]:
        """See `WATCHED`: of a device tier what somebody would miss, then what the host has, too."""
        cache, scheduler = self.scheduler.cache, self.scheduler
        device, host = cache.device, cache.host
        clean = cache.clean_pages
        return (
            len(scheduler.running),
            len(scheduler.queued) + len(scheduler.suspended),
            iteration.num_tokens,
            (device.num_pages - device.num_empty - clean) / device.num_pages,
            clean / device.num_pages,
            (host.num_pages - host.num_empty) / host.num_pages if host.num_pages else 0.0,
        )
