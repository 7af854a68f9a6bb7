"""`pensieve cells`: the figures of BatchMaker, and its policies on this machine."""

from __future__ import annotations

import argparse
from typing import Any

FIGURES = ("2.5", "2.7", "2.8", "2.9", "2.10", "2.13", "2.14", "2.15")
MODELS = ("lstm", "seq2seq", "tree")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "cells",
        help="compare cellular batching with padding, graph merging and no batching",
        description="Print the figures of BatchMaker (cellular batching) on a simulator, the paper's number "
        "beside ours, with a verdict. Then serve random requests on one thread of this CPU with each policy. "
        "Without options, all figures and models are printed.",
    )
    parser.add_argument(
        "--figure",
        nargs="*",
        choices=FIGURES,
        metavar="N.N",
        help="only these figures, such as 2.5",
    )
    parser.add_argument(
        "--model",
        nargs="*",
        choices=MODELS,
        metavar="MODEL",
        help=f"only these: {', '.join(MODELS)}",
    )
    parser.add_argument(
        "--requests", type=_count, default=600, metavar="N", help="requests of a run (default: 600)"
    )
    parser.add_argument(
        "--seeds", type=_count, default=3, metavar="N", help="random seeds (default: 3)"
    )
    parser.set_defaults(run=run)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ValueError("must be a whole number above 0")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    from pensieve.cells import comparison, figures

    everything = arguments.figure is None and arguments.model is None
    seeds = range(arguments.seeds)
    names = FIGURES if everything else arguments.figure or ()
    for name in names:
        print(f"{'figure ' + name:36} {'paper':>7} {'ours':>8}  {'verdict':14}  reason")
        for row in figures.FIGURES[name](seeds):
            paper = "" if row.paper is None else f"{row.paper:.4g}"
            print(f"{row.name:36} {paper:>7} {row.ours:8.4g}  {row.verdict:14}  {row.reason}")
        print()
    for name in MODELS if everything else arguments.model or ():
        print(
            f"\n{name + ' on this CPU':20} {'1/CPU s':>10} {'P50 ms':>8} {'P99 ms':>8}  exact  order"
        )
        for each in comparison.compare(name, arguments.requests, seeds):
            exact = "yes" if each.exact else "no"
            times = f"{each.throughput:10.0f} {each.p50_ms:8.1f} {each.p99_ms:8.1f}"
            print(f"{each.policy:20} {times}  {exact:5}  {each.verdict}")
        print()
    return 0
