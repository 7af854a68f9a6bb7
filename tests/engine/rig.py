"""An engine over the ledger executor and a virtual clock, and random traffic for it."""

from __future__ import annotations

import io
import random
from array import array
from collections.abc import Sequence
from typing import Any
from zlib import crc32

from pensieve.core.cache import CacheConfig
from pensieve.core.cost import CostProfile
from pensieve.core.iteration import Iteration, Outcome, SampledToken
from pensieve.core.policies.registry import policy_named
from pensieve.core.scheduler import Scheduler
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.core.turn import FinishReason, TurnOptions
from pensieve.engine.engine import Engine, EngineConfig, EngineConfigs
from pensieve.engine.journal import Journal
from pensieve.engine.mailbox import Mailbox
from pensieve.engine.messages import (
    CancelTurn,
    DeleteConversation,
    EngineEvent,
    EngineMessage,
    EvictConversation,
    ForkConversation,
    RewindConversation,
    SubmitTurn,
    TurnEnded,
)
from pensieve.engine.ports import Ports
from pensieve.sampling import Sampling
from pensieve.sim.executor import VirtualClock
from tests.fakes import LedgerExecutor, reply_to

COST = CostProfile.analytic(num_parameters=1000, num_layers=2, num_heads=2, head_size=8)
CACHE = CacheConfig(device_pages=12, host_pages=20, chunk_tokens=4)
SCHEDULER = SchedulerConfig(batch_tokens_max=16, turns_max=8)
ENGINE = EngineConfig(context_max=CACHE.device_tokens_max, turns_queued_max=4)


class ListSink:
    def __init__(self) -> None:
        self.events: list[EngineEvent] = []

    def publish(self, events: Sequence[EngineEvent]) -> None:
        self.events.extend(events)

    def ends(self) -> dict[int, TurnEnded]:
        return {event.attempt_id: event for event in self.events if isinstance(event, TurnEnded)}

    def reply_of(self, attempt_id: int) -> list[int]:
        deltas = [event for event in self.events if isinstance(event, SampledToken)]
        return [event.token_id for event in deltas if event.attempt_id == attempt_id]


class Auditor:
    """An observer that checks every invariant after every commit, and counts commits."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.num_commits = 0
        self.num_ahead = 0  # commits while a later iteration had already been launched
        self._num_planned = 0

    def received(self, message: EngineMessage, now: float) -> None:
        return

    def planned(self, iteration: Iteration | None, now: float) -> None:
        self._num_planned += iteration is not None

    def committed(self, iteration: Iteration, outcome: Outcome, now: float) -> None:
        self.scheduler.check(now)
        self.num_commits += 1
        self.num_ahead += self._num_planned > self.num_commits

    def published(self, events: Sequence[EngineEvent]) -> None:
        return


class PacedExecutor(LedgerExecutor):
    """An executor whose iterations take `seconds`."""

    def __init__(self, clock: VirtualClock, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.clock = clock
        self.seconds = 0.0

    def collect(self) -> Outcome:
        self.clock.advance(self.seconds)
        return super().collect()


class Rig:
    def __init__(
        self,
        seed: int = 0,
        journal: io.StringIO | None = None,
        *,
        depth: int = 1,
        failing: float = 0.0,
        stops: bool = True,
        scheduler: SchedulerConfig = SCHEDULER,
        config: EngineConfig = ENGINE,
        cache: CacheConfig = CACHE,
    ) -> None:
        self.clock = VirtualClock()
        policy = policy_named("value", COST, cache.chunk_tokens)
        self.executor = PacedExecutor(
            self.clock,
            cache.device_pages,
            cache.host_pages,
            cache.chunk_tokens,
            seed,
            failing=failing,
            stops=stops,
            depth=depth,
        )
        self.mailbox, self.sink = Mailbox(), ListSink()
        configs = EngineConfigs(cache, scheduler, config)
        ports = Ports(self.clock, self.mailbox, self.sink)
        self.engine = Engine(configs, policy, self.executor, ports)
        self.scheduler = self.engine.scheduler
        self.auditor = Auditor(self.scheduler)
        self.engine.observe(self.auditor)
        if journal is not None:
            observer = Journal(journal, config, cache, scheduler, "value", COST)
            self.engine.observe(observer)
            self.scheduler.cache.content.note_found = observer.note_found

    def run(self) -> None:
        while self.engine.step():
            self.clock.advance(0.05)

    def take(self, *seconds: float) -> None:
        """Run iterations that take these times."""
        for each in seconds:
            self.executor.seconds = each
            assert self.engine.step()


def packed(tokens: Sequence[int]) -> bytes:
    return array("I", tokens).tobytes()


def options_of(reply: int) -> TurnOptions:
    return TurnOptions(Sampling(max_tokens=reply))


def submit(
    attempt_id: int, name: str, log: list[int], prompt: list[int], reply: int = 6, root: str = ""
) -> SubmitTurn:
    return SubmitTurn(
        attempt_id, name, packed(log + prompt), len(log), options_of(reply), root=root
    )


def traffic(
    rig: Rig, seed: int, num_messages: int, reply_max: int = 9, roots: Sequence[str] = ("",)
) -> None:
    """Run several conversations at once, with all requests that a client may send.

    With two or more `roots`, most messages begin alike, and every conversation has one of the roots.
    """
    choose = random.Random(seed)
    logs: dict[str, list[int]] = {}
    prompts: dict[int, tuple[str, list[int]]] = {}
    attempt_id, num_names, num_seen = 0, 0, 0
    for _ in range(num_messages):
        running = {name for turn, (name, _) in prompts.items() if turn not in rig.sink.ends()}
        resting = [name for name in logs if name not in running]
        roll = choose.random()
        if roll < 0.6:
            if len(logs) < 6:
                num_names += 1
                logs[f"c{num_names}"] = []
                resting.append(f"c{num_names}")
            if resting:
                attempt_id += 1
                name = choose.choice(resting)
                prompt = [choose.randrange(500) for _ in range(choose.randint(1, 9))]
                if len(roots) > 1 and choose.random() < 0.7:
                    prompt = [*range(choose.randint(1, 16)), *prompt[:2]]
                prompts[attempt_id] = (name, logs[name] + prompt)
                reply = choose.randint(1, reply_max)
                root = roots[crc32(name.encode()) % len(roots)]
                rig.mailbox.put(submit(attempt_id, name, logs[name], prompt, reply, root))
        elif roll < 0.7 and running:
            turn, (name, _) = next((t, p) for t, p in prompts.items() if p[0] in running)
            rig.mailbox.put(CancelTurn(turn, len(logs[name])))
        elif roll < 0.8 and resting and len(logs) < 6:
            num_names += 1
            source = choose.choice(resting)
            logs[f"c{num_names}"] = list(logs[source])
            rig.mailbox.put(ForkConversation(source, len(logs[source]), f"c{num_names}"))
        elif roll < 0.85 and resting:
            name = choose.choice(resting)
            del logs[name][len(logs[name]) // 2 :]
            rig.mailbox.put(RewindConversation(name, len(logs[name])))
        elif roll < 0.9 and resting:
            name = choose.choice(resting)
            del logs[name]
            rig.mailbox.put(DeleteConversation(name))
        elif resting:
            rig.mailbox.put(EvictConversation(choose.choice(resting)))
        for _ in range(choose.randint(0, 3)):
            rig.engine.step()
            rig.clock.advance(choose.choice((0.01, 5.0)))
        for event in rig.sink.events[num_seen:]:
            if isinstance(event, TurnEnded):
                name, context = prompts[event.attempt_id]
                sampled = rig.sink.reply_of(event.attempt_id)
                if event.finish in (FinishReason.STOP, FinishReason.LENGTH):
                    assert sampled == reply_to(context, len(context) + len(sampled))
                    logs[name] = context + sampled
        num_seen = len(rig.sink.events)
    rig.run()
