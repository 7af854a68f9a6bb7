"""Whether the objective for the time between tokens (`--tbt`) can be met at all, found out at the start.

The smallest iteration of use has one turn that generates behind a short context and TOKENS_MIN tokens of
somebody's prompt: less of a prompt is never computed.  An objective below what that takes would not be met
however little there is to do, and prompts would crawl for nothing; so the daemon does not start with it, and
names the smallest one that it would start with.

What it takes is predicted where costs were measured on this machine.  An estimate from the model's shape
and a data sheet may be wrong by a factor of two or three, so where there is nothing better such an iteration
is run a few times before the first turn comes, on the executor itself: the pages are empty then, and
whoever gets one later overwrites it before anything reads it.  The quickest run counts, as other work on the
machine only ever adds to it.

An engine that is started again, because one has died, is not refused: the machine may be busy for a moment,
and the objective was feasible when the daemon started.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

from pensieve.core.cost import IterationCost
from pensieve.core.iteration import Iteration, Slice, TurnStart
from pensieve.core.iteration_builder import TOKENS_MIN
from pensieve.engine.ports import Executor
from pensieve.errors import ConfigError
from pensieve.sampling import Sampling

CONTEXT = 32  # tokens of the turn that generates
NUM_RUNS = 4
ESTIMATED = "estimated"
MEASURED = "measured at the start"
WRITER, READER = 1, 2  # turns that are gone before the first one of a client comes


class Smallest(NamedTuple):
    """The smallest objective that can be met, and where that is known from."""

    seconds: float
    source: str


class Pages(NamedTuple):
    """Of the device tier."""

    num_pages: int
    chunk_tokens: int


def smallest_tbt(
    cost: IterationCost, source: str, executor: Executor, pages: Pages, now: Callable[[], float]
) -> Smallest | None:
    """`source`: of the cost, ESTIMATED or a word for people; None where it cannot be known.

    Nothing else uses the executor yet.
    """
    if source != ESTIMATED:
        return Smallest(cost.iteration_seconds([(CONTEXT, CONTEXT + 1), (0, TOKENS_MIN)]), source)
    seconds = measured(executor, pages, now)
    return Smallest(seconds, MEASURED) if seconds is not None else None


def measured(executor: Executor, pages: Pages, now: Callable[[], float]) -> float | None:
    """Seconds of the smallest iteration of use; None where the device tier is too small for it."""

    def num_of(num_tokens: int) -> int:
        return -(-num_tokens // pages.chunk_tokens)

    longest = CONTEXT + NUM_RUNS
    written = array("i", range(num_of(longest)))
    read = array("i", range(len(written), len(written) + num_of(TOKENS_MIN)))
    if len(written) + len(read) > pages.num_pages:
        return None
    log, sampling = array("I", [1] * (CONTEXT + 1)), Sampling(max_tokens=longest, ignore_eos=True)
    prompt = Slice(READER, 0, TOKENS_MIN, log[:TOKENS_MIN], read)

    def run(*slices: Slice, index: int = 0, **rest: Any) -> float:
        began = now()
        executor.launch(Iteration(index, slices, **rest))
        executor.collect()
        return now() - began

    started = (TurnStart(WRITER, log, sampling), TurnStart(READER, log[:TOKENS_MIN], sampling))
    context = Slice(WRITER, 0, CONTEXT, log[:CONTEXT], written[: num_of(CONTEXT)])
    run(context, prompt, started=started)
    seconds = []
    for index in range(NUM_RUNS):
        start = CONTEXT + index
        table = written[: num_of(start + 1)]
        decode = Slice(WRITER, start, start + 1, log[:1], table, needs_token=True)
        seconds.append(run(decode, prompt, index=1 + index))
    run(prompt, index=1 + NUM_RUNS, ended=(WRITER, READER))
    return min(seconds)


def check(tbt_seconds: float, smallest: Smallest) -> None:
    """ConfigError where the objective is infeasible."""
    if not 0.0 < tbt_seconds < smallest.seconds:
        return
    raise ConfigError(
        f"--tbt {tbt_seconds:g} cannot be met: one turn beside {TOKENS_MIN} tokens of a prompt takes "
        f"{smallest.seconds:.3g} s here ({smallest.source}); the smallest feasible objective is "
        f"--tbt {_rounded_up(smallest.seconds):g}"
    )


def _rounded_up(seconds: float) -> float:
    """To two digits, so that it is still feasible when it is measured again."""
    digit = 10.0 ** (math.floor(math.log10(seconds)) - 1)
    return round(math.ceil(seconds / digit + 0.5) * digit, 12)
