"""Plans the host memory of one replica, and how many replicas a load needs.

Host memory is chosen first, for one replica (capacity.py).  From what that replica carries follows how many
are needed for the wanted rate if each conversation stays with its replica, and if each turn goes to any
(fleet.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pensieve.sim.cost import CostModel
from pensieve.sim.plan.capacity import (
    HostMemory,
    Progress,
    first_guess,
    host_memories,
    recommended,
)
from pensieve.sim.plan.fleet import (
    AFFINITY,
    RANDOM,
    Needed,
    RandomRouting,
    fleet,
    needed_at_random,
    needed_with_affinity,
)
from pensieve.sim.plan.load import Load
from pensieve.sim.plan.replica import Replica, Row, Slo
from pensieve.sim.plan.routing import fullest_over_mean


@dataclass(frozen=True)
class PlanRequest:
    """What is planned: a replica without host memory, a load, limits, and the wanted rate."""

    replica: Replica
    load: Load
    slo: Slo
    wanted: float  # conversations per second
    host_tokens_max: int
    compared: tuple[int, ...] = ()  # numbers of replicas for which both ways of routing are shown


@dataclass(frozen=True)
class Plan:
    """What was found."""

    request: PlanRequest
    host_memory: tuple[HostMemory, ...]  # each size that was tried
    chosen: HostMemory
    with_affinity: Needed
    at_random: Needed | None  # None: no number of replicas is enough
    fleets: tuple[Row, ...]  # both ways of routing, by number of replicas

    def values(self) -> dict[str, Any]:
        """For JSON."""
        cost = self.request.replica.cost
        return {
            "slo": vars(self.request.slo),
            "policy": self.request.replica.policy,
            "host_memory": [_sized(each, cost, each is self.chosen) for each in self.host_memory],
            "wanted": self.request.wanted,
            "needed": {
                AFFINITY: self.with_affinity._asdict(),
                RANDOM: None if self.at_random is None else self.at_random._asdict(),
            },
            "fleets": list(self.fleets),
        }


def make_plan(request: PlanRequest, progress: Progress = lambda line: None) -> Plan:
    """Raises Impossible where no load is low enough for the limits."""
    replica, load, slo = request.replica, request.load, request.slo
    replica.check(slo, load.typical.input_tokens)
    guess = first_guess(replica, load.typical)
    tried = host_memories(replica, load, slo, guess, request.host_tokens_max, progress)
    chosen = recommended(tried)
    equipped = replace(replica, host_tokens=chosen.host_tokens)
    pace = chosen.row["seconds_per_token"] or slo.tbt_p99_seconds
    routing = RandomRouting(equipped, load, slo, chosen.rate, pace, progress)
    together = needed_with_affinity(chosen.rate, request.wanted)
    apart = needed_at_random(routing.carries, chosen.rate, request.wanted)
    rows: list[Row] = []
    for num_replicas in sorted({*request.compared, together.num_replicas} - {1}):
        rows += _compared(routing, num_replicas)
    return Plan(request, tuple(tried), chosen, together, apart, tuple(rows))


def _compared(routing: RandomRouting, num_replicas: int) -> list[Row]:
    """Both ways of routing: what so many replicas carry, and figures at a load that both carry."""
    load, alone = routing.load, routing.rate_alone
    at_random = routing.carries(num_replicas, routing.lowest)
    rate_each = at_random or alone
    rows = []
    for way, carries in ((AFFINITY, alone), (RANDOM, at_random)):
        routing.progress(f"{num_replicas} replicas, {way}, {rate_each:.3g} a second each")
        row = fleet(routing.replica, load, rate_each, num_replicas, way, routing.pace)
        fullest = None
        if way == AFFINITY:
            fullest = fullest_over_mean(load.conversations_at_once(alone), num_replicas)
        rows.append({**row, "carries": carries * num_replicas, "fullest": fullest})
    return rows


def _sized(each: HostMemory, cost: CostModel, chosen: bool) -> dict[str, Any]:
    return {
        **each.row,
        "host_tokens": each.host_tokens,
        "host_gigabytes": each.host_tokens * cost.kv_bytes_per_token / 1e9,
        "rate": each.rate,
        "recommended": chosen,
    }
