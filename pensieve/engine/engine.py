"""The engine's loop: take messages, run an iteration per step, and publish events.

`step` plans one iteration and commits one outcome. It runs in one thread, and no other thread uses the
scheduler. The executor's depth is the number of iterations that may be launched and not collected. At depth
2, the executor computes one iteration while the next iteration is planned and launched:

    depth 1     plan 1, launch 1, collect 1 │ plan 2, launch 2, collect 2 │ …
    depth 2     plan 1, launch 1 │ plan 2, launch 2, collect 1 │ plan 3, launch 3, collect 2 │ …

A step collects and commits the oldest launched iteration in two cases: `depth` iterations are launched, or
nothing more can be planned without an outcome. So when a step returns False, every launched iteration has
been collected.

At depth 2, the engine always plans one iteration before the previous outcome is known. This wastes one token
for each turn that ends with that outcome (`tokens_idle`), and a message may wait for one more iteration.

As long as the cache has KV of a conversation, the engine also has the tokens of its log
(`CachedConversation.log`). So a message brings only new tokens. A turn of an unknown conversation waits
outside the scheduler until the service has provided the log. If a turn has a constraint that is not compiled
yet, the turn is first held back (turns_awaiting_constraints.py).

The service has already checked the limits of a message. They are checked again here, so an invalid message
ends only its own turn.

`num_rounds` counts the rounds of `run`: iterations and idle waits. Rounds are short, so if the number does
not change for long, the main thread hangs.

If the executor fails (a device error, out of memory), `run` ends every turn with ENGINE_FAILED, closes the
mailbox and raises. Launched iterations are not collected. No history is lost, because it is in the store. The
service then starts another engine process.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pensieve import gc_pause
from pensieve.core.cache import CacheConfig, KVCache
from pensieve.core.identities import Identities
from pensieve.core.iteration import Iteration, SampledToken
from pensieve.core.policies.protocol import EvictionPolicy
from pensieve.core.scheduler import Scheduler
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.core.tiers import IsIntact, trusted
from pensieve.core.turn import Ended, FinishReason, Turn, Usage
from pensieve.engine.cache_views import cached, picture, usage
from pensieve.engine.hand_over import HandOver, verified
from pensieve.engine.messages import (
    TOKEN_BYTES,
    Answer,
    CancelTurn,
    CheckIntegrity,
    DeleteConversation,
    EngineEvent,
    EngineMessage,
    EvictConversation,
    Explain,
    ExportKv,
    ForkConversation,
    GetStats,
    ImportKv,
    ListCached,
    LogNeeded,
    OpenImport,
    Picture,
    ProvideLog,
    RewindConversation,
    SubmitTurn,
    TurnAdmitted,
    TurnEnded,
)
from pensieve.engine.metrics import Metrics, TurnTimes
from pensieve.engine.ports import Executor, Observer, Ports
from pensieve.engine.turns_awaiting_constraints import TurnsAwaitingConstraints

IDLE_SECONDS = 1.0  # length of an idle round; the first idle round ends with a garbage collection


@dataclass(frozen=True)
class EngineConfig:
    context_max: int  # tokens; the smaller of the model's and the device tier's limit
    turns_queued_max: int = 1024  # further turns are refused with QUEUE_FULL
    ttft_seconds: float = 0.0  # objective for the time to the first token of a reply; 0: none


@dataclass(frozen=True)
class EngineConfigs:
    """The configurations of the parts; `fitted` derives the limit that depends on several of them."""

    cache: CacheConfig
    scheduler: SchedulerConfig
    engine: EngineConfig

    @classmethod
    def fitted(
        cls,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        context_max: int | None = None,  # the model's own limit, if it has one
        turns_queued_max: int = EngineConfig.turns_queued_max,
        ttft_seconds: float = 0.0,
    ) -> EngineConfigs:
        """Make the configurations, with contexts limited to the device tier's size."""
        limit = cache.device_tokens_max
        if context_max is not None:
            limit = min(context_max, limit)
        return cls(cache, scheduler, EngineConfig(limit, turns_queued_max, ttft_seconds))


class Engine:
    """Cache, scheduler and loop.

    Three programs run an engine, each with its own executor and clock:

        daemon       an executor that runs a model, and the machine's clock
        simulator    an executor that models the durations, and a virtual clock
        replay       the recorded outcomes and times of a journal

    Nothing else may differ, so that the simulator plans the same iterations as the daemon.
    """

    def __init__(
        self,
        configs: EngineConfigs,
        policy: EvictionPolicy,
        executor: Executor,
        ports: Ports,
        observers: Sequence[Observer] = (),
        is_intact: IsIntact = trusted,
    ) -> None:
        self.config = configs.engine
        self.scheduler = Scheduler(KVCache(configs.cache, policy, is_intact), configs.scheduler)
        self.executor = executor
        self.clock, self.mailbox, self.sink = ports.clock, ports.mailbox, ports.sink
        self.metrics = Metrics(self.scheduler, self.clock.now())
        self.turn_times = TurnTimes(self.scheduler, self.config.ttft_seconds)
        self._observers: tuple[Observer, ...] = (self.metrics, self.turn_times, *observers)
        self.num_rounds = 0  # rounds of `run`; other threads read this
        self.held = TurnsAwaitingConstraints(ports.preparer, ports.mailbox.wake)
        self.hand_over = HandOver(self.scheduler.cache, ports.pages)
        self._launched: deque[Iteration] = deque()  # not collected yet, oldest first
        # Called in idle rounds. Raises an error that would otherwise go unnoticed while no turn runs.
        self.check_idle: Callable[[], None] = lambda: None
        # Turns whose log the service was asked for, by attempt_id.
        self._lacking_log: dict[int, SubmitTurn] = {}

    def observe(self, observer: Observer) -> None:
        """Add an observer."""
        self._observers = (*self._observers, observer)

    def step(self) -> bool:
        """Launch the next iteration and commit the oldest if due. Return False if idle."""
        self._deliver(self.mailbox.drain())
        iteration = self._plan()
        if iteration is not None:
            self.executor.launch(iteration)
            self._launched.append(iteration)
        elif not self._launched:
            return False
        if iteration is None or len(self._launched) >= self.executor.depth:
            self._commit(self._launched.popleft())
        return True

    def run(self) -> None:
        """Step until the mailbox is closed and nothing is left to do."""
        try:
            garbage_collected = False
            while True:
                self.num_rounds += 1
                if self.step():
                    garbage_collected = False
                    continue
                if self.mailbox.closed:
                    if not self.held.turns:
                        return
                    self.held.wait()
                self.check_idle()
                if not self.mailbox.wait(IDLE_SECONDS) and not garbage_collected:
                    gc_pause.collect()
                    garbage_collected = True
        except BaseException:
            self.mailbox.close("the engine has failed")
            self._end_everything()
            raise

    # -- in --

    def _deliver(self, messages: Sequence[EngineMessage]) -> None:
        if self.held.turns:
            for ready in self.held.take_ready():
                self._receive(ready)
        for message in messages:
            if not (isinstance(message, SubmitTurn) and self._hold_if_not_ready(message)):
                self._receive(message)

    def _hold_if_not_ready(self, message: SubmitTurn) -> bool:
        """Hold back a turn whose constraint is not ready, and return whether it is held.

        A turn that is refused anyway is not held.
        """
        if message.options.constraint is None or self._num_waiting >= self.config.turns_queued_max:
            return False
        return not _is_among(message.conversation_id, self.held.turns) and self.held.hold(message)

    def _receive(self, message: EngineMessage) -> None:
        if isinstance(message, ImportKv) and not message.is_verified:
            message = verified(message, self.hand_over.slot_bytes)
        now = self.clock.now()
        for observer in self._observers:
            observer.received(message, now)
        self._publish(self.take(message, now))

    def take(self, message: EngineMessage, now: float) -> list[EngineEvent]:
        """Carry out one message; return the events that follow at once."""
        scheduler, cache = self.scheduler, self.scheduler.cache
        if self.hand_over.imports:
            self.hand_over.close_import(message)
        match message:
            case SubmitTurn():
                return self._submit(message, now)
            case ProvideLog():
                self._provide(message, now)
            case CancelTurn(attempt_id, log_tokens):
                waiting = self._lacking_log.pop(attempt_id, None) or self.held.turns.pop(
                    attempt_id, None
                )
                if waiting is not None:
                    return [_ended_at_once(waiting, FinishReason.CANCELLED, now)]
                scheduler.cancel(attempt_id, log_tokens, now)
            case ForkConversation(source_id, num_tokens, target_id):
                # An earlier conversation with this id may still be ending, and be in the cache.
                if target_id not in cache.conversations:
                    cache.fork(source_id, num_tokens, target_id, now)
            case RewindConversation(conversation_id, num_tokens):
                ended = self._give_up_waiting(conversation_id, now, warms_only=True)
                if scheduler.turn_of(conversation_id) is None:
                    scheduler.rewind(conversation_id, num_tokens, now)
                return [*ended, *self._drain_ended()]
            case DeleteConversation(conversation_id):
                ended = self._give_up_waiting(conversation_id, now)
                scheduler.delete(conversation_id, now)
                return [*ended, *self._drain_ended()]
            case EvictConversation(conversation_id, to_host, query_id):
                num_chunks = scheduler.evict(conversation_id, to_host, now)
                if query_id:
                    return [Answer(query_id, figures={"chunks": num_chunks})]
            case ListCached(query_id, limit, least_valuable):
                return [Answer(query_id, rows=cached(cache, limit, least_valuable, now))]
            case Explain(query_id, conversation_id):
                log_lines = cache.eviction_log.lines_of(conversation_id, now)
                locations = cache.locations(conversation_id)
                figures = usage(cache, conversation_id, now)
                return [Answer(query_id, figures, rows=(*locations, *log_lines))]
            case Picture(query_id, limit, prefix):
                return [Answer(query_id, rows=picture(cache, limit, prefix))]
            case GetStats(query_id):
                figures = self.metrics.figures(now) | self.turn_times.figures(now)
                return [Answer(query_id, figures=figures)]
            case CheckIntegrity(query_id):
                return [Answer(query_id, problems=self._problems(now))]
            case ExportKv():
                return [self.hand_over.export(message)]
            case OpenImport(conversation_id):
                self.hand_over.open(message, self._is_busy(conversation_id))
            case ImportKv():
                return [self.hand_over.take_in(message, now)]
        return self._drain_ended()

    def _submit(self, message: SubmitTurn, now: float) -> list[EngineEvent]:
        scheduler, conversation_id = self.scheduler, message.conversation_id
        running = scheduler.turn_of(conversation_id)
        if running is not None and running.warm and not message.warm:
            # The conversation's next turn has arrived. It uses the KV that the warm has brought so far.
            scheduler.cancel(running.attempt_id, len(running.tokens), now)
            running = None
        events = self._give_up_waiting(conversation_id, now, warms_only=True)
        is_busy = self._is_busy(conversation_id)
        num_tokens = message.first_position + len(message.tokens) // TOKEN_BYTES
        refusal = None
        if num_tokens >= self.config.context_max:
            refusal = "CONTEXT_FULL"
        elif self._num_waiting >= self.config.turns_queued_max:
            refusal = "QUEUE_FULL"
        elif num_tokens <= message.history_tokens and not (message.warm and num_tokens):
            refusal = "NO_TOKENS"
        elif not message.warm and is_busy:
            refusal = "TURN_RUNNING"
        if refusal is not None:
            return [*events, _ended_at_once(message, FinishReason.FAILED, now, refusal)]
        if message.warm and is_busy:
            return [*events, _ended_at_once(message, FinishReason.WARMED, now)]
        known = array("I")
        if message.first_position:
            if (found := self._known_log(message)) is None:
                self._lacking_log[message.attempt_id] = message
                needed = LogNeeded(message.attempt_id, conversation_id, message.first_position)
                return [*events, needed]
            known = found
        self._begin(message, known, now)
        return events

    def _is_busy(self, conversation_id: str) -> bool:
        """Whether a turn of the conversation runs, or waits outside the scheduler."""
        if self.scheduler.turn_of(conversation_id) is not None:
            return True
        outside = self._lacking_log, self.held.turns
        return any(_is_among(conversation_id, turns) for turns in outside)

    @property
    def _num_waiting(self) -> int:
        return len(self.scheduler.queued) + len(self._lacking_log) + len(self.held.turns)

    def _begin(self, message: SubmitTurn, known: array[int], now: float) -> None:
        """Submit a turn whose context is complete: `known`, then the tokens of the message."""
        known.frombytes(message.tokens)
        length_max = len(known) + message.options.sampling.max_tokens
        turn = Turn(
            attempt_id=message.attempt_id,
            conversation_id=message.conversation_id,
            tokens=known,
            history_tokens=message.history_tokens,
            prompt_end=len(known),
            length_max=min(length_max, self.config.context_max),
            options=message.options,
            warm=message.warm,
            share=message.share,
            weight=message.weight,
            identities=self._identities_of(message) if message.root else None,
            is_temporary=message.is_temporary,
        )
        self.scheduler.submit(turn, now)

    def _identities_of(self, message: SubmitTurn) -> Identities:
        """Return the identities of the turn's chunks, as far as they are known."""
        cache = self.scheduler.cache
        conversation = cache.conversations.get(message.conversation_id)
        known = conversation.identities if conversation is not None else None
        if known is not None and known.root == message.root:
            return known.beginning(message.first_position)
        return Identities(message.root, cache.config.chunk_tokens)

    def _known_log(self, message: SubmitTurn) -> array[int] | None:
        """Return a copy of the log before the message's first position; None if a part of it is unknown."""
        conversation = self.scheduler.cache.conversations.get(message.conversation_id)
        if conversation is None or len(conversation.log) < message.first_position:
            return None
        return conversation.log[: message.first_position]

    def _provide(self, message: ProvideLog, now: float) -> None:
        waiting = self._lacking_log.pop(message.attempt_id, None)
        if waiting is None:
            return  # it was cancelled in the meantime
        known = array("I")
        known.frombytes(message.tokens)
        if len(known) == waiting.first_position:
            # If the cache had valid KV of this conversation, the log would not have been needed. So a cached
            # conversation with this id is outdated. Do not compare the tokens of the two logs: during a
            # replay there are no tokens, because a journal does not record them.
            self.scheduler.rewind(waiting.conversation_id, 0, now)
            self._begin(waiting, known, now)
        else:
            self._publish([_ended_at_once(waiting, FinishReason.FAILED, now, "LOG_MISSING")])

    def _give_up_waiting(
        self, conversation_id: str, now: float, *, warms_only: bool = False
    ) -> list[EngineEvent]:
        """End the turns of a conversation that wait for its log or for their constraints."""
        ended: list[EngineEvent] = []
        for message in [] if warms_only else list(self.held.turns.values()):
            if message.conversation_id == conversation_id:
                del self.held.turns[message.attempt_id]
                ended.append(_ended_at_once(message, FinishReason.CANCELLED, now))
        for message in list(self._lacking_log.values()):
            if message.conversation_id == conversation_id and (message.warm or not warms_only):
                del self._lacking_log[message.attempt_id]
                reason = FinishReason.WARMED if message.warm else FinishReason.CANCELLED
                ended.append(_ended_at_once(message, reason, now))
        return ended

    def _plan(self) -> Iteration | None:
        now = self.clock.now()
        iteration = self.scheduler.plan(now)
        self._publish(self._drain_ended())
        for observer in self._observers:
            observer.planned(iteration, now)
        if iteration is not None:
            self._publish([self._admitted(each.attempt_id) for each in iteration.started])
        return iteration

    def _admitted(self, attempt_id: int) -> TurnAdmitted:
        turn = self.scheduler.turn(attempt_id)
        if turn is None:  # a warm that had nothing to compute
            return TurnAdmitted(attempt_id)
        return TurnAdmitted(attempt_id, turn.usage.new_tokens + turn.usage.recomputed_tokens)

    # -- out --

    def _commit(self, iteration: Iteration) -> None:
        outcome = self.executor.collect()
        now = self.clock.now()
        news = self.scheduler.commit(iteration, outcome, now)
        for observer in self._observers:
            observer.committed(iteration, outcome, now)
        self._publish(self._events(news))

    def _publish(self, events: Sequence[EngineEvent]) -> None:
        if events:
            for event in events if self.held.prepared else ():
                if isinstance(event, TurnEnded):
                    self.held.forget(event.attempt_id)
            for observer in self._observers:
                observer.published(events)
            self.sink.publish(events)

    def _drain_ended(self) -> list[EngineEvent]:
        return self._events(self.scheduler.drain_ended())

    @staticmethod
    def _events(news: Sequence[SampledToken | Ended]) -> list[EngineEvent]:
        return [each if isinstance(each, SampledToken) else _turn_ended(each) for each in news]

    def _end_everything(self) -> None:
        now = self.clock.now()
        failed, reason = FinishReason.FAILED, "ENGINE_FAILED"
        events: list[EngineEvent] = [
            TurnEnded(
                turn.attempt_id,
                turn.conversation_id,
                failed,
                replace(turn.usage, finished_at=now),
                reason,
            )
            for turn in self.scheduler.turns()
        ]
        waiting = [*self._lacking_log.values(), *self.held.turns.values()]
        self.held.turns.clear()
        events += [_ended_at_once(each, failed, now, reason) for each in waiting]
        self._publish(events)

    def _problems(self, now: float) -> tuple[str, ...]:
        try:
            self.scheduler.check(now)
        except AssertionError as problem:
            return (str(problem) or "an invariant of the cache does not hold",)
        return ()


def _is_among(conversation_id: str, turns: Mapping[int, SubmitTurn]) -> bool:
    return any(each.conversation_id == conversation_id for each in turns.values())


def _turn_ended(end: Ended) -> TurnEnded:
    turn, finish, failure = end
    usage = replace(turn.usage)
    return TurnEnded(turn.attempt_id, turn.conversation_id, finish, usage, failure)


def _ended_at_once(
    message: SubmitTurn, finish: FinishReason, now: float, failure: str | None = None
) -> TurnEnded:
    """Return the end of a turn that the scheduler never had."""
    usage = Usage(submitted_at=now, finished_at=now)
    return TurnEnded(message.attempt_id, message.conversation_id, finish, usage, failure)
