"""`pensieve profile`: measure the cost of a model's iterations and copies on this machine.

The executor is built as in `pensieve serve`, with tiers of the same size, and runs synthetic
iterations (profile_points.py, profile_driver.py). The results are

    the cost of iterations    fitted (sim/fit_points.py) to iterations of chosen shapes (profile_points.py);
                              its error is measured on random iterations that were held out of the fit
    the cost of chunks        time to recompute one chunk after contexts of 2^n tokens (core/cost.py)
    the link                  pages per second between the tiers, in each direction and in both together

When everything is measured, the results are written to one file (sim/cost_file.py). The file goes to the
folder of profiles that daemons use when they start (launch/profiles.py), or to --output.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from pensieve.bench.plots import Sheet
from pensieve.bench.profile_driver import (
    QUICK_ROUNDS,
    ROUNDS,
    CopyTimes,
    Driver,
    Measured,
    measure_points,
)
from pensieve.bench.profile_points import CHUNKS, DECODES, IterationLimits, ProfilePoint, points_of
from pensieve.bench.report import Report, machine, progress
from pensieve.config import Settings
from pensieve.errors import ModelError
from pensieve.launch import profiles
from pensieve.launch.model_folder import resolve_model
from pensieve.launch.sizing import turns_max
from pensieve.sim.cost import CostModel
from pensieve.sim.fit import FitError
from pensieve.sim.fit_points import chunk_profile, errors_of, fit_points

SECONDS, QUICK_SECONDS = 150.0, 20.0  # time for the iterations
TURNS_MAX = 64  # turns that generate in one iteration
# Sarathi-Serve's objectives for the time between tokens are STRICT and RELAXED times the time of an iteration
# with BASE_TURNS decoding turns, whose contexts have BASE_CONTEXT tokens.
BASE_TURNS, BASE_CONTEXT = 32, 4096
STRICT, RELAXED = 5, 25
COPY_REPEATS = 9
SPREAD_MAX = 0.5  # a larger spread of an iteration's times means other work on the machine
CORES_SHARE_MIN = 0.6  # a smaller part of the CPU time means that other processes took the rest


@dataclass(frozen=True)
class ProfileOptions:
    quick: bool = False
    output: Path | None = None  # None: the folder of profiles


class Profile(NamedTuple):
    cost: CostModel
    errors: tuple[FitError, ...]  # errors of held-out iterations
    points: list[Measured]
    copies: CopyTimes | None  # medians
    left_out: int  # points that would have taken too long

    @property
    def spread(self) -> float:
        """Return the median spread of the times of an iteration, relative to its time."""
        return statistics.median(each.spread for each in self.points)


def run(settings: Settings, options: ProfileOptions, report: Report) -> Profile:
    from pensieve.launch.executor import build_executor
    from pensieve.text import Tokenizer

    folder = resolve_model(settings.model, progress)
    with ExitStack() as undo:
        tokenizer = Tokenizer.load(folder)
        built = build_executor(settings, folder, tokenizer, frozenset(), progress, undo)
        model, memory = built.ranks.model, built.tiers.memory
        key = profiles.key_of(settings, folder, model)
        device = str(model.flat.module.device)
        report.about(
            key.name,
            machine(device),
            f"{key.measured_with['dtype']}, KV in {key.measured_with['kv_dtype']}, "
            f"{settings.weights} weights, {model.flat.form}",
        )
        limits = IterationLimits(
            turns=min(TURNS_MAX, turns_max(settings, built.tiers.pages.device)),
            tokens=settings.token_budget,
            context=model.shape.context_max,
            pages=built.tiers.pages.device,
            chunk_tokens=settings.chunk_tokens,
        )
        kv_bytes = settings.tensor_parallel * model.shape.kv_bytes_per_token
        points = points_of(limits, options.quick)
        driver = Driver(built.executor, limits, model.shape.vocab_size, points)
        day = time.strftime("%Y-%m-%d")
        unmeasured = unmeasured_cost(
            model.shape.num_layers, kv_bytes, f"{key.name}, {machine(device)}"
        )
        began = time.perf_counter(), time.process_time()
        with _progress_bar() as on_progress:
            profile = measure_profile(
                driver, points, limits, unmeasured, memory.host_pages, options.quick, on_progress
            )
        on_cpu = device == "cpu" and settings.tensor_parallel == 1
        cores_share = _cores_share(*began) if on_cpu else 1.0
    path = options.output or key.path
    figures = {"cores_share": cores_share, **figures_of(profile)}
    profiles.write(path, profiles.text_of(key, profile.cost, day, figures))
    if cores_share < CORES_SHARE_MIN or profile.spread > SPREAD_MAX:
        report.line(
            f"something else was running: this process got {cores_share:.0%} of its cores' time, and the "
            f"times of an iteration differed by {profile.spread:.0%}"
        )
    _print(profile, limits, path, options, report)
    report.finish({"path": str(path), "objectives": objectives(profile.cost, limits), **figures})
    return profile


def _cores_share(began: float, cpu_began: float) -> float:
    """Return the part of the time since `began` for which this process's compute threads had a CPU."""
    import torch

    seconds = torch.get_num_threads() * (time.perf_counter() - began)
    return min((time.process_time() - cpu_began) / seconds, 1.0)


def unmeasured_cost(layers: int, kv_bytes_per_token: int, source: str) -> CostModel:
    """Return a cost model without any measured costs."""
    return CostModel(
        0.0, 0.0, 0.0, 0.0, 0.0, layers, kv_bytes_per_token, float("inf"), f"a profile of {source}"
    )


def measure_profile(
    driver: Driver,
    points: Sequence[ProfilePoint],
    limits: IterationLimits,
    unmeasured: CostModel,
    host_pages: int,
    quick: bool = False,
    on_progress: Any = lambda share: None,
) -> Profile:
    """Measure the points and the copies, and fit the costs. `unmeasured` has the parts that are not measured.

    Raises ModelError if the tiers are too small.
    """
    seconds = QUICK_SECONDS if quick else SECONDS
    rounds = QUICK_ROUNDS if quick else ROUNDS
    found = measure_points(driver, points, seconds, rounds, on_progress, driver.clock)
    decode_point = next(point for point in points if point.kind == DECODES)
    copies = _medians(driver.copies(decode_point, host_pages, COPY_REPEATS))
    if copies is not None:
        size = copies.pages * limits.chunk_tokens * unmeasured.kv_bytes_per_token
        unmeasured = replace(unmeasured, link_bytes_per_second=size / copies.inward)
    rows = [each.point.observed(each.seconds) for each in found if not each.point.held_out]
    try:
        cost = fit_points(rows, unmeasured)
    except ValueError as error:
        raise ModelError(f"a larger --device-cache is needed: {error}") from error
    chunks = {each.point.spans[0][0]: each.seconds for each in found if each.point.kind == CHUNKS}
    if (recompute := chunk_profile(chunks, cost, limits.chunk_tokens)) is not None:
        cost = replace(cost, chunk_costs=(limits.chunk_tokens, recompute))
    unseen = [
        (each.point.kind, each.point.observed(each.seconds))
        for each in found
        if each.point.held_out
    ]
    return Profile(cost, errors_of(cost, unseen), found, copies, len(points) - len(found))


def objectives(cost: CostModel, limits: IterationLimits) -> dict[str, float]:
    """Return Sarathi's objectives for the time between tokens: multiples of a decode iteration's time."""
    context = min(BASE_CONTEXT, limits.context)
    base = cost.decode_seconds(BASE_TURNS, context)
    return {
        "turns": BASE_TURNS,
        "context": context,
        "iteration_seconds": base,
        "strict_seconds": STRICT * base,
        "relaxed_seconds": RELAXED * base,
    }


def figures_of(profile: Profile) -> dict[str, Any]:
    """Return the figures of the file that are stored for people. No program reads them."""
    copies = profile.copies
    return {
        "errors": [each._asdict() for each in profile.errors],
        "spread": profile.spread,
        "copies": copies._asdict() if copies is not None else None,
        "iterations": [
            {
                **asdict(each.point),
                "seconds": each.seconds,
                "predicted": profile.cost.iteration_seconds(each.point.spans),
                "times": each.times,
            }
            for each in profile.points
        ],
    }


def _medians(times: Sequence[CopyTimes]) -> CopyTimes | None:
    if not times:
        return None
    _, *columns = zip(*times, strict=True)
    return CopyTimes(times[0].pages, *(statistics.median(column) for column in columns))


@contextmanager
def _progress_bar() -> Iterator[Any]:
    """Show a progress bar for the measured time, on a terminal only."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("measuring iterations"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda share: bar.update(task, completed=share)


def _print(
    profile: Profile, limits: IterationLimits, path: Path, options: ProfileOptions, report: Report
) -> None:
    cost, copies = profile.cost, profile.copies
    fitted = sum(not each.point.held_out for each in profile.points)
    report.line(f"{fitted} iterations fitted, {len(profile.points) - fitted} held out")
    if profile.left_out:
        report.line(f"left out {profile.left_out} iterations that would take too long here")
    report.table(
        "error of the prediction, of held-out iterations",
        ("", "iterations", "median", "P90"),
        [
            (each.kind, str(each.held_out), f"{each.median:.1%}", f"{each.p90:.1%}")
            for each in profile.errors
            if each.median is not None and each.p90 is not None
        ],
    )
    if cost.chunk_costs is not None:
        recompute = cost.chunk_costs[1]
        points = recompute.attention_seconds
        contexts = [points[0][0], points[len(points) // 2][0], points[-1][0]]
        listed = ", ".join(
            f"{recompute.chunk_seconds(at) * 1e3:.1f} ms after a context of {at:,}"
            for at in contexts
        )
        report.line(f"to recompute a chunk of {limits.chunk_tokens} tokens: {listed} tokens")
    if copies is not None:
        size = copies.pages * limits.chunk_tokens * cost.kv_bytes_per_token / 1e9
        report.line(
            f"pages between the tiers: in {size / copies.inward:.1f} GB/s, out "
            f"{size / copies.outward:.1f}, both at once {2 * size / copies.both:.1f}; a chunk "
            f"{cost.copy_seconds(limits.chunk_tokens) * 1e3:.2f} ms"
        )
    aims = objectives(cost, limits)
    report.line(
        f"{BASE_TURNS} generating turns with contexts of {aims['context']:,} tokens take "
        f"{aims['iteration_seconds'] * 1e3:.0f} ms: objectives for the time between tokens (Sarathi) are "
        f"strict {aims['strict_seconds']:.2f} s, relaxed {aims['relaxed_seconds']:.2f} s"
    )
    used = "daemons of this model use it from now on"
    if options.output:
        used = "`pensieve simulate --cost FILE` uses it"
    report.line(f"written to {path}; {used}")


def plot(profile: Profile, path: Path, facts: Sequence[str]) -> None:
    """Draw the errors on held-out iterations, and the cost of recomputing chunks."""
    quartiles = "each time is the lower quartile of its repetitions"
    sheet = Sheet("What iterations cost on this machine", [*facts, quartiles], 4.0)
    unseen = [each for each in profile.points if each.point.held_out]
    panel = sheet.panel(
        "held-out iterations",
        "prediction error of at most, %",
        "share of iterations, %",
        most=100.0,
    )
    panel.horizontal_line("nine of ten", 90.0)
    for kind in dict.fromkeys(each.point.kind for each in unseen):
        errors = sorted(
            100 * abs(profile.cost.iteration_seconds(each.point.spans) / each.seconds - 1)
            for each in unseen
            if each.point.kind == kind
        )
        shares = [100 * (index + 1) / len(errors) for index in range(len(errors))]
        panel.line(kind, [0.0, *errors], [0.0, *shares], marked=False, step=True)
    if profile.cost.chunk_costs is not None:
        tokens, recompute = profile.cost.chunk_costs
        contexts = [context for context, _ in recompute.attention_seconds]
        costs = [1e3 * recompute.chunk_seconds(context) for context in contexts]
        panel = sheet.panel(
            f"to recompute {tokens} tokens", "context, tokens", "ms", swept=contexts
        )
        panel.line("in a full batch", contexts, costs)
        if profile.cost.link_bytes_per_second < float("inf"):
            panel.horizontal_line("to copy them", 1e3 * profile.cost.copy_seconds(tokens))
    sheet.save(path)
