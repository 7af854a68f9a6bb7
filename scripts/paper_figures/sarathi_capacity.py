"""Figures 9 to 11 of the Sarathi-Serve paper (Agrawal et al., 2024): capacity, and the cost of pieces.

Figures 9 and 10 show the highest load at which the P99 between tokens meets an objective and the median time
in the queue is within 2 s. Each request is a new conversation without cached history. Figure 9: Mistral-7B on
one A100-80GB and Yi-34B on two. Figure 10: LLaMA2-70B on eight A40 and Falcon-180B on eight A100-80GB, in two
pipeline stages of four each (pipeline.py). There are two data sets, and these systems, all with our scheduler
and cache:

    Sarathi         a token budget of 512 (strict) or 2,048 (relaxed; LLaMA2-70B 1,536), as in the paper
    by objective    `--tbt`: as many prompt tokens as are predicted to fit into 0.9 of the objective
    vLLM            whole prompts in separate passes, each with at most as many tokens as the longest context
    Orca            whole prompts, any number, together with the generating turns; memory for the longest
                    context is reserved for each turn, so few turns run at once

In figure 10, the first two of these systems have one engine, like the daemon with `--pipeline-stages 2`. The
other two have one engine per batch in flight.

The objectives follow the paper's rule: 5 and 25 times the duration of an iteration of 32 turns with contexts
of 4,096 tokens, on the simulated machine. Rates lie on a grid with steps of 2^(1/8), the same for all systems
and seeds.

Figure 11 shows the time of a prompt in pieces, relative to its time in one piece. Nothing else runs. It has
no random load, so all seeds are equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from pensieve.bench.capacity_search import Impossible, Row, Slo, capacity
from pensieve.sim.cost import (
    HARDWARE,
    MODELS,
    CostModel,
    HardwarePreset,
    ModelPreset,
    device_tokens_of,
)
from pensieve.sim.workload import HABITS, drawn
from scripts.measurements.replica import Replica, Window
from scripts.paper_figures.pipeline import Pipeline, run_pipeline, stage_of
from scripts.paper_figures.study import GPU, Line, Panel, Spread, Study, ratio

STRICT, RELAXED = "strict", "relaxed"
TIMES = {STRICT: 5.0, RELAXED: 25.0}  # objective / iteration of BATCH turns with CONTEXT tokens
BATCH, CONTEXT = 32, 4096
BY_OBJECTIVE_TOKENS = 8192  # limit of an iteration
AIM = 0.9  # target of an iteration / objective; below 1, as the P99 is about the target
GRID_STEPS = 8  # grid steps per doubling of the rate
RATE_LEAST = 0.02
OURS, BY_OBJECTIVE, VLLM, ORCA = "Sarathi", "by objective", "vLLM", "Orca"
WORKLOADS = {"requests": "openchat_sharegpt4", "documents": "arxiv_summarization"}
A40 = HardwarePreset("a40", 149.7e12, 0.696e12, 25e9, 48e9, 0.0)
FALCON = ModelPreset("falcon-180b", 180e9, 80, 232, 8, 64)
PROMPTS, PIECES = (2048, 4096, 8192, 16_384), (512, 1024, 2048)


@dataclass(frozen=True)
class Machine:
    """A model on its GPUs, as in the paper."""

    model: ModelPreset
    hardware: HardwarePreset  # the devices of one stage
    num_stages: int
    guess: float  # requests/s at which a search begins, a power of two
    # Capacities in the paper's text, by data set, objective, compared system.
    paper: dict[tuple[str, str, str], str]
    budgets: dict[str, int] = field(default_factory=lambda: {STRICT: 512, RELAXED: 2048})

    @property
    def device_tokens(self) -> int:
        """Return the tokens of KV in all stages together."""
        whole = replace(self.hardware, devices=self.hardware.devices * self.num_stages)
        return device_tokens_of(self.model, whole)

    @property
    def cost(self) -> CostModel:
        """Return the cost of one stage; of the whole model if there is one stage."""
        return stage_of(CostModel.of(self.model, self.hardware), self.num_stages)

    @property
    def decode_seconds(self) -> float:
        """Return the time of the iteration that the objectives are multiples of."""
        return self.num_stages * self.cost.iteration_seconds([(CONTEXT, CONTEXT + 1)] * BATCH)

    def systems(self, workload: str, slo: str) -> dict[str, Pipeline]:
        """Return the systems; those that ignore the objective are equal for both objectives."""
        context_max, stages = HABITS[workload].context_max, self.num_stages
        tokens = self.device_tokens // stages
        plain = Replica(self.cost, tokens, 0, "value")
        ours = replace(plain, device_tokens=self.device_tokens, stages=stages)
        tbt = AIM * TIMES[slo] * self.decode_seconds
        found = {
            OURS: replace(ours, token_budget=self.budgets[slo]),
            BY_OBJECTIVE: replace(ours, token_budget=BY_OBJECTIVE_TOKENS, tbt_seconds=tbt),
            VLLM: replace(plain, token_budget=context_max, phases="separate"),
            ORCA: replace(plain, token_budget=1 << 20, turns_max=max(tokens // context_max, 1)),
        }
        return {name: Pipeline(replica, stages) for name, replica in found.items()}


A100 = HARDWARE[GPU]
MACHINES = {
    "9": (
        Machine(
            MODELS["mistral-7b"],
            A100,
            1,
            2.0,
            {("", "", VLLM): "to 2.6 x", ("requests", STRICT, ORCA): "3.2 x"},
        ),
        Machine(
            MODELS["yi-34b"],
            replace(A100, devices=2),
            1,
            0.5,
            {("", "", VLLM): "to 2.8 x", ("requests", RELAXED, VLLM): "2.7 x"},
        ),
    ),
    "10": (
        Machine(
            MODELS["llama2-70b"],
            replace(A40, devices=4),
            2,
            0.25,
            {},
            {STRICT: 512, RELAXED: 1536},
        ),
        Machine(FALCON, replace(A100, devices=4), 2, 0.25, {("", "", VLLM): "to 6.9 x"}),
    ),
}


@dataclass
class Capacities:
    """The highest rates, and all simulations that were run for them."""

    study: Study
    _rows: dict[tuple[Pipeline, str, int, int], Row] = field(default_factory=dict)

    def rates(self, replica: Pipeline, workload: str, slo: Slo, guess: float) -> list[float]:
        """Return the highest rate by seed; 0 if no rate is low enough."""
        found: list[float] = []
        extent = self.study.extent
        for seed in range(extent.seeds):
            begin = found[-1] if found and found[-1] else guess

            def trial(rate: float, seed: int = seed) -> Row:
                return self._row(replica, workload, rate, seed)

            try:
                rate, _ = capacity(
                    trial,
                    slo,
                    begin,
                    2.0**0.5 if begin == guess else 2.0**0.25,
                    resolution=extent.capacity_resolution,
                    rate_least=RATE_LEAST,
                )
            except Impossible:
                rate = 0.0
            found.append(rate)
        return found

    def _row(self, replica: Pipeline, workload: str, rate: float, seed: int) -> Row:
        step = round(GRID_STEPS * math.log2(rate))
        key = (replica, workload, step, seed)
        if key not in self._rows:
            extent = self.study.extent
            window = Window(
                0.0,
                extent.capacity_warm_seconds,
                extent.capacity_warm_seconds + extent.capacity_seconds,
            )
            arrivals = drawn(HABITS[workload], 2.0 ** (step / GRID_STEPS), window.ends, seed)
            self._rows[key] = run_pipeline(replica, arrivals, window)
        return self._rows[key]


def capacities(study: Study, figure: str) -> Iterator[Line]:
    """Figures 9 and 10: each machine, under both objectives, with both data sets."""
    known = Capacities(study)
    for machine in MACHINES[figure]:
        for workload in WORKLOADS:
            yield from _of_one(study, figure, known, machine, workload)


def _of_one(
    study: Study, figure: str, known: Capacities, machine: Machine, workload: str
) -> Iterator[Line]:
    model, data_set = machine.model.name, WORKLOADS[workload]
    seconds = {name: times * machine.decode_seconds for name, times in TIMES.items()}
    found: dict[str, dict[str, list[float]]] = {}  # by system and objective
    for objective, limit in seconds.items():
        for system, pipeline in machine.systems(workload, objective).items():
            rates = known.rates(pipeline, workload, Slo(limit, math.inf), machine.guess)
            found.setdefault(system, {})[objective] = rates
            study.progress(
                f"figure {figure}, {model}, {workload}, {objective} ({limit:.3g} s), {system}: "
                f"{Spread(tuple(rates)).shown('{:.2f}')} requests/s"
            )
        for one, other in ((OURS, VLLM), (OURS, ORCA), (BY_OBJECTIVE, OURS)):
            paper = machine.paper
            published = paper.get((workload, objective, other)) or paper.get(("", "", other), "")
            yield Line(
                figure,
                f"{model}, {data_set}, {objective}: capacity, {one} over {other}",
                published,
                ratio(found[one][objective], found[other][objective]),
                note=f"{Spread(tuple(found[one][objective])).shown('{:.2f}')} requests/s",
                aim="" if one == BY_OBJECTIVE else "more than 1",
            )
    study.notes.append(
        (
            figure,
            f"{model}, P99 between tokens within {seconds[STRICT]:.3g} s (strict) and "
            f"{seconds[RELAXED]:.3g} s (relaxed); {data_set}, requests/s: "
            + "; ".join(
                f"{system} {Spread(tuple(rates[STRICT])).shown('{:.2f}')} and "
                f"{Spread(tuple(rates[RELAXED])).shown('{:.2f}')}"
                for system, rates in found.items()
            ),
        )
    )
    _draw(study, f"{figure}: {model}, {data_set}", found, seconds)


def _draw(
    study: Study, title: str, found: dict[str, dict[str, list[float]]], seconds: dict[str, float]
) -> None:
    """Draw a line per system, from the strict objective to the relaxed one."""

    def line(by_slo: dict[str, list[float]], seed: int) -> list[tuple[float, float]]:
        return [(seconds[slo], by_slo[slo][seed]) for slo in TIMES]

    study.panels.append(
        Panel(
            title,
            title,
            "objective for the P99 gap (s)",
            "requests per second",
            {system: line(by_slo, 0) for system, by_slo in found.items()},
            {
                system: [line(by_slo, seed) for seed in range(1, study.extent.seeds)]
                for system, by_slo in found.items()
            },
        )
    )


def seconds_in_pieces(cost: CostModel, prompt: int, piece: int) -> float:
    """Return the time of a prompt in pieces, alone on the machine."""
    return sum(
        cost.iteration_seconds([(start, min(start + piece, prompt))])
        for start in range(0, prompt, piece)
    )


def figure_11(study: Study) -> Iterator[Line]:
    """Figure 11: the overhead of pieces, by prompt length and piece length."""
    _, machine = MACHINES["9"]
    model, cost = machine.model.name, machine.cost
    lines: dict[str, list[tuple[float, float]]] = {}
    for piece in PIECES:
        overheads: Sequence[float] = [
            seconds_in_pieces(cost, prompt, piece) / seconds_in_pieces(cost, prompt, prompt)
            for prompt in PROMPTS
        ]
        lines[f"pieces of {piece:,}"] = list(zip(map(float, PROMPTS), overheads, strict=True))
        yield Line(
            "11",
            f"{model}: largest time of a prompt in pieces of {piece:,} tokens, relative to one piece",
            "near 1" if piece == max(PIECES) else "more with smaller pieces",
            Spread((max(overheads),) * study.extent.seeds),
            "{:.3f} x",
            "no random load: all seeds are equal",
        )
    study.panels.append(
        Panel(
            "11",
            f"11: {model}, prompts in pieces",
            "tokens of the prompt",
            "time relative to one piece",
            lines,
        )
    )
    study.notes.append(
        (
            "11",
            "the remaining overhead is that of each iteration. Not simulated: matrices of few rows are "
            "multiplied less efficiently, and ranks exchange sums more often",
        )
    )
