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
from pensieve.bench.workload import SHAPES, Shape
from pensieve.cli import bench_batch, bench_capacity, bench_kernels
from pensieve.cli.bench_kernels import add_model, add_plot, counts
from pensieve.core.policies.registry import POLICIES
from pensieve.errors import InvalidArgument

CONVERSATIONS = (1_000, 10_000, 100_000)
PLANNING = """\
`planning` measures what a decision costs: `plan` and `commit` of the real scheduler and cache, with
256 turns generating, a full host tier, and growing numbers of cached conversations.  The executor
answers at once, so what is timed is bookkeeping alone.  Garbage collection stays on."""
SERVICE = """\
A real `pensieve serve` on one core, with arithmetic instead of a model; engine and clients have the
other cores.  Every stream is one conversation with one long turn.  It counts the tokens that
arrive at the clients, from the first to the last, and the gaps between the messages of a stream."""
HISTORY = """\
A real `pensieve history`, and replicas without engines that make the calls of one turn after the other, each
as the one store thread of a daemon does. 0 replicas: the same turns on the store itself, without a service.
Every conversation is read back before a figure is printed."""
ISOLATION = """\
A real `pensieve serve` on one core, with arithmetic instead of a model, and two tenants. A quiet one talks
in a few conversations. A noisy one, limited to one turn at once and ten tokens per second, does its worst:
requests as large as may be and larger, floods of reads, creates, deletions and forks, texts as long as
the context, turns of the highest priority that are left early. A round is some seconds without it and as
many with it; the quiet tenant's times to the first token and gaps are compared."""
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
SWAP = """\
The first part moves scattered pages between the arenas of both tiers, as the copier does, and compares the
speed with one large copy of as many bytes. The second runs a daemon: the same message is sent to a
conversation with a history of `--history` tokens, again and again, with its KV on the device, in the host
tier, and dropped, and the time to the first token is compared. In between it is rewound, so that every
time is that of the same turn; its reply must be the same, and its usage must show that its KV was there."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("bench", help="measure this machine and this build")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for add in (
        _planning,
        _service,
        _history,
        _isolation,
        _chat,
        bench_batch.batch_parser,
        bench_capacity.capacity_parser,
        _swap,
        bench_kernels.attention_parser,
        bench_kernels.step_parser,
    ):
        add(kinds)
    for each in kinds.choices.values():
        each.add_argument("--json", action="store_true", help="print figures as JSON")
        each.set_defaults(run=partial(_run, each.get_default("run")))


def _run(act: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    if getattr(arguments, "plot", None) is not None:
        plots.matplotlib()  # before minutes are spent
    return act(arguments)


def _planning(kinds: Any) -> None:
    parser = kinds.add_parser(
        "planning",
        help="time of plan + commit against the number of cached conversations",
        description=PLANNING,
    )
    parser.add_argument(
        "--conversations",
        type=counts,
        default=CONVERSATIONS,
        metavar="N,N,…",
        help="cached conversations (default: 1000,10000,100000; together they fill both tiers)",
    )
    parser.add_argument("--running", type=int, default=256, help="turns generating (default: 256)")
    parser.add_argument(
        "--iterations", type=int, default=2000, help="iterations to time (default: 2000)"
    )
    parser.add_argument(
        "--policy",
        type=lambda text: text.split(","),
        default=list(POLICIES),
        metavar="NAME,…",
        help=f"(default: {','.join(POLICIES)})",
    )
    parser.set_defaults(run=planning)


def planning(arguments: argparse.Namespace) -> int:
    from pensieve.bench import planning as bench

    bench.run(
        arguments.policy,
        arguments.conversations,
        arguments.running,
        arguments.iterations,
        Report(arguments.json),
    )
    return 0


def _service(kinds: Any) -> None:
    parser = kinds.add_parser(
        "service",
        help="tokens per second that the service delivers, without a model",
        description=SERVICE,
    )
    parser.add_argument(
        "--streams",
        type=int,
        default=256,
        metavar="N",
        help="turns that run at once (default: 256)",
    )
    parser.add_argument(
        "--tokens", type=int, default=400, metavar="N", help="tokens of each reply (default: 400)"
    )
    _iteration_seconds(parser, 0.0)
    parser.add_argument(
        "--history",
        type=counts,
        metavar="N,N,…",
        help="instead: what a short turn costs the service in conversations of so many tokens",
    )
    parser.set_defaults(run=service)


def _history(kinds: Any) -> None:
    parser = kinds.add_parser(
        "history",
        help="turns per second that one history carries for several daemons",
        description=HISTORY,
    )
    parser.add_argument(
        "--replicas",
        type=counts,
        default=(0, 1, 4, 16),
        metavar="N,N,…",
        help="daemons that share it (default: 0,1,4,16; 0: no service)",
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="of each figure (default: 5)")
    parser.add_argument(
        "--folder",
        type=Path,
        help="where histories are made, and removed (default: where temporary files are)",
    )
    parser.set_defaults(run=history)


def history(arguments: argparse.Namespace) -> int:
    from pensieve.bench import history as bench

    bench.run(arguments.replicas, arguments.seconds, arguments.folder, Report(arguments.json))
    return 0


def _iteration_seconds(parser: argparse.ArgumentParser, default: float) -> None:
    parser.add_argument(
        "--iteration-seconds",
        type=float,
        default=default,
        metavar="S",
        help=f"duration of an iteration, which is one token of each turn (default: {default:g})",
    )


def service(arguments: argparse.Namespace) -> int:
    from pensieve.bench import service as bench

    seconds, report = arguments.iteration_seconds, Report(arguments.json)
    if arguments.history is not None:
        bench.run_histories(arguments.history, arguments.tokens, report)
        return 0
    bench.run(arguments.streams, arguments.tokens, seconds, report)
    return 0


def _isolation(kinds: Any) -> None:
    parser = kinds.add_parser(
        "isolation",
        help="what one tenant notices of another one that does its worst",
        description=ISOLATION,
    )
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="without and with it (default: 3)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=15.0,
        metavar="S",
        help="of each half of a round (default: 15)",
    )
    _iteration_seconds(parser, 0.01)
    parser.set_defaults(run=isolation)


def isolation(arguments: argparse.Namespace) -> int:
    from pensieve.bench import isolation as bench

    bench.run(
        arguments.rounds,
        arguments.seconds,
        arguments.iteration_seconds,
        Report(arguments.json),
    )
    return 0


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
    options = bench.Options(
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


def _shape_of(arguments: argparse.Namespace) -> Shape:
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


def _swap(kinds: Any) -> None:
    parser = kinds.add_parser(
        "swap",
        help="pages per second between the tiers, and the first token of a turn whose history is there",
        description=SWAP,
    )
    add_model(parser, "0.37 B")
    parser.add_argument(
        "--history", type=int, default=2000, metavar="N", help="tokens (default: 2000)"
    )
    parser.add_argument(
        "--message", type=int, default=64, metavar="N", help="tokens of the message (default: 64)"
    )
    parser.add_argument(
        "--repeats", type=int, default=9, metavar="N", help="times for each median (default: 9)"
    )
    add_plot(parser, "the times")
    parser.set_defaults(run=swap)


def swap(arguments: argparse.Namespace) -> int:
    from pensieve.bench import swap as bench

    history, message, repeats = arguments.history, arguments.message, arguments.repeats
    report = Report(arguments.json)
    turns = bench.run(arguments.model, history, message, repeats, report)
    if arguments.plot is not None:
        bench.plot(turns, arguments.plot, report.facts)
    return 0
