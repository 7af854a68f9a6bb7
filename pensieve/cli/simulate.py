"""`pensieve simulate`: the options, and the sweep that the command runs by default."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pensieve.cli import simulate_journal
from pensieve.core.policies.registry import POLICIES
from pensieve.errors import ConfigError, InvalidArgument
from pensieve.sim.cost import CHUNK_TOKENS, HARDWARE, INSTANT, MODELS
from pensieve.sim.executor import PHASES
from pensieve.sim.workload import WORKLOAD_PRESETS

if TYPE_CHECKING:
    from pensieve.sim.cost import CostModel, HardwarePreset
    from pensieve.sim.simulator import SimulationFigures
    from pensieve.sim.sweep import Source, SweepPoint, SweepSettings
    from pensieve.sim.trace import Problems


EXAMPLES = """\
examples:
  pensieve simulate --workload assistant --hardware instant --device-tokens 500k --host-tokens 0
      Compare the policies in a cache that holds half a minute of the load: their costs differ by a tenth.
      If everything fits (`--workload sharegpt` with the tiers of an H200), the costs are equal.
  pensieve simulate TRACE --hardware instant --device-tokens 1M,3M --host-tokens 0 --plot figures
      Compare the policies on a trace of your own, for two cache sizes, and draw one sheet.
  pensieve simulate --workload sharegpt --rate 1,2,4 --policy return --seed 0,1,2
      Simulate llama3-8b on an H200 under three loads; the figures are medians over three seeds."""
REPORT_SECONDS = 10.0  # how often a long run reports its progress
Value = TypeVar("Value")

COMPARED_POLICIES = ("lru", "value", "return")
AUTO = -1  # as many tokens as fit
PROMPT_SECONDS = 0.05  # the default of a daemon, see config/settings.py


class _Help(argparse.HelpFormatter):
    """A formatter that keeps the line breaks of the examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text == EXAMPLES else super()._fill_text(text, width, indent)


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "simulate",
        help="run the scheduler and the cache on a trace, with a virtual clock",
        description="Compare eviction policies, or predict how a model performs on a machine. A trace is a "
        "file of JSON lines, in Mooncake's form (timestamp, input_length, output_length, hash_ids) or in a "
        "plain form (conversation, `at` or `after`, input_tokens, output_tokens). Unreadable lines are "
        "counted and reported. The times of iterations and copies follow from the model's shape and the "
        "machine's data sheet. With --hardware instant they are 0, and only the policy matters. Options with "
        "several values (N,…) are swept: each combination is a row.",
        epilog=EXAMPLES,
        formatter_class=_Help,
    )
    add_arguments(parser)
    simulate_journal.add_arguments(parser)
    parser.set_defaults(run=command)


def command(arguments: argparse.Namespace) -> int:
    if arguments.journal is not None:
        return simulate_journal.run(arguments)
    if arguments.fit is not None:
        raise InvalidArgument("--fit", "needs --journal, to which the costs are fitted")
    check(arguments)
    return _sweep(arguments, _points(arguments))


def _sweep(arguments: argparse.Namespace, sweep_points: list[SweepPoint]) -> int:
    from pensieve.bench import plots, simulate_sheet
    from pensieve.core.scheduler_config import SchedulerConfig
    from pensieve.sim import report
    from pensieve.sim.cost import instant
    from pensieve.sim.sweep import SweepSettings
    from pensieve.sim.trace import Problems

    if arguments.plot is not None:
        plots.matplotlib()  # fail now, not after hours of simulation
    cost = _cost(arguments)
    timeless = arguments.cost is None and arguments.hardware == INSTANT
    recompute = instant(CHUNK_TOKENS)[1] if timeless else cost.recompute(CHUNK_TOKENS)
    drawn_until = arguments.seconds if arguments.workload is not None else None
    setting = SweepSettings(
        source=_source(arguments),
        cost=cost,
        recompute=recompute,
        scheduler=SchedulerConfig(
            arguments.token_budget,
            arguments.turns_max,
            arguments.prompt_seconds,
            arguments.tbt,
            cost.computing,
            arguments.share,
        ),
        keep_gaps=not timeless,
        keep_series=arguments.plot is not None,
        count_from=arguments.count_from,
        until=drawn_until if arguments.until is None else arguments.until,
        stateless=arguments.stateless,
        phases=arguments.phases,
    )
    policy_note = ""
    if recompute.copy_seconds and any(point.policy == "return" for point in sweep_points):
        policy_note = "; the policy `return` weighs copies against recomputing, as in a daemon"
    print(f"assumed: {cost.source}{policy_note}", file=sys.stderr)
    rows = []
    problems = Problems()
    for number, point in enumerate(sweep_points, 1):
        problems = Problems()
        name = f"{number} of {len(sweep_points)}, {point.policy}"
        if len(arguments.seed) > 1:
            name += f", seed {point.seed}"
        rows.append(_simulate_point(setting, point, problems, name, arguments.record))
        _check_read(arguments, problems)
        print(f"{name}: {rows[-1]['turns']:,} turns", file=sys.stderr, flush=True)
    report.add_savings(rows)
    _report(problems)
    refused = max(row["refused"] for row in rows)
    if refused:
        print(
            f"{refused} turns were refused: they are larger than the device tier", file=sys.stderr
        )
    if reason := report.why_equal(rows):
        print(reason, file=sys.stderr)
    if arguments.plot is not None:
        facts = _facts(arguments, cost)
        path = simulate_sheet.draw(rows, facts, arguments.plot)
        print(f"drawn: {path}", file=sys.stderr)
    if arguments.json:
        print(json.dumps({"assumed": cost.source, "problems": problems.count, "rows": rows}))
    else:
        print(report.table(rows))
    return 0


def _simulate_point(
    setting: SweepSettings, point: SweepPoint, problems: Problems, name: str, record: Path | None
) -> dict[str, Any]:
    """Simulate one point of the sweep and return its row. With `record`, also write a journal."""
    from pensieve.sim.sweep import recorded

    simulator = setting.simulator(point)
    recording = nullcontext() if record is None else recorded(record, simulator, setting, point)
    with recording:
        arrivals = setting.source.arrivals(point.rate, problems, point.seed)
        counts = simulator.run(arrivals, _progress(name))
    return setting.row(point, simulator, counts)


def _facts(arguments: argparse.Namespace, cost: CostModel) -> list[str]:
    """Return the facts to show with a plot: model and machine, load, seeds."""
    facts = [f"simulated: {cost.source}"]
    if arguments.workload is not None:
        reaction = f", reactions {arguments.reaction:g} s" if arguments.reaction else ""
        facts.append(f"{arguments.workload} conversations for {arguments.seconds:g} s{reaction}")
        seeds = ", ".join(map(str, arguments.seed))
        facts.append(f"seeds {seeds}" if len(arguments.seed) > 1 else f"seed {seeds}")
    else:
        facts.append(", ".join(path.name for path in arguments.traces))
    if arguments.count_from:
        facts.append(f"counted from {arguments.count_from:g} s")
    if arguments.stateless:
        facts.append("stateless")
    return facts


def _source(arguments: argparse.Namespace) -> Source:
    from pensieve.sim.sweep import Source

    return Source(
        tuple(arguments.traces),
        arguments.workload,
        arguments.seconds,
        arguments.reaction,
    )


def _cost(arguments: argparse.Namespace) -> CostModel:
    """Return the costs from a file, from a data sheet, or zero costs for `instant`."""
    from pensieve.sim import cost_file
    from pensieve.sim.cost import CostModel, instant

    if arguments.cost is not None:
        return cost_file.load(arguments.cost)
    if arguments.hardware == INSTANT:
        return instant(CHUNK_TOKENS)[0]
    return CostModel.of(MODELS[arguments.model], _hardware(arguments))


def _hardware(arguments: argparse.Namespace) -> HardwarePreset:
    return replace(HARDWARE[arguments.hardware], devices=arguments.devices)


def _points(arguments: argparse.Namespace) -> list[SweepPoint]:
    """Return the points of the sweep: all combinations of the options that have several values."""
    from pensieve.sim.sweep import points

    devices, hosts = _tiers(arguments)
    return points(policies_of(arguments), arguments.rate, devices, hosts, arguments.seed)


def _tiers(arguments: argparse.Namespace) -> tuple[list[int], list[int]]:
    """Return the sizes of the device tier and of the host tier, in tokens."""
    from pensieve.sim.sweep import TierRoom

    room = TierRoom()
    if arguments.cost is None and arguments.hardware != INSTANT:
        room = TierRoom.of(MODELS[arguments.model], _hardware(arguments))
    devices = [room.device_tokens if each == AUTO else each for each in arguments.device_tokens]
    hosts = [room.host_tokens if each == AUTO else each for each in arguments.host_tokens]
    room.check(devices, arguments.model, f"{arguments.devices} x {arguments.hardware}")
    return devices, hosts


def _check_read(arguments: argparse.Namespace, problems: Problems) -> None:
    """Raise ConfigError if no line of a trace could be read."""
    if arguments.workload is not None or problems.num_read:
        return
    names = ", ".join(map(str, arguments.traces))
    if not problems.lines:
        raise ConfigError(f"{names} is empty: not a trace")
    line, text = problems.lines[0]
    raise ConfigError(f"nothing in {names} can be read: {problems.location(line)} ({text})")


def _report(problems: Problems) -> None:
    if problems.count:
        shown = ", ".join(f"{problems.location(line)} ({text})" for line, text in problems.lines)
        more = "" if problems.count == len(problems.lines) else ", …"
        print(f"{problems.count} lines were not understood: {shown}{more}", file=sys.stderr)


def _progress(name: str) -> Callable[[float, SimulationFigures], None]:
    """Return a function that reports the progress of a long run on standard error."""
    last = time.monotonic()

    def report(now: float, counts: SimulationFigures) -> None:
        nonlocal last
        if time.monotonic() - last >= REPORT_SECONDS:
            last = time.monotonic()
            print(f"{name}: at {now:,.0f} s, {counts.turns:,} turns", file=sys.stderr, flush=True)

    return report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "traces", nargs="*", type=Path, metavar="TRACE", help="trace files of JSON lines"
    )
    parser.add_argument(
        "--workload",
        choices=sorted(WORKLOAD_PRESETS),
        help="draw conversations of this kind instead of reading a trace",
    )
    parser.add_argument(
        "--rate",
        type=_several(float),
        default=[1.0],
        metavar="N,…",
        help="conversations per second of --workload (default: 1)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=600.0,
        metavar="N",
        help="duration of the arrivals of --workload (default: 600)",
    )
    parser.add_argument(
        "--until",
        type=float,
        metavar="SECONDS",
        help="stop the simulation at this time; unfinished turns are not counted (default: with --workload, "
        "the value of --seconds, so that only the time with arrivals counts; otherwise the end of the trace)",
    )
    parser.add_argument(
        "--reaction",
        type=float,
        metavar="SECONDS",
        help="mean time from a reply to the next message (default: depends on --workload)",
    )
    parser.add_argument(
        "--seed",
        type=_several(int),
        default=[0],
        metavar="N,…",
        help="seeds of the random load; with several seeds, figures are medians (default: 0)",
    )
    parser.add_argument(
        "--policy",
        metavar="NAME,…",
        help=f"policies to compare: {', '.join(POLICIES)}, and clairvoyant, which knows the trace and can "
        "hardly be beaten "
        f"(default: {','.join(COMPARED_POLICIES)}; with --stateless the policy does not matter)",
    )
    parser.add_argument(
        "--model",
        choices=sorted(MODELS),
        default="llama3-8b",
        help="model that is simulated (default: llama3-8b)",
    )
    parser.add_argument(
        "--hardware",
        choices=[*sorted(HARDWARE), INSTANT],
        default="h200",
        help="device that is simulated (default: h200)",
    )
    parser.add_argument(
        "--devices",
        type=int,
        default=1,
        metavar="N",
        help="number of devices that share each layer; communication takes no time (default: 1)",
    )
    parser.add_argument(
        "--device-tokens",
        type=_several(tokens),
        default=[AUTO],
        metavar="N,…",
        help="size of the device tier, like 500k; auto: 90 %% of the device's memory, minus "
        "the weights "
        "(default: auto; 500k with --hardware instant or --cost)",
    )
    parser.add_argument(
        "--host-tokens",
        type=_several(tokens),
        default=[AUTO],
        metavar="N,…",
        help="size of the host tier; 0: none; auto: the host memory per device in the preset of --hardware, "
        "such as 220 GB for h200 and 32 GB for cpu "
        "(default: auto; 2M with --hardware instant or --cost)",
    )
    parser.add_argument(
        "--stateless",
        action="store_true",
        help="forget a conversation's KV after each turn and recompute its history with the next "
        "message: the stateless server to compare with",
    )
    parser.add_argument(
        "--phases",
        choices=PHASES,
        default="unified",
        help="separate: if an iteration has prompts and decodes, it takes two passes, first the "
        "prompts, then the decodes. To simulate a scheduler that prefers prefills, also pass "
        "--token-budget 1000000, so that prompts are not split. (default: unified)",
    )
    parser.add_argument(
        "--token-budget",
        type=int,
        default=2048,
        metavar="N",
        help="maximum tokens of an iteration (default: 2048)",
    )
    parser.add_argument(
        "--prompt-seconds",
        type=float,
        default=0.0,
        metavar="S",
        help="how much longer an iteration may take for prompts while other turns generate; a daemon's own "
        f"default is {PROMPT_SECONDS} (default: 0, no limit)",
    )
    parser.add_argument(
        "--tbt",
        type=float,
        default=0.0,
        metavar="S",
        help="objective for the time between two tokens: an iteration gets only as many prompt tokens as "
        "its predicted time allows (default: 0, none)",
    )
    parser.add_argument(
        "--share",
        type=int,
        default=0,
        metavar="N",
        help="tokens of a reply after which the turn gives its place to a waiting turn (default: 0, never)",
    )
    parser.add_argument(
        "--turns-max",
        type=int,
        default=256,
        metavar="N",
        help="maximum turns that run at once (default: 256)",
    )
    parser.add_argument(
        "--count-from",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="do not count turns that begin before this time; times count from a trace's first "
        "message",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FOLDER",
        help="draw simulate.png into this folder: one sheet with the results, and with tiers and turns "
        "over time (needs the extra bench)",
    )
    parser.add_argument("--json", action="store_true", help="print figures as JSON")


def policies_of(arguments: argparse.Namespace) -> list[str]:
    """Return the policies of --policy, or the default policies."""
    if arguments.policy is not None:
        return list(arguments.policy.split(","))
    return list(COMPARED_POLICIES[:1] if arguments.stateless else COMPARED_POLICIES)


def check(arguments: argparse.Namespace) -> None:
    """Raise an error for options that cannot be combined."""
    from pensieve.sim.sweep import CLAIRVOYANT

    known = (*POLICIES, CLAIRVOYANT)
    if unknown := [name for name in policies_of(arguments) if name not in known]:
        raise InvalidArgument("policy", f"{unknown[0]!r} is none of {', '.join(known)}")
    if CLAIRVOYANT in policies_of(arguments) and arguments.record is not None:
        raise InvalidArgument(
            "policy", "clairvoyant knows the future of the trace: it cannot be recorded"
        )
    if bool(arguments.traces) == (arguments.workload is not None):
        raise InvalidArgument("TRACE", "give trace files or --workload, not both")
    if arguments.workload is None and len(arguments.rate) > 1:
        raise InvalidArgument("rate", "several rates need --workload: a trace has its own rate")
    if arguments.workload is None and len(arguments.seed) > 1:
        raise InvalidArgument("seed", "several seeds need --workload: a trace is not random")
    if min(*arguments.rate, arguments.seconds) <= 0 or (arguments.reaction or 1) <= 0:
        raise InvalidArgument("rate, seconds, reaction", "must be above 0")
    if arguments.until is not None and arguments.until <= arguments.count_from:
        raise InvalidArgument("until", "must be after --count-from, or nothing is counted")
    if arguments.workload is not None and arguments.seconds <= arguments.count_from:
        raise InvalidArgument("count_from", "must be before --seconds, or nothing is counted")
    if min(arguments.token_budget, arguments.turns_max, arguments.devices) < 1:
        raise InvalidArgument("token_budget, turns_max, devices", "must be 1 or more")
    if arguments.token_budget < arguments.turns_max:
        raise InvalidArgument(
            "token_budget",
            f"must be at least --turns-max ({arguments.turns_max}), because each running turn generates one "
            "token per iteration",
        )
    for name in ("prompt_seconds", "tbt", "share"):
        if not getattr(arguments, name) >= 0:
            raise InvalidArgument(name, "must be at least 0")
    timeless = arguments.hardware == INSTANT and arguments.cost is None
    if timeless and arguments.phases != "unified":
        raise InvalidArgument(
            "phases", "differ only in their times, and with --hardware instant all times are 0"
        )


def _several(parse: Callable[[str], Value]) -> Callable[[str], list[Value]]:
    """Return a parser for comma-separated values."""

    def several(text: str) -> list[Value]:
        try:
            return [parse(each) for each in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"must be a number, or several with commas between them, not {text!r}"
            ) from None

    return several


def tokens(text: str) -> int:
    """Parse `500k`, `3M`, a plain number or `auto`."""
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
        raise argparse.ArgumentTypeError(
            f"must be a number of tokens such as 500000, 500k or 3M, not {text!r}"
        )
    return count
