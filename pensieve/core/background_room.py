"""Limit the tokens of background turns in an iteration to the room that interactive turns leave.

*Background* turns belong to batch jobs: no client waits for them. All other turns are *interactive*. An
iteration is filled with interactive turns first. Then the number of background tokens is limited:

    the iteration has                  background tokens
    only decodes of interactive turns  as many as lengthen the iteration by at most SHARE
    an interactive prompt              none, because a first token waits for this iteration
    no interactive turn                as many as take SECONDS, because an interactive turn may arrive;
                                       any number, if there was no interactive turn for QUIET_SECONDS

**With generating turns**, the cost of one more token depends on the machine. If reading the weights takes
most of the time, a token costs almost nothing. On a CPU with two cores, it may cost a tenth of the iteration.
So the cost is measured:

    seconds of a token = (measured - r · predicted without background) / background tokens

r is the median of measured seconds / predicted seconds in the last iterations without background turns. Of
the last few measured costs, the second highest is used, so one late iteration changes nothing. From one
iteration to the next, the number of tokens at most doubles. After PROBE_AFTER iterations with background
turns, one iteration has none, to measure r. If there is no room at all, one token is tried every RETRY_AFTER
iterations.

**Without interactive turns**, the number of tokens is adapted so that an iteration takes SECONDS.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from pensieve.core.iteration_builder import TOKENS_MIN, IterationBuilder
from pensieve.core.time_budget import second_highest

SHARE = 0.05  # maximum fraction by which background tokens lengthen an iteration
SECONDS = 0.08
QUIET_SECONDS = 30.0
NUM_KEPT = 7  # measurements
PROBE_AFTER = 16
RETRY_AFTER = 256
GROWTH = 2


class BackgroundRoom:
    """Created when the first background turn is submitted."""

    def __init__(self, ratios: Sequence[float]) -> None:
        """`ratios`: measured / predicted seconds of the latest iterations with only interactive decodes."""
        self._ratios = ratios
        self._costs: deque[tuple[int, float]] = deque(
            maxlen=NUM_KEPT
        )  # (number of tokens, seconds per token)
        self._num_with = self._num_without = (
            0  # successive iterations with background turns, and without
        )
        self._pace = TOKENS_MIN  # token limit of an iteration without interactive turns

    def limit(self, builder: IterationBuilder, quiet_seconds: float) -> None:
        """Limit the background tokens that the builder takes from now on.

        `quiet_seconds`: the time since the last interactive turn ended.
        """
        builder.num_interactive = builder.num_tokens
        if (num_tokens := self._tokens(builder, quiet_seconds)) is not None:
            builder.limit(num_tokens)

    def planned(self, builder: IterationBuilder) -> None:
        """Count successive iterations with interactive turns: with background turns, and without."""
        if builder.num_tokens > builder.num_background:
            self._num_with = self._num_with + 1 if builder.num_background else 0
            self._num_without = 0 if builder.num_background else self._num_without + 1

    def committed(self, builder: IterationBuilder, seconds: float) -> None:
        """Learn from the seconds that the iteration took."""
        if builder.num_prompt_tokens:
            return
        num_tokens, predicted = builder.num_background, builder.predicted_without
        if num_tokens == builder.num_tokens:
            self._set_pace(num_tokens, seconds)
        elif num_tokens and self._ratios:
            extra_seconds = seconds - statistics.median(self._ratios) * predicted
            self._costs.append((num_tokens, max(extra_seconds, 0.0) / num_tokens))

    def _tokens(self, builder: IterationBuilder, quiet_seconds: float) -> int | None:
        if not builder.num_tokens:
            return None if quiet_seconds >= QUIET_SECONDS else self._pace
        if builder.num_tokens > builder.num_decodes or not self._ratios:
            return 0
        if self._num_with >= PROBE_AFTER:
            return 0
        if not self._costs:
            return 1
        predicted = builder.predicted_without * statistics.median(self._ratios)
        most = GROWTH * max(num_tokens for num_tokens, _ in self._costs)
        cost = second_highest([seconds for _, seconds in self._costs])
        room = min(int(SHARE * predicted / cost), most) if cost else most
        return room or int(self._num_without >= RETRY_AFTER)

    def _set_pace(self, num_tokens: int, seconds: float) -> None:
        if not num_tokens or seconds <= 0.0:
            return
        if (
            num_tokens >= self._pace or seconds > SECONDS
        ):  # a smaller iteration does not show whether the limit is right
            fitting = num_tokens * min(SECONDS / seconds, GROWTH)
            self._pace = max(int(fitting), TOKENS_MIN)
