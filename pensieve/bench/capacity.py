"""`pensieve bench capacity`: find the highest load that meets latency objectives, for three schedulers.

Each scheduler runs in its own daemon and gets the same chats and long documents (capacity_load.py):

    ours             limit the prompt tokens of an iteration so that its predicted time meets the objective
    whole prompts    run uncut prompts together with the generating turns (like Orca)
    prefill first    run uncut prompts in a separate pass before the generating turns (like early vLLM)

A load *passes* if three figures meet their objectives: the P99 time between tokens, the median time to
the first token, and the median time in the queue. capacity_search.py finds the highest rate of conversations
by doubling and halving. Each trial ends after a fixed number of seconds. A request that is still waiting at
the end counts with the time that it has waited. With a given rate there is no search: the load is played to
its end, in several rounds with different conversations.

Our scheduler fills iterations up to the objective, so its P99 is close to the objective. In a search, our
daemon therefore gets only AIM_SHARE times the objective.

By default there are the two objectives of the Sarathi-Serve paper: 5 and 25 times the time of an iteration
with 32 generating turns and contexts of 4,096 tokens. That time is measured on the executor before a daemon
starts (bench/step.py). The schedulers that ignore the objective run once for both objectives.

Before a daemon is timed, a conversation must get the same replies after its KV was evicted (bench/chat.py).
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
    duration_text,
    line_of,
    result_text,
    show_found,
    show_rows,
)
from pensieve.bench.capacity_search import RATE_MOST, Impossible, Slo, capacity
from pensieve.bench.chat import check
from pensieve.bench.measured_model import measured_model, model_in_words
from pensieve.bench.report import Report, machine, progress
from pensieve.errors import InvalidArgument

DEFAULT_MODEL = "0.37B"  # random weights of this shape
STRICT, RELAXED = 5.0, 25.0  # multiples of the time of the iteration below
BATCH, CONTEXT, REPEATS = 32, 4096, 7  # turns, tokens of context, and repeats of that iteration
WARM_SHARE = 0.1  # first part of the duration; turns that begin in this part are not counted
RESOLUTION = 1.15  # ratio of rates at which a search ends
CONVERSATIONS_MIN = 4  # a search gives up at rates with fewer conversations in a trial
WHOLE_TOKENS = 16_384  # token budget that does not cut prompts
OURS_TOKENS = 2048  # token budget where the objective cuts prompts
AIM_SHARE = 0.87  # share of the objective in a search; see above
OURS, WHOLE_PROMPTS, PREFILL_FIRST = "ours", "whole prompts", "prefill first"
# Schedulers by their names on the command line.
SCHEDULERS = {"ours": OURS, "whole": WHOLE_PROMPTS, "first": PREFILL_FIRST}


@dataclass(frozen=True)
class CapacityOptions:
    model: str  # "" for random weights
    load: OfferedLoad
    tbt: float  # objective for the P99 time between tokens; 0: measure two objectives
    ttft: float  # objective for the median time to the first token; 0: none
    rate: float  # conversations per second; 0: search for the highest
    seconds: float  # time in which conversations begin
    rounds: int  # with a given rate
    seed: int
    schedulers: tuple[str, ...] = (OURS, WHOLE_PROMPTS, PREFILL_FIRST)

    def __post_init__(self) -> None:
        load = self.load
        if min(load.turns, load.input_tokens, load.document_tokens, self.rounds) < 1:
            raise InvalidArgument(
                "turns, input-tokens, document-tokens, rounds", "must be at least 1"
            )
        if load.output_tokens < 2:
            raise InvalidArgument("output-tokens", "must be at least 2: one token has no gap")
        if not 0 <= load.document_share <= 1:
            raise InvalidArgument("documents", "must be a share, from 0 to 1")
        if min(self.tbt, self.ttft, self.rate, load.think_seconds) < 0:
            raise InvalidArgument("tbt, ttft, rate, think", "must be at least 0")
        if self.seconds <= 0:
            raise InvalidArgument("seconds", "must be above 0")
        if self.rate and self.rate * self.seconds < CONVERSATIONS_MIN:
            raise InvalidArgument(
                "rate",
                f"{self.rate:g} conversations/s makes fewer than {CONVERSATIONS_MIN} conversations in "
                f"{self.seconds:g} s. Use a longer --seconds or a higher --rate",
            )


class Scheduling(NamedTuple):
    """One way to schedule prompts, and the objective that its daemon gets, if any."""

    name: str
    tbt: float = 0.0
    aim: float = 1.0  # share of the objective that the daemon gets

    @property
    def flags(self) -> list[str]:
        """Return the command-line flags of the daemon."""
        budget = OURS_TOKENS if self.tbt else WHOLE_TOKENS
        return ["--tbt", f"{self.aim * self.tbt:g}", "--token-budget", str(budget)]

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables of the daemon."""
        engine = "separate" if self.name == PREFILL_FIRST else "model"
        return {"PENSIEVE_ENGINE": engine, "PENSIEVE_PROMPT_SECONDS": "0"}

    def __str__(self) -> str:
        return f"{self.name}, {duration_text(self.tbt)}" if self.tbt else self.name


def run(options: CapacityOptions, report: Report) -> list[CapacityRow]:
    load = options.load
    with measured_model(options.model, DEFAULT_MODEL) as folder:
        decode_seconds = 0.0 if options.tbt else measured_decode_seconds(folder)
        objectives = (
            [options.tbt] if options.tbt else [STRICT * decode_seconds, RELAXED * decode_seconds]
        )
        target = f"{options.rate:g} conversations/s" if options.rate else "the highest load"
        report.about(
            model_in_words(options.model, DEFAULT_MODEL),
            machine(),
            f"{target} for {options.seconds:g} s",
            str(load),
            f"seed {options.seed}",
        )
        if decode_seconds:
            report.line(
                f"an iteration of {BATCH} generating turns with contexts of {CONTEXT:,} tokens takes "
                f"{duration_text(decode_seconds)}. Objectives between tokens: "
                f"strict {duration_text(objectives[0])}, relaxed {duration_text(objectives[1])}"
            )
        gc_pause.freeze()  # a collection over torch's objects would delay all clients
        rows: list[CapacityRow] = []
        found: list[CapacityResult] = []
        aim = 1.0 if options.rate else AIM_SHARE
        for scheduling, limits in daemons(options.schedulers, objectives, aim):
            with trials(folder, scheduling, options) as trial:
                if options.rate:
                    for number in range(options.rounds):
                        played = trial(options.rate, options.seed + number, None)
                        rows += rows_of_round(scheduling, limits, options, number, played, report)
                else:
                    searched = search(scheduling, limits, options, trial)
                    rows += searched.rows
                    found += searched.found
                    for each in searched.found:
                        report.line(result_text(each))
    if options.rate:
        ours = [str(Scheduling(OURS, tbt)) for tbt in objectives]
        show_rows(
            rows,
            [(each, other) for each in ours for other in (PREFILL_FIRST, WHOLE_PROMPTS)],
            report,
        )
    else:
        show_found(found, report)
    report.finish(
        {
            "load": asdict(load),
            "seconds": options.seconds,
            "seed": options.seed,
            "objectives": objectives,
            "first_token_objective": options.ttft or None,
            "decode_seconds": decode_seconds or None,
            "rows": [row.values() for row in rows],
            "capacity": [asdict(each) for each in found],
        }
    )
    return rows


def measured_decode_seconds(folder: Path) -> float:
    from pensieve.bench import step

    progress(f"measuring an iteration of {BATCH} turns with contexts of {CONTEXT:,} tokens")
    return step.decode_seconds(folder, BATCH, CONTEXT, REPEATS)


def daemons(
    schedulers: Sequence[str], objectives: Sequence[float], aim: float = 1.0
) -> Iterator[tuple[Scheduling, Sequence[float]]]:
    """Yield each daemon to start, and the objectives that its figures are compared with."""
    for name in schedulers:
        if name == OURS:
            yield from ((Scheduling(OURS, tbt, aim), (tbt,)) for tbt in objectives)
        else:
            yield Scheduling(name), objectives


# arguments: rate, seed, seconds until the load is cut off
Trial = Callable[[float, int, float | None], Played]


@contextlib.contextmanager
def trials(folder: Path, scheduling: Scheduling, options: CapacityOptions) -> Iterator[Trial]:
    """Start and check a daemon; yield a function that plays a load to it."""
    progress(f"{scheduling}: starting a daemon")
    with serving([str(folder), *scheduling.flags], scheduling.variables) as daemon:
        asyncio.run(check(daemon.address, daemon.admin_address, options.seed))
        yield partial(_play, daemon, options)


def _play(
    daemon: BenchDaemon, options: CapacityOptions, rate: float, seed: int, seconds_max: float | None
) -> Played:
    scripts = options.load.scripts(rate, options.seconds, seed)
    if not scripts:
        raise InvalidArgument("seed", "no conversation begins in this time. Use a longer --seconds")
    return asyncio.run(play(daemon.address, scripts, options.load.output_tokens, seconds_max))


def rows_of_round(
    scheduling: Scheduling,
    objectives: Sequence[float],
    options: CapacityOptions,
    number: int,
    played: Played,
    report: Report,
) -> list[CapacityRow]:
    """Report a round. Return a row for each objective; the rows differ only in the attained share."""
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
    """Find the highest load that passes with each objective; play each load only once."""
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
        verdict = ", ".join(slo.violations(row)) or "passed"
        progress(f"  within {duration_text(slo.tbt_p99_seconds)}: {verdict}; {line_of(figures)}")
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
