"""What several replicas carry together, and how many of them a rate needs.

With affinity each replica serves its share of the conversations and holds their histories.  With random
routing each holds the less of what it serves the more replicas there are, so their number is raised until
they carry the rate (`needed_at_random`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from pensieve.sim.plan.capacity import RESOLUTION, Progress, capacity
from pensieve.sim.plan.load import Load
from pensieve.sim.plan.replica import Impossible, Replica, Row, Slo, run_replica
from pensieve.sim.plan.routing import (
    at_random_of_few,
    at_random_of_many,
    with_affinity,
    with_times,
)

SIMULATED_MAX = 4  # replicas that are all simulated
REPLICAS_MAX = 1000
AFFINITY, RANDOM = "affinity", "random"


def fleet(
    replica: Replica, load: Load, rate_each: float, num_replicas: int, routing: str, pace: float
) -> Row:
    """Figures of N replicas with `rate_each` apiece; of all of them if they are few, else of one (`scaled`).

    `pace` is the seconds per token of replies that are not simulated here.
    """
    all_of_them = num_replicas <= SIMULATED_MAX
    rate = rate_each * num_replicas if all_of_them else rate_each
    window = load.window(rate)
    rows = []
    for index in range(num_replicas if all_of_them else 1):
        arrivals = load.arrivals(rate)
        if num_replicas == 1 or (routing == AFFINITY and not all_of_them):
            pass  # a share of independent conversations is as many of them
        elif routing == AFFINITY:
            arrivals = with_affinity(arrivals, index, num_replicas)
        elif all_of_them:
            arrivals = at_random_of_few(with_times(arrivals, pace), index, num_replicas)
        else:
            arrivals = at_random_of_many(with_times(arrivals, pace), num_replicas)
        rows.append(run_replica(replica, arrivals, window))
    worst = {
        key: max((row[key] for row in rows if row[key] is not None), default=None)
        for key in ("tbt_p99", "ttft_p50", "queue_p50")
    }
    history = sum(row["history_tokens"] for row in rows)
    recomputed = sum(row["recomputed_tokens"] for row in rows)
    return {
        "replicas": num_replicas,
        "routing": routing,
        "rate": rate_each * num_replicas,
        "scaled": not all_of_them,
        **worst,
        "history_tokens": history,
        "recomputed_tokens": recomputed,
        "recomputed_share": recomputed / history if history else 0.0,
        "asked": sum(row["asked"] for row in rows),
        "refused": sum(row["refused"] for row in rows),
        "tokens_per_second": sum(row["tokens_per_second"] for row in rows)
        * (1 if all_of_them else num_replicas),
    }


class Needed(NamedTuple):
    """How many replicas a rate needs."""

    num_replicas: int
    rate_each: float  # that one of them carries


def needed_with_affinity(rate_each: float, wanted: float) -> Needed:
    """Each replica carries what it would carry alone: its conversations are independent of the others'.

    How many meet in one replica varies among replicas as it varies in time where one is simulated.
    """
    return Needed(max(math.ceil(wanted / rate_each - 1e-9), 1), rate_each)


@dataclass
class RandomRouting:
    """What one of N replicas carries if each turn goes to any of them."""

    replica: Replica
    load: Load
    slo: Slo
    rate_alone: float  # that a replica carries which is the only one
    pace: float  # seconds per token of replies that are not simulated
    progress: Progress = lambda line: None
    _known: dict[int, float] = field(default_factory=dict)  # by number of replicas

    @property
    def lowest(self) -> float:
        """Of what was found so far."""
        return min(self._known.values(), default=self.rate_alone)

    def carries(self, num_replicas: int, guess: float = 0.0) -> float:
        """From simulating one of them; 0 if it carries nothing."""
        if num_replicas not in self._known:
            self._known[num_replicas] = self._carries(num_replicas, guess or self.rate_alone)
        return self._known[num_replicas]

    def _carries(self, num_replicas: int, guess: float) -> float:
        def trial(rate: float) -> Row:
            arrivals = at_random_of_many(
                with_times(self.load.arrivals(rate), self.pace), num_replicas
            )
            row = run_replica(self.replica, arrivals, self.load.window(rate))
            verdict = ", ".join(self.slo.violations(row)) or "carried"
            self.progress(f"one of {num_replicas} at random, {rate:.3g} a second each: {verdict}")
            return row

        if num_replicas == 1:
            return self.rate_alone
        try:
            return min(capacity(trial, self.slo, guess, 1.4)[0], self.rate_alone)
        except Impossible:
            return 0.0


def needed_at_random(
    carries: Callable[[int, float], float], rate_each: float, wanted: float
) -> Needed | None:
    """The number of replicas is raised until it is enough; None if it never is.

    The more replicas there are, the less each carries: `carries(num_replicas, guess)`.
    """
    num_replicas, each = max(math.ceil(wanted / rate_each - 1e-9), 1), rate_each
    while num_replicas <= REPLICAS_MAX:
        each = min(each, carries(num_replicas, each))
        if not each:
            return None
        enough = max(math.ceil(wanted / each - 1e-9), 1)
        if enough <= num_replicas * RESOLUTION:
            return Needed(max(enough, num_replicas), each)
        num_replicas = enough
    return None
