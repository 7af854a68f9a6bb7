"""A model in pipeline stages, served by one of our engines, or by one for each batch that is in flight.

With P stages, P batches are in flight, each in another stage.  No turn's next token can be computed before
the last one has been through all stages, so a turn is in one of these batches and no other.

**One engine** has P iterations in flight, as the daemon's with `--pipeline-stages` (core/pipeline_stages.py).

**P engines** have a batch each: each has its scheduler and its part of the memory for KV, and every new
request goes to the next one (vLLM calls them virtual engines).  What they share is the stages.

An iteration goes through the stages in their order, and waits for each until it is free:

    begins in stage i  =  max(ends in stage i - 1, the stage's last iteration ended)

So when iterations of different lengths alternate, a stage stands idle behind the longer one: a bubble.  With
an engine for each batch that of another engine is the only one that it can meet, and stages are taken in the
order in which iterations are launched, since the engine whose clock is furthest behind always steps first.
What stages send to one another takes no time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice, tee

from pensieve.bench.capacity_search import Row
from pensieve.core.iteration import Slice
from pensieve.sim.cost import CostModel
from pensieve.sim.executor import ModelledExecutor, VirtualClock
from pensieve.sim.simulator import Simulator
from pensieve.sim.trace import Arrival
from scripts.measurements.replica import Admitted, Replica, Window, row_of


def stage_of(cost: CostModel, num_stages: int) -> CostModel:
    """The cost of one stage, where `cost` is that of all layers on the devices of one stage."""
    return replace(
        cost,
        dense_seconds_per_token=cost.dense_seconds_per_token / num_stages,
        dense_seconds_min=cost.dense_seconds_min / num_stages,
        attention_seconds_per_pair=cost.attention_seconds_per_pair / num_stages,
        attention_seconds_per_key=cost.attention_seconds_per_key / num_stages,
    )


class Stages:
    """When each stage will be free."""

    def __init__(self, num_stages: int) -> None:
        self._free = [0.0] * num_stages

    def pass_through(self, now: float, seconds: float) -> float:
        """When an iteration that is launched now, and takes so long in each stage, leaves the last one."""
        at = now
        for index, free in enumerate(self._free):
            at = self._free[index] = max(at, free) + seconds
        return at


class StagedExecutor(ModelledExecutor):
    """Iterations of one engine, `depth` of them in flight, in stages that it shares with the others."""

    def __init__(
        self, stages: Stages, cost: CostModel, clock: VirtualClock, phases: str, depth: int
    ) -> None:
        super().__init__(cost, clock, None, phases)
        self._stages, self.depth = stages, depth

    def _compute_seconds(self, slices: Sequence[Slice]) -> float:
        seconds, now = super()._compute_seconds(slices), self._clock.now()
        return self._stages.pass_through(now, seconds) - now if seconds else 0.0


@dataclass(frozen=True)
class Pipeline:
    """Replicas over the same stages; `engine` is one of them, and its cost that of a stage.

    It is the only one if it has the stages itself.
    """

    engine: Replica
    num_stages: int

    @property
    def num_engines(self) -> int:
        return self.num_stages // self.engine.stages


def run_pipeline(pipeline: Pipeline, arrivals: Iterable[Arrival], window: Window) -> Row:
    """The figures of all engines together."""
    number, stages = pipeline.num_engines, Stages(pipeline.num_stages)
    admitted = Admitted(window.counted_from)
    simulators: list[Simulator] = []
    for index, part in enumerate(tee(arrivals, number)):
        simulator = pipeline.engine.simulator(window)
        engine = pipeline.engine
        executor = StagedExecutor(
            stages, engine.cost, simulator.clock, engine.phases, engine.stages
        )
        simulator.executor = simulator.engine.executor = executor
        simulator.engine.observe(admitted)
        if simulators:
            simulator.counts = simulators[0].counts
        simulator.begin(islice(part, index, None, number))
        simulators.append(simulator)
    going = list(simulators)
    while going:
        behind = min(going, key=lambda each: each.clock.now())
        if not behind.advance():
            going.remove(behind)
    return row_of(simulators, admitted, window)
