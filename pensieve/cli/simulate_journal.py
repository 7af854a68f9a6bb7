"""`pensieve simulate --journal`: replay a journal, and fit costs to it."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pensieve import __version__
from pensieve.errors import ConfigError, InvalidArgument

if TYPE_CHECKING:
    from pensieve.engine.journal import Replay
    from pensieve.sim.fit import Fit
    from pensieve.sim.observed import Observations

REPORT_EVERY = 200_000  # iterations
ERRORS_KEPT = 100_000  # how many of the newest prediction errors are kept


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "journals",
        "`pensieve serve --journal FILE` records the inputs of its schedule: lengths and times, no text.",
    )
    group.add_argument(
        "--journal",
        type=Path,
        metavar="FILE",
        help="instead of a trace: plan the iterations of this journal again, and compare; exit code 1 if an "
        "iteration differs",
    )
    group.add_argument(
        "--fit",
        type=Path,
        metavar="FILE",
        help="with --journal: fit costs to its iteration times, print the error, and write the costs here",
    )
    group.add_argument(
        "--cost",
        type=Path,
        metavar="FILE",
        help="use the costs in this file, written by --fit, instead of the costs of --model on --hardware",
    )
    group.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="append a journal of the simulation to this file, as `serve --journal` does",
    )


def run(arguments: argparse.Namespace) -> int:
    from pensieve.engine.journal import JournalError, NotAJournal, Replay
    from pensieve.engine.metrics import PredictionErrors
    from pensieve.sim.observed import Observations

    path = arguments.journal
    if arguments.traces or arguments.workload is not None:
        raise InvalidArgument(
            "journal", "a journal has its own turns; leave out trace files and --workload"
        )
    replay, observations, errors = (
        Replay(_lines(path)),
        Observations(),
        PredictionErrors(ERRORS_KEPT),
    )
    problem = None
    try:
        for replayed in replay:
            observations.add(replayed)
            errors.add(replayed.iteration.predicted_seconds, replayed.ended - replayed.begun)
            if replay.num_agreed % REPORT_EVERY == 0:
                print(f"{replay.num_agreed:,} iterations", file=sys.stderr, flush=True)
    except NotAJournal as error:
        raise ConfigError(f"{path}: {error}") from error
    except JournalError as error:
        problem = str(error)
    if not replay.num_engines:
        raise ConfigError(f"{path} is empty: not a journal")
    result: dict[str, Any] = {
        "journal": str(path),
        "iterations": replay.num_agreed,
        "engines": replay.num_engines,
        "lines_cut_off": replay.cut_off,
        "problem": problem,
    }
    median, p90 = errors.quantiles(0.5, 0.9)
    if errors:
        result["prediction_error"] = {"median": median, "p90": p90}
    if not arguments.json:
        print("\n".join(_outcome(path, replay, problem)))
        if errors:
            print(
                f"  error of the times predicted before iterations began: {median:.0%} (median), "
                f"{p90:.0%} (P90)"
            )
    if problem is None and arguments.fit is not None:
        fit = _fit_costs(arguments, replay, observations)
        result["fit"] = {
            "cost": {name: value for name, value in vars(fit.cost).items() if name != "source"},
            "errors": [each._asdict() for each in fit.errors],
            "found": fit.found,
            "assumed": fit.assumed,
        }
        if not arguments.json:
            print("\n".join(_fit_table(arguments.fit, fit)))
    if arguments.json:
        print(json.dumps(result))
    return 0 if problem is None else 1


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            yield from file
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def _outcome(path: Path, replay: Replay, problem: str | None) -> Iterator[str]:
    engines = f", by {replay.num_engines} engines" if replay.num_engines > 1 else ""
    count = f"{replay.num_agreed:,} iterations{engines}"
    if problem is None:
        yield f"{path}: {count}, all planned again as they were recorded"
    else:
        yield f"{path}: {problem}. The {count} before this were planned as recorded"
        if replay.written_by != __version__:
            version = replay.written_by or "(an old version)"
            yield f"  pensieve {version} wrote it; {__version__} may plan differently"
    for line in replay.cut_off[:3]:
        yield f"  line {line} is incomplete, because its engine was killed, and was left out"
    if len(replay.cut_off) > 3:
        yield f"  and {len(replay.cut_off) - 3} more lines"


def _fit_costs(arguments: argparse.Namespace, replay: Replay, observations: Observations) -> Fit:
    from pensieve.sim import cost_file
    from pensieve.sim.cost import HARDWARE, INSTANT, MODELS
    from pensieve.sim.fit import assumed_costs, fitted

    hardware = arguments.hardware
    if str(replay.model.get("device", "")).startswith("cpu"):
        hardware = "cpu"
    if hardware == INSTANT:
        raise InvalidArgument("hardware", "`instant` has no data sheet for a fit; name a machine")
    assumed = assumed_costs(replay.model, MODELS[arguments.model], HARDWARE[hardware])
    name = replay.model.get("name") or arguments.model
    source = f"fitted to {replay.num_agreed:,} iterations of {name} in {arguments.journal.name}"
    try:
        fit = fitted(observations, assumed, source)
    except ValueError as error:
        raise ConfigError(f"{arguments.journal} cannot be fitted: {error}") from error
    cost_file.save(fit, arguments.fit)
    return fit


def _fit_table(path: Path, fit: Fit) -> Iterator[str]:
    yield "error of the fit, |predicted - measured| / measured, over iterations that were held out:"
    yield f"{'':>14}{'iterations':>12}{'held out':>10}{'median':>9}{'P90':>9}"
    for each in fit.errors:
        median, p90 = ("-" if v is None else f"{v:.1%}" for v in (each.median, each.p90))
        yield f"{each.kind:>14}{each.seen:>12,}{each.held_out:>10,}{median:>9}{p90:>9}"
    cost = fit.cost
    values = (
        ("dense_seconds_per_token", cost.dense_seconds_per_token * 1e6, "µs per token"),
        ("dense_seconds_min", cost.dense_seconds_min * 1e3, "ms at least (reading the weights)"),
        ("attention_seconds_per_pair", cost.attention_seconds_per_pair * 1e9, "ns per pair"),
        ("attention_seconds_per_key", cost.attention_seconds_per_key * 1e9, "ns per key read"),
        ("overhead_seconds", cost.overhead_seconds * 1e3, "ms per iteration"),
        ("link_bytes_per_second", cost.link_bytes_per_second / 1e9, "GB/s between the tiers"),
    )
    yield f"costs, in {path}:"
    for name, value, unit in values:
        found = "" if name in fit.found else "   (assumed)"
        yield f"  {name:<28}{'inf' if math.isinf(value) else format(value, '.4g'):>10} {unit}{found}"
    for note in fit.assumed:
        yield f"  {note}"
