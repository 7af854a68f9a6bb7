"""`pensieve bench chat`."""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from typing import Any

from pensieve.bench.report import Report
from pensieve.bench.workload import SHAPES, WorkloadShape
from pensieve.cli.bench_options import add_model, add_plot
from pensieve.errors import InvalidArgument

CHAT = """\
Conversations arrive all at once or at a Poisson rate. Each sends a message, waits for the whole reply,
pauses, and sends the next message, all over gRPC. Measured at the client:

    first, later      time to the first token of a conversation's first turn, and of later turns
    gap               time between two consecutive pieces of a streamed reply
    normalized        time of a turn divided by its tokens
    tokens by source  context tokens of all turns: new, on the device, in the host tier, or recomputed

Before the measurement, a short test conversation runs, and each of its turns is repeated. If this command
started the daemon, it drops the conversation's KV before each repetition. Both runs must get the same
replies, token for token (on a GPU, except after near ties). Replies are greedy and have a fixed length, so
two measurements with the same seed do the same work."""


def add_parser(kinds: Any) -> None:
    parser = kinds.add_parser(
        "chat",
        help="run conversations with a daemon: time to first token, gaps, tokens per second",
        description=CHAT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser, "0.37 B")
    parser.add_argument(
        "--address",
        default="",
        metavar="HOST:PORT",
        help="a daemon to measure (default: one is started)",
    )
    parser.add_argument(
        "--shape",
        choices=SHAPES,
        default="short",
        help="; ".join(
            f"{name}: {shape.conversations} conversations x {shape.turns} turns x "
            f"{shape.input_tokens} in / {shape.output_tokens} out"
            + (
                f", {shape.rate:g} arriving a second, with pauses of {shape.think_seconds:g} s between turns"
                if shape.rate
                else ", all at once, without pauses between turns"
            )
            + (
                f", with a device tier for {shape.device_share * 100:g} percent of the KV of all "
                "conversations"
                if shape.device_share
                else ""
            )
            for name, shape in SHAPES.items()
        ),
    )
    for name in ("conversations", "turns", "input-tokens", "output-tokens"):
        parser.add_argument(
            f"--{name}",
            type=int,
            metavar="N",
            help=f"number of {name.replace('-', ' ')}, instead of the shape's",
        )
    parser.add_argument(
        "--rate",
        type=float,
        metavar="N",
        help="conversations per second, arriving at random; 0: all at once",
    )
    parser.add_argument(
        "--think",
        type=float,
        metavar="S",
        help="seconds between a reply and the next message, exponential",
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", help="seed of the texts (default: a new one each time)"
    )
    for tier in ("device", "host"):
        parser.add_argument(
            f"--{tier}-cache",
            metavar="SIZE",
            help=f"size of the {tier} tier of the daemon that is started",
        )
    parser.add_argument(
        "--weights",
        metavar="TYPE",
        help="weights of the daemon that is started; see `pensieve serve`",
    )
    parser.add_argument(
        "--kv-dtype",
        metavar="TYPE",
        help="type of KV of the daemon that is started; see `pensieve serve`",
    )
    parser.add_argument(
        "--stream",
        metavar="MODE",
        help="auto, on or off: run turns that do not fit into the device tier with their KV in the host "
        "tier. For the daemon that this command starts; see `pensieve serve`",
    )
    add_plot(parser, "the times")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from pensieve.bench import chat as bench

    seed = arguments.seed if arguments.seed is not None else random.randrange(1 << 30)
    options = bench.ChatOptions(
        _shape_of(arguments),
        seed,
        arguments.model,
        arguments.address,
        arguments.device_cache,
        arguments.host_cache,
        arguments.weights,
        arguments.kv_dtype,
        arguments.stream,
    )
    report = Report(arguments.json)
    turns = bench.run(options, report)
    if arguments.plot is not None:
        bench.plot(turns, arguments.plot, report.facts)
    return 0


def _shape_of(arguments: argparse.Namespace) -> WorkloadShape:
    named = SHAPES[arguments.shape]
    changes = {
        name: value
        for name in ("conversations", "turns", "input_tokens", "output_tokens")
        if (value := getattr(arguments, name)) is not None
    }
    if any(value < 1 for value in changes.values()):
        raise InvalidArgument(", ".join(changes), "must be at least 1")
    for field, name in (("rate", "rate"), ("think_seconds", "think")):
        value = getattr(arguments, name)
        if value is not None:
            if value < 0:
                raise InvalidArgument(name, "must not be negative")
            changes[field] = value
    return replace(named, **changes)
