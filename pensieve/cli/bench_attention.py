"""`pensieve bench attention`."""

from __future__ import annotations

import argparse
from typing import Any

from pensieve.bench.report import Report
from pensieve.cli.bench_options import add_plot, counts

# For each option: its default, its value with --full (as in docs/performance.md), and its help text.
SIZES = {
    "context": ((256, 1024, 4096), (128, 256, 512, 1024, 2048, 4096), "tokens of each turn"),
    "batch": ((8,), (32, 8), "numbers of turns"),
    "head-size": ((128,), (64, 128), "sizes of a head"),
}


def add_parser(kinds: Any) -> None:
    parser = kinds.add_parser(
        "attention",
        help="compare attention over scattered pages with torch on contiguous keys and values",
        description="Time multi_token_attention over pages in random order, and compare it with three "
        "baselines: torch's fused attention on contiguous keys and values (the fastest of up to four calls: "
        "a padded batch or a loop, and grouped heads or heads folded into rows); gathering the pages first; "
        "and one query at a time. Each result is checked before it is timed. The default is a dozen shapes.",
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="measure the 96 shapes of docs/performance.md, in ten minutes",
    )
    for name, (quick, full, text) in SIZES.items():
        quick_text, full_text = (",".join(map(str, each)) for each in (quick, full))
        parser.add_argument(
            f"--{name}",
            type=counts,
            metavar="N,N,…",
            help=f"{text} (default: {quick_text}; with --full: {full_text})",
        )
    parser.add_argument(
        "--queries", type=int, default=8, metavar="N", help="tokens of each slice (default: 8)"
    )
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="measure only this type (default: both)"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=9,
        metavar="N",
        help="repetitions for each median (default: 9)",
    )
    add_plot(parser, "the ratios")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from pensieve.bench import attention as bench

    chosen = (arguments.context, arguments.batch, arguments.head_size)
    contexts, batches, head_sizes = (
        given or (full if arguments.full else quick)
        for given, (quick, full, _) in zip(chosen, SIZES.values(), strict=True)
    )
    options = bench.AttentionOptions(
        contexts, batches, head_sizes, arguments.queries, arguments.dtype, arguments.repeats
    )
    report = Report(arguments.json)
    rows = bench.run(options, report)
    if arguments.plot is not None:
        bench.plot(rows, arguments.plot, report.facts)
    return 0
