"""How many prompt tokens may join an iteration that generating turns wait for.

A generating turn waits for the whole iteration, so a long piece of somebody's prompt is a gap in everybody
else's reply.  `TimeBudget` predicts what an iteration takes (cost.py).  Prompts join as long as the
prediction stays within the lesser of

    tbt_seconds             the objective: the time between two tokens of a reply
    prompt_seconds_max      what prompts may add to what the iteration takes without them: up to twice that
                            if more than BACKLOG_SECONDS of prompts wait, in proportion

A turn is also not admitted beside others if all of them together would miss the objective once they generate,
without any prompt.  So a batch is as large as the objective allows.  A turn that would miss it alone limits
no batch.

0 is no limit.  There is also none while no turn generates, because nobody waits.  A prompt ends however slow
the machine is: TOKENS_MIN of the first prompt are always allowed.  They cost little if reading the weights
takes most of the time.

**A closed loop.**  The time of generating turns and what prompts add to it are predicted apart, and each is
corrected by measurement:

    seconds = a · predicted without prompts + b · predicted of the prompts' pieces

b is the second highest of the last few ratios.  Before the first ratio, b is a.  One late iteration changes
nothing, and two are believed.  A machine whose times vary has shorter pieces, because the P99 of the times
counts and not their median.  (Iterations full of a document, beside other work on two cores, took 1.28 times
the prediction at their P99 with the second highest of seven, and 1.47 times with the median; 0.95 and 1.01
times in the middle.)

a is the ratio of the last iteration without prompts.  So the prediction need only know how iterations differ,
and not how fast the machine is, which other work on it changes.  a is measured before any prompt joins.  If
prompts never end, one iteration goes without them after PROBE_AFTER with some.  Otherwise the error of a
prediction for more turns or longer contexts would be charged to the prompts, whose pieces would become
shorter and shorter.  If an iteration with prompts takes clearly less than it should without, a is measured
anew.

Few tokens cost nothing if reading the weights takes most of the time, and a b learned from them would let in
pieces that are far too long.  So no iteration takes more than GROWTH times as much of prompts as the most
that was measured lately, and no more than that if the last one took its time.  Pieces double until they take
time, or reach what is allowed.

`plan` and `commit` are given the times, so the budget is as repeatable as the rest: a journal replays to the
same pieces.  With pipeline stages a turn's next token comes with the last of as many iterations as there are
stages.  So each of them is allowed its part of what prompts may add, and the objective is kept by what the
iterations in flight make of it (pipeline_stages.py).  An iteration in which a turn generates took from the
last commit to its own, because a generating turn waits for that long: all that is done between two
iterations counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from pensieve.core.iteration_builder import TOKENS_MIN, IterationBuilder
from pensieve.core.pipeline_stages import StageTimes
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.core.turn import Turn

NUM_KEPT = 7  # measurements of what prompts add
TYPICAL = 256  # tokens of a piece
PROBE_AFTER = 16  # iterations with prompts, until there is one without
GROWTH = 2.0  # of what is predicted of prompts, from one iteration to the next
BACKLOG_SECONDS = 2.0  # of prompts that wait or have begun, as predicted and corrected
BACKLOG_FACTOR = 2.0
STALE_SHARE = 0.75  # of what an iteration should take without prompts


class _Measured(NamedTuple):
    """What prompts added to an iteration."""

    ratio: float  # of what was predicted
    predicted: float


class TimeBudget:
    def __init__(self, config: SchedulerConfig) -> None:
        self._stages = config.stages
        self._tbt = config.tbt_seconds / config.stages  # of one iteration, where all are alike
        self._stage_times = StageTimes(config.stages) if config.stages > 1 else None
        self._added_max = config.prompt_seconds_max / config.stages
        self._turns_max = min(config.turns_max, config.batch_tokens_max)
        self._limits = self._tbt > 0.0 or self._added_max > 0.0
        self._predict = config.cost.pass_seconds
        self._seconds_per_token = config.cost.piece_seconds(0, TYPICAL) / TYPICAL  # of prompts
        self._without: float | None = None  # measured over predicted seconds; None: to be measured
        self._added: deque[_Measured] = deque(maxlen=NUM_KEPT)
        self._num_with = 0  # iterations with prompts since the last one without
        self._committed_at = float("-inf")

    def limit(
        self, builder: IterationBuilder, started: Iterable[Turn], num_waiting: int, now: float
    ) -> None:
        """Let prompts join for so long; the builder has all its decodes and nothing else.

        Beside the prefills that have started, so many tokens of prompts wait.
        """
        builder.num_decodes = len(builder.slices)
        without = builder.predicted() if builder.num_decodes else self._predict(1, 0, 0, 1)
        builder.predicted_without = without
        somebody_waits = builder.num_decodes > 0 or builder.others_generate
        if not self._limits or not somebody_waits or not without:
            return  # nobody waits, or nothing takes time
        a = self._without
        if a is None or self._num_with >= PROBE_AFTER:
            builder.limit(0)
        elif a > 0.0:
            num_tokens = num_waiting + sum(turn.num_missing for turn in started)
            allowed = self._added_max * self._backlog_factor(num_tokens) or float("inf")
            if self._tbt:
                allowed = min(allowed, self._longest(now) - a * without)
            builder.seconds_max = self._predicted_within(max(allowed, 0.0), a)

    def has_room_for(self, turn: Turn, running: Collection[Turn]) -> bool:
        """Whether it may run beside these.

        As many run as may, and as could generate together within the objective, if this one alone could.
        """
        if len(running) >= self._turns_max:
            return False
        if not self._tbt or not running:
            return True
        alone = len(turn.tokens)
        num_positions = alone + sum(len(each.tokens) for each in running)
        most = self._tbt / (self._without or 1.0)
        num_turns = -(-(len(running) + 1) // self._stages)  # of one iteration
        num_positions //= self._stages
        together = self._predict(num_turns, num_positions, num_positions, num_turns)
        return together <= most or most < self._predict(1, alone, alone, 1)

    def planned(self, builder: IterationBuilder, now: float) -> float:
        """What the iteration is predicted to take; 0 where it computes nothing, or nothing is known yet."""
        num_prompt_tokens = builder.num_prompt_tokens
        self._num_with = self._num_with + 1 if num_prompt_tokens else 0
        a = self._without or 0.0
        seconds = a * builder.predicted()
        if num_prompt_tokens and self._added:
            with_prompts = a * builder.predicted_without + self._slowness * builder.seconds_added
            seconds = max(seconds, with_prompts)
        if self._stage_times is not None:
            self._stage_times.planned(now, seconds)
        return seconds

    def committed(self, builder: IterationBuilder, now: float) -> None:
        since, without, added = self._committed_at, builder.predicted_without, builder.seconds_added
        if not builder.num_decodes or since == float("-inf"):
            since = max(builder.planned_at, since)
        measured, self._committed_at = now - since, now
        if self._stage_times is not None:
            measured = self._stage_times.committed(now)
        if builder.num_background or not without:  # background turns took time, or nothing does
            return
        if not builder.num_prompt_tokens:
            if builder.num_decodes:
                self._without = measured / without
            return
        base = without * (self._without or 0.0)
        if builder.num_decodes and measured < STALE_SHARE * base:
            self._without = None
        elif builder.num_prompt_tokens >= TOKENS_MIN and added:
            if not builder.num_decodes and self._added:
                return  # nobody waited for it, and it may be of another size altogether
            self._added.append(_Measured(max(measured - base, 0.0) / added, added))

    def _longest(self, now: float) -> float:
        """What an iteration may take, in each stage, if the objective is to be met."""
        if self._stage_times is None:
            return self._tbt
        return self._stage_times.longest(now, self._committed_at, self._tbt * self._stages)

    def _backlog_factor(self, num_tokens: int) -> float:
        """Who generates waits a little longer where others wait much longer for their first tokens."""
        slowness = self._slowness if self._added else self._without or 0.0
        seconds = slowness * self._seconds_per_token * num_tokens
        return min(max(seconds / BACKLOG_SECONDS, 1.0), BACKLOG_FACTOR)

    @property
    def _slowness(self) -> float:
        """b, where anything was measured."""
        return second_highest([each.ratio for each in self._added])

    def _predicted_within(self, seconds: float, a: float) -> float:
        """How much may be predicted of prompts that are to take so long."""
        if not self._added:
            return seconds / a
        b, most = self._slowness, max(each.predicted for each in self._added)
        if b * most < seconds:  # it may be more than was measured: as far as the last one says
            latest = max(b, self._added[-1].ratio)
            return max(most, min(seconds / latest, GROWTH * most) if latest else GROWTH * most)
        return seconds / b if seconds else 0.0


def second_highest(values: Sequence[float]) -> float:
    """Of one value, that."""
    return sorted(values)[max(len(values) - 2, 0)]
