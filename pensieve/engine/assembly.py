"""Assembles an engine from cache, scheduler and executor; every engine is assembled here.

    KVCache(config, policy) → Scheduler(cache, config) → Engine(config, scheduler, executor, ports)

The caller brings what differs: a daemon the executor that runs a model and the machine's clock, the
simulator a modelled executor and a virtual clock, a replay what a journal recorded.  Nothing else may
differ, or a simulated iteration would not be the daemon's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pensieve.core.cache import CacheConfig, KVCache
from pensieve.core.cache_values import IsIntact, trusted
from pensieve.core.policies.protocol import RetentionPolicy
from pensieve.core.scheduler import Scheduler
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.engine.engine import Engine, EngineConfig
from pensieve.engine.mailbox import Mailbox
from pensieve.engine.ports import Clock, Executor, KvPages, Observer, Preparer, Sink


@dataclass(frozen=True)
class EngineConfigs:
    """The configuration of each part; `fitted` computes what follows from several of them."""

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
        """A context is at most what the device tier holds."""
        limit = cache.device_tokens_max
        if context_max is not None:
            limit = min(context_max, limit)
        return cls(cache, scheduler, EngineConfig(limit, turns_queued_max, ttft_seconds))


@dataclass(frozen=True)
class Ports:
    """What an engine reads its time and messages from, and where its events go."""

    clock: Clock
    mailbox: Mailbox
    sink: Sink
    preparer: Preparer | None = None  # None: turns wait in the executor for what they need
    pages: KvPages | None = None  # None: no KV is handed over


def assemble(
    configs: EngineConfigs,
    policy: RetentionPolicy,
    executor: Executor,
    ports: Ports,
    observers: Sequence[Observer] = (),
    is_intact: IsIntact = trusted,
) -> Engine:
    """An engine that is ready to step."""
    scheduler = Scheduler(KVCache(configs.cache, policy, is_intact), configs.scheduler)
    return Engine(
        configs.engine,
        scheduler,
        executor,
        ports.clock,
        ports.mailbox,
        ports.sink,
        observers,
        ports.preparer,
        ports.pages,
    )
