"""Simulate one load with all combinations of policies, rates and tier sizes.

A `SweepPoint` is one combination. `SweepSettings` are common to all points. The machine limits the sizes
of the tiers (`TierRoom`). Errors name the option with the invalid value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from pensieve.core.cache import CacheConfig
from pensieve.core.cost import CostProfile
from pensieve.core.policies.protocol import EvictionPolicy
from pensieve.core.policies.registry import policy_named
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.engine.journal import Journal, opened
from pensieve.errors import ConfigError, InvalidArgument
from pensieve.sim import report
from pensieve.sim.clairvoyant import ClairvoyantPolicy
from pensieve.sim.cost import (
    CHUNK_TOKENS,
    DEVICE_SHARE,
    CostModel,
    HardwarePreset,
    ModelPreset,
    device_tokens_of,
    host_tokens_of,
)
from pensieve.sim.simulator import SimulationFigures, Simulator
from pensieve.sim.trace import Arrival, Problems, from_zero, lines_of, read
from pensieve.sim.workload import WORKLOAD_PRESETS, drawn

DEVICE_TOKENS_MIN = 4 * CHUNK_TOKENS
DEVICE_TOKENS, HOST_TOKENS = 500_000, 2_000_000  # default sizes if no machine limits them
CLAIRVOYANT = "clairvoyant"


class SweepPoint(NamedTuple):
    """One simulation of a sweep."""

    policy: str
    rate: float
    device_tokens: int
    host_tokens: int
    seed: int = 0  # of the random workload


def points(
    policies: Iterable[str],
    rates: Iterable[float],
    devices: Iterable[int],
    hosts: Iterable[int],
    seeds: Iterable[int] = (0,),
) -> list[SweepPoint]:
    """Return every combination."""
    return [SweepPoint(*each) for each in product(policies, rates, devices, hosts, seeds)]


@dataclass(frozen=True)
class TierRoom:
    """The default tier sizes in tokens of KV, and the largest device tier."""

    device_tokens: int = DEVICE_TOKENS
    host_tokens: int = HOST_TOKENS
    device_tokens_max: int | None = None  # None: no limit

    @classmethod
    def of(cls, model: ModelPreset, hardware: HardwarePreset) -> TierRoom:
        """Return the tokens of KV that fit next to a model's weights on a machine."""
        device = device_tokens_of(model, hardware)
        if device < DEVICE_TOKENS_MIN:
            share = DEVICE_SHARE * hardware.memory_bytes
            raise InvalidArgument(
                "model",
                f"the weights of {model.name} are {model.weight_bytes / 1e9:.0f} GB, and {hardware.devices}"
                f" x {hardware.name} have {share / 1e9:.0f} GB for weights and KV. Use more --devices or a"
                " smaller model",
            )
        spare = (1 - DEVICE_SHARE) * hardware.memory_bytes / model.kv_bytes_per_token
        return cls(device, host_tokens_of(model, hardware), int(device + spare))

    def check(self, devices: Iterable[int], model: str, hardware: str) -> None:
        """Raise InvalidArgument if a device tier is too small or does not fit."""
        least, most = min(devices), max(devices)
        if least < DEVICE_TOKENS_MIN:
            raise InvalidArgument("device_tokens", f"must be at least {DEVICE_TOKENS_MIN}")
        if self.device_tokens_max is not None and most > self.device_tokens_max:
            raise InvalidArgument(
                "device_tokens",
                f"{most:,} tokens of {model} do not fit {hardware}: next to the weights there is room for "
                f"{self.device_tokens_max:,}",
            )


@dataclass(frozen=True)
class Source:
    """The source of arrivals: trace files, or a random workload."""

    traces: tuple[Path, ...] = ()
    workload: str | None = None
    seconds: float = 600.0  # duration of a random workload
    reaction_seconds: float | None = None

    def arrivals(self, rate: float, problems: Problems, seed: int = 0) -> Iterator[Arrival]:
        if self.workload is None:
            return from_zero(read(lines_of(self.traces, problems), problems))
        return drawn(
            WORKLOAD_PRESETS[self.workload],
            rate,
            self.seconds,
            seed,
            reaction_seconds=self.reaction_seconds,
        )


@dataclass(frozen=True)
class SweepSettings:
    """The settings that all points of a sweep share."""

    source: Source
    cost: CostModel
    recompute: CostProfile
    scheduler: SchedulerConfig
    keep_gaps: bool
    keep_series: bool
    count_from: float
    until: float | None
    stateless: bool
    phases: str

    def simulator(self, point: SweepPoint) -> Simulator:
        return Simulator(
            self.cost,
            self._policy(point),
            CacheConfig(point.device_tokens // CHUNK_TOKENS, point.host_tokens // CHUNK_TOKENS),
            self.scheduler,
            keep_gaps=self.keep_gaps,
            count_from=self.count_from,
            until=self.until,
            stateless=self.stateless,
            phases=self.phases,
            keep_series=self.keep_series,
        )

    def _policy(self, point: SweepPoint) -> EvictionPolicy:
        if point.policy != CLAIRVOYANT:
            return policy_named(point.policy, self.recompute, CHUNK_TOKENS)
        return ClairvoyantPolicy(self.source.arrivals(point.rate, Problems(), point.seed))

    def row(
        self, point: SweepPoint, simulator: Simulator, counts: SimulationFigures
    ) -> dict[str, Any]:
        """Return the figures of a point, with the parameters of the point."""
        row = {
            **report.figures(point.policy, counts),
            "rate": point.rate if self.source.workload is not None else None,
            "device_size": point.device_tokens,
            "host_size": point.host_tokens,
            "seed": point.seed if self.source.workload is not None else None,
            "stateless": self.stateless,
            "phases": self.phases,
        }
        if simulator.series is not None:
            row["series"] = simulator.series.means()
        return row


@contextmanager
def recorded(
    path: Path, simulator: Simulator, setting: SweepSettings, point: SweepPoint
) -> Iterator[None]:
    """Append the actions of this simulator's engine to the journal at `path`, inside the block."""
    cost, scheduler = setting.cost, simulator.scheduler
    journal_model = {
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
                journal_model,
            )
        )
        yield
