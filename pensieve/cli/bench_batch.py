"""`pensieve bench batch`: its options."""

from __future__ import annotations

import argparse
from typing import Any

from pensieve.bench.report import Report
from pensieve.cli.bench_kernels import add_model
from pensieve.errors import InvalidArgument

DESCRIPTION = """Runs a batch of requests, many of which begin alike, through a daemon's engine: with those of
a common prefix together (as `pensieve batch` does), with a cache that keeps what was used last, and without
sharing. The replies must be the same. Minutes on a CPU: each prompt has 1,500 tokens by default."""


def batch_parser(kinds: Any) -> None:
    parser = kinds.add_parser(
        "batch", help="a batch of requests that share prefixes", description=DESCRIPTION
    )
    add_model(parser, "the shape --shape")
    parser.add_argument(
        "--shape",
        default="0.37B",
        help="shape of the random weights: 0.03B, 0.37B or 1.1B (default: 0.37B)",
    )
    for name, default, what in (
        ("requests", 60, "how many"),
        ("prefix", 1100, "tokens that requests of a group begin with, on average"),
        ("own", 400, "tokens of a request's own, on average"),
        ("output", 32, "tokens of each reply"),
        ("cache", 0, "tokens of the device tier (default: a ninth of the prompts, as the paper's)"),
        ("rounds", 1, "how often all ways are measured, by turns"),
        ("seed", 1, "of the requests"),
    ):
        shown = f"{what} (default: {default})" if default else what
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=shown)
    parser.add_argument(
        "--degree",
        type=float,
        default=7.0,
        metavar="D",
        help="how many requests have the prefix of one, on average (default: 7)",
    )
    parser.set_defaults(run=batch)


def batch(arguments: argparse.Namespace) -> int:
    from pensieve.bench import batch as bench
    from pensieve.config import resolve

    least = min(arguments.requests, arguments.prefix, arguments.own, arguments.output)
    if min(least, arguments.rounds) < 1 or arguments.degree < 1:
        raise InvalidArgument("requests, prefix, own, output, rounds, degree", "are at least 1")
    whole = arguments.requests * (arguments.prefix + arguments.own)
    longest = 2 * (arguments.prefix + arguments.own) + arguments.output
    cache = arguments.cache or max(whole // 9, 4 * longest)
    if cache < longest:
        raise InvalidArgument("cache", f"is at least {longest} tokens, for the longest request")
    flags = {"device_cache": f"{cache}t", "host_cache": "0t", "policy": "lru"}
    settings = resolve(flags, {}).settings
    options = bench.Options(
        arguments.model,
        arguments.shape,
        arguments.requests,
        arguments.prefix,
        arguments.own,
        arguments.degree,
        arguments.output,
        cache,
        arguments.rounds,
        arguments.seed,
    )
    bench.run(options, settings, Report(arguments.json))
    return 0
