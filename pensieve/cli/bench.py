"""`pensieve bench` parses the flags of each bench in pensieve/bench and runs it."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pensieve.bench import plots
from pensieve.bench.report import Report
from pensieve.bench.workload import SHAPES, WorkloadShape
from pensieve.errors import InvalidArgument

CHAT = """\
Conversations arrive (all at once, or at a Poisson rate), each sends a message, waits for the whole
reply, thinks, and goes on. Everything goes through gRPC. Measured at the client:

    first, later      time to the first token of a conversation's first turn, and of later ones
    gap               between the messages of a stream
    normalized        time of a turn over its tokens
    tokens by source  what later turns found on the device, in the host tier, or had to recompute

Before anything is timed, a conversation runs twice, the second time (if the daemon was started here)
with its KV dropped between the turns: both must get the same replies, token for token. Replies do
not end by themselves and are greedy, so two runs with one seed do the same work."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("bench", help="measure this machine and this build")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for add in (
        _chat,
        capacity_parser,
        attention_parser,
        step_parser,
    ):
        add(kinds)
    for each in kinds.choices.values():
        each.add_argument("--json", action="store_true", help="print figures as JSON")
        each.set_defaults(run=partial(_run, each.get_default("run")))


def _run(act: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    if getattr(arguments, "plot", None) is not None:
        plots.matplotlib()  # before minutes are spent
    return act(arguments)


def _chat(kinds: Any) -> None:
    parser = kinds.add_parser(
        "chat",
        help="conversations with a daemon: time to first token, gaps, tokens per second",
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
                f", {shape.rate:g} arriving a second and thinking for {shape.think_seconds:g} s"
                if shape.rate
                else ", all at once and without thinking"
            )
            + (
                f", on a device tier for {shape.device_share * 100:g} percent of it"
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
        help="auto, on or off, for the daemon that is started; see `pensieve serve`",
    )
    add_plot(parser, "the times")
    parser.set_defaults(run=chat)


def chat(arguments: argparse.Namespace) -> int:
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
        raise InvalidArgument(", ".join(changes), "are at least 1")
    for field, name in (("rate", "rate"), ("think_seconds", "think")):
        value = getattr(arguments, name)
        if value is not None:
            if value < 0:
                raise InvalidArgument(name, "is not negative")
            changes[field] = value
    return replace(named, **changes)


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


def capacity_parser(kinds: Any) -> None:
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
    parser.set_defaults(run=capacity)


def capacity(arguments: argparse.Namespace) -> int:
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


# Of `bench attention`, by option: the defaults, and with --full those of docs/performance.md.
ATTENTION = {
    "context": ((256, 1024, 4096), (128, 256, 512, 1024, 2048, 4096), "tokens of each turn"),
    "batch": ((8,), (32, 8), "numbers of turns"),
    "head-size": ((128,), (64, 128), "sizes of a head"),
}


def add_model(parser: argparse.ArgumentParser, size: str) -> None:
    text = f"a folder or a hub id (default: random weights of {size})"
    parser.add_argument("model", nargs="?", default="", help=text)


def add_plot(parser: argparse.ArgumentParser, what: str) -> None:
    text = f"draw {what} (needs the extra `bench`)"
    parser.add_argument("--plot", type=Path, metavar="FILE", help=text)


def counts(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(","))


def attention_parser(kinds: Any) -> None:
    parser = kinds.add_parser(
        "attention",
        help="attention over scattered pages against torch on keys and values in one piece",
        description="Times multi_token_attention over pages in random order against torch's fused "
        "attention on contiguous keys and values (the best of padded batch and loop, with grouped "
        "heads as they are and folded into rows), against gathering the pages first, and against one "
        "query at a time. Every answer is checked before it is timed. The default is a dozen shapes.",
    )
    parser.add_argument(
        "--full", action="store_true", help="the 96 shapes of docs/performance.md: ten minutes"
    )
    for name, (quick, whole, what) in ATTENTION.items():
        few, many = (",".join(map(str, each)) for each in (quick, whole))
        parser.add_argument(
            f"--{name}",
            type=counts,
            metavar="N,N,…",
            help=f"{what} (default: {few}; with --full: {many})",
        )
    parser.add_argument(
        "--queries", type=int, default=8, metavar="N", help="tokens of each slice (default: 8)"
    )
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="measure only this type (default: both)"
    )
    parser.add_argument(
        "--repeats", type=int, default=9, metavar="N", help="times for each median (default: 9)"
    )
    add_plot(parser, "the ratios")
    parser.set_defaults(run=attention)


def attention(arguments: argparse.Namespace) -> int:
    from pensieve.bench import attention as bench

    chosen = (arguments.context, arguments.batch, arguments.head_size)
    contexts, batches, head_sizes = (
        given or (whole if arguments.full else quick)
        for given, (quick, whole, _) in zip(chosen, ATTENTION.values(), strict=True)
    )
    options = bench.AttentionOptions(
        contexts, batches, head_sizes, arguments.queries, arguments.dtype, arguments.repeats
    )
    report = Report(arguments.json)
    rows = bench.run(options, report)
    if arguments.plot is not None:
        bench.plot(rows, arguments.plot, report.facts)
    return 0


def step_parser(kinds: Any) -> None:
    parser = kinds.add_parser(
        "step",
        help="an iteration of a model against the time that reading its weights takes",
        description="Times one iteration (forward, sampling) of turns that generate, alone and beside a "
        "piece of a prompt, and divides by the time that reading the weights takes at the bandwidth "
        "measured in between. Before that several turns must get the same tokens in a batch as alone.",
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
        help="prompt tokens beside the turns (default: 256)",
    )
    parser.add_argument(
        "--repeats", type=int, default=15, metavar="N", help="times for each median (default: 15)"
    )
    parser.add_argument(
        "--weights", choices=("native", "int8"), default="native", help="(default: native)"
    )
    parser.add_argument(
        "--kv-dtype",
        choices=("auto", "int8", "fp8"),
        default="auto",
        help="type that KV is kept in (default: auto, the model's own)",
    )
    parser.add_argument(
        "--parts",
        action="store_true",
        help="also what each part of the compiled layers takes, and how fast their weights are read",
    )
    add_plot(parser, "the ratios")
    parser.set_defaults(run=step)


def step(arguments: argparse.Namespace) -> int:
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
