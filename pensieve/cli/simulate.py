"""`pensieve simulate`: a trace played to the daemon's own scheduler and cache on a virtual clock."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pensieve.cli import simulate_journal
from pensieve.core.retention import POLICIES
from pensieve.errors import ConfigError, InvalidArgument
from pensieve.sim.model import HARDWARE, INSTANT, MODELS
from pensieve.sim.trace import HABITS

CHUNK_TOKENS = 32


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "simulate",
        help="play a trace to the scheduler and the cache on a virtual clock",
        description="Compares retention policies, or tells what a model on a machine would deliver. A "
        "trace is a file of JSON lines, Mooncake's (timestamp, input_length, output_length, hash_ids) or "
        "plain (conversation, at or after, input_tokens, output_tokens). Lines that cannot be read are "
        "counted and named. Iterations and copies take what the model's shape and the machine's data sheet "
        "say; with --hardware instant they take no time, and only the policy is seen.",
    )
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE", help="files of JSON lines")
    parser.add_argument(
        "--workload", choices=sorted(HABITS), help="conversations drawn like these, and no file"
    )
    parser.add_argument(
        "--rate", type=float, default=1.0, metavar="N", help="drawn a second (default: 1)"
    )
    parser.add_argument(
        "--seconds", type=float, default=600.0, metavar="N", help="drawn for so long (default: 600)"
    )
    parser.add_argument(
        "--reaction", type=float, metavar="SECONDS", help="mean, of drawn ones (default: theirs)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of what is drawn")
    parser.add_argument(
        "--policy",
        default="lru,value,return",
        metavar="NAME,…",
        help=f"of {', '.join(POLICIES)} (default: all, one after another)",
    )
    parser.add_argument(
        "--model", choices=sorted(MODELS), default="llama3-8b", help="(default: llama3-8b)"
    )
    parser.add_argument(
        "--hardware", choices=[*sorted(HARDWARE), INSTANT], default="h200", help="(default: h200)"
    )
    parser.add_argument(
        "--device-tokens", type=_tokens, default=500_000, metavar="N", help="(default: 500k)"
    )
    parser.add_argument(
        "--host-tokens", type=_tokens, default=2_000_000, metavar="N", help="(default: 2M)"
    )
    parser.add_argument(
        "--token-budget",
        type=int,
        default=2048,
        metavar="N",
        help="of an iteration (default: 2048)",
    )
    parser.add_argument(
        "--turns-max", type=int, default=256, metavar="N", help="computed at once (default: 256)"
    )
    parser.add_argument(
        "--count-from",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="turns that begin before are played and not counted",
    )
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    simulate_journal.add_arguments(parser)
    parser.set_defaults(run=command)


def command(arguments: argparse.Namespace) -> int:
    from pensieve.core.cache import CacheConfig
    from pensieve.core.retention import policy_named
    from pensieve.core.scheduler import SchedulerConfig
    from pensieve.sim import report
    from pensieve.sim.model import CostModel, instant
    from pensieve.sim.simulator import Simulator
    from pensieve.sim.trace import Problems

    if arguments.journal is not None:
        return simulate_journal.run(arguments)
    if arguments.fit is not None:
        raise InvalidArgument("fit", "what is fitted is a --journal")
    names = arguments.policy.split(",")
    if unknown := [name for name in names if name not in POLICIES]:
        raise InvalidArgument("policy", f"{unknown[0]!r} is none of {', '.join(POLICIES)}")
    if bool(arguments.traces) == (arguments.workload is not None):
        raise InvalidArgument("TRACE", "name files, or draw a --workload; not both")
    if min(arguments.rate, arguments.seconds) <= 0 or (arguments.reaction or 1) <= 0:
        raise InvalidArgument("rate, seconds, reaction", "are above 0")
    if arguments.device_tokens < 4 * CHUNK_TOKENS:
        raise InvalidArgument("device_tokens", f"is at least {4 * CHUNK_TOKENS}")
    if arguments.cost is not None:
        cost = simulate_journal.cost_of(arguments.cost)
        recompute = cost.recompute(CHUNK_TOKENS)
    elif arguments.hardware == INSTANT:
        cost, recompute = instant(CHUNK_TOKENS)
    else:
        cost = CostModel.of(MODELS[arguments.model], HARDWARE[arguments.hardware])
        recompute = cost.recompute(CHUNK_TOKENS)
    print(f"assumed: {cost.source}", file=sys.stderr)
    rows = []
    problems = Problems()
    for name in names:
        problems = Problems()
        simulator = Simulator(
            cost,
            policy_named(name, recompute, CHUNK_TOKENS),
            CacheConfig(
                arguments.device_tokens // CHUNK_TOKENS, arguments.host_tokens // CHUNK_TOKENS
            ),
            SchedulerConfig(arguments.token_budget, arguments.turns_max),
            keep_gaps=arguments.cost is not None or arguments.hardware != INSTANT,
            count_from=arguments.count_from,
        )
        with ExitStack() as files:
            if arguments.record is not None:
                files.enter_context(
                    simulate_journal.recorded(arguments.record, simulator, name, recompute, cost)
                )
            counts = simulator.run(_visits(arguments, problems, files))
        rows.append(report.figures(name, counts))
        print(f"{name}: {counts.turns:,} turns", file=sys.stderr, flush=True)
    report.compared(rows)
    if problems.count:
        shown = ", ".join(f"line {line} ({text})" for line, text in problems.lines)
        more = "" if problems.count == len(problems.lines) else ", …"
        print(f"{problems.count} lines were not understood: {shown}{more}", file=sys.stderr)
    refused = rows[0]["refused"]
    if refused:
        print(f"{refused} turns were larger than the device tier", file=sys.stderr)
    if arguments.json:
        print(json.dumps({"assumed": cost.source, "problems": problems.count, "rows": rows}))
    else:
        print(report.table(rows))
    return 0


def _visits(arguments: argparse.Namespace, problems: Any, files: ExitStack) -> Iterator[Any]:
    from pensieve.sim.trace import drawn, read

    if arguments.workload is not None:
        yield from drawn(
            HABITS[arguments.workload],
            arguments.rate,
            arguments.seconds,
            arguments.seed,
            reaction_seconds=arguments.reaction,
        )
        return
    yield from read(_lines(arguments.traces, files), problems)


def _lines(paths: Iterable[Path], files: ExitStack) -> Iterator[str]:
    for path in paths:
        try:
            file = files.enter_context(path.open(encoding="utf-8", errors="replace"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        yield from file


def _tokens(text: str) -> int:
    """`500k`, `3M` or a plain number."""
    factors = {"k": 1_000, "m": 1_000_000}
    factor = factors.get(text[-1:].lower(), 1)
    digits = text[:-1] if factor > 1 else text
    try:
        return int(float(digits) * factor)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of tokens (500000, 500k, 3M)"
        ) from None
