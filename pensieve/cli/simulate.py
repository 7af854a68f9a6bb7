"""The command `pensieve simulate`, and the sweep that it runs by default."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pensieve.cli import (
    simulate_journal,
    simulate_options,
)
from pensieve.cli.simulate_options import AUTO, policies_of
from pensieve.errors import ConfigError, InvalidArgument
from pensieve.sim.cost import CHUNK_TOKENS, HARDWARE, INSTANT, MODELS

if TYPE_CHECKING:
    from pensieve.sim.cost import CostModel, HardwarePreset
    from pensieve.sim.simulator import Counts
    from pensieve.sim.sweep import Point, Setting, Source
    from pensieve.sim.trace import Problems

EXAMPLES = """\
examples:
  pensieve simulate --workload assistant --hardware instant --device-tokens 500k --host-tokens 0
      compares the policies in a cache that holds half a minute of the load: they differ by a tenth.
      Where everything fits (`--workload sharegpt` with the tiers of an H200), they are equal.
  pensieve simulate TRACE --hardware instant --device-tokens 1M,3M --host-tokens 0 --plot figures
      the same on a trace of your own, for two sizes, drawn as one sheet.
  pensieve simulate --workload sharegpt --rate 1,2,4 --policy return --seed 0,1,2
      what llama3-8b on an H200 delivers under three loads; medians over three seeds."""
REPORT_SECONDS = 10.0  # how often a long run reports its progress


class _Help(argparse.HelpFormatter):
    """Breaks no line of the examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text == EXAMPLES else super()._fill_text(text, width, indent)


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "simulate",
        help="play a trace to the scheduler and the cache on a virtual clock",
        description="Compares retention policies, or tells what a model on a machine would deliver. A "
        "trace is a file of JSON lines, Mooncake's (timestamp, input_length, output_length, hash_ids) or "
        "plain (conversation, at or after, input_tokens, output_tokens). Lines that cannot be read are "
        "counted and named. Iterations and copies take what the model's shape and the machine's data "
        "sheet say; with --hardware instant they take no time, and only the policy is seen. Options that "
        "take several values (N,…) are swept: every combination is a row.",
        epilog=EXAMPLES,
        formatter_class=_Help,
    )
    simulate_options.add_arguments(parser)
    simulate_journal.add_arguments(parser)
    parser.set_defaults(run=command)


def command(arguments: argparse.Namespace) -> int:
    if arguments.journal is not None:
        return simulate_journal.run(arguments)
    if arguments.fit is not None:
        raise InvalidArgument("fit", "what is fitted is a --journal")
    simulate_options.check(arguments)
    return _sweep(arguments, _points(arguments))


def _sweep(arguments: argparse.Namespace, found: list[Point]) -> int:
    from pensieve.bench import plots, simulate_sheet
    from pensieve.core.scheduler_config import SchedulerConfig
    from pensieve.sim import report
    from pensieve.sim.cost import instant
    from pensieve.sim.sweep import Setting
    from pensieve.sim.trace import Problems

    if arguments.plot is not None:
        plots.matplotlib()  # before hours are spent
    cost = _cost(arguments)
    timeless = arguments.cost is None and arguments.hardware == INSTANT
    recompute = instant(CHUNK_TOKENS)[1] if timeless else cost.recompute(CHUNK_TOKENS)
    drawn_until = arguments.seconds if arguments.workload is not None else None
    setting = Setting(
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
    weighed = ""
    if recompute.copy_seconds and any(point.policy == "return" for point in found):
        weighed = "; return weighs copies against recomputing, as in a daemon with --cost"
    print(f"assumed: {cost.source}{weighed}", file=sys.stderr)
    rows = []
    problems = Problems()
    for number, point in enumerate(found, 1):
        problems = Problems()
        name = f"{number} of {len(found)}, {point.policy}"
        if len(arguments.seed) > 1:
            name += f", seed {point.seed}"
        rows.append(_simulated(setting, point, problems, name, arguments.record))
        _check_read(arguments, problems)
        print(f"{name}: {rows[-1]['turns']:,} turns", file=sys.stderr, flush=True)
    report.compared(rows)
    _report(problems)
    refused = max(row["refused"] for row in rows)
    if refused:
        print(f"{refused} turns were larger than the device tier", file=sys.stderr)
    if idle := report.why_equal(rows):
        print(idle, file=sys.stderr)
    if arguments.plot is not None:
        facts = _facts(arguments, cost)
        path = simulate_sheet.draw(rows, facts, arguments.plot)
        print(f"drawn: {path}", file=sys.stderr)
    if arguments.json:
        print(json.dumps({"assumed": cost.source, "problems": problems.count, "rows": rows}))
    else:
        print(report.table(rows))
    return 0


def _simulated(
    setting: Setting, point: Point, problems: Problems, name: str, record: Path | None
) -> dict[str, Any]:
    """The row of one point; with `record` its journal is written, too."""
    from pensieve.sim.sweep import recorded

    simulator = setting.simulator(point)
    recording = nullcontext() if record is None else recorded(record, simulator, setting, point)
    with recording:
        arrivals = setting.source.arrivals(point.rate, problems, point.seed)
        counts = simulator.run(arrivals, _progress(name))
    return setting.row(point, simulator, counts)


def _facts(arguments: argparse.Namespace, cost: CostModel) -> list[str]:
    """What a figure says of all that is in it: model and machine, load, seeds."""
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
    """Of a file, of a machine on which nothing takes time, or of a data sheet."""
    from pensieve.sim import cost_file
    from pensieve.sim.cost import CostModel, instant

    if arguments.cost is not None:
        return cost_file.load(arguments.cost)
    if arguments.hardware == INSTANT:
        return instant(CHUNK_TOKENS)[0]
    return CostModel.of(MODELS[arguments.model], _hardware(arguments))


def _hardware(arguments: argparse.Namespace) -> HardwarePreset:
    return replace(HARDWARE[arguments.hardware], devices=arguments.devices)


def _points(arguments: argparse.Namespace) -> list[Point]:
    """Every combination of options with several values."""
    from pensieve.sim.sweep import points

    devices, hosts = _tiers(arguments)
    return points(policies_of(arguments), arguments.rate, devices, hosts, arguments.seed)


def _tiers(arguments: argparse.Namespace) -> tuple[list[int], list[int]]:
    """Tokens of the device tier, and of the host tier: each of what may be several."""
    from pensieve.sim.sweep import Room

    room = Room()
    if arguments.cost is None and arguments.hardware != INSTANT:
        room = Room.of(MODELS[arguments.model], _hardware(arguments))
    devices = [room.device_tokens if each == AUTO else each for each in arguments.device_tokens]
    hosts = [room.host_tokens if each == AUTO else each for each in arguments.host_tokens]
    room.check(devices, arguments.model, f"{arguments.devices} x {arguments.hardware}")
    return devices, hosts


def _check_read(arguments: argparse.Namespace, problems: Problems) -> None:
    """A trace of which nothing can be read is no trace."""
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


def _progress(name: str) -> Callable[[float, Counts], None]:
    """Reports on stderr, now and then, how far a long run is."""
    last = time.monotonic()

    def report(now: float, counts: Counts) -> None:
        nonlocal last
        if time.monotonic() - last >= REPORT_SECONDS:
            last = time.monotonic()
            print(f"{name}: at {now:,.0f} s, {counts.turns:,} turns", file=sys.stderr, flush=True)

    return report
