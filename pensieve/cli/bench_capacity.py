"""`pensieve bench capacity`."""

from __future__ import annotations

import argparse
from typing import Any

from pensieve.bench.report import Report
from pensieve.cli.bench_options import add_model, add_plot
from pensieve.errors import InvalidArgument

CAPACITY = """\
The highest load of chats and long documents that a daemon carries within objectives, for three ways to
schedule prompts. Each way is a daemon of its own, and the same conversations come to each of them:

    ours             prompts join an iteration as far as it is predicted to take no longer than --tbt
    whole prompts    uncut, beside the turns that generate
    prefill first    uncut, in a pass of their own before the turns that generate go on

A load is carried if the P99 of the time between tokens is within --tbt, the median time to the first token
within --ttft, and the median time in the queue below 2 s. The highest one is searched by doubling and
halving. With --rate that load is played to its end instead: gaps, first tokens, tokens per second.

Without --tbt there are two objectives, strict and relaxed: 5 and 25 times an iteration of 32 turns that
generate behind 4,096 tokens, which is measured first. A search takes half an hour; it says how far it is."""
WAYS = ("ours", "whole", "first")


def add_parser(kinds: Any) -> None:
    parser = kinds.add_parser(
        "capacity",
        help="the highest load that meets objectives, for three ways to schedule long prompts",
        description=CAPACITY,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser, "0.37 B")
    numbers: tuple[tuple[str, type, str, float, str], ...] = (
        ("tbt", float, "S", 0, "objective for the P99 of the time between tokens (default: strict and "
         "relaxed, measured)"),
        ("ttft", float, "S", 0, "objective for the median time to the first token (default: none)"),
        ("rate", float, "N", 0, "play this load, in conversations per second, and search for none"),
        ("seconds", float, "S", 60, "conversations begin for so long, in each trial (default: 60)"),
        ("rounds", int, "N", 1, "with --rate: play it so often, with other conversations (default: 1)"),
        ("turns", int, "N", 3, "turns of a conversation (default: 3)"),
        ("input-tokens", int, "N", 32, "tokens of a message (default: 32)"),
        ("output-tokens", int, "N", 32, "tokens of a reply (default: 32)"),
        ("documents", float, "SHARE", 0.5, "conversations that begin with a long document (default: 0.5)"),
        ("document-tokens", int, "N", 1000, "mean length of a document (default: 1000)"),
        ("think", float, "S", 1, "seconds between a reply and the next message, exponential (default: 1)"),
        ("seed", int, "N", 0, "seed of the conversations (default: 0)"),
    )  # fmt: skip
    for name, kind, metavar, default, text in numbers:
        parser.add_argument(f"--{name}", type=kind, metavar=metavar, default=default, help=text)
    parser.add_argument(
        "--schedulings",
        metavar="NAME,…",
        default=",".join(WAYS),
        help=f"which ways are measured (default: {','.join(WAYS)})",
    )
    add_plot(parser, "the P99 of the gaps over the load")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from pensieve.bench import capacity as bench
    from pensieve.bench import capacity_report
    from pensieve.bench.capacity_load import OfferedLoad

    names = arguments.schedulings.split(",")
    if unknown := [name for name in names if name not in bench.WAYS]:
        raise InvalidArgument("schedulings", f"{unknown[0]!r} is none of {', '.join(bench.WAYS)}")
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
        tuple(bench.WAYS[name] for name in names),
    )
    report = Report(arguments.json)
    rows = bench.run(options, report)
    if arguments.plot is not None:
        capacity_report.plot(rows, arguments.plot, report.facts)
    return 0
