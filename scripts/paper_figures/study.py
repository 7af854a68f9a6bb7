"""The models, memory, seeds and simulations that all paper figures share.

Results of simulations are kept, so that none runs twice.

Models and memory are those of the Pensieve paper: 40 GB of KV and 220 GB of host memory per A100-80GB. The
paper compares throughputs at equal P90 normalized latency, but names no latency. Here it is `LIMIT_MS`, which
is above the flat part of every curve.

Every figure is computed once per seed. A ratio compares two systems under the same conversations, seed by
seed. The report shows the median over the seeds, with the least and the most.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from pensieve.sim.cost import HARDWARE, MODELS, CostModel
from pensieve.sim.workload import HABITS
from scripts.paper_figures.equal_latency import SCANNED_MAX, Crossing, Row, first_crossing
from scripts.paper_figures.scenario import Scenario

LIMIT_MS = 200.0
KV_BYTES, HOST_BYTES = 40e9, 220e9  # per GPU, in the paper
GPU = "a100-80gb"
THROUGHPUT, P90 = "throughput (output tokens per second)", "P90 normalized latency (ms per token)"

ASSUMED = (
    f"time: data sheets x 0.6 (pensieve/sim/cost.py), {GPU}; several GPUs are one larger one, and "
    "communication between them, sampling and tokenization take no time; an iteration has 0.5 ms of overhead",
    f"memory: {KV_BYTES / 1e9:.0f} GB of KV and {HOST_BYTES / 1e9:.0f} GB of host memory per GPU "
    "(Sarathi, Baton: KV has 0.9 of the device's memory, minus the weights)",
    "load: conversations like ShareGPT's, with means of 5.56 turns (log-normal), and 37.8 tokens in, 204.6 "
    "tokens out and 60 s of reaction time (exponential); at most 16,384 tokens of context; each simulation "
    "starts with a steady load",
    f"throughput: output tokens per second at the lowest load where the P90 of normalized latency crosses "
    f"{LIMIT_MS:g} ms per token",
    "each figure: the median over seeds (least to most); a ratio compares two systems seed by seed",
)


@dataclass(frozen=True)
class Spread:
    """The values of one figure by seed."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def shown(self, form: str) -> str:
        least, most = form.format(min(self.values)), form.format(max(self.values))
        if least == most:
            return least
        return f"{form.format(self.median)} ({least} to {most})"


def ratio(ours: Iterable[float], theirs: Iterable[float]) -> Spread:
    return Spread(tuple(a / (b or math.nan) for a, b in zip(ours, theirs, strict=True)))


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    figure: str
    what: str
    paper: str  # the paper's number; "" if its text gives none
    ours: Spread
    form: str = "{:.2f} x"
    note: str = ""
    aim: str = ""  # the value that ours should reach

    @property
    def shown(self) -> str:
        return self.ours.shown(self.form)


@dataclass(frozen=True)
class Panel:
    """The curves of a figure by name, as (x, y): those of the first seed, and those of the others."""

    name: str
    title: str
    x: str
    y: str
    lines: dict[str, list[tuple[float, float]]]
    repeats: dict[str, list[list[tuple[float, float]]]] = field(default_factory=dict)
    limit: float | None = None
    most: float | None = None  # the upper end of y, such as 100 for a percentage


@dataclass(frozen=True)
class Extent:
    """How much is simulated."""

    seeds: int = 3
    warm_seconds: float = 100.0
    seconds: float = 600.0  # counted, per simulation
    grouped_seconds: float = 300.0  # with grouped query heads: more turns in the same time
    halvings: int = 2  # bisection steps between two rates of the grid
    scanned_max: int = SCANNED_MAX
    crowding: tuple[float, ...] = (0.9, 1.0, 1.1, 1.2, 1.35)  # figure 3.14: rate / rate at limit
    requests: int = 128  # table 4
    queries: int = 120  # of Baton's table 1
    capacity_warm_seconds: float = 30.0  # figures 9 and 10: not counted
    capacity_seconds: float = 150.0  # figures 9 and 10: counted
    capacity_resolution: float = 1.1  # ratio of rates at which the search ends
    faster: float = 1.0  # multiplies the guess at which the search for a rate begins
    steady: bool = True  # False: no conversations at the start


# Simulates all figures, without meaningful results: an empty system, and a single rate each.
QUICK = Extent(1, 4.0, 8.0, 8.0, 0, 1, (1.0,), 8, 8, 1.0, 3.0, math.inf, 4.0, False)


@dataclass
class Study:
    """Simulations whose results are kept, because several figures share them."""

    extent: Extent = field(default_factory=Extent)
    progress: Callable[[str], None] = lambda line: None
    panels: list[Panel] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)  # figure, observation
    crossings: dict[Scenario, Crossing] = field(default_factory=dict)
    _rows: dict[tuple[Scenario, float], Row] = field(default_factory=dict)

    def scenario(self, model: str, num_gpus: int = 1, **options: Any) -> Scenario:
        """Return a scenario with the first seed."""
        preset = MODELS[model]
        per_token = preset.kv_bytes_per_token
        return Scenario(
            **{
                "cost": CostModel.of(preset, replace(HARDWARE[GPU], devices=num_gpus)),
                "device_tokens": int(num_gpus * KV_BYTES / per_token),
                "host_tokens": int(num_gpus * HOST_BYTES / per_token),
                "habits": HABITS["sharegpt"],
                "warm_seconds": self.extent.warm_seconds,
                "seconds": self.seconds_of(model),
                "steady": self.extent.steady,
                **options,
            }
        )

    def seconds_of(self, model: str) -> float:
        """Return how many seconds of a simulation count.

        With them, all models run about the same number of turns.
        """
        grouped = MODELS[model].kv_heads < MODELS[model].heads
        return self.extent.grouped_seconds if grouped else self.extent.seconds

    def seeded(self, scenario: Scenario) -> Iterator[Scenario]:
        return (replace(scenario, seed=seed) for seed in range(self.extent.seeds))

    def simulate(self, scenario: Scenario, rate: float) -> Row:
        if (scenario, rate) not in self._rows:
            row = self._rows[scenario, rate] = scenario.simulate(rate)
            p90 = row["normalized_p90"]
            latency = "no turn ended" if p90 is None else f"P90 {p90:.0f} ms/token"
            tokens = row["tokens_per_second"] or 0.0
            self.progress(
                f"  seed {scenario.seed}, {rate:.3g} conversations/s: {tokens:,.0f} tokens/s, {latency}"
            )
        return self._rows[scenario, rate]

    def at_limit(self, name: str, scenario: Scenario, guess: float) -> list[Crossing]:
        """Return where each seed's P90 reaches the limit."""
        if scenario not in self.crossings:
            self.progress(name)
            guess *= self.extent.faster
            for seeded in self.seeded(scenario):
                found = self.crossings[seeded] = first_crossing(
                    lambda rate, seeded=seeded: self.simulate(seeded, rate),  # type: ignore[misc]
                    LIMIT_MS,
                    guess,
                    self.extent.halvings,
                    self.extent.scanned_max,
                )
                guess = found.rate
        return [self.crossings[seeded] for seeded in self.seeded(scenario)]

    def throughputs(self, name: str, scenario: Scenario, guess: float) -> list[float]:
        return [each.tokens_per_second for each in self.at_limit(name, scenario, guess)]

    def lower_latency(self, ours: Scenario, theirs: Scenario) -> Spread:
        """Return the largest reduction of latency in per cent, under loads up to the limit of `theirs`."""
        self.progress("latency under less load")
        found = []
        for one, other in zip(self.seeded(ours), self.seeded(theirs), strict=True):
            at_limit, best = self.crossings[other].rate, 0.0
            for rate in (at_limit / 2, at_limit * 0.75, at_limit):
                latency = self.simulate(one, rate)["normalized_p90"]
                other_latency = self.simulate(other, rate)["normalized_p90"]
                if latency and other_latency:
                    best = max(best, 1 - latency / other_latency)
            found.append(100 * best)
        return Spread(tuple(found))

    def note_crossings(self, figure: str, systems: dict[str, Scenario]) -> None:
        """Note which of these systems cross the limit several times or never."""
        for name, scenario in systems.items():
            found = [self.crossings[each] for each in self.seeded(scenario)]
            several = [each for each in found if each.num_upward > 1]
            if several:
                spans = ", ".join(
                    f"first between {each.bracket[0]:.3g} and {each.bracket[1]:.3g}, last between "
                    f"{each.last_bracket[0]:.3g} and {each.last_bracket[1]:.3g} conversations/s"
                    for each in several
                )
                self.notes.append(
                    (
                        figure,
                        f"the P90 of {name} crosses the limit more than once in {len(several)} of "
                        f"{len(found)} seeds ({spans}); the first crossing counts",
                    )
                )
            if missed := sum(not each.reached for each in found):
                self.notes.append(
                    (
                        figure,
                        f"the P90 of {name} did not reach the limit in {missed} of {len(found)} seeds",
                    )
                )

    def draw(self, name: str, title: str, scenarios: dict[str, Scenario]) -> None:
        """Draw the curves of all simulated rates."""
        curves = {
            label: [self._curve(seeded) for seeded in self.seeded(each)]
            for label, each in scenarios.items()
        }
        lines = {label: found[0] for label, found in curves.items()}
        repeats = {label: found[1:] for label, found in curves.items()}
        self.panels.append(Panel(name, title, THROUGHPUT, P90, lines, repeats, LIMIT_MS))

    def _curve(self, scenario: Scenario) -> list[tuple[float, float]]:
        rates = sorted(rate for simulated, rate in self._rows if simulated == scenario)
        rows = [self._rows[scenario, rate] for rate in rates]
        return [
            (row["tokens_per_second"], row["normalized_p90"])
            for row in rows
            if row["normalized_p90"]
        ]
