"""`pensieve bench step`."""

from __future__ import annotations

import argparse
from typing import Any

from pensieve.bench.report import Report
from pensieve.cli.bench_options import add_model, add_plot, counts


def add_parser(kinds: Any) -> None:
    parser = kinds.add_parser(
        "step",
        help="compare an iteration of a model with the time to read its weights",
        description="Check that each turn gets the same tokens in a batch as by itself. Then time an "
        "iteration (forward pass and sampling) of generating turns, first without and then with a piece of a "
        "prompt. "
        "Divide the iteration's time by the time to read the weights. The latter is computed from "
        "the memory bandwidth, which is measured between iterations.",
    )
    add_model(parser, "the shape --shape")
    parser.add_argument(
        "--shape",
        default="0.37B",
        help="shape of the random weights: 0.03B, 0.37B or 1.1B (default: 0.37B)",
    )
    parser.add_argument(
        "--batch",
        type=counts,
        default=(1, 16, 64),
        metavar="N,N,…",
        help="numbers of turns (default: 1,16,64)",
    )
    parser.add_argument(
        "--context", type=int, default=64, metavar="N", help="tokens of each turn (default: 64)"
    )
    parser.add_argument(
        "--prompt",
        type=int,
        default=256,
        metavar="N",
        help="prompt tokens in the iteration (default: 256)",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=15,
        metavar="N",
        help="repetitions for each median (default: 15)",
    )
    parser.add_argument(
        "--weights",
        choices=("native", "int8"),
        default="native",
        help="type of the weights (default: native)",
    )
    parser.add_argument(
        "--kv-dtype",
        choices=("auto", "int8", "fp8"),
        default="auto",
        help="type of the cached KV (default: auto, the model's own)",
    )
    parser.add_argument(
        "--parts",
        action="store_true",
        help="also time each part of the compiled layers, and how fast their weights are read",
    )
    add_plot(parser, "the ratios")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from pensieve.bench import step as bench

    options = bench.StepOptions(
        arguments.model,
        arguments.shape,
        arguments.batch,
        arguments.context,
        arguments.prompt,
        arguments.repeats,
        int8=arguments.weights == "int8",
        parts=arguments.parts,
        kv_dtype=arguments.kv_dtype,
    )
    report = Report(arguments.json)
    rows = bench.run(options, report)
    if arguments.plot is not None:
        bench.plot(rows, arguments.plot, report.facts)
    return 0
