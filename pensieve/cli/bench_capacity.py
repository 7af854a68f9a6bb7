"""`pensieve bench capacity`."""

from __future__ import annotations

import argparse
from typing import Any

from pensieve.bench.report import Report
from pensieve.cli.bench_options import add_model, add_plot
from pensieve.errors import InvalidArgument

CAPACITY = """\
Find the highest load of chats and long documents that a daemon serves within objectives, for three ways to
schedule prompts. Each way has its own daemon, and all daemons get the same conversations:

    ours             prompts are split, so that the predicted time of each iteration is within --tbt
    whole prompts    prompts are not split, and run in the same iterations as decodes
    prefill first    prompts are not split, and run in a pass of their own before the decodes

A daemon serves a load if the P99 of the time between tokens is within --tbt, the median time to the first
token within --ttft, and the median time in the queue below 2 s. The search doubles and halves the load. With
--rate, that load is run to its end instead, and gaps, first tokens and tokens per second are printed.

Without --tbt, the command first measures the time of an iteration in which 32 turns generate, each with a
context of 4,096 tokens. The two objectives, strict and relaxed, are 5 and 25 times this time. A search takes
half an hour and reports its progress."""
SCHEDULERS = ("ours", "whole", "first")


def add_parser(kinds: Any) -> None:
    parser = kinds.add_parser(
        "capacity",
        help="find the highest load within objectives, for three ways to schedule long prompts",
        description=CAPACITY,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser, "0.37 B")
    numbers: tuple[tuple[str, type, str, float, str], ...] = (
        ("tbt", float, "S", 0, "objective for the P99 of the time between tokens (default: strict and "
         "relaxed, measured)"),
        ("ttft", float, "S", 0, "objective for the median time to the first token (default: none)"),
        ("rate", float, "N", 0, "run this load, in conversations per second, without a search"),
        ("seconds", float, "S", 60, "seconds of each trial in which conversations start (default: 60)"),
        ("rounds", int, "N", 1, "with --rate: number of runs, each with other conversations (default: 1)"),
        ("turns", int, "N", 3, "turns per conversation (default: 3)"),
        ("input-tokens", int, "N", 32, "tokens of a message (default: 32)"),
        ("output-tokens", int, "N", 32, "tokens of a reply (default: 32)"),
        ("documents", float, "SHARE", 0.5, "part of the conversations with a long document (default: 0.5)"),
        ("document-tokens", int, "N", 1000, "mean length of a document (default: 1000)"),
        ("think", float, "S", 1, "seconds between a reply and the next message, exponential (default: 1)"),
        ("seed", int, "N", 0, "seed of the conversations (default: 0)"),
    )  # fmt: skip
    for name, kind, metavar, default, text in numbers:
        parser.add_argument(f"--{name}", type=kind, metavar=metavar, default=default, help=text)
    parser.add_argument(
        "--schedulings",
        metavar="NAME,…",
        default=",".join(SCHEDULERS),
        help="the schedulers to compare: ours, whole (whole prompts), first (prefill first) (default: "
        f"{','.join(SCHEDULERS)})",
    )
    add_plot(parser, "the P99 of the gaps over the load")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from pensieve.bench import capacity as bench
    from pensieve.bench import capacity_report
    from pensieve.bench.capacity_load import OfferedLoad

    names = arguments.schedulings.split(",")
    if unknown := [name for name in names if name not in bench.SCHEDULERS]:
        raise InvalidArgument(
            "schedulings", f"must be among {', '.join(bench.SCHEDULERS)}, not {unknown[0]!r}"
        )
    load = OfferedLoad(
        arguments.turns,
        arguments.input_tokens,
        arguments.output_tokens,
        arguments.documents,
        arguments.document_tokens,
        arguments.think,
    )
    options = bench.CapacityOptions(
        arguments.model,
        load,
        arguments.tbt,
        arguments.ttft,
        arguments.rate,
        arguments.seconds,
        arguments.rounds,
        arguments.seed,
        tuple(bench.SCHEDULERS[name] for name in names),
    )
    report = Report(arguments.json)
    rows = bench.run(options, report)
    if arguments.plot is not None:
        capacity_report.plot(rows, arguments.plot, report.facts)
    return 0
