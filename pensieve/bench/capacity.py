"""`pensieve bench capacity`: the highest load that meets objectives, for three ways to schedule prompts.

A daemon is started for each way, and the same chats and long documents arrive at each (capacity_load.py):

    ours             prompts join an iteration as far as it is predicted to take no longer than the objective
    whole prompts    uncut, beside the turns that generate (Orca's way)
    prefill first    uncut, in a pass of their own before the turns that generate go on (vLLM's way once)

A load is *carried* if the P99 of the time between tokens, the median time to the first token and the median
time in the queue are within their objectives; capacity_search.py finds the highest rate of conversations,
by doubling and halving.  Each trial is of so many seconds, and
is cut off at their end: what waits then counts as waited for so far.  With a rate given, that load is played
to its end instead, in several rounds with other conversations.

Iterations that are filled up to an objective have their P99 beside it and not below, so in a search ours is
told AIM of it.

Without an objective there are two, those of the Sarathi-Serve paper: 5 and 25 times the time of an iteration
in which 32 turns generate behind contexts of 4,096 tokens, measured on the executor before a daemon is
started (bench/step.py).  What does not depend on the objective is played once for both.

Before a daemon is timed a conversation runs twice, the second time with its KV dropped between its turns:
both must get the same replies (bench/chat.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pensieve import gc_pause
from pensieve.bench.bench_daemon import BenchDaemon, serving
from pensieve.bench.capacity_load import Figures, OfferedLoad, Played, play
from pensieve.bench.capacity_report import (
    CapacityResult,
    CapacityRow,
    in_time,
    in_words,
    line_of,
    show_found,
    show_rows,
)
from pensieve.bench.capacity_search import RATE_MOST, Impossible, Slo, capacity
from pensieve.bench.chat import check
from pensieve.bench.measured_model import measured_model, model_in_words
from pensieve.bench.report import Report, machine, progress
from pensieve.errors import InvalidArgument

DEFAULT_MODEL = "0.37B"  # random weights of that shape
STRICT, RELAXED = 5.0, 25.0  # times the iteration below
BATCH, CONTEXT, REPEATS = 32, 4096, 7  # of that iteration
WARM_SHARE = 0.1  # of the time: what begins before does not count
RESOLUTION = 1.15  # of the rate, in a search
CONVERSATIONS_MIN = 4  # of a trial; a search gives up where fewer come
WHOLE_TOKENS = 16_384  # of an iteration, so that prompts are not cut
OURS_TOKENS = 2048  # the same, where the objective cuts them
AIM = 0.87  # of the objective, in a search: iterations are filled up to what they are aimed at
OURS, MIXED, FIRST = "ours", "whole prompts", "prefill first"
WAYS = {"ours": OURS, "whole": MIXED, "first": FIRST}  # by what a person types


@dataclass(frozen=True)
class CapacityOptions:
    model: str  # "" for random weights
    load: OfferedLoad
    tbt: float  # the objective for P99 between tokens; 0: two, measured
    ttft: float  # the objective for the median first token; 0: none
    rate: float  # conversations per second; 0: search for the highest
    seconds: float  # for so long conversations begin
    rounds: int  # of a load that is given
    seed: int
    ways: tuple[str, ...] = (OURS, MIXED, FIRST)

    def __post_init__(self) -> None:
        load = self.load
        if min(load.turns, load.input_tokens, load.document_tokens, self.rounds) < 1:
            raise InvalidArgument("turns, input-tokens, document-tokens, rounds", "are at least 1")
        if load.output_tokens < 2:
            raise InvalidArgument("output-tokens", "is at least 2: one token has no gap")
        if not 0 <= load.document_share <= 1:
            raise InvalidArgument("documents", "is a share, from 0 to 1")
        if min(self.tbt, self.ttft, self.rate, load.think_seconds) < 0:
            raise InvalidArgument("tbt, ttft, rate, think", "are not negative")
        if self.seconds <= 0:
            raise InvalidArgument("seconds", "is above 0")
        if self.rate and self.rate * self.seconds < CONVERSATIONS_MIN:
            raise InvalidArgument(
                "rate",
                f"of {self.rate:g} conversations a second makes fewer than {CONVERSATIONS_MIN} of them in "
                f"{self.seconds:g} s: --seconds is to be longer",
            )


class Scheduling(NamedTuple):
    """One way to schedule prompts, with the objective that it is told, if any."""

    name: str
    tbt: float = 0.0
    aim: float = 1.0  # what share of it the daemon is told

    @property
    def flags(self) -> list[str]:
        """Of its daemon."""
        budget = OURS_TOKENS if self.tbt else WHOLE_TOKENS
        return ["--tbt", f"{self.aim * self.tbt:g}", "--token-budget", str(budget)]

    @property
    def variables(self) -> dict[str, str]:
        """Of its daemon."""
        engine = "separate" if self.name == FIRST else "model"
        return {"PENSIEVE_ENGINE": engine, "PENSIEVE_PROMPT_SECONDS": "0"}

    def __str__(self) -> str:
        return f"{self.name}, {in_time(self.tbt)}" if self.tbt else self.name


def run(options: CapacityOptions, report: Report) -> list[CapacityRow]:
    load = options.load
    with measured_model(options.model, DEFAULT_MODEL) as folder:
        base = 0.0 if options.tbt else measured_base(folder)
        objectives = [options.tbt] if options.tbt else [STRICT * base, RELAXED * base]
        what = f"{options.rate:g} conversations/s" if options.rate else "the highest load"
        report.about(
            model_in_words(options.model, DEFAULT_MODEL),
            machine(),
            f"{what} for {options.seconds:g} s",
            str(load),
            f"seed {options.seed}",
        )
        if base:
            report.line(
                f"an iteration of {BATCH} turns that generate behind {CONTEXT:,} tokens takes "
                f"{in_time(base)}: strict {in_time(objectives[0])}, relaxed {in_time(objectives[1])} "
                "between tokens"
            )
        gc_pause.freeze()  # a pass over torch's objects would be a gap of every client
        rows: list[CapacityRow] = []
        found: list[CapacityResult] = []
        aim = 1.0 if options.rate else AIM
        for scheduling, limits in daemons(options.ways, objectives, aim):
            with trials(folder, scheduling, options) as trial:
                if options.rate:
                    for number in range(options.rounds):
                        played = trial(options.rate, options.seed + number, None)
                        rows += noted(scheduling, limits, options, number, played, report)
                else:
                    searched = search(scheduling, limits, options, trial)
                    rows += searched.rows
                    found += searched.found
                    for each in searched.found:
                        report.line(in_words(each))
    if options.rate:
        ours = [str(Scheduling(OURS, tbt)) for tbt in objectives]
        show_rows(rows, [(each, other) for each in ours for other in (FIRST, MIXED)], report)
    else:
        show_found(found, report)
    report.finish(
        {
            "load": asdict(load),
            "seconds": options.seconds,
            "seed": options.seed,
            "objectives": objectives,
            "first_token_objective": options.ttft or None,
            "decode_seconds": base or None,
            "rows": [row.values() for row in rows],
            "capacity": [asdict(each) for each in found],
        }
    )
    return rows


def measured_base(folder: Path) -> float:
    from pensieve.bench.step import decode_seconds

    progress(f"measuring an iteration of {BATCH} turns behind {CONTEXT:,} tokens")
    return decode_seconds(folder, BATCH, CONTEXT, REPEATS)


def daemons(
    ways: Sequence[str], objectives: Sequence[float], aim: float = 1.0
) -> Iterator[tuple[Scheduling, Sequence[float]]]:
    """Each daemon that is needed, and the objectives that it is held against."""
    for name in ways:
        if name == OURS:
            yield from ((Scheduling(OURS, tbt, aim), (tbt,)) for tbt in objectives)
        else:
            yield Scheduling(name), objectives


Trial = Callable[[float, int, float | None], Played]  # rate, seed, cut off after so many seconds


@contextlib.contextmanager
def trials(folder: Path, scheduling: Scheduling, options: CapacityOptions) -> Iterator[Trial]:
    """What plays a load to a daemon of its own, which has been checked."""
    progress(f"{scheduling}: starting a daemon")
    with serving([str(folder), *scheduling.flags], scheduling.variables) as daemon:
        asyncio.run(check(daemon.address, daemon.admin_address, options.seed))
        yield partial(_play, daemon, options)


def _play(
    daemon: BenchDaemon, options: CapacityOptions, rate: float, seed: int, seconds_max: float | None
) -> Played:
    scripts = options.load.scripts(rate, options.seconds, seed)
    if not scripts:
        raise InvalidArgument("seed", "draws no conversation in this time: --seconds, --rate")
    return asyncio.run(play(daemon.address, scripts, options.load.output_tokens, seconds_max))


def noted(
    scheduling: Scheduling,
    objectives: Sequence[float],
    options: CapacityOptions,
    number: int,
    played: Played,
    report: Report,
) -> list[CapacityRow]:
    """A row for each objective; only what attained it differs."""
    rows = []
    for objective in objectives:
        figures = Figures.of(played, WARM_SHARE * options.seconds, objective)
        seed = options.seed + number
        rows.append(CapacityRow(str(scheduling), objective, options.rate, seed, figures))
    report.line(f"{scheduling}, seed {options.seed + number}: {line_of(rows[0].figures)}")
    return rows


# -- the highest load --


class Searched(NamedTuple):
    rows: list[CapacityRow]
    found: list[CapacityResult]


def search(
    scheduling: Scheduling, objectives: Sequence[float], options: CapacityOptions, trial: Trial
) -> Searched:
    """The highest load within each objective; a load is played once."""
    played: dict[float, Played] = {}
    warm = WARM_SHARE * options.seconds
    rate_least = CONVERSATIONS_MIN / options.seconds

    def row_of(rate: float, slo: Slo) -> dict[str, Any]:
        if rate not in played:
            progress(f"{scheduling}: {rate:.3g} conversations/s for {options.seconds:g} s")
            played[rate] = trial(rate, options.seed, options.seconds)
        figures = Figures.of(played[rate], warm, slo.tbt_p99_seconds)
        row = {
            "tbt_p99": figures.gap_p99,
            "ttft_p50": figures.first_token_p50,
            "queue_p50": figures.queue_p50,
        }
        verdict = ", ".join(slo.violations(row)) or "carried"
        progress(f"  within {in_time(slo.tbt_p99_seconds)}: {verdict}; {line_of(figures)}")
        return row

    found = []
    for objective in objectives:
        slo = Slo(objective, options.ttft or math.inf)
        try:
            rate, _ = capacity(
                partial(row_of, slo=slo),
                slo,
                2 * rate_least,
                resolution=RESOLUTION,
                rate_least=rate_least * 1.01,
            )
        except Impossible as error:
            found.append(CapacityResult(str(scheduling), objective, 0.0, None, str(error)))
            continue
        figures = Figures.of(played[rate], warm, objective)
        found.append(CapacityResult(str(scheduling), objective, min(rate, RATE_MOST), figures))
    rows = [
        CapacityRow(
            str(scheduling), objective, rate, options.seed, Figures.of(each, warm, objective)
        )
        for objective in objectives
        for rate, each in sorted(played.items())
    ]
    return Searched(rows, found)
