"""The options and the output of `pensieve simulate --batch`."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pensieve.errors import InvalidArgument

if TYPE_CHECKING:
    from pensieve.sim.batch import BatchShape
    from pensieve.sim.cost import CostModel

ELSEWHERE = ("traces", "workload", "plan", "policy", "until", "stateless", "plot", "record")
COLUMNS = (
    ("saving", "tokens saved", "{:.1%}"),
    ("requests_per_second", "requests/s", "{:.2f}"),
    ("over_off", "x off", "{:.2f}"),
    ("over_lru", "x lru", "{:.2f}"),
    ("seconds", "seconds", "{:,.0f}"),
    ("output_tokens_per_second", "output tokens/s", "{:,.0f}"),
    ("tokens_per_iteration", "tokens/iteration", "{:,.0f}"),
    ("suspensions", "suspensions", "{:,.0f}"),
)
SPREAD = ("saving", "requests_per_second", "over_off", "over_lru")  # shown with least and most


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "batches",
        "All requests are known ahead, and many begin alike: what it brings to share by groups, as a "
        "daemon's jobs do, against a cache that keeps what was used last, and against no sharing.",
    )
    group.add_argument(
        "--batch",
        metavar="SHAPE",
        help="simulate a batch, and no load: snippets or ranking, or PREFIX/OWNxDEGREE, like 2000/200x16: so "
        "many tokens that so many requests begin with, and so many of their own",
    )
    group.add_argument(
        "--apart",
        type=float,
        metavar="N",
        help="how far from one another requests of one prefix lie in the file, in requests; inf: anywhere "
        "(default: 400, and inf for PREFIX/OWNxDEGREE)",
    )


def run(arguments: argparse.Namespace, cost: CostModel, device_tokens: int) -> int:
    from pensieve.sim.batch import SHARINGS, bounds, drawn_batch, shape_named

    _check(arguments)
    try:
        shape = shape_named(arguments.batch)
    except ValueError as error:
        raise InvalidArgument("batch", f"{arguments.batch!r} is no shape of a batch") from error
    if arguments.apart is not None:
        shape = replace(shape, apart=arguments.apart)
    assumed = list(_assumed(arguments, shape, cost, device_tokens))
    for line in assumed:
        print(line, file=sys.stderr)
    rows: list[dict[str, Any]] = []
    for seed in arguments.seed:
        batch = drawn_batch(shape, seed)
        could = bounds(batch)
        found = {}
        for sharing in SHARINGS:
            print(f"seed {seed}, {sharing} …", file=sys.stderr, flush=True)
            figures = _simulate(arguments, cost, device_tokens, batch, shape, sharing)
            found[sharing] = {"seed": seed, "sharing": sharing, **could, **figures}
        for row in found.values():
            for other in ("off", "lru"):
                row[f"over_{other}"] = found[other]["seconds"] / row["seconds"]
            rows.append(row)
    if arguments.json:
        print(json.dumps({"assumed": assumed, "rows": rows}))
    else:
        print("\n".join(text(assumed, rows)))
    return 0


def _simulate(
    arguments: argparse.Namespace,
    cost: CostModel,
    device_tokens: int,
    batch: Sequence[Any],
    shape: BatchShape,
    sharing: Any,
) -> dict[str, float]:
    from pensieve.core.cache import CacheConfig
    from pensieve.core.scheduler_config import SchedulerConfig
    from pensieve.sim.batch import BatchSetting, BatchSimulator
    from pensieve.sim.cost import CHUNK_TOKENS

    setting = BatchSetting(
        cost,
        cost.recompute(CHUNK_TOKENS),
        CacheConfig(device_tokens // CHUNK_TOKENS, 0),
        SchedulerConfig(arguments.token_budget, arguments.turns_max, cost=cost.computing),
    )
    simulator = BatchSimulator(setting, batch, shape.output_tokens_max, sharing)
    return simulator.finish().row()


def _check(arguments: argparse.Namespace) -> None:
    for name in ELSEWHERE:
        if getattr(arguments, name):
            raise InvalidArgument(name, "is not for --batch")
    if arguments.hardware == "instant" and arguments.cost is None:
        raise InvalidArgument("hardware", "with `instant` nothing takes time: no throughput")
    if len(set(arguments.device_tokens)) > 1:
        raise InvalidArgument("device_tokens", "one is simulated with --batch")
    if not 1 <= arguments.turns_max <= arguments.token_budget:
        raise InvalidArgument("turns_max", "is at least 1, and at most --token-budget")
    if arguments.apart is not None and not arguments.apart >= 0:
        raise InvalidArgument("apart", "is at least 0")


def _assumed(
    arguments: argparse.Namespace, shape: BatchShape, cost: CostModel, device_tokens: int
) -> Iterator[str]:
    yield (
        f"costs: {cost.source}; {device_tokens:,} tokens of KV on the device, none on the host; up to "
        f"{arguments.turns_max} requests at once, {arguments.token_budget} tokens an iteration"
    )
    if shape.varies:
        yield (
            f"batch: {shape.requests:,} requests, {shape.prefix_tokens} tokens of prefix (of which "
            f"{shape.instructions_tokens} are everybody's) and {shape.own_tokens} of their own in the mean, "
            f"a half to one and a half of it; share degree {shape.share_degree:g} in the mean over requests, "
            "groups of geometric sizes"
        )
    else:
        yield (
            f"batch: {shape.requests:,} requests of {shape.prefix_tokens} + {shape.own_tokens} tokens, "
            f"{shape.share_degree:g} of each prefix"
        )
    yield (
        f"replies: {shape.output_tokens} tokens{' in the mean' if shape.varies else ''}, of "
        f"{shape.output_tokens_max} that a request allows; no system knows them ahead"
    )
    order = "in any order"
    if shape.apart < math.inf:
        order = f"those of one prefix about {shape.apart:g} requests apart (normal distribution)"
    yield f"file: {order}"
    yield (
        "attention over a shared page is charged to each request that reads it, though kernels read it once "
        "for a group: what groups bring there is left out"
    )


def text(assumed: Sequence[str], rows: Sequence[dict[str, Any]]) -> Iterable[str]:
    """Medians over the seeds; of the most important, the least and the most as well."""
    yield from assumed
    seeds = sorted({row["seed"] for row in rows})
    could, tree = (statistics.median(row[key] for row in rows) for key in ("one_prefix", "tree"))
    yield (
        f"could be saved: {could:.1%} with one prefix for each request, {tree:.1%} with prefixes within one "
        f"another; medians of {len(seeds)} seed{'s' * (len(seeds) > 1)}, least and most behind them"
    )
    yield ""
    lines = [["sharing", *(title for _, title, _ in COLUMNS)]]
    for sharing in dict.fromkeys(row["sharing"] for row in rows):
        repeats = [row for row in rows if row["sharing"] == sharing]
        cells = [sharing]
        for key, _, form in COLUMNS:
            values = [row[key] for row in repeats]
            cell = form.format(statistics.median(values))
            if key in SPREAD and len(values) > 1:
                cell += f" ({form.format(min(values))} to {form.format(max(values))})"
            cells.append(cell)
        lines.append(cells)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        yield "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
