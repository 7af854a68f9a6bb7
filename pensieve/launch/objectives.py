"""Check at the start whether the objective for the time between tokens (`--tbt`) is feasible.

The smallest useful iteration has one generating turn with a short context, and TOKENS_MIN tokens of a prompt.
If this iteration takes longer than the objective, the objective can never be met, and limiting prompts would
slow them down without benefit. The daemon then refuses to start and names the smallest feasible objective.

If costs were measured on this machine, the time of the iteration is predicted from them. Otherwise the
executor runs the iteration a few times before the first turn, because estimated costs may be wrong by a
factor of two or three. The pages are unused at that time, and are overwritten before anything reads them. The
fastest run counts, because other work on the machine can only slow a run down.

After a restart of the engine, there is no check. The objective was feasible before, and the machine may be
busy for a moment.
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

CONTEXT = 32  # tokens of the generating turn
NUM_RUNS = 4
ESTIMATED = "estimated"
MEASURED = "measured at the start"
DECODE_TURN, PROMPT_TURN = 1, 2  # attempt ids; both turns end before a client's first turn


class SmallestTbt(NamedTuple):
    """The smallest feasible objective for the time between tokens, and the source of this figure."""

    seconds: float
    source: str


class Pages(NamedTuple):
    """The pages of the device tier."""

    num_pages: int
    chunk_tokens: int


def smallest_tbt(
    cost: IterationCost, source: str, executor: Executor, pages: Pages, now: Callable[[], float]
) -> SmallestTbt | None:
    """Predict or measure the smallest feasible objective.

    Return None if the device tier is too small to measure. `source` is ESTIMATED, or describes for people
    where `cost` comes from. Nothing else may use the executor yet.
    """
    if source != ESTIMATED:
        return SmallestTbt(
            cost.iteration_seconds([(CONTEXT, CONTEXT + 1), (0, TOKENS_MIN)]), source
        )
    seconds = measure(executor, pages, now)
    return SmallestTbt(seconds, MEASURED) if seconds is not None else None


def measure(executor: Executor, pages: Pages, now: Callable[[], float]) -> float | None:
    """Run the smallest useful iteration. Return its seconds, or None if the device tier is too small."""

    def num_pages(num_tokens: int) -> int:
        return -(-num_tokens // pages.chunk_tokens)

    longest = CONTEXT + NUM_RUNS
    decode_pages = array("i", range(num_pages(longest)))
    prompt_pages = array("i", range(len(decode_pages), len(decode_pages) + num_pages(TOKENS_MIN)))
    if len(decode_pages) + len(prompt_pages) > pages.num_pages:
        return None
    log, sampling = array("I", [1] * (CONTEXT + 1)), Sampling(max_tokens=longest, ignore_eos=True)
    prompt = Slice(PROMPT_TURN, 0, TOKENS_MIN, log[:TOKENS_MIN], prompt_pages)

    def run(*slices: Slice, index: int = 0, **others: Any) -> float:
        began = now()
        executor.launch(Iteration(index, slices, **others))
        executor.collect()
        return now() - began

    started = (
        TurnStart(DECODE_TURN, log, sampling),
        TurnStart(PROMPT_TURN, log[:TOKENS_MIN], sampling),
    )
    context = Slice(DECODE_TURN, 0, CONTEXT, log[:CONTEXT], decode_pages[: num_pages(CONTEXT)])
    run(context, prompt, started=started)
    seconds = []
    for index in range(NUM_RUNS):
        start = CONTEXT + index
        table = decode_pages[: num_pages(start + 1)]
        decode = Slice(DECODE_TURN, start, start + 1, log[:1], table, needs_token=True)
        seconds.append(run(decode, prompt, index=1 + index))
    run(prompt, index=1 + NUM_RUNS, ended=(DECODE_TURN, PROMPT_TURN))
    return min(seconds)


def check(tbt_seconds: float, smallest: SmallestTbt) -> None:
    """Raise ConfigError if the objective is infeasible."""
    if not 0.0 < tbt_seconds < smallest.seconds:
        return
    raise ConfigError(
        f"--tbt {tbt_seconds:g} cannot be met: one turn beside {TOKENS_MIN} tokens of a prompt takes "
        f"{smallest.seconds:.3g} s here ({smallest.source}). The smallest feasible objective is "
        f"--tbt {_rounded_up(smallest.seconds):g}"
    )


def _rounded_up(seconds: float) -> float:
    """Round up to two significant digits, so that a later measurement does not exceed the result."""
    digit = 10.0 ** (math.floor(math.log10(seconds)) - 1)
    return round(math.ceil(seconds / digit + 0.5) * digit, 12)
