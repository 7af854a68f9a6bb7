"""Plan the number of machines for a load, and their host memory.

A replica passes at a rate of conversations if, after the warm-up, three figures meet their limits: the P99
time between the tokens of a reply, the median time to the first token, and the median time in the queue (2
s). The search tries no host memory, then half of the device tier, and then doubles the size. It stops when
the memory is never full or more memory does not help. The smallest size whose rate is within 5 % of the best
is chosen. A conversation stays on its replica, so the number of replicas follows from the rate of one
replica.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from pensieve.bench.capacity_search import RATE_LEAST, Impossible, Row, Slo, capacity
from pensieve.errors import InvalidArgument
from pensieve.sim.cost import CHUNK_TOKENS, CostModel
from pensieve.sim.workload import WORKLOAD_PRESETS
from scripts.measurements.machine_options import Progress, add_machine, machine_of, ms
from scripts.measurements.replica import Load, Replica, run_replica

BETTER = 1.04  # the search continues while more host memory raises the rate by this factor
ENOUGH = 0.95  # part of the best rate that is enough
PROMPTS_SHARE = 0.75  # part of the time between tokens that prompts may use


class HostMemory(NamedTuple):
    """A size of host memory, and the highest rate at which a replica passes with it."""

    host_tokens: int
    rate: float
    row: Row


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="scripts/measure machines", description=__doc__)
    add_machine(parser)
    parser.add_argument("--workload", choices=sorted(WORKLOAD_PRESETS), default="sharegpt")
    parser.add_argument("--rate", type=float, default=50.0, help="conversations/s (default: 50)")
    parser.add_argument("--tbt-p99", type=float, default=0.1, help="seconds (default: 0.1)")
    parser.add_argument("--ttft-p50", type=float, default=1.0, help="seconds (default: 1)")
    parser.add_argument(
        "--seconds", type=float, help="measured seconds (default: twice --reaction, at least 60)"
    )
    parser.add_argument(
        "--reaction",
        type=float,
        help="mean seconds from a reply to the next message (default: the workload's)",
    )
    arguments = parser.parse_args(given)
    machine = machine_of(arguments)
    slo = Slo(arguments.tbt_p99, arguments.ttft_p50)
    load = Load(WORKLOAD_PRESETS[arguments.workload], arguments.reaction, arguments.seconds)
    replica = Replica(machine.cost, machine.device_tokens, 0)
    budget = budget_within(machine.cost, slo, replica.token_budget, replica.turns_max)
    replica = replace(replica, token_budget=budget)
    print(f"{machine.cost.source}; {machine.device_tokens:,} tokens of KV on the device; at most")
    print(
        f"{budget} tokens an iteration; {arguments.workload}, "
        f"measured for {load.window.seconds:g} s after the warm-up"
    )
    try:
        replica.check(slo, load.preset.input_tokens)
        tried = host_memories(replica, load, slo, machine.host_tokens, Progress())
    except Impossible as error:
        raise InvalidArgument("tbt-p99, ttft-p50, device-tokens", str(error)) from error
    chosen = recommended(tried)
    print(
        f"{'host tokens':>12}{'GB':>8}{'conversations/s':>17}{'tokens/s':>10}{'TBT P99 ms':>16}"
        f"{'TTFT P50 ms':>14}{'recomputed':>12}{'from host':>11}"
    )
    for each in tried:
        row = each.row
        print(
            f"{each.host_tokens:>12,}{each.host_tokens * machine.cost.kv_bytes_per_token / 1e9:>8.1f}"
            f"{each.rate:>17.3g}{row['tokens_per_second']:>10,.0f}{ms(row['tbt_p99']):>16}"
            f"{ms(row['ttft_p50']):>14}{row['recomputed_share']:>12.1%}{row['host_share']:>11.1%}"
            f"{'   <- the least within 5 % of the best' if each is chosen else ''}"
        )
    print(
        f"{arguments.rate:g} conversations a second: {replicas_needed(chosen.rate, arguments.rate)} replicas"
    )


def replicas_needed(rate_each: float, wanted: float) -> int:
    return max(math.ceil(wanted / rate_each - 1e-9), 1)


def budget_within(cost: CostModel, slo: Slo, most: int, least: int) -> int:
    """Halve the token budget from `most` until an iteration full of prompt tokens is short enough.

    The iteration may take PROMPTS_SHARE of the P99 objective for the time between two tokens. The rest is for
    the contexts of the generating turns.
    """
    limit = PROMPTS_SHARE * slo.tbt_p99_seconds
    while most // 2 >= least and cost.iteration_seconds([(0, most)]) > limit:
        most //= 2
    return most


def first_guess(replica: Replica, load: Load) -> float:
    """Return a low estimate of the rate, from the cost of a turn in a full batch."""
    decode = replica.cost.iteration_seconds([(1000, 1001)] * 32) / 32
    prompt = replica.cost.dense_seconds_per_token * load.preset.input_tokens
    turn = prompt + decode * load.preset.output_tokens
    return max(0.25 / (load.preset.turns_mean * turn), RATE_LEAST)


def host_memories(
    replica: Replica, load: Load, slo: Slo, host_tokens_max: int, progress: Callable[[str], None]
) -> list[HostMemory]:
    """Try sizes of host memory; return each with the highest rate at which a replica passes."""
    tried: list[HostMemory] = []
    for host_tokens in _sizes(replica.device_tokens, host_tokens_max):
        sized = replace(replica, host_tokens=host_tokens)
        rows: dict[float, Row] = {}

        def trial(rate: float, sized: Replica = sized, rows: dict[float, Row] = rows) -> Row:
            if rate not in rows:
                rows[rate] = row = run_replica(sized, load.arrivals(rate), load.window)
                sized.check_served(row)
                verdict = ", ".join(slo.violations(row)) or "passed"
                progress(
                    f"{sized.host_tokens:,} tokens on the host, {rate:.3g} conversations/s: {verdict}"
                )
            return rows[rate]

        if not tried:
            rate, row = capacity(trial, slo, first_guess(replica, load))
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
    """Return the smallest host memory that reaches nearly the best rate."""
    best = max(each.rate for each in tried)
    return next(each for each in tried if each.rate >= ENOUGH * best)


if __name__ == "__main__":
    main()
