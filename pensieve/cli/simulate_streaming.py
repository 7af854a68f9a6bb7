"""The options and the output of `pensieve simulate --streaming`."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pensieve.errors import InvalidArgument

if TYPE_CHECKING:
    from pensieve.sim.cost import CostModel
    from pensieve.sim.simulator import Counts
    from pensieve.sim.systems import ServingSetting

ELSEWHERE = (
    "traces",
    "workload",
    "policy",
    "until",
    "stateless",
    "plot",
    "record",
    "count_from",
    "share",
)
FIGURES = (
    ("normalized_mean", "normalized latency, ms/token"),
    ("gap_max", "latency bound (longest time between two tokens of a reply), ms"),
    ("gap_p99", "P99 of the times between two tokens, ms"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "servers of requests",
        "Single requests, like the first rounds of conversations, come at random: the daemon's scheduler "
        "beside those of vLLM, Orca and FastServe.",
    )
    group.add_argument(
        "--streaming",
        action="store_true",
        help="simulate such requests over several rates, by several schedules: how long a token takes, and "
        "how long the longest pause in a reply is",
    )
    group.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help="requests of each run; all are served to their end (default: ten times what the device holds "
        "at once, 500 to 3000)",
    )
    group.add_argument(
        "--link",
        type=float,
        metavar="GB/s",
        help="what all links between devices and host bring together, each way (default: as the data sheets "
        "say); streaming depends on it",
    )
    group.add_argument(
        "--limit",
        type=float,
        metavar="MS",
        help="normalized latency up to which a rate counts as sustained (default: half again as long as an "
        "iteration of as many turns as the device holds)",
    )


def check(arguments: argparse.Namespace) -> None:
    for name in ELSEWHERE:
        if getattr(arguments, name):
            raise InvalidArgument(name, "is not for --streaming")
    if arguments.phases != "unified":
        raise InvalidArgument("phases", "are those of each schedule with --streaming")
    if arguments.hardware == "instant" and arguments.cost is None:
        raise InvalidArgument("hardware", "with `instant` nothing takes time: no latency")
    for name in ("device_tokens", "host_tokens"):
        if len(set(getattr(arguments, name))) > 1:
            raise InvalidArgument(name, "one is simulated with --streaming")
    if arguments.rate and min(arguments.rate) <= 0:
        raise InvalidArgument("rate", "is above 0")
    if not 1 <= arguments.turns_max <= arguments.token_budget:
        raise InvalidArgument("turns_max", "is at least 1, and at most --token-budget")
    for name in ("requests", "limit", "link"):
        given = getattr(arguments, name)
        if not (given is None or given > 0):
            raise InvalidArgument(name, "is above 0")
    for name in ("prompt_seconds", "tbt"):
        if not getattr(arguments, name) >= 0:
            raise InvalidArgument(name, "is at least 0")


def run(
    arguments: argparse.Namespace,
    cost: CostModel,
    devices: Sequence[int],
    hosts: Sequence[int],
    progress: Callable[[str], Callable[[float, Counts], None]],
) -> int:
    from pensieve.sim.systems import SYSTEMS, ServingSetting, counts_of, requests_of

    if arguments.link is not None:
        link = 1e9 * arguments.link
        source = (
            f"{cost.source}; a link of {arguments.link:g} GB/s instead of the data sheet's (--link)"
        )
        cost = replace(cost, link_bytes_per_second=link, source=source)
    setting = ServingSetting(
        cost,
        devices[0],
        hosts[0],
        arguments.turns_max,
        batch_tokens_max=arguments.token_budget,
        prompt_seconds=arguments.prompt_seconds,
        tbt_seconds=arguments.tbt,
    )
    if setting.device_tokens < 2 * setting.context_max:
        raise InvalidArgument(
            "device_tokens",
            f"{setting.device_tokens:,} tokens of KV fit; schedules that reserve it for a whole context of "
            f"{setting.context_max:,} need two of them",
        )
    rates = sorted(set(arguments.rate)) or setting.rates()
    num_requests = arguments.requests or setting.num_requests
    limit = 1000 * setting.limit_seconds if arguments.limit is None else arguments.limit
    assumed = list(_assumed(setting, num_requests))
    for line in assumed:
        print(line, file=sys.stderr)
    rows: list[dict[str, Any]] = []
    for seed in arguments.seed:
        for rate in rates:
            name = f"seed {seed}, {rate:g} requests/s"
            print(f"{name} …", file=sys.stderr, flush=True)
            for system in SYSTEMS:
                arrivals = requests_of(rate, num_requests, seed)
                counts = counts_of(system, setting, arrivals, progress(f"{name}, {system}"))
                rows.append({"system": system, "rate": rate, "seed": seed, **_figures(counts)})
    if arguments.json:
        print(json.dumps({"assumed": assumed, "limit": limit, "rows": rows}))
    else:
        print("\n".join(text(assumed, rows, limit)))
    return 0


def _figures(counts: Counts) -> dict[str, float | None]:
    first, gap, longest = (
        counts.first_tokens.quantile(0.5),
        counts.gaps.quantile(0.99),
        counts.gaps.quantile(1.0),
    )
    return {
        "requests": counts.turns,
        "normalized_mean": 1000 * counts.latencies.total / counts.latencies.count,
        "gap_max": None if longest is None else 1000 * longest,
        "gap_p99": None if gap is None else 1000 * gap,
        "first_token_p50": first,
        "tokens_per_second": counts.delivered_tokens / counts.seconds,
        "iterations": counts.iterations,
    }


def _assumed(setting: ServingSetting, num_requests: int) -> Iterator[str]:
    from pensieve.sim.schedules.fastserve import SPARE_SHARE, STARVING_SECONDS
    from pensieve.sim.schedules.vllm import BLOCK_TOKENS
    from pensieve.sim.systems import OUTPUT_TOKENS, PROMPT_TOKENS, STAGING_SHARE

    places = min(setting.device_tokens // setting.context_max, setting.turns_max)
    yield (
        f"costs: {setting.cost.source}; devices exchange nothing, each has a link of its own; "
        f"{setting.cost.link_bytes_per_second / 1e9:.0f} GB/s each way in all"
    )
    yield (
        f"tiers: {setting.device_tokens:,} tokens of KV on the device, {setting.host_tokens:,} on the host; "
        f"at most {setting.turns_max} requests run at once, whatever the system"
    )
    yield (
        f"load: {num_requests:,} requests a run, arriving at random (Poisson); prompts and replies are "
        f"log-normal, like ShareGPT's first rounds (means {PROMPT_TOKENS} and {OUTPUT_TOKENS} tokens; their "
        f"spread is assumed); those of {setting.context_max:,} tokens or more, 3 %, are left out"
    )
    yield (
        f"alone, a request takes {1000 * setting.unloaded_seconds:.1f} ms/token; the device holds "
        f"{setting.turns_held} requests at once, and would carry {setting.rate_held:.2g} a second; in "
        f"an iteration of them the link brings the KV of {setting.turns_linked:.3g} more"
    )
    yield (
        f"resident: the daemon's scheduler, {setting.batch_tokens_max} tokens an iteration, to which prompts "
        + (
            f"add at most {setting.prompt_seconds:g} s"
            if setting.prompt_seconds
            else "have no limit"
        )
        + (
            f", {setting.tbt_seconds:g} s between tokens as objective"
            if setting.tbt_seconds
            else ""
        )
    )
    yield (
        f"streamed: the same with --stream auto; {STAGING_SHARE:.0%} of the device tier are staging arenas"
    )
    yield (
        f"vllm: blocks of {BLOCK_TOKENS}, whole prompts before any decode ({setting.batch_tokens_max:,} "
        "tokens at most), the latest is preempted and recomputed, nothing on the host"
    )
    yield (
        f"orca: {places} places of {setting.context_max:,} tokens (no request names a smaller limit), whole "
        "prompts beside decodes, nothing on the host"
    )
    yield (
        f"fastserve: the same places, {SPARE_SHARE:.0%} of them kept free for who comes; quanta double from "
        f"one iteration of a request alone; promoted after {STARVING_SECONDS:g} s without one; copies beside "
        "iterations"
    )


def text(assumed: Sequence[str], rows: Sequence[dict[str, Any]], limit: float) -> Iterable[str]:
    """Medians over the seeds, with the least and the most."""
    yield from assumed
    seeds, rates = sorted({row["seed"] for row in rows}), sorted({row["rate"] for row in rows})
    systems = list(dict.fromkeys(row["system"] for row in rows))
    yield f"medians of {len(seeds)} seed{'s' * (len(seeds) > 1)}, least and most behind them"
    for key, title in FIGURES:
        yield ""
        yield title
        lines = [["requests/s", *systems]]
        for rate in rates:
            cells = [f"{rate:g}"]
            for system in systems:
                found = [row for row in rows if (row["system"], row["rate"]) == (system, rate)]
                cells.append(_spread([row[key] for row in found if row[key] is not None], _number))
            lines.append(cells)
        yield from _aligned(lines)
    yield ""
    busy = rates[-1]
    yield f"sustained within {limit:.3g} ms/token, and delivered at {busy:g} requests/s"
    lines = [["system", "requests/s", "over vllm", "tokens/s", "over vllm"]]
    carried = {
        (system, seed): _sustained(rows, system, seed, limit)
        for system in systems
        for seed in seeds
    }
    delivered = {
        (row["system"], row["seed"]): row["tokens_per_second"]
        for row in rows
        if row["rate"] == busy
    }
    for system in systems:
        lines.append(
            [
                system,
                _spread([carried[system, seed] for seed in seeds], _rate(rates)),
                _over_vllm(carried, system, seeds),
                _spread([delivered[system, seed] for seed in seeds], _number),
                _over_vllm(delivered, system, seeds),
            ]
        )
    yield from _aligned(lines)


def _over_vllm(found: dict[tuple[str, int], float], system: str, seeds: Sequence[int]) -> str:
    """By seed, where both are known."""
    pairs = [(found[system, seed], found["vllm", seed]) for seed in seeds]
    known = [own / other for own, other in pairs if 0 < own < math.inf and 0 < other < math.inf]
    return _spread(known, "{:.2f} x".format)


def _sustained(rows: Sequence[dict[str, Any]], system: str, seed: int, limit: float) -> float:
    from pensieve.sim.systems import sustained

    own = [row for row in rows if (row["system"], row["seed"]) == (system, seed)]
    return sustained(sorted((row["rate"], row["normalized_mean"]) for row in own), limit)


def _rate(rates: Sequence[float]) -> Callable[[float], str]:
    """Of a sustained one; beyond the rates that were simulated it is only known on which side."""

    def shown(rate: float) -> str:
        if rate == math.inf:
            return f"above {rates[-1]:g}"
        return f"{rate:.3g}" if rate else f"below {rates[0]:g}"

    return shown


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _spread(values: Sequence[float], shown: Callable[[float], str]) -> str:
    if not values:
        return "-"
    cell = shown(statistics.median(values))
    if len(values) > 1 and shown(min(values)) != shown(max(values)):
        cell += f" ({shown(min(values))} to {shown(max(values))})"
    return cell


def _aligned(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        yield "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
