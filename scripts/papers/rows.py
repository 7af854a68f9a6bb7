"""Rows of the papers' tables and figures: the paper's claim beside our values, and how much is simulated."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from scripts.papers.claims import Claim


class Spread(tuple[float, ...]):
    """The values of one row by seed."""

    @property
    def median(self) -> float:
        return statistics.median(self)

    def shown(self, form: str) -> str:
        least, most = form.format(min(self)), form.format(max(self))
        return least if least == most else f"{form.format(self.median)} ({least} to {most})"


def ratio(ours: Iterable[float], theirs: Iterable[float]) -> Spread:
    return Spread(a / (b or math.nan) for a, b in zip(ours, theirs, strict=True))


def largest(spreads: Iterable[Spread]) -> Spread:
    """Return the largest value of each seed."""
    return Spread(map(max, zip(*spreads, strict=True)))


@dataclass(frozen=True)
class Row:
    figure: str  # such as "figure 9"
    name: str
    paper: Claim
    ours: Spread
    reason: str = ""

    def because(self, reason: str) -> Row:
        """Return this row with one line that says why the numbers agree or differ."""
        return replace(self, reason=reason)

    @property
    def verdict(self) -> str:
        return self.paper.verdict(self.ours)

    @property
    def ours_shown(self) -> str:
        return self.ours.shown(self.paper.form)


@dataclass(frozen=True)
class Extent:
    """How much is simulated for each figure."""

    seeds: int = 3
    # Conversations (Pensieve).
    warm_seconds: float = 100.0  # not counted
    seconds: float = 600.0  # counted, per simulation
    confirming: int = 3  # rates on each side of the limit; see equal_latency.py
    # Capacities (Sarathi-Serve).
    capacity_warm_seconds: float = 30.0
    capacity_seconds: float = 150.0
    capacity_requests: float = 100.0  # minimum in a simulation at the first rate of a search
    resolution: float = 1.1  # ratio of rates at which the search ends
    requests: int = 128  # table 4
    # Panels of FluidInfer.
    panel_fills: float = 6.0  # number of requests, as a multiple of what fits on the device
    bound_seeds: int = 5  # loads for each latency bound
    batch_share: float = 1.0  # of the requests of a batch (BatchLLM)
    repeats: int = 30  # timed calls of a kernel


QUICK = Extent(
    seeds=1,
    warm_seconds=60.0,
    seconds=150.0,
    confirming=1,
    capacity_warm_seconds=20.0,
    capacity_seconds=60.0,
    capacity_requests=40.0,
    resolution=1.2,
    panel_fills=2.0,
    bound_seeds=3,
    batch_share=0.5,
    repeats=5,
)
Figure = Callable[[Extent], Iterator[Row]]
