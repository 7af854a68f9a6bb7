"""Puts cache, scheduler and executor together to an engine, in the one place for that.

    KVCache(config, policy) → Scheduler(cache, config) → Engine(config, scheduler, executor, ports)

Who calls it brings what differs: a daemon the executor that runs a model and the machine's clock, the
simulator a modelled executor and a virtual clock.  Nothing else may differ, or a simulated iteration
would not be the daemon's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pensieve.core.cache import CacheConfig, KVCache
from pensieve.core.policies.protocol import RetentionPolicy
from pensieve.core.scheduler import Scheduler, SchedulerConfig
from pensieve.engine.engine import Engine, EngineConfig
from pensieve.engine.mailbox import Mailbox
from pensieve.engine.ports import Clock, Executor, Observer, Sink


@dataclass(frozen=True)
class EngineConfigs:
    """The section of each part; what follows from several of them is computed in `fitted`."""

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
    ) -> EngineConfigs:
        """A context is at most what the device tier holds."""
        limit = cache.device_tokens_max
        if context_max is not None:
            limit = min(context_max, limit)
        return cls(cache, scheduler, EngineConfig(limit, turns_queued_max))


@dataclass(frozen=True)
class Ports:
    """What an engine reads its time and messages from, and where its events go."""

    clock: Clock
    mailbox: Mailbox
    sink: Sink


def assemble(
    configs: EngineConfigs,
    policy: RetentionPolicy,
    executor: Executor,
    ports: Ports,
    observers: Sequence[Observer] = (),
) -> Engine:
    """An engine that is ready to step."""
    scheduler = Scheduler(KVCache(configs.cache, policy), configs.scheduler)
    return Engine(
        configs.engine, scheduler, executor, ports.clock, ports.mailbox, ports.sink, observers
    )
