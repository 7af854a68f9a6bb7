"""The highest rate of conversations one replica carries, and what host memory adds to it.

`capacity` finds the rate by doubling it, and then by halving the interval between a rate that is carried
(replica.py) and one that is not; each step is a simulation of bounded length.

`host_memories` tries host memory from none upward, each time twice as much, until it is never full or adds
nothing; `recommended` is the smallest size that carries within 5 % of the best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from pensieve.sim.cost import CHUNK_TOKENS, CostModel
from pensieve.sim.plan.load import Load, Typical
from pensieve.sim.plan.replica import Impossible, Replica, Row, Slo, run_replica

RESOLUTION = 1.04  # the ratio of the lowest rate that is not carried to the highest that is
RATE_LEAST, RATE_MOST = 1e-4, 1e5
BETTER = 1.04  # by what more host memory must raise the rate for the search to go on
ENOUGH = 0.95  # of the best rate
PROMPTS_SHARE = 0.75  # of the time between tokens: what prompts may take of it

Progress = Callable[[str], None]


def capacity(
    trial: Callable[[float], Row],
    slo: Slo,
    rate: float,
    step: float = 2.0,
    *,
    resolution: float = RESOLUTION,
    rate_least: float = RATE_LEAST,
) -> tuple[float, Row]:
    """The highest rate that is carried, to within `resolution`, and its figures.

    The search begins at `rate`.
    """
    low, row, high = 0.0, Row(), math.inf
    while not low or high / low > resolution:
        if math.isinf(high):
            tried = step * low or min(rate, RATE_MOST)
        else:
            tried = math.sqrt(low * high) if low else high / step
        if tried > RATE_MOST:
            break
        found = trial(tried)
        broken = slo.violations(found)
        if not broken:
            low, row = tried, found
        elif tried < rate_least:
            raise Impossible(f"at {tried:.2g} conversations a second still: {', '.join(broken)}")
        else:
            high = tried
    return low, row


def budget_within(cost: CostModel, slo: Slo, most: int, least: int) -> int:
    """Tokens of an iteration: `most`, halved until an iteration full of prompts fits between two tokens.

    It must leave time for the contexts of the turns that generate beside it.
    """
    limit = PROMPTS_SHARE * slo.tbt_p99_seconds
    while most // 2 >= least and cost.iteration_seconds([(0, most)]) > limit:
        most //= 2
    return most


def first_guess(replica: Replica, typical: Typical) -> float:
    """A low estimate of the rate, from what a turn costs in a full batch."""
    decode = replica.cost.iteration_seconds([(1000, 1001)] * 32) / 32
    prompt = replica.cost.dense_seconds_per_token * typical.input_tokens
    return 0.25 / (typical.turns * (prompt + decode * typical.output_tokens))


# -- host memory --


class HostMemory(NamedTuple):
    """A size of host memory, and the rate that it carries."""

    host_tokens: int
    rate: float
    row: Row


def host_memories(
    replica: Replica,
    load: Load,
    slo: Slo,
    guess: float,
    host_tokens_max: int,
    progress: Progress = lambda line: None,
) -> list[HostMemory]:
    """Each size of host memory that was tried, with the rate that it carries."""
    tried: list[HostMemory] = []
    for host_tokens in _sizes(replica.device_tokens, host_tokens_max):
        sized = replace(replica, host_tokens=host_tokens)

        rows: dict[float, Row] = {}

        def trial(rate: float, sized: Replica = sized, rows: dict[float, Row] = rows) -> Row:
            if rate not in rows:
                rows[rate] = row = run_replica(sized, load.arrivals(rate), load.window(rate))
                sized.check_served(row)
                verdict = ", ".join(slo.violations(row)) or "carried"
                progress(
                    f"{sized.host_tokens:,} tokens on the host, {rate:.3g} a second: {verdict}"
                )
            return rows[rate]

        if not tried:
            rate, row = capacity(trial, slo, guess)
        elif slo.violations(trial(tried[-1].rate * BETTER)):
            rate = tried[-1].rate
            row = trial(rate)
            if slo.violations(row):
                rate, row = capacity(trial, slo, rate, 1.2)
        else:
            rate, row = capacity(trial, slo, tried[-1].rate * BETTER, 1.2)
        tried.append(HostMemory(host_tokens, rate, row))
        grew = len(tried) < 3 or rate > tried[-3].rate * BETTER
        if (host_tokens and not row["host_full"]) or not grew:
            break
    return tried


def _sizes(device_tokens: int, most: int) -> Iterator[int]:
    yield 0
    size = max(device_tokens // 2, CHUNK_TOKENS)
    while size * 1.4 < most:
        yield size
        size *= 2
    if most:
        yield most


def recommended(tried: Sequence[HostMemory]) -> HostMemory:
    """The smallest host memory that carries nearly as much as any."""
    best = max(each.rate for each in tried)
    return next(each for each in tried if each.rate >= ENOUGH * best)
