"""Limit the prompt tokens of an iteration for which generating turns wait.

A generating turn waits for the whole iteration, so a long piece of one client's prompt is a gap in all other
replies. `TimeBudget` predicts the time of an iteration (cost.py). Prompts join as long as the prediction
stays within the smaller of

    tbt_seconds             the objective for the time between two tokens of a reply prompt_seconds_max
    added to the time without prompts; up to twice as much, in proportion, if more than
                            BACKLOG_SECONDS of prompts wait

Also, a turn is not admitted beside others if all of them would miss the objective once they generate, without
any prompt. So a batch is as large as the objective allows. A turn that alone would miss the objective is
admitted all the same.

0 means no limit. There is also no limit while no turn generates. TOKENS_MIN of the first prompt are always
allowed, so a prompt ends however slow the machine is. They cost little if reading the weights takes most of
the time.

**A closed loop.** The time of generating turns and the time added by prompts are predicted separately, and
measurements correct both:

    seconds = a · predicted without prompts + b · predicted of the prompts' pieces

b is the second highest of the last few measured ratios (a, before the first). So one late iteration changes
nothing, but two do. If a machine's times vary, pieces become shorter, because the P99 of the times matters
and not their median.

a is the ratio of the last iteration without prompts. So the prediction must know only how iterations differ,
not how fast the machine is at the moment. a is measured before any prompt joins. If there are always prompts,
every PROBE_AFTER-th iteration has none. Otherwise prediction errors for more turns or longer contexts would
be charged to the prompts, whose pieces would become shorter and shorter. If an iteration with prompts takes
clearly less time than predicted without them, a is measured again.

If reading the weights takes most of the time, a few tokens cost nothing, and a b learned from them would
allow pieces that are far too long. So no iteration has more than GROWTH times the most prompt seconds (as
predicted) that were measured recently, and not more than that most if the last one was slow. Pieces double
until they take time, or reach the limit.

`plan` and `commit` get the times as arguments, so a journal replays to the same pieces. With pipeline stages,
a turn's next token comes after as many iterations as there are stages. So each iteration may add its part of
prompt_seconds_max, and the iterations in flight determine the objective (pipeline_stages.py). The time of an
iteration in which a turn generates is from the last commit to its own, because a generating turn waits for
all of that.
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
GROWTH = 2.0  # of the predicted seconds of prompts, from one iteration to the next
BACKLOG_SECONDS = 2.0  # of prompts that wait or have begun, as predicted and corrected
BACKLOG_FACTOR = 2.0
STALE_SHARE = 0.75  # of the time without prompts; an iteration below it shows that `a` is outdated


class _Measured(NamedTuple):
    """The time that prompts added to an iteration."""

    ratio: float  # measured over predicted seconds
    predicted: float


class TimeBudget:
    def __init__(self, config: SchedulerConfig) -> None:
        self._stages = config.stages
        # For one iteration, if all take the same time.
        self._tbt = config.tbt_seconds / config.stages
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
        """Limit the time of prompts in an iteration that has all its decodes and nothing else.

        `started`: the prefills that have begun. `num_waiting`: tokens of other prompts that wait.
        """
        builder.num_decodes = len(builder.slices)
        without = builder.predicted() if builder.num_decodes else self._predict(1, 0, 0, 1)
        builder.predicted_without = without
        somebody_waits = builder.num_decodes > 0 or builder.others_generate
        if not self._limits or not somebody_waits or not without:
            return  # no turn waits for the iteration, or the model takes no time
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
        """Whether a turn may run beside the running ones.

        It may if a place is free and all of them could generate together within the objective. A turn that
        could not even do so alone is allowed.
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
        """Predict the seconds of an iteration at its launch; 0 if it computes nothing or `a` is unknown."""
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
        if builder.num_background or not without:  # background turns distort the measurement
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
                return  # it had no limit, so its size may be out of proportion
            self._added.append(_Measured(max(measured - base, 0.0) / added, added))

    def _longest(self, now: float) -> float:
        """Return the time that an iteration may take in each stage, to meet the objective."""
        if self._stage_times is None:
            return self._tbt
        return self._stage_times.longest(now, self._committed_at, self._tbt * self._stages)

    def _backlog_factor(self, num_tokens: int) -> float:
        """Let generating turns wait a little longer if many prompts wait for their first tokens."""
        slowness = self._slowness if self._added else self._without or 0.0
        seconds = slowness * self._seconds_per_token * num_tokens
        return min(max(seconds / BACKLOG_SECONDS, 1.0), BACKLOG_FACTOR)

    @property
    def _slowness(self) -> float:
        """b, once a ratio was measured."""
        return second_highest([each.ratio for each in self._added])

    def _predicted_within(self, seconds: float, a: float) -> float:
        """Return the predicted seconds of prompts that really take `seconds`."""
        if not self._added:
            return seconds / a
        b, most = self._slowness, max(each.predicted for each in self._added)
        if b * most < seconds:  # more than was measured: grow, unless the last one was slow
            latest = max(b, self._added[-1].ratio)
            return max(most, min(seconds / latest, GROWTH * most) if latest else GROWTH * most)
        return seconds / b if seconds else 0.0


def second_highest(values: Sequence[float]) -> float:
    """Return the second highest value, or the only one."""
    return sorted(values)[max(len(values) - 2, 0)]
