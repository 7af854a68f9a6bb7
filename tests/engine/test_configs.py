"""The configuration of an engine: limits that follow from several parts, and no shared objects."""

from __future__ import annotations

import pytest

from pensieve.core.cache import CacheConfig
from pensieve.core.policies.lru import LruPolicy
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.engine.engine import Engine, EngineConfigs
from pensieve.engine.mailbox import Mailbox, Outbox
from pensieve.engine.ports import Ports
from pensieve.sim.cost import instant
from pensieve.sim.executor import ModelledExecutor, VirtualClock


@pytest.mark.parametrize(("model_max", "context_max"), [(None, 96), (50, 50), (1000, 96)])
def test_the_context_limit_is_the_smaller_of_model_and_device_tier(
    model_max: int | None, context_max: int
) -> None:
    """Four pages of 32 slots; one page is reserved for copy on write."""
    configs = EngineConfigs.fitted(CacheConfig(4, 0, 32), SchedulerConfig(64, 2), model_max)
    assert configs.engine.context_max == context_max


def test_an_assembled_engine_has_nothing_to_do_at_first() -> None:
    configs = EngineConfigs.fitted(CacheConfig(4, 4, 32), SchedulerConfig(64, 2))
    clock, mailbox = VirtualClock(), Mailbox()
    executor = ModelledExecutor(instant(32)[0], clock, lambda iteration, begun, ended: None)
    engine = Engine(configs, LruPolicy(), executor, Ports(clock, mailbox, Outbox()))
    assert not engine.step()
    assert engine.scheduler.cache.config is configs.cache
    engine.scheduler.check(clock.now())
