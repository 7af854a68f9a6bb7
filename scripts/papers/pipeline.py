"""Simulate a model in pipeline stages, with one engine or with one engine for each batch in flight.

With P stages, P batches are in flight, each in a different stage. A turn's next token cannot be computed
before the previous token has left all stages, so a turn is in only one of these batches.

**One engine** has P iterations in flight, like the daemon with `--pipeline-stages` (core/pipeline_stages.py).

**P engines** have one batch each. Each has its scheduler and its part of the memory for KV, and new requests
go to the engines in turn (vLLM calls them virtual engines). They share the stages.

An iteration goes through the stages in order, and waits for each until it is free:

    begins in stage i  =  max(ends in stage i - 1, the stage's last iteration ended)

So when iterations of different lengths alternate, a stage is idle after a shorter iteration, while the longer
one is still in another stage: a bubble.
Iterations enter the stages in the order in which they are launched, because the engine whose clock is
furthest behind always steps first. With one engine per batch, each engine has only one iteration in flight.
So an iteration waits only for iterations of the other engines. Communication between stages takes no time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice, tee

from pensieve.bench.capacity_search import Row
from pensieve.core.iteration import Slice
from pensieve.sim.cost import CostModel, ModelPreset
from pensieve.sim.executor import ModelledExecutor, VirtualClock
from pensieve.sim.simulator import Simulator
from pensieve.sim.trace import Arrival
from scripts.measurements.replica import AdmissionObserver, Replica, Window, row_of


def stage_of(model: ModelPreset, num_stages: int) -> ModelPreset:
    """Return the part of a model in one stage."""
    return replace(
        model, parameters=model.parameters / num_stages, layers=model.layers // num_stages
    )


class Stages:
    """When each stage becomes free."""

    def __init__(self, num_stages: int) -> None:
        self._free = [0.0] * num_stages

    def pass_through(self, now: float, seconds: float) -> float:
        """Launch an iteration that takes `seconds` in each stage; return when it leaves the last stage."""
        at = now
        for index, free in enumerate(self._free):
            at = self._free[index] = max(at, free) + seconds
        return at


class StagedExecutor(ModelledExecutor):
    """An executor with `depth` iterations of one engine in flight, in stages shared with other engines."""

    def __init__(
        self, stages: Stages, cost: CostModel, clock: VirtualClock, phases: str, depth: int
    ) -> None:
        super().__init__(cost, clock, None, phases)
        self._stages, self.depth = stages, depth

    def _compute_seconds(self, slices: Sequence[Slice]) -> float:
        seconds, now = super()._compute_seconds(slices), self._clock.now()
        return self._stages.pass_through(now, seconds) - now if seconds else 0.0


def run_pipeline(
    engine: Replica, num_stages: int, arrivals: Iterable[Arrival], window: Window
) -> Row:
    """Return the figures of all engines together. Each is like `engine`, whose cost is the cost of one stage.

    If an engine handles the stages itself, there is only one engine.
    """
    number, stages = num_stages // engine.stages, Stages(num_stages)
    admitted = AdmissionObserver(window.counted_from)
    simulators: list[Simulator] = []
    for index, part in enumerate(tee(arrivals, number)):
        simulator = engine.simulator(window)
        simulator.executor = simulator.engine.executor = StagedExecutor(
            stages, engine.cost, simulator.clock, engine.phases, engine.stages
        )
        simulator.engine.observe(admitted)
        if simulators:
            simulator.counts = simulators[0].counts
        simulator.begin(islice(part, index, None, number))
        simulators.append(simulator)
    active = list(simulators)
    while active:
        next_simulator = min(active, key=lambda each: each.clock.now())
        if not next_simulator.advance():
            active.remove(next_simulator)
    return row_of(simulators, admitted, window)
