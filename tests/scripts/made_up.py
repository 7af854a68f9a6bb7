"""A slow made-up machine with its load and limits. Simulating minutes of it takes only a moment."""

from __future__ import annotations

from functools import cache

from pensieve.bench.capacity_search import Row, Slo
from pensieve.sim.cost import CostModel
from pensieve.sim.workload import WorkloadPreset
from scripts.measurements.replica import Load, Replica, run_replica

COST = CostModel(0.0002, 0.01, 1e-8, 2.5e-7, 0.0005, 20, 400_000, 20e9, "made up")
SMALL = Replica(COST, 16_000, 0, "value", 256, 64)
CHAT = WorkloadPreset(5.0, 150.0, 20.0, 10.0, 8000)  # short replies, which are simulated faster
LOAD = Load(CHAT, seconds=30.0)
SLO = Slo(0.08, 0.3)


@cache
def trial(rate: float, replica: Replica = SMALL) -> Row:
    return run_replica(replica, LOAD.arrivals(rate), LOAD.window)
