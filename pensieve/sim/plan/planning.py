"""How many conversations one replica carries, what host memory brings, and how many replicas are needed.

The highest rate of conversations that is carried (replica.py) is found by doubling and then halving the
interval (`capacity`), each time by a simulation of bounded length.

Host memory is tried from none upwards, each time twice as much, until it is never full or brings nothing
more; the least that carries within 5 % of the best is the one to buy.  From the rate that is wanted follow
the replicas.  With affinity each hears its share and knows it; with random routing the more there are the
less each knows of whom it hears, so their number is raised until they carry the rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from pensieve.sim.cost import CostModel
from pensieve.sim.plan.fleet import at_home, routed, scattered, timed
from pensieve.sim.plan.load import Load, Typical
from pensieve.sim.plan.replica import CHUNK_TOKENS, Impossible, Replica, Row, Slo, played

NARROW = 1.04  # between a rate that is carried and one that is not
RATE_LEAST, RATE_MOST = 1e-4, 1e5
BETTER = 1.04  # what more host memory must bring to go on
ENOUGH = 0.95  # of the best
SIMULATED_MAX = 4  # replicas that are all played
REPLICAS_MAX = 1000
PROMPTS_SHARE = 0.75  # of the time between tokens
AFFINITY, RANDOM = "affinity", "random"

Told = Callable[[str], None]


def capacity(
    trial: Callable[[float], Row], slo: Slo, rate: float, step: float = 2.0
) -> tuple[float, Row]:
    """The highest rate that is carried, to within `NARROW`, and its figures; the search begins at `rate`."""
    low, row, high = 0.0, Row(), math.inf
    while not low or high / low > NARROW:
        if math.isinf(high):
            tried = step * low or min(rate, RATE_MOST)
        else:
            tried = math.sqrt(low * high) if low else high / step
        if tried > RATE_MOST:
            break
        found = trial(tried)
        broken = slo.broken(found)
        if not broken:
            low, row = tried, found
        elif tried < RATE_LEAST:
            raise Impossible(f"at {tried:.2g} conversations a second still: {', '.join(broken)}")
        else:
            high = tried
    return low, row


def budget_within(cost: CostModel, slo: Slo, most: int, least: int) -> int:
    """Tokens of an iteration, halved until one full of prompts fits between two tokens of who generates,
    whose contexts take time, too."""
    limit = PROMPTS_SHARE * slo.tbt_p99_seconds
    while most // 2 >= least and cost.iteration_seconds([(0, most)]) > limit:
        most //= 2
    return most


def first_guess(replica: Replica, typical: Typical) -> float:
    """Conversations per second, from what a turn computes in good company, and carefully."""
    decode = replica.cost.iteration_seconds([(1000, 1001)] * 32) / 32
    prompt = replica.cost.dense_seconds_per_token * typical.input_tokens
    return 0.25 / (typical.turns * (prompt + decode * typical.output_tokens))


# -- host memory --


class HostMemory(NamedTuple):
    host_tokens: int
    rate: float
    row: Row


def host_memories(
    replica: Replica,
    load: Load,
    slo: Slo,
    guess: float,
    host_tokens_max: int,
    told: Told = lambda line: None,
) -> list[HostMemory]:
    """What each size of host memory carries."""
    tried: list[HostMemory] = []
    for host_tokens in _sizes(replica.device_tokens, host_tokens_max):
        sized = replace(replica, host_tokens=host_tokens)

        rows: dict[float, Row] = {}

        def trial(rate: float, sized: Replica = sized, rows: dict[float, Row] = rows) -> Row:
            if rate not in rows:
                rows[rate] = row = played(sized, load.visits(rate), load.window(rate))
                sized.check_served(row)
                said = ", ".join(slo.broken(row)) or "carried"
                told(f"{sized.host_tokens:,} tokens on the host, {rate:.3g} a second: {said}")
            return rows[rate]

        if not tried:
            rate, row = capacity(trial, slo, guess)
        elif slo.broken(trial(tried[-1].rate * BETTER)):
            rate = tried[-1].rate
            row = trial(rate)
            if slo.broken(row):
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
    """The least memory that carries nearly as much as any."""
    best = max(each.rate for each in tried)
    return next(each for each in tried if each.rate >= ENOUGH * best)


# -- replicas --


def fleet(
    replica: Replica, load: Load, rate_each: float, num_replicas: int, routing: str, pace: float
) -> Row:
    """N replicas that hear `rate_each` apiece; all of them where they are few, else one (`scaled`).

    `pace` are the seconds that a turn takes per token of its reply, where it is not simulated here.
    """
    all_of_them = num_replicas <= SIMULATED_MAX
    rate = rate_each * num_replicas if all_of_them else rate_each
    window = load.window(rate)
    rows = []
    for index in range(num_replicas if all_of_them else 1):
        visits = load.visits(rate)
        if num_replicas == 1 or (routing == AFFINITY and not all_of_them):
            pass  # a share of independent conversations is as many of them
        elif routing == AFFINITY:
            visits = at_home(visits, index, num_replicas)
        elif all_of_them:
            visits = routed(timed(visits, pace), index, num_replicas)
        else:
            visits = scattered(timed(visits, pace), num_replicas)
        rows.append(played(replica, visits, window))
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
    num_replicas: int
    rate_each: float  # that one of them carries


def needed_with_affinity(rate_each: float, wanted: float) -> Needed:
    """A share of the conversations is to one replica what as many are that are nobody else's.

    How many meet in one varies from replica to replica as it varies in time where one is simulated.
    """
    return Needed(max(math.ceil(wanted / rate_each - 1e-9), 1), rate_each)


def carried_at_random(
    replica: Replica,
    load: Load,
    slo: Slo,
    rate_each: float,
    num_replicas: int,
    pace: float,
    told: Told = lambda line: None,
    guess: float = 0.0,
) -> float:
    """What one of N carries if each turn goes to any of them, from one that is played; 0 if nothing."""

    def trial(rate: float) -> Row:
        visits = scattered(timed(load.visits(rate), pace), num_replicas)
        row = played(replica, visits, load.window(rate))
        said = ", ".join(slo.broken(row)) or "carried"
        told(f"one of {num_replicas} at random, {rate:.3g} a second each: {said}")
        return row

    if num_replicas == 1:
        return rate_each
    try:
        return min(capacity(trial, slo, guess or rate_each, 1.4)[0], rate_each)
    except Impossible:
        return 0.0


def needed_at_random(
    carries: Callable[[int, float], float], rate_each: float, wanted: float
) -> Needed | None:
    """The more replicas the less each carries: their number is raised until it is enough, if ever it is.

    `carries` is asked what one of so many carries, with a first guess.
    """
    num_replicas, each = max(math.ceil(wanted / rate_each - 1e-9), 1), rate_each
    while num_replicas <= REPLICAS_MAX:
        each = min(each, carries(num_replicas, each))
        if not each:
            return None
        enough = max(math.ceil(wanted / each - 1e-9), 1)
        if enough <= num_replicas * NARROW:
            return Needed(max(enough, num_replicas), each)
        num_replicas = enough
    return None
