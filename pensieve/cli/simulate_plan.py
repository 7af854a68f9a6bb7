"""The options and the output of `pensieve simulate --plan`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pensieve.errors import InvalidArgument

if TYPE_CHECKING:
    from pensieve.sim.cost import CostModel
    from pensieve.sim.plan.load import Load
    from pensieve.sim.plan.planning import PlanRequest
    from pensieve.sim.trace import Arrival

REPLICAS_MAX = 1000
SECONDS = 600.0  # the default of --seconds
ELSEWHERE = ("until", "stateless", "plot", "record")  # options of a single simulation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "planning",
        "The highest rate of conversations that one replica serves within limits, what host memory "
        "brings, and how many replicas the wanted --rate needs (of a trace: its own rate), if each "
        "conversation stays with its replica and if each turn goes to any.",
    )
    group.add_argument("--plan", action="store_true", help="plan, instead of simulating one load")
    group.add_argument(
        "--tbt-p99",
        type=float,
        default=0.1,
        metavar="SECONDS",
        help="limit of the P99 of the time between tokens (default: 0.1)",
    )
    group.add_argument(
        "--ttft-p50",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="limit of the median time to the first token; the median in the queue is limited to 2 s "
        "(default: 1)",
    )
    group.add_argument(
        "--replicas",
        type=_counts,
        default=[],
        metavar="N,…",
        help="compare the two ways of routing for so many, up to 1000, as well",
    )
    group.add_argument(
        "--plan-seconds",
        type=float,
        metavar="N",
        help="of each simulation that count (default: two reaction times, at least 60; of a trace half)",
    )


def run(
    arguments: argparse.Namespace,
    cost: CostModel,
    policy: str,
    device_tokens: int,
    host_tokens_max: int,
    arrivals: Iterable[Arrival],
) -> int:
    """`arrivals` are those of the trace, if there is one."""
    from pensieve.sim.plan.capacity import budget_within
    from pensieve.sim.plan.load import Drawn, Recorded
    from pensieve.sim.plan.planning import PlanRequest, make_plan
    from pensieve.sim.plan.replica import Impossible, Replica, Slo
    from pensieve.sim.workload import HABITS

    _check(arguments, policy)
    slo = Slo(arguments.tbt_p99, arguments.ttft_p50)
    load: Load
    if arguments.workload is not None:
        wanted = arguments.rate[0]
        load = Drawn(
            HABITS[arguments.workload],
            arguments.reaction,
            arguments.plan_seconds,
            arguments.seed[0],
        )
    else:
        try:
            load = recorded = Recorded(arrivals, arguments.plan_seconds)
        except ValueError as error:
            raise InvalidArgument("TRACE", str(error)) from error
        wanted = recorded.rate
    budget = budget_within(cost, slo, arguments.token_budget, arguments.turns_max)
    replica = Replica(cost, device_tokens, 0, policy, budget, arguments.turns_max)
    request = PlanRequest(replica, load, slo, wanted, host_tokens_max, tuple(arguments.replicas))
    begun = time.monotonic()

    def progress(line: str) -> None:
        print(f"{time.monotonic() - begun:6.0f} s  {line}", file=sys.stderr, flush=True)

    assumed = _assumed(arguments, request)
    for line in assumed:
        print(line, file=sys.stderr)
    try:
        plan = make_plan(request, progress)
    except Impossible as error:
        raise InvalidArgument("tbt_p99, ttft_p50, device_tokens", str(error)) from error
    result = {"assumed": assumed, **plan.values()}
    if arguments.json:
        print(json.dumps(result))
    else:
        print("\n".join(text(result, load)))
    return 0


def _check(arguments: argparse.Namespace, policy: str) -> None:
    from pensieve.core.policies.registry import POLICIES

    if policy not in POLICIES:
        raise InvalidArgument("policy", f"{policy} is for a single simulation, not for --plan")
    limits = (arguments.tbt_p99, arguments.ttft_p50, arguments.plan_seconds or 1.0)
    if not min(limits) > 0:
        raise InvalidArgument("tbt_p99, ttft_p50, plan_seconds", "are above 0")
    for name in ELSEWHERE:
        if getattr(arguments, name):
            raise InvalidArgument(name, "is for a single simulation, not for --plan")
    if arguments.phases != "unified" or arguments.count_from:
        raise InvalidArgument("phases, count_from", "are for a single simulation, not for --plan")
    if arguments.seconds != SECONDS:
        raise InvalidArgument("seconds", "of each simulation of a plan are --plan-seconds")
    if len(arguments.rate) > 1:
        raise InvalidArgument("rate", "one is planned for")
    if len(arguments.seed) > 1:
        raise InvalidArgument("seed", "one is planned with")
    if arguments.hardware == "instant" and arguments.cost is None:
        raise InvalidArgument(
            "hardware", "with `instant` nothing takes time: there is nothing to plan"
        )


def _assumed(arguments: argparse.Namespace, request: PlanRequest) -> list[str]:
    replica, load, slo, wanted = request.replica, request.load, request.slo, request.wanted
    window = load.window(wanted)
    lines = [
        f"costs: {replica.cost.source}; {replica.device_tokens:,} tokens of KV on the device; policy "
        f"{replica.policy}, up to {replica.turns_max} turns at once",
        f"limits: P99 between tokens {slo.tbt_p99_seconds:g} s, median first token "
        f"{slo.ttft_p50_seconds:g} s, median in the queue {slo.queue_p50_seconds:g} s",
    ]
    if replica.token_budget < arguments.token_budget:
        lines.append(
            f"an iteration has {replica.token_budget} tokens, not {arguments.token_budget}: so many of "
            "prompts fit between two tokens of turns that generate"
        )
    if arguments.workload is not None:
        lines.append(
            f"load: {arguments.workload}, drawn; each simulation begins with the conversations that would "
            f"be in progress, and {window.seconds:g} s of it count"
        )
    else:
        lines.append(
            f"load: a trace of {wanted:.3g} conversations a second; for less some are left out by name, "
            f"for more several copies of it run at once; {window.seconds:.0f} s, the second half, count"
        )
    return lines


def text(result: dict[str, Any], load: Load) -> Iterable[str]:
    """The plan as a table."""
    yield from result["assumed"]
    yield ""
    yield "one replica, by host memory:"
    yield (
        f"{'tokens':>12}{'GB':>8}{'conversations/s':>17}{'turns/s':>9}{'tokens/s':>10}{'P99 between ms':>16}"
        f"{'first P50 ms':>14}{'recomputed':>12}{'from host':>11}"
    )
    for row in result["host_memory"]:
        yield (
            f"{row['host_tokens']:>12,}{row['host_gigabytes']:>8.1f}{row['rate']:>17.3g}"
            f"{row['turns_per_second']:>9.3g}{row['tokens_per_second']:>10,.0f}"
            f"{_ms(row['tbt_p99']):>16}{_ms(row['ttft_p50']):>14}"
            f"{row['recomputed_share']:>12.1%}{row['host_share']:>11.1%}"
            f"{'   <- the least within 5 % of the best' if row['recommended'] else ''}"
        )
    best = next(row for row in result["host_memory"] if row["recommended"])
    yield f"(its load: {load.description(best['rate'])}; rates are found to within 4 %)"
    wanted, needed = result["wanted"], result["needed"]
    together, apart = needed["affinity"], needed["random"]
    yield ""
    yield f"for {wanted:.4g} conversations a second, with {best['host_gigabytes']:.1f} GB of KV on each host:"
    count = together["num_replicas"]
    yield f"  {count:,} replica{'s' * (count > 1)} with affinity"
    if apart is None:
        yield f"  with random routing {REPLICAS_MAX:,} replicas are not enough"
    else:
        count = apart["num_replicas"]
        yield (
            f"  {count:,} replica{'s' * (count > 1)} with random routing, each of which carries "
            f"{apart['rate_each']:.3g} a second"
        )
    if result["fleets"]:
        yield ""
        yield "what replicas carry together, and figures at a load that both ways of routing carry:"
        yield (
            f"{'replicas':>9} {'routing':<9}{'carry/s':>9}{'at load/s':>11}{'recomputed':>12}"
            f"{'first P50 ms':>14}{'P99 between ms':>16}{'fullest':>9}"
        )
    for row in result["fleets"]:
        how = (
            "scaled from one of them, thinned load"
            if row["scaled"]
            else "all simulated; the slowest"
        )
        yield (
            f"{row['replicas']:>9,} {row['routing']:<9}{row['carries']:>9.4g}{row['rate']:>11.4g}"
            f"{row['recomputed_share']:>12.1%}{_ms(row['ttft_p50']):>14}{_ms(row['tbt_p99']):>16}"
            f"{_number(row['fullest']):>9}   {how}"
        )
    if result["fleets"]:
        yield "(fullest: conversations of the P99 replica over the mean, by names that are hashed)"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _counts(text: str) -> list[int]:
    try:
        found = [int(each) for each in text.split(",")]
    except ValueError:
        found = [0]
    if not all(1 <= each <= REPLICAS_MAX for each in found):
        raise argparse.ArgumentTypeError(f"{text!r}: numbers of replicas are 1 to {REPLICAS_MAX}")
    return found
