"""`pensieve cells`: the policies of cellular batching on this machine."""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

MODELS = ("lstm", "seq2seq", "tree")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "cells",
        help="compare cellular batching with padding, graph merging and no batching",
        description="Serve random requests on one thread of this CPU with each policy. Print medians over "
        "the seeds, in CPU time: the requests per second if all arrive at once, and the latency if they "
        "arrive at 80 % of the throughput of graph merging.",
    )
    parser.add_argument(
        "--model",
        nargs="+",
        choices=MODELS,
        default=MODELS,
        metavar="MODEL",
        help=f"only these models: {', '.join(MODELS)}",
    )
    parser.add_argument(
        "--requests", type=_count, default=200, metavar="N", help="requests of a run (default: 200)"
    )
    parser.add_argument(
        "--seeds", type=_count, default=3, metavar="N", help="number of seeds (default: 3)"
    )
    parser.set_defaults(run=run)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ValueError("must be a whole number above 0")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    from pensieve.cells.comparison import compare

    for name in arguments.model:
        print(f"{name:12} {'1/CPU s':>8} {'P50 ms':>8} {'P90 ms':>8} {'P99 ms':>8}  exact")
        runs = [compare(name, arguments.requests, seed) for seed in range(arguments.seeds)]
        for policy in runs[0]:
            *numbers, exact = zip(*(each[policy] for each in runs), strict=True)
            shown = " ".join(f"{median(each):8.1f}" for each in numbers)
            print(f"{policy:12} {shown}  {'yes' if all(exact) else 'no'}")
        print()
    return 0
