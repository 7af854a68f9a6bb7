"""Limit the prompt tokens of an iteration, because generating turns wait for the whole iteration.

A long piece of one client's prompt delays all other replies. `TimeBudget` predicts the time of an iteration
(cost.py). Prompts join as long as the prediction is within both limits:

    tbt_seconds           the longest time of an iteration: the objective for the time between two tokens of
                          a reply
    prompt_seconds_max    the longest time that prompts may add to an iteration. While more than
                          BACKLOG_SECONDS of prompts wait, the limit grows in proportion to the waiting
                          prompts, at most to twice its value.

A limit of 0 means no limit. There is also no limit while no turn generates. TOKENS_MIN tokens of the first
prompt are always allowed, so every prompt is computed even on a slow machine. These tokens cost little if
reading the weights takes most of the time.

Also, a turn is admitted only if all running turns will still meet the objective when they generate without
any prompt. So a batch is as large as the objective allows. A turn that would miss the objective even alone is
admitted anyway.

**A closed loop.** The time of generating turns and the time added by prompts are predicted separately, and
measurements correct both:

    seconds =   decode factor · (predicted seconds without prompts)
              + prompt factor · (predicted seconds of the prompts' pieces)

**The decode factor** is measured seconds / predicted seconds of the last iteration without prompts. So the
prediction needs to know only how iterations differ, not how fast the machine is at the moment. The factor is
measured before any prompt joins. If there are always prompts, one iteration in PROBE_AFTER has none. Such
iterations are needed because decodes can also be slower than predicted. If the decode factor were never
measured again, their excess would be charged to the prompts, and pieces would become shorter and shorter. If
an iteration with prompts takes clearly less time than predicted without them, the decode factor is measured
again.

**The prompt factor** is the ratio of measured to predicted seconds that prompts added: the second highest
ratio of the last few iterations. So one late iteration changes nothing, but two do. Before the first
measurement, the prompt factor equals the decode factor. If the times of a machine vary, pieces become
shorter. This is intended, because the objective is about the P99 and not the median.

**Growth.** If reading the weights takes most of the time, a few prompt tokens cost nothing. A prompt factor
that was learned from them would allow far too long pieces. So the predicted seconds of an iteration's prompts
are at most GROWTH times the largest predicted seconds among the last few measured iterations, and less if the
last iteration was slow. Pieces therefore at most double between measured iterations. The doubling stops when
their time becomes measurable, or at tbt_seconds or prompt_seconds_max.

`plan` and `commit` get the times as arguments, so a replayed journal has the same pieces. With S pipeline
stages, a turn's next token comes after S iterations. So each iteration may add an S-th of prompt_seconds_max.
How long an iteration may take without missing the objective depends on the iterations in flight
(pipeline_stages.py).
If an iteration has decodes, its time counts from the previous commit to its own commit, because generating
turns wait for all of this time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from pensieve.core.iteration_builder import TOKENS_MIN, IterationBuilder
from pensieve.core.pipeline_stages import StageTimes
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.core.turn import Turn

NUM_KEPT = 7  # how many measurements of the time that prompts add are kept
TYPICAL = 256  # tokens in a typical piece
PROBE_AFTER = 16  # successive iterations with prompts, before an iteration without prompts
GROWTH = 2.0  # how much the predicted seconds of prompts may grow beyond recent iterations
# If waiting and begun prompts are predicted to take longer, iterations may have longer pieces.
BACKLOG_SECONDS = 2.0
BACKLOG_FACTOR = 2.0
# If an iteration takes less than this share of the predicted time without prompts, the decode factor is
# outdated.
STALE_SHARE = 0.75


class _Measured(NamedTuple):
    """The time that prompts added to an iteration."""

    ratio: float  # measured over predicted seconds
    predicted: float


class TimeBudget:
    def __init__(self, config: SchedulerConfig) -> None:
        self._stages = config.stages
        # The part of the objective for one iteration, if all iterations take the same time.
        self._tbt = config.tbt_seconds / config.stages
        self._stage_times = StageTimes(config.stages) if config.stages > 1 else None
        self._added_max = config.prompt_seconds_max / config.stages
        self._turns_max = min(config.turns_max, config.batch_tokens_max)
        self._has_limit = self._tbt > 0.0 or self._added_max > 0.0
        self._predict = config.cost.pass_seconds
        self._seconds_per_token = config.cost.piece_seconds(0, TYPICAL) / TYPICAL  # of prompts
        self._decode_factor: float | None = None  # None: to be measured
        self._added: deque[_Measured] = deque(maxlen=NUM_KEPT)
        # Iterations with prompts since the last iteration without prompts.
        self._num_iterations_with_prompts = 0
        self._committed_at = float("-inf")

    def limit(
        self, builder: IterationBuilder, started: Iterable[Turn], num_waiting: int, now: float
    ) -> None:
        """Limit the time of prompts in an iteration that has all its decodes and nothing else.

        `started`: the prefills that have begun. `num_waiting`: tokens of other prompts that wait.
        """
        builder.num_decodes = len(builder.slices)
        predicted = builder.predicted() if builder.num_decodes else self._predict(1, 0, 0, 1)
        builder.predicted_without = predicted
        turns_wait = builder.num_decodes > 0 or builder.others_generate
        if not self._has_limit or not turns_wait or not predicted:
            return  # no turn waits for the iteration, or the model takes no time
        decode_factor = self._decode_factor
        if decode_factor is None or self._num_iterations_with_prompts >= PROBE_AFTER:
            builder.limit(0)
        elif decode_factor > 0.0:
            num_tokens = num_waiting + sum(turn.num_missing for turn in started)
            allowed = self._added_max * self._backlog_factor(num_tokens) or float("inf")
            if self._tbt:
                allowed = min(allowed, self._longest(now) - decode_factor * predicted)
            builder.seconds_max = self._predicted_within(max(allowed, 0.0), decode_factor)

    def has_room_for(self, turn: Turn, running: Collection[Turn]) -> bool:
        """Whether a turn may run beside the running turns.

        It may if fewer than `turns_max` turns run and all of them could generate together within the
        objective. A turn that would miss the objective even alone is also allowed.
        """
        if len(running) >= self._turns_max:
            return False
        if not self._tbt or not running:
            return True
        num_own = len(turn.tokens)
        num_positions = num_own + sum(len(each.tokens) for each in running)
        most = self._tbt / (self._decode_factor or 1.0)
        num_turns = -(-(len(running) + 1) // self._stages)  # of one iteration
        num_positions //= self._stages
        seconds = self._predict(num_turns, num_positions, num_positions, num_turns)
        return seconds <= most or most < self._predict(1, num_own, num_own, 1)

    def planned(self, builder: IterationBuilder, now: float) -> float:
        """Predict the seconds of an iteration at its launch; 0 if it is empty or the time is unknown."""
        num_prompt_tokens = builder.num_prompt_tokens
        self._num_iterations_with_prompts = (
            self._num_iterations_with_prompts + 1 if num_prompt_tokens else 0
        )
        decode_factor = self._decode_factor or 0.0
        seconds = decode_factor * builder.predicted()
        if num_prompt_tokens and self._added:
            with_prompts = (
                decode_factor * builder.predicted_without
                + self._prompt_factor * builder.seconds_added
            )
            seconds = max(seconds, with_prompts)
        if self._stage_times is not None:
            self._stage_times.planned(now, seconds)
        return seconds

    def committed(self, builder: IterationBuilder, now: float) -> None:
        """Learn from the time that the iteration took."""
        since, added = self._committed_at, builder.seconds_added
        predicted = builder.predicted_without  # without prompts
        if not builder.num_decodes or since == float("-inf"):
            since = max(builder.planned_at, since)
        measured, self._committed_at = now - since, now
        if self._stage_times is not None:
            measured = self._stage_times.committed(now)
        if builder.num_background or not predicted:  # background turns distort the measurement
            return
        if not builder.num_prompt_tokens:
            if builder.num_decodes:
                self._decode_factor = measured / predicted
            return
        base = predicted * (self._decode_factor or 0.0)
        if builder.num_decodes and measured < STALE_SHARE * base:
            self._decode_factor = None
        elif builder.num_prompt_tokens >= TOKENS_MIN and added:
            if not builder.num_decodes and self._added:
                return  # the iteration had no limit, so its prompts may be unusually large
            self._added.append(_Measured(max(measured - base, 0.0) / added, added))

    def _longest(self, now: float) -> float:
        """Return how long an iteration may take in each stage without missing the objective."""
        if self._stage_times is None:
            return self._tbt
        return self._stage_times.longest(now, self._committed_at, self._tbt * self._stages)

    def _backlog_factor(self, num_tokens: int) -> float:
        """Let generating turns wait a little longer if many prompts wait for their first tokens."""
        factor = self._prompt_factor if self._added else self._decode_factor or 0.0
        seconds = factor * self._seconds_per_token * num_tokens
        return min(max(seconds / BACKLOG_SECONDS, 1.0), BACKLOG_FACTOR)

    @property
    def _prompt_factor(self) -> float:
        """Only valid if a ratio was measured."""
        return second_highest([each.ratio for each in self._added])

    def _predicted_within(self, seconds: float, decode_factor: float) -> float:
        """Return the limit for the prompts' predicted seconds, so that they really take `seconds`."""
        if not self._added:
            return seconds / decode_factor
        factor, most = self._prompt_factor, max(each.predicted for each in self._added)
        if factor * most < seconds:  # more than was measured: grow, unless the latest was slow
            latest = max(factor, self._added[-1].ratio)
            return max(most, min(seconds / latest, GROWTH * most) if latest else GROWTH * most)
        return seconds / factor if seconds else 0.0


def second_highest(values: Sequence[float]) -> float:
    """Return the second highest value, or the only value."""
    return sorted(values)[max(len(values) - 2, 0)]
