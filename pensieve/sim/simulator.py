"""Run a trace through the daemon's own engine, on a virtual clock.

A message arrives at its time, but not before the previous turn of its conversation has ended, because its
author reads the reply first. The message then goes to the engine's mailbox. If it begins with the history of
another conversation, a fork precedes it. If it keeps only a part of its own history, a rewind precedes it.

With `stateless` a conversation is forgotten when its turn has ended, and a fork brings no KV. So each turn
computes its whole history again, in the same batches and with the same scheduler. This is the stateless
server to compare with.

Memory holds the due turns and the length of each conversation that may continue. The trace is read while the
simulation runs, and figures take a fixed amount of memory (series.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from pensieve.core.cache import CacheConfig
from pensieve.core.iteration import Iteration, SampledToken
from pensieve.core.policies.protocol import EvictionPolicy
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.core.turn import TurnOptions
from pensieve.engine.engine import Engine, EngineConfigs
from pensieve.engine.mailbox import Mailbox
from pensieve.engine.messages import (
    EngineEvent,
    ForkConversation,
    RewindConversation,
    SubmitTurn,
    TurnEnded,
)
from pensieve.engine.ports import Ports
from pensieve.sampling import Sampling
from pensieve.sim.cost import CostModel, instant
from pensieve.sim.executor import ModelledExecutor, VirtualClock
from pensieve.sim.series import Distribution, Series
from pensieve.sim.trace import Arrival

COST_CONTEXT = 32_000  # in reports, a chunk after l tokens costs 1 + l / COST_CONTEXT
# The names of the values over time; see `_levels`.  The last three are fractions of a tier.
SERIES = (
    "running",
    "queued",
    "tokens",
    "device",
    "clean",
    "host",
)
STEPS_PER_REPORT = 2000  # engine steps between two calls of `progress`


@dataclass
class SimulationFigures:
    """Figures of a run. Figures of turns count only turns that begin at `count_from` or later."""

    num_submitted: int = 0  # all turns that were due, counted or not
    turns: int = 0
    refused: int = 0  # turns too large to serve
    history_tokens: int = 0  # context from earlier turns
    recomputed_tokens: int = 0  # part of that context whose KV was gone
    recompute_cost: float = 0.0  # cost of those tokens, in units of a chunk without context
    device_tokens: int = 0
    host_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0  # tokens of counted turns
    delivered_tokens: int = 0  # tokens of all turns since counting began
    iterations: int = 0
    seconds: float = 0.0  # from `count_from` to the last token, or to `until`
    latencies: Distribution = field(default_factory=Distribution)  # a turn's time / its tokens
    first_tokens: Distribution = field(default_factory=Distribution)  # to each turn's first token
    gaps: Distribution = field(default_factory=Distribution)  # between tokens, with `keep_gaps`


@dataclass(slots=True)
class _Conversation:
    """A conversation that may have more turns."""

    length: int = 0  # tokens of its log
    running: bool = False
    waiting: list[Arrival] = field(default_factory=list)


class Simulator:
    def __init__(
        self,
        cost: CostModel,
        policy: EvictionPolicy,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        *,
        context_max: int | None = None,
        keep_gaps: bool = False,
        count_from: float = 0.0,  # earlier turns are simulated and not counted
        until: float | None = None,  # stop at this time, whatever is left
        free_until: float = 0.0,  # before this time, nothing takes time, to fill the cache
        stateless: bool = False,
        phases: str = "unified",
        keep_series: bool = False,
    ) -> None:
        self.clock = VirtualClock()
        free = instant(cache.chunk_tokens)[0]
        self.executor = ModelledExecutor(
            free if free_until else cost, self.clock, self._watch, phases
        )
        self.mailbox = Mailbox(1 << 20)
        configs = EngineConfigs.fitted(cache, scheduler, context_max or None, 1 << 20)
        self.config = configs.engine
        ports = Ports(self.clock, self.mailbox, self)
        self.engine = Engine(configs, policy, self.executor, ports)
        self.scheduler = self.engine.scheduler
        self.counts = SimulationFigures()
        self._chunk_tokens = cache.chunk_tokens
        self._keep_gaps = keep_gaps
        self._count_from = count_from
        self._until = until
        self._free_until, self._cost = free_until, cost
        self._stateless = stateless
        self.series = Series(SERIES) if keep_series else None
        self._conversations: dict[str, _Conversation] = {}
        self._source: Iterator[Arrival] = iter(())
        self._next_arrival: Arrival | None = None  # the next arrival of the trace
        self._due: list[tuple[float, int, Arrival]] = []
        self._num_due = 0
        # By turn id: the conversation, the arrival, and when the message arrived.
        self._turns: dict[int, tuple[str, Arrival, float]] = {}
        self._last_token: dict[int, float] = {}
        self._num_turns = 0

    def run(
        self,
        arrivals: Iterable[Arrival],
        progress: Callable[[float, SimulationFigures], None] | None = None,
    ) -> SimulationFigures:
        """Run to the end of the trace and of every turn; call `progress` now and then."""
        self.begin(arrivals)
        num_steps = 0
        while self.advance():
            num_steps += 1
            if progress is not None and num_steps % STEPS_PER_REPORT == 0:
                progress(self.clock.now(), self.counts)
        return self.counts

    def begin(self, arrivals: Iterable[Arrival]) -> None:
        self._source = iter(arrivals)
        self._next_arrival = next(self._source, None)

    def advance(self) -> bool:
        """Run one engine step, or move to the next event; return False at the end."""
        now = self.clock.now()
        if self._until is not None and now >= self._until:
            self.counts.seconds = self._until - self._count_from
            return self._end()
        if self._free_until and now >= self._free_until:
            self.executor.use_costs(self._cost)
            self._free_until = 0.0
        while self._next_arrival is not None and (
            self._next_arrival.at is None or self._next_arrival.at <= now
        ):
            self._arrive(self._next_arrival)
            self._next_arrival = next(self._source, None)
        while self._due and self._due[0][0] <= now:
            due, _, arrival = heapq.heappop(self._due)
            self._submit(arrival, due)
        if self.engine.step():
            return True
        moments = [self._due[0][0]] if self._due else []
        if self._next_arrival is not None and self._next_arrival.at is not None:
            moments.append(self._next_arrival.at)
        if not moments:
            return self._end()
        moments += [each for each in (self._until, self._free_until) if each]
        self.clock.advance_to(min(moments))
        return True

    def _end(self) -> bool:
        self.counts.iterations = self.scheduler.counters.iterations
        return False

    # -- messages to the engine --

    def _arrive(self, arrival: Arrival) -> None:
        conversation = self._conversations.setdefault(arrival.conversation, _Conversation())
        if conversation.running or conversation.waiting or arrival.at is None:
            conversation.waiting.append(arrival)
            self._submit_next(arrival.conversation)
        else:
            conversation.running = True
            self._submit(arrival, arrival.at)

    def _submit_next(self, name: str) -> None:
        """Make the next message of a conversation due after its pause, if its last turn has ended."""
        conversation = self._conversations[name]
        if conversation.running or not conversation.waiting:
            return
        arrival = conversation.waiting.pop(0)
        conversation.running = True
        earliest = self.clock.now() + arrival.after
        self._num_due += 1
        heapq.heappush(self._due, (max(earliest, arrival.at or 0.0), self._num_due, arrival))

    def _submit(self, arrival: Arrival, since: float) -> None:
        """Submit a message that arrived at `since`, which may be before the last iteration's end."""
        name = arrival.conversation
        conversation = self._conversations[name]
        self.counts.num_submitted += 1
        if arrival.fork_of:
            source = self._conversations.get(arrival.fork_of)
            conversation.length = min(arrival.history_tokens or 0, source.length if source else 0)
            if arrival.history_tokens is None and source is not None:
                conversation.length = source.length
            if not self._stateless:
                self.mailbox.put(ForkConversation(arrival.fork_of, conversation.length, name))
        elif arrival.history_tokens is not None and arrival.history_tokens < conversation.length:
            conversation.length = arrival.history_tokens
            self.mailbox.put(RewindConversation(name, conversation.length))
        if arrival.log_tokens is not None:
            conversation.length = arrival.log_tokens
        history = conversation.length
        tokens = history + arrival.input_tokens
        if tokens + arrival.output_tokens >= self.config.context_max:
            self.counts.refused += 1
            conversation.running = False
            self._submit_next(name)
            return
        self._num_turns += 1
        self._turns[self._num_turns] = (name, arrival, since)
        options = TurnOptions(Sampling(max_tokens=arrival.output_tokens))
        self.mailbox.put(SubmitTurn(self._num_turns, name, bytes(4 * tokens), history, options))

    # -- events of the engine --

    def publish(self, events: Sequence[EngineEvent]) -> None:
        now = self.clock.now()
        counted = now >= self._count_from
        last_token = self._last_token
        # Few keys, because most turns had their last token in the same iteration.
        gaps: dict[float, int] = {}
        num_delivered = 0
        for event in events:
            if isinstance(event, SampledToken):
                num_delivered += 1
                if self._keep_gaps:
                    attempt_id = event.attempt_id
                    if counted and attempt_id in last_token:
                        gap = now - last_token[attempt_id]
                        gaps[gap] = gaps.get(gap, 0) + 1
                    last_token[attempt_id] = now
            elif isinstance(event, TurnEnded):
                self._end_turn(event, now)
        if counted:
            self.counts.delivered_tokens += num_delivered
            self.counts.seconds = now - self._count_from
            for gap, times in gaps.items():
                self.counts.gaps.add(gap, times)

    def _end_turn(self, event: TurnEnded, now: float) -> None:
        name, arrival, since = self._turns.pop(event.attempt_id)
        self._last_token.pop(event.attempt_id, None)
        conversation, counts, usage = self._conversations[name], self.counts, event.usage
        conversation.running = False
        if event.failure is not None:
            counts.refused += 1
        else:
            history = conversation.length
            conversation.length += arrival.input_tokens + usage.output_tokens
            if since >= self._count_from:
                counts.turns += 1
                counts.history_tokens += history
                counts.recomputed_tokens += usage.recomputed_tokens
                counts.device_tokens += usage.device_tokens
                counts.host_tokens += usage.host_tokens
                counts.input_tokens += arrival.input_tokens
                counts.output_tokens += usage.output_tokens
                counts.latencies.add((now - since) / max(usage.output_tokens, 1))
                if usage.first_token_at is not None:
                    counts.first_tokens.add(usage.first_token_at - since)
        if self._stateless:
            self.mailbox.put(RewindConversation(name, 0))
        self._submit_next(name)

    def _watch(self, iteration: Iteration, begun: float, ended: float) -> None:
        """Add up the cost of recomputing KV of earlier turns, which grows with the context."""
        for piece in iteration.slices:
            turn, start = self.scheduler.turn(piece.attempt_id), piece.start
            if turn is None or start >= turn.history_tokens - 1:
                continue
            stop = min(piece.stop, turn.history_tokens - 1, turn.computed_to)
            if start < stop and self._turns[turn.attempt_id][2] >= self._count_from:
                tokens = stop - start
                middle = (start + stop) / 2
                self.counts.recompute_cost += (
                    tokens / self._chunk_tokens * (1 + middle / COST_CONTEXT)
                )
        if self.series is not None:
            self.series.add(ended, self._levels(iteration))

    def _levels(self, iteration: Iteration) -> tuple[float, ...]:
        """Return the values of `SERIES`; device pages without and with a copy on the host are separate."""
        cache, scheduler = self.scheduler.cache, self.scheduler
        device, host = cache.device, cache.host
        clean = cache.tiers.num_reclaimable
        return (
            len(scheduler.running),
            len(scheduler.queued) + len(scheduler.suspended),
            iteration.num_tokens,
            (device.num_pages - device.num_empty - clean) / device.num_pages,
            clean / device.num_pages,
            (host.num_pages - host.num_empty) / host.num_pages if host.num_pages else 0.0,
        )
