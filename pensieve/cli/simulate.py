"""`pensieve simulate`: a trace played to the daemon's own scheduler and cache on a virtual clock."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from pensieve.cli import simulate_journal, simulate_plan
from pensieve.core.policies.registry import POLICIES
from pensieve.errors import ConfigError, InvalidArgument
from pensieve.sim.cost import (
    DEVICE_SHARE,
    HARDWARE,
    INSTANT,
    MODELS,
    device_tokens_of,
    host_tokens_of,
)
from pensieve.sim.executor import PHASES
from pensieve.sim.trace import HABITS

CHUNK_TOKENS = 32
DEVICE_TOKENS, HOST_TOKENS = 500_000, 2_000_000  # where no machine says how much it holds
COMPARED = ("lru", "value", "return")
CLAIRVOYANT = "clairvoyant"
AUTO = -1  # tokens: as many as fit
TELL_SECONDS = 10.0  # how often a long run says where it is


class Point(NamedTuple):
    """One simulation of a sweep."""

    policy: str
    rate: float
    device_tokens: int
    host_tokens: int


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "simulate",
        help="play a trace to the scheduler and the cache on a virtual clock",
        description="Compares retention policies, or tells what a model on a machine would deliver. A "
        "trace is a file of JSON lines, Mooncake's (timestamp, input_length, output_length, hash_ids) or "
        "plain (conversation, at or after, input_tokens, output_tokens). Lines that cannot be read are "
        "counted and named. Iterations and copies take what the model's shape and the machine's data sheet "
        "say; with --hardware instant they take no time, and only the policy is seen. Options that take "
        "several values (N,…) are swept: every combination is a row.",
    )
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE", help="files of JSON lines")
    parser.add_argument(
        "--workload", choices=sorted(HABITS), help="conversations drawn like these, and no file"
    )
    parser.add_argument(
        "--rate",
        type=_several(float),
        default=[1.0],
        metavar="N,…",
        help="conversations drawn a second (default: 1)",
    )
    parser.add_argument(
        "--seconds", type=float, default=600.0, metavar="N", help="drawn for so long (default: 600)"
    )
    parser.add_argument(
        "--until",
        type=float,
        metavar="SECONDS",
        help="the clock stops there, and what has not ended is not counted (default: --seconds if "
        "they are drawn, so that figures are those of the load; else the end of the trace)",
    )
    parser.add_argument(
        "--reaction", type=float, metavar="SECONDS", help="mean, of drawn ones (default: theirs)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of what is drawn")
    parser.add_argument(
        "--policy",
        metavar="NAME,…",
        help=f"of {', '.join(POLICIES)}, and {CLAIRVOYANT}, which knows the trace: hardly to be beaten "
        f"(default: {','.join(COMPARED)}; with --stateless it does not matter)",
    )
    parser.add_argument(
        "--model", choices=sorted(MODELS), default="llama3-8b", help="(default: llama3-8b)"
    )
    parser.add_argument(
        "--hardware", choices=[*sorted(HARDWARE), INSTANT], default="h200", help="(default: h200)"
    )
    parser.add_argument(
        "--devices",
        type=int,
        default=1,
        metavar="N",
        help="of them, each layer divided among them; talk between them takes no time (default: 1)",
    )
    parser.add_argument(
        "--device-tokens",
        type=_several(_tokens),
        default=[AUTO],
        metavar="N,…",
        help="of KV, like 500k; auto: what is left beside the weights of 0.9 of the device's memory "
        "(default: auto; 500k with --hardware instant or --cost)",
    )
    parser.add_argument(
        "--host-tokens",
        type=_several(_tokens),
        default=[AUTO],
        metavar="N,…",
        help="of KV on the host; 0: the device only; auto: 220 GB a device, 32 GB for cpu "
        "(default: auto; 2M with --hardware instant or --cost)",
    )
    parser.add_argument(
        "--stateless",
        action="store_true",
        help="a conversation's KV is forgotten after each turn, and its history is computed again "
        "with the next message: the server without a memory to compare with",
    )
    parser.add_argument(
        "--phases",
        choices=PHASES,
        default="unified",
        help="separate: an iteration with prompts and with turns that generate takes two passes, "
        "prompts first; with a --token-budget of 1000000 whole prompts go first, as in schedulers that "
        "put prefill first (default: unified)",
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
        help="turns that begin before are played and not counted; times count from a trace's first "
        "message",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FOLDER",
        help="draw there: tiers and tokens per iteration over time, and what was swept (needs the "
        "extra bench)",
    )
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    simulate_journal.add_arguments(parser)
    simulate_plan.add_arguments(parser)
    parser.set_defaults(run=command)


def command(arguments: argparse.Namespace) -> int:
    from pensieve.bench import plots
    from pensieve.core.cache import CacheConfig
    from pensieve.core.scheduler import SchedulerConfig
    from pensieve.sim import cost_file, report
    from pensieve.sim.cost import CostModel, instant
    from pensieve.sim.simulator import Simulator
    from pensieve.sim.trace import Problems

    if arguments.journal is not None:
        return simulate_journal.run(arguments)
    if arguments.fit is not None:
        raise InvalidArgument("fit", "what is fitted is a --journal")
    _check(arguments)
    points = _points(arguments)
    if arguments.plot is not None:
        plots.matplotlib()  # before hours are spent
    if arguments.cost is not None:
        cost = cost_file.load(arguments.cost)
        recompute = cost.recompute(CHUNK_TOKENS)
    elif arguments.hardware == INSTANT:
        cost, recompute = instant(CHUNK_TOKENS)
    else:
        cost = CostModel.of(MODELS[arguments.model], _hardware(arguments))
        recompute = cost.recompute(CHUNK_TOKENS)
    if arguments.plan:
        return _plan(arguments, cost, points)
    weighed = ""
    if recompute.copy_seconds and any(point.policy == "return" for point in points):
        weighed = "; return weighs copies against recomputing, as in a daemon with --cost"
    print(f"assumed: {cost.source}{weighed}", file=sys.stderr)
    rows = []
    problems = Problems()
    drawn_until = arguments.seconds if arguments.workload is not None else None
    for number, point in enumerate(points, 1):
        problems = Problems()
        simulator = Simulator(
            cost,
            _policy(arguments, point, recompute),
            CacheConfig(point.device_tokens // CHUNK_TOKENS, point.host_tokens // CHUNK_TOKENS),
            SchedulerConfig(arguments.token_budget, arguments.turns_max),
            keep_gaps=arguments.cost is not None or arguments.hardware != INSTANT,
            count_from=arguments.count_from,
            until=drawn_until if arguments.until is None else arguments.until,
            stateless=arguments.stateless,
            phases=arguments.phases,
            keep_series=arguments.plot is not None,
        )
        named = f"{number} of {len(points)}, {point.policy}"
        with ExitStack() as files:
            if arguments.record is not None:
                files.enter_context(
                    simulate_journal.recorded(
                        arguments.record, simulator, point.policy, recompute, cost
                    )
                )
            counts = simulator.run(_visits(arguments, point.rate, problems, files), _teller(named))
        row = {**report.figures(point.policy, counts), **_where(arguments, point)}
        if simulator.series is not None:
            row["series"] = simulator.series.means()
        rows.append(row)
        print(f"{named}: {counts.turns:,} turns", file=sys.stderr, flush=True)
    report.compared(rows)
    _report(problems)
    refused = max(row["refused"] for row in rows)
    if refused:
        print(f"{refused} turns were larger than the device tier", file=sys.stderr)
    if arguments.plot is not None:
        for path in plots.simulated(rows, arguments.plot):
            print(f"drawn: {path}", file=sys.stderr)
    if arguments.json:
        print(json.dumps({"assumed": cost.source, "problems": problems.count, "rows": rows}))
    else:
        print(report.table(rows))
    return 0


def _policy(arguments: argparse.Namespace, point: Point, recompute: Any) -> Any:
    from pensieve.core.policies.registry import policy_named
    from pensieve.sim.clairvoyant import ClairvoyantPolicy
    from pensieve.sim.trace import Problems

    if point.policy != CLAIRVOYANT:
        return policy_named(point.policy, recompute, CHUNK_TOKENS)
    with ExitStack() as files:
        return ClairvoyantPolicy(_visits(arguments, point.rate, Problems(), files))


def _plan(arguments: argparse.Namespace, cost: Any, points: list[Point]) -> int:
    from pensieve.sim.trace import Problems

    point, problems = points[0], Problems()
    if arguments.policy is None:
        point = point._replace(policy="value")
    elif len({each.policy for each in points}) > 1:
        raise InvalidArgument("policy", "one is planned with")
    if len({each.device_tokens for each in points}) > 1:
        raise InvalidArgument("device_tokens", "one is planned with")
    most = max(each.host_tokens for each in points)
    with ExitStack() as files:
        visits = list(_visits(arguments, 1.0, problems, files)) if arguments.traces else []
    _report(problems)
    return simulate_plan.run(arguments, cost, point.policy, point.device_tokens, most, visits)


def _report(problems: Any) -> None:
    if problems.count:
        shown = ", ".join(f"{problems.place(line)} ({text})" for line, text in problems.lines)
        more = "" if problems.count == len(problems.lines) else ", …"
        print(f"{problems.count} lines were not understood: {shown}{more}", file=sys.stderr)


def _check(arguments: argparse.Namespace) -> None:
    """What cannot be simulated, with the reason."""
    known = (*POLICIES, CLAIRVOYANT)
    if unknown := [name for name in _names(arguments) if name not in known]:
        raise InvalidArgument("policy", f"{unknown[0]!r} is none of {', '.join(known)}")
    if CLAIRVOYANT in _names(arguments) and (arguments.plan or arguments.record is not None):
        raise InvalidArgument(
            "policy", "clairvoyant knows a trace: it cannot serve, plan or record"
        )
    if bool(arguments.traces) == (arguments.workload is not None):
        raise InvalidArgument("TRACE", "name files, or draw a --workload; not both")
    if arguments.workload is None and len(arguments.rate) > 1:
        raise InvalidArgument("rate", "a recorded trace has its own; several are for a --workload")
    if min(*arguments.rate, arguments.seconds) <= 0 or (arguments.reaction or 1) <= 0:
        raise InvalidArgument("rate, seconds, reaction", "are above 0")
    if arguments.until is not None and arguments.until <= arguments.count_from:
        raise InvalidArgument("until", "is after --count-from, or nothing is counted")
    if arguments.workload is not None and arguments.seconds <= arguments.count_from:
        raise InvalidArgument("count_from", "is before --seconds, or nothing is counted")
    if min(arguments.token_budget, arguments.turns_max, arguments.devices) < 1:
        raise InvalidArgument("token_budget, turns_max, devices", "are 1 or more")
    if arguments.token_budget < arguments.turns_max:
        raise InvalidArgument(
            "token_budget",
            f"{arguments.token_budget} tokens an iteration are fewer than the {arguments.turns_max} "
            "turns (--turns-max) that may generate in it, one token each",
        )
    timeless = arguments.hardware == INSTANT and arguments.cost is None
    if timeless and arguments.phases != "unified":
        raise InvalidArgument("phases", "differ in time, and with --hardware instant there is none")


def _points(arguments: argparse.Namespace) -> list[Point]:
    """Every combination of what takes several values."""
    device, host = DEVICE_TOKENS, HOST_TOKENS
    fitting = None
    if arguments.cost is None and arguments.hardware != INSTANT:
        model, hardware = MODELS[arguments.model], _hardware(arguments)
        device, host = device_tokens_of(model, hardware), host_tokens_of(model, hardware)
        fitting = int(device + 0.1 * hardware.memory_bytes / model.kv_bytes_per_token)
        if device < 4 * CHUNK_TOKENS:
            room = DEVICE_SHARE * hardware.memory_bytes
            raise InvalidArgument(
                "model",
                f"the weights of {model.name} are {model.weight_bytes / 1e9:.0f} GB, and of the memory of "
                f"{hardware.devices} x {hardware.name} {room / 1e9:.0f} GB are for weights and KV: no room "
                "(--devices)",
            )
    devices = [device if each == AUTO else each for each in arguments.device_tokens]
    hosts = [host if each == AUTO else each for each in arguments.host_tokens]
    if min(devices) < 4 * CHUNK_TOKENS:
        raise InvalidArgument("device_tokens", f"is at least {4 * CHUNK_TOKENS}")
    if fitting is not None and max(devices) > fitting:
        raise InvalidArgument(
            "device_tokens",
            f"{max(devices):,} tokens of {arguments.model} do not fit {arguments.devices} x "
            f"{arguments.hardware}: beside the weights there is room for {fitting:,}",
        )
    return [Point(*each) for each in product(_names(arguments), arguments.rate, devices, hosts)]


def _names(arguments: argparse.Namespace) -> list[str]:
    if arguments.policy is not None:
        return list(arguments.policy.split(","))
    return list(COMPARED[:1] if arguments.stateless else COMPARED)


def _where(arguments: argparse.Namespace, point: Point) -> dict[str, Any]:
    """What a row says of its place in a sweep."""
    return {
        "rate": point.rate if arguments.workload is not None else None,
        "device_size": point.device_tokens,
        "host_size": point.host_tokens,
        "stateless": arguments.stateless,
        "phases": arguments.phases,
    }


def _hardware(arguments: argparse.Namespace) -> Any:
    return replace(HARDWARE[arguments.hardware], devices=arguments.devices)


def _teller(named: str) -> Callable[[float, Any], None]:
    """Says on stderr, now and then, how far a long run is."""
    last = time.monotonic()

    def tell(now: float, counts: Any) -> None:
        nonlocal last
        if time.monotonic() - last >= TELL_SECONDS:
            last = time.monotonic()
            print(f"{named}: at {now:,.0f} s, {counts.turns:,} turns", file=sys.stderr, flush=True)

    return tell


def _visits(
    arguments: argparse.Namespace, rate: float, problems: Any, files: ExitStack
) -> Iterator[Any]:
    from pensieve.sim.trace import drawn, from_zero, read

    if arguments.workload is not None:
        yield from drawn(
            HABITS[arguments.workload],
            rate,
            arguments.seconds,
            arguments.seed,
            reaction_seconds=arguments.reaction,
        )
        return
    yield from from_zero(read(_lines(arguments.traces, files, problems), problems))


def _lines(paths: Iterable[Path], files: ExitStack, problems: Any) -> Iterator[str]:
    number = 0
    for path in paths:
        try:
            file = files.enter_context(path.open(encoding="utf-8", errors="replace"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        problems.files.append((number, str(path)))
        for line in file:
            number += 1
            yield line


def _several(one: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """For argparse: values between commas."""

    def several(text: str) -> list[Any]:
        try:
            return [one(each) for each in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no number, nor several with commas between"
            ) from None

    return several


def _tokens(text: str) -> int:
    """`500k`, `3M` or a plain number; `auto`."""
    if text == "auto":
        return AUTO
    factors = {"k": 1_000, "m": 1_000_000}
    factor = factors.get(text[-1:].lower(), 1)
    digits = text[:-1] if factor > 1 else text
    try:
        count = int(float(digits) * factor)
    except (ValueError, OverflowError):
        count = -1
    if count < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens (500000, 500k, 3M)")
    return count
