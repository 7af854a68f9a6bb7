"""What is played to draw a figure again, remembered: several figures share their curves.

Models and memory are those of the Pensieve paper: 40 GB of KV and 220 GB of host memory for each A100-80GB.
Its text compares throughputs at equal P90 normalized latency and names no limit, so they are read at
`LIMIT_MS`, where all curves have left their flat part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from pensieve.sim.cost import HARDWARE, MODELS, CostModel
from pensieve.sim.scenario import AtLatency, Row, Scenario, at_latency
from pensieve.sim.trace import HABITS

LIMIT_MS = 200.0
KV_BYTES, HOST_BYTES = 40e9, 220e9  # of each GPU, in the paper
GPU = "a100-80gb"
X, Y = "throughput (output tokens per second)", "P90 normalized latency (ms per token)"

ASSUMED = (
    f"time: data sheets x 0.6 (sim/model.py), {GPU}; several GPUs are one larger one, and talk between "
    "them, sampling and tokenisation take no time; an iteration has 0.5 ms of overhead",
    f"memory: {KV_BYTES / 1e9:.0f} GB of KV and {HOST_BYTES / 1e9:.0f} GB of host memory per GPU (table 4: "
    "what is left of 0.9 of the device's memory)",
    "load: conversations like ShareGPT's (5.56 turns, log-normal; 37.8 tokens in, 204.6 out, to 16,384), "
    "reaction times exponential around 60 s, in a load that has gone on for long",
    f"throughput: output tokens per second where the P90 of normalized latency is {LIMIT_MS:g} ms per token",
)


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    figure: str
    what: str
    paper: str  # "" where its text gives no number
    ours: float
    form: str = "{:.2f} x"
    note: str = ""
    aim: str = ""  # what ours should be

    @property
    def shown(self) -> str:
        return self.form.format(self.ours)


@dataclass(frozen=True)
class Panel:
    """What is drawn of a figure: lines by name, each of (x, y)."""

    name: str
    title: str
    x: str
    y: str
    lines: dict[str, list[tuple[float, float]]]
    logarithmic: bool = False
    limit: float | None = None


@dataclass(frozen=True)
class Extent:
    """How much is simulated."""

    warm_seconds: float = 100.0
    seconds: float = 300.0
    narrowings: int = 3
    crowding: tuple[float, ...] = (
        0.9,
        1.0,
        1.1,
        1.2,
        1.35,
    )  # of figure 3.14, of the rate at the limit
    requests: int = 128
    seeds: int = 4
    steps_max: int = 24
    faster: float = 1.0  # where the search for a rate begins
    lived_in: bool = True


# All that the full one plays, and nothing to learn from it: the house is empty, the search a single step.
QUICK = Extent(4.0, 8.0, 0, (1.0,), 8, 1, 1, 4.0, False)


@dataclass
class Study:
    extent: Extent = field(default_factory=Extent)
    told: Callable[[str], None] = lambda line: None
    panels: list[Panel] = field(default_factory=list)
    _found: dict[Scenario, AtLatency] = field(default_factory=dict)
    _rows: dict[tuple[Scenario, float], Row] = field(default_factory=dict)

    def scenario(self, model: str, num_gpus: int = 1, **options: Any) -> Scenario:
        preset = MODELS[model]
        per_token = preset.kv_bytes_per_token
        return Scenario(
            **{
                "cost": CostModel.of(preset, replace(HARDWARE[GPU], devices=num_gpus)),
                "device_tokens": int(num_gpus * KV_BYTES / per_token),
                "host_tokens": int(num_gpus * HOST_BYTES / per_token),
                "habits": HABITS["sharegpt"],
                "warm_seconds": self.extent.warm_seconds,
                "seconds": self.extent.seconds,
                "lived_in": self.extent.lived_in,
                **options,
            }
        )

    def play(self, scenario: Scenario, rate: float) -> Row:
        if (scenario, rate) not in self._rows:
            row = self._rows[scenario, rate] = scenario.play(rate)
            p90 = row["normalized_p90"]
            said = "nobody was served" if p90 is None else f"P90 {p90:.0f} ms/token"
            tokens = row["tokens_per_second"] or 0.0
            self.told(f"  {rate:.3g} conversations/s: {tokens:,.0f} tokens/s, {said}")
        return self._rows[scenario, rate]

    def lower_latency(self, one: Scenario, other: Scenario) -> float:
        """By which share at most, under loads up to the one at which `other` is at the limit."""
        self.told("latency under less load")
        most = self._found[other].rate
        best = 0.0
        for rate in (most / 2, most * 0.75, most):
            latency = self.play(one, rate)["normalized_p90"]
            other_latency = self.play(other, rate)["normalized_p90"]
            if latency and other_latency:
                best = max(best, 1 - latency / other_latency)
        return best

    def at_limit(self, named: str, scenario: Scenario, guess: float) -> AtLatency:
        if scenario not in self._found:
            self.told(named)
            self._found[scenario] = at_latency(
                lambda rate: self.play(scenario, rate),
                LIMIT_MS,
                guess * self.extent.faster,
                self.extent.narrowings,
                self.extent.steps_max,
            )
        return self._found[scenario]

    def draw(self, name: str, title: str, scenarios: dict[str, Scenario]) -> None:
        """The curves of all that was played."""
        self.panels.append(
            Panel(
                name, title, X, Y, {a: self._curve(b) for a, b in scenarios.items()}, True, LIMIT_MS
            )
        )

    def _curve(self, scenario: Scenario) -> list[tuple[float, float]]:
        rates = sorted(rate for played, rate in self._rows if played == scenario)
        rows = [self._rows[scenario, rate] for rate in rates]
        return [
            (row["tokens_per_second"], row["normalized_p90"])
            for row in rows
            if row["normalized_p90"]
        ]
