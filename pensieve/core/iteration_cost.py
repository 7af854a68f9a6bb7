"""What an iteration takes, predicted from the work in its slices.

An iteration is bound by whichever is slower of reading and computing, for the dense part and for attention
apart:

    seconds = max(reading weights, a · tokens) + max(b · keys, c · pairs) + overhead

A *key* is a position whose KV a slice reads, a *pair* a token and a position that it sees.  So a piece of a
prompt behind a long context costs more than one at the beginning, and turns that generate cost more as they
grow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Work(NamedTuple):
    """Of slices: their tokens, pairs of a token and a position that it sees, and positions that are read."""

    tokens: int
    pairs: int
    keys: int

    def and_piece(self, start: int, stop: int) -> Work:
        """With the slice [start, stop) beside it."""
        tokens, pairs, keys = work_of([(start, stop)])
        return Work(self.tokens + tokens, self.pairs + pairs, self.keys + keys)


def work_of(spans: Iterable[tuple[int, int]]) -> Work:
    """Of slices [start, stop)."""
    tokens = pairs = keys = 0
    for start, stop in spans:
        tokens += stop - start
        pairs += (stop - start) * (start + stop + 1) // 2
        keys += stop
    return Work(tokens, pairs, keys)


@dataclass(frozen=True)
class IterationCost:
    """Seconds of an iteration, for one model on one machine."""

    dense_seconds_per_token: float
    dense_seconds_min: float  # reading the weights
    attention_seconds_per_pair: float  # of a token and one that it sees
    attention_seconds_per_key: float  # reading a context's KV once
    overhead_seconds: float

    def pass_seconds(self, tokens: int, pairs: int, keys: int) -> float:
        """Of one pass through the model; see `Work`."""
        if not tokens:
            return 0.0
        dense = max(self.dense_seconds_min, self.dense_seconds_per_token * tokens)
        attention = max(
            self.attention_seconds_per_key * keys, self.attention_seconds_per_pair * pairs
        )
        return dense + attention + self.overhead_seconds

    def iteration_seconds(self, spans: Iterable[tuple[int, int]]) -> float:
        """Of slices [start, stop)."""
        return self.pass_seconds(*work_of(spans))

    def piece_seconds(self, start: int, stop: int) -> float:
        """What the piece [start, stop) of a prompt adds to an iteration that reads the weights anyway."""
        tokens, pairs, keys = work_of([(start, stop)])
        attention = max(
            self.attention_seconds_per_key * keys, self.attention_seconds_per_pair * pairs
        )
        return self.dense_seconds_per_token * tokens + attention

    def tokens_within(self, seconds: float, start: int, most: int, step: int) -> int:
        """How long a piece from `start` on may be to add no more.

        A multiple of `step`, or `most` where that fits.
        """

        def fits(num_tokens: int) -> bool:
            return self.piece_seconds(start, start + num_tokens) <= seconds

        if fits(most):
            return most
        low, high = 0, -(-most // step)  # in steps: `low` fit, or there are none; `high` do not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle * step) else (low, middle)
        return low * step
