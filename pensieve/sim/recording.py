"""Writes the journal that `serve --journal` would write of the iterations of a simulation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pensieve.engine.journal import Journal, opened
from pensieve.errors import ConfigError
from pensieve.sim.simulator import Simulator
from pensieve.sim.sweep import Point, Setting


@contextmanager
def recorded(path: Path, simulator: Simulator, setting: Setting, point: Point) -> Iterator[None]:
    """Inside, what this simulator's engine does is appended to the journal at `path`."""
    cost, scheduler = setting.cost, simulator.scheduler
    computed_by = {
        "name": cost.source,
        "device": "simulated",
        "layers": cost.layers,
        "kv_bytes_per_token": cost.kv_bytes_per_token,
    }
    try:
        file = opened(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    with file:
        simulator.engine.observe(
            Journal(
                file,
                simulator.config,
                scheduler.cache.config,
                scheduler.config,
                point.policy,
                setting.recompute,
                computed_by,
            )
        )
        yield
