"""What an iteration takes, predicted from the work in its slices.

A *key* is a position whose KV a slice reads, a *pair* a token and a position that it sees, a *decode* a slice
of one token, as a turn that generates has one.  So a piece of a prompt behind a long context costs more than
one at the beginning, and turns that generate cost more as they grow.

Known by rates (a data sheet, a journal), an iteration is bound by whichever is slower of reading and
computing, for the dense part and for attention apart:

    seconds = max(reading weights, a · tokens) + max(b · keys, c · pairs) + overhead

Known by points (`pensieve profile`), the dense part and what decodes add to it (their rows of logits,
sampling, their text) are measured at some counts, and are straight between them; and attention first reads
and then computes, which also tells apart the keys of decodes from the pairs of a prompt beside them:

    seconds = dense(tokens) + decoding(decodes) + b · keys + c · pairs

The rates are there as well then: what a further piece adds to a batch that is full is `a` for each token.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

Points = tuple[tuple[int, float], ...]  # (count, seconds), ascending


class Work(NamedTuple):
    """Of slices: tokens, pairs of a token and one that it sees, positions read, and slices of one token."""

    tokens: int
    pairs: int
    keys: int
    decodes: int = 0

    def and_piece(self, start: int, stop: int) -> Work:
        """With the slice [start, stop) beside it."""
        tokens, pairs, keys, decodes = work_of([(start, stop)])
        return Work(
            self.tokens + tokens, self.pairs + pairs, self.keys + keys, self.decodes + decodes
        )


def work_of(spans: Iterable[tuple[int, int]]) -> Work:
    """Of slices [start, stop)."""
    tokens = pairs = keys = decodes = 0
    for start, stop in spans:
        tokens += stop - start
        pairs += (stop - start) * (start + stop + 1) // 2
        keys += stop
        decodes += stop - start == 1
    return Work(tokens, pairs, keys, decodes)


@dataclass(frozen=True)
class IterationCost:
    """Seconds of an iteration, for one model on one machine."""

    dense_seconds_per_token: float
    dense_seconds_min: float  # reading the weights
    attention_seconds_per_pair: float  # of a token and one that it sees
    attention_seconds_per_key: float  # reading a context's KV once
    overhead_seconds: float
    dense_points: Points = field(default=(), kw_only=True)  # by tokens; () where rates are known
    decode_points: Points = field(default=(), kw_only=True)  # by decodes, from 0 on

    def __post_init__(self) -> None:
        for name in ("dense_points", "decode_points"):
            points = tuple((int(count), float(seconds)) for count, seconds in getattr(self, name))
            counts = [count for count, _ in points]
            if counts != sorted(set(counts)) or len(counts) == 1:
                raise ValueError(f"{name} are two or more, in ascending order")
            if any(not 0 <= seconds < float("inf") for _, seconds in points):
                raise ValueError(f"{name} have seconds of at least 0")
            object.__setattr__(self, name, points)
        if bool(self.dense_points) != bool(self.decode_points):
            raise ValueError("dense_points and decode_points are measured together")

    def pass_seconds(self, tokens: int, pairs: int, keys: int, decodes: int = 0) -> float:
        """Of one pass through the model; see `Work`."""
        if not tokens:
            return 0.0
        attention = self.attention_seconds(pairs, keys)
        if self.dense_points:
            dense = between(self.dense_points, tokens) + between(self.decode_points, decodes)
            return dense + attention + self.overhead_seconds
        dense = max(self.dense_seconds_min, self.dense_seconds_per_token * tokens)
        return dense + attention + self.overhead_seconds

    def attention_seconds(self, pairs: int, keys: int) -> float:
        reading = self.attention_seconds_per_key * keys
        computing = self.attention_seconds_per_pair * pairs
        return reading + computing if self.dense_points else max(reading, computing)

    def iteration_seconds(self, spans: Iterable[tuple[int, int]]) -> float:
        """Of slices [start, stop)."""
        return self.pass_seconds(*work_of(spans))

    def decode_seconds(self, turns: int, context: int) -> float:
        """Of an iteration in which so many turns generate, behind contexts of so many tokens."""
        return self.pass_seconds(turns, turns * context, turns * context, turns)

    def piece_seconds(self, start: int, stop: int) -> float:
        """What the piece [start, stop) of a prompt adds to an iteration that reads the weights anyway."""
        tokens, pairs, keys, _ = work_of([(start, stop)])
        return self.dense_seconds_per_token * tokens + self.attention_seconds(pairs, keys)

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


def between(points: Points, count: int) -> float:
    """On the straight line between two points; level before the first, and straight on behind the last."""
    right = bisect_right(points, (count, float("inf")))
    if not right:
        return points[0][1]
    right = min(right, len(points) - 1)
    (low, low_seconds), (high, high_seconds) = points[right - 1], points[right]
    return max(low_seconds + (high_seconds - low_seconds) * (count - low) / (high - low), 0.0)
