"""Predict seconds: to recompute a chunk (`CostProfile`), and to run an iteration (`IterationCost`).

**A chunk** after a context of l tokens costs  cost_attention(l) + c.  The cost of attention is known at
context lengths that are powers of two. Between them it is interpolated linearly. After the last one it is
extrapolated along the last segment. The constant c is the cost of everything else. It does not depend on l.

Policies sort chunks into value classes by this cost (`CostSteps`, `value_class_at`). From one value class to
the next, the cost rises by the factor `value_class_ratio`. The value class of a chunk is log(cost / cost of
the cheapest chunk) / log(value_class_ratio) steps above that of the cheapest chunk. If a value is a product,
such as cost times weight of the holders, the steps of the factors are added.

**An iteration** is predicted from the work in its slices. A *key* is a position whose KV a slice reads. A
*pair* is a token and a position that the token sees. A *decode* is a slice of one token; a generating turn
has one decode in an iteration. So a piece of a prompt costs more after a long context, and a decode costs
more as its conversation grows.

If rates are known (from a data sheet or a journal), the dense part takes as long as the slower of two steps:
reading the weights, and computing. Attention takes as long as the slower of reading keys and computing pairs:

    seconds = max(reading weights, a · tokens) + max(b · keys, c · pairs) + overhead

Two optional terms describe kernels more closely. Matrix kernels compute whole tiles, so `a · tokens` counts
tokens in multiples of `tile_tokens`. The first tiles wait for weights, so the shorter of the two dense steps
is not hidden completely: `unhidden_share` of its time is added.

If points are known (`pensieve profile`), the dense part was measured at several token counts. The additional
time of decodes (logits, sampling, text) was measured at several decode counts. Both are linear between the
points. Attention first reads and then computes, so the times of keys and pairs are added:

    seconds = dense(tokens) + decoding(decodes) + b · keys + c · pairs

The rates are also known in this case. `a` is the cost of a token that is added to a full batch.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

Points = tuple[tuple[int, float], ...]  # (count, seconds), ascending


# -- a chunk --


@dataclass(frozen=True)
class CostProfile:
    """Seconds to recompute one chunk, by the length of the context before it."""

    attention_seconds: tuple[tuple[int, float], ...]  # (context tokens, seconds), ascending
    other_seconds: float
    measured: bool = False  # timed on this machine; False: computed from the model's shape
    copy_seconds: float = 0.0  # time to copy a chunk from one tier to the other; 0: unknown

    def __post_init__(self) -> None:
        contexts = [context for context, _ in self.attention_seconds]
        if len(contexts) < 2 or contexts != sorted(set(contexts)):
            raise ValueError("a cost profile needs two or more ascending context lengths")
        if any(context & (context - 1) for context in contexts):
            raise ValueError("the context lengths of a cost profile must be powers of two")
        attention = [seconds for _, seconds in self.attention_seconds]
        if self.other_seconds <= 0 or min(self.copy_seconds, *attention) < 0:
            raise ValueError("the times of a cost profile must be positive")

    def chunk_seconds(self, context_tokens: int) -> float:
        points = self.attention_seconds
        right = bisect_right(points, (context_tokens, float("inf")))
        right = min(max(right, 1), len(points) - 1)
        (low, low_seconds), (high, high_seconds) = points[right - 1], points[right]
        slope = (high_seconds - low_seconds) / (high - low)
        return self.other_seconds + max(low_seconds + slope * (context_tokens - low), 0.0)

    @classmethod
    def measured_at(
        cls,
        attention_seconds: Mapping[int, float],
        other_seconds: float,
        copy_seconds: float = 0.0,
    ) -> CostProfile:
        points = tuple(sorted(attention_seconds.items()))
        return cls(points, other_seconds, measured=True, copy_seconds=copy_seconds)

    def scaled(self, scale: float) -> CostProfile:
        """Return the profile for chunks that are `scale` times as large."""
        return CostProfile(
            tuple((context, scale * seconds) for context, seconds in self.attention_seconds),
            scale * self.other_seconds,
            self.measured,
            scale * self.copy_seconds,
        )

    @classmethod
    def analytic(
        cls,
        num_parameters: int,
        num_layers: int,
        num_heads: int,
        head_size: int,
        chunk_tokens: int = 32,
        operations_per_second: float = 1e12,
    ) -> CostProfile:
        """Estimate the costs from the model's shape.

        A token takes two operations for each parameter. A pair of query and key takes four operations for
        each layer and head dimension. Retention only compares costs, so the rate may be rough.
        """
        per_context = 4.0 * num_layers * num_heads * head_size * chunk_tokens
        return cls(
            tuple(
                (1 << power, per_context * (1 << power) / operations_per_second)
                for power in range(5, 18)
            ),
            max(2.0 * num_parameters * chunk_tokens, 1.0) / operations_per_second,
        )


class CostSteps(dict[int, float]):
    """For each chunk index, log(cost / cost of the cheapest chunk) / log(value_class_ratio).

    A value is computed when it is first read. Later reads are only dict lookups, because every decision of
    the cache needs these values.
    """

    def __init__(self, cost: CostProfile, chunk_tokens: int, value_class_ratio: float) -> None:
        super().__init__()
        self._cost = cost
        self._chunk_tokens = chunk_tokens
        self._value_class_ratio = value_class_ratio
        self._least_seconds = cost.chunk_seconds(0)

    def __missing__(self, chunk_index: int) -> float:
        seconds = self._cost.chunk_seconds((chunk_index + 1) * self._chunk_tokens)
        steps = math.log(seconds / self._least_seconds, self._value_class_ratio)
        self[chunk_index] = steps
        return steps


def value_class_at(steps: float, num_value_classes: int) -> int:
    """Return the value class that is `steps` above class 0, rounded down and limited to existing classes."""
    return min(max(int(steps), 0), num_value_classes - 1)


# -- an iteration --


class Work(NamedTuple):
    """The work of slices: the counts of tokens, pairs, keys and decodes (see the module's docstring)."""

    tokens: int
    pairs: int
    keys: int
    decodes: int = 0

    def plus_slice(self, start: int, stop: int) -> Work:
        """Return this work plus the slice [start, stop)."""
        tokens, pairs, keys, decodes = work_of([(start, stop)])
        return Work(
            self.tokens + tokens, self.pairs + pairs, self.keys + keys, self.decodes + decodes
        )


def work_of(spans: Iterable[tuple[int, int]]) -> Work:
    """Return the work of slices [start, stop)."""
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
    dense_seconds_min: float  # time to read the weights
    attention_seconds_per_pair: float  # time to compute a pair
    attention_seconds_per_key: float  # time to read the KV of a key once
    overhead_seconds: float
    tile_tokens: int = field(default=1, kw_only=True)  # tokens of a tile of the matrix kernels
    unhidden_share: float = field(default=0.0, kw_only=True)  # see the module's docstring
    dense_points: Points = field(default=(), kw_only=True)  # by number of tokens; (): use the rates
    decode_points: Points = field(default=(), kw_only=True)  # by number of decodes, starting at 0

    def __post_init__(self) -> None:
        for name in ("dense_points", "decode_points"):
            points = tuple((int(count), float(seconds)) for count, seconds in getattr(self, name))
            counts = [count for count, _ in points]
            if counts != sorted(set(counts)) or len(counts) == 1:
                raise ValueError(f"{name} must be two or more points in ascending order")
            if any(not 0 <= seconds < float("inf") for _, seconds in points):
                raise ValueError(f"{name} must have seconds of at least 0")
            object.__setattr__(self, name, points)
        if bool(self.dense_points) != bool(self.decode_points):
            raise ValueError("dense_points and decode_points must be measured together")

    def pass_seconds(self, tokens: int, pairs: int, keys: int, decodes: int = 0) -> float:
        """Predict one pass through the model; see `Work`."""
        if not tokens:
            return 0.0
        attention = self.attention_seconds(pairs, keys)
        if self.dense_points:
            dense = between(self.dense_points, tokens) + between(self.decode_points, decodes)
            return dense + attention + self.overhead_seconds
        return self.dense_seconds(tokens) + attention + self.overhead_seconds

    def dense_seconds(self, tokens: int) -> float:
        """Predict the dense part of a pass from the rates."""
        if tokens > self.tile_tokens:  # smaller products have kernels with smaller tiles
            tokens = -(-tokens // self.tile_tokens) * self.tile_tokens
        reading, computing = self.dense_seconds_min, self.dense_seconds_per_token * tokens
        return max(reading, computing) + self.unhidden_share * min(reading, computing)

    def attention_seconds(self, pairs: int, keys: int) -> float:
        reading = self.attention_seconds_per_key * keys
        computing = self.attention_seconds_per_pair * pairs
        return reading + computing if self.dense_points else max(reading, computing)

    def iteration_seconds(self, spans: Iterable[tuple[int, int]]) -> float:
        """Predict an iteration of slices [start, stop)."""
        return self.pass_seconds(*work_of(spans))

    def decode_seconds(self, turns: int, context: int) -> float:
        """Predict an iteration in which `turns` turns generate, each with `context` tokens."""
        return self.pass_seconds(turns, turns * context, turns * context, turns)

    def piece_seconds(self, start: int, stop: int) -> float:
        """Predict the time that the piece [start, stop) of a prompt adds to an iteration."""
        tokens, pairs, keys, _ = work_of([(start, stop)])
        return self.dense_seconds_per_token * tokens + self.attention_seconds(pairs, keys)

    def tokens_within(self, seconds: float, start: int, most: int, step: int) -> int:
        """Return the length of a piece from `start` on that adds at most `seconds`.

        Returns `most` if this length fits, otherwise a multiple of `step`.
        """

        def fits(num_tokens: int) -> bool:
            return self.piece_seconds(start, start + num_tokens) <= seconds

        if fits(most):
            return most
        low, high = 0, -(-most // step)  # in steps: `low` fits (or is 0), `high` does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle * step) else (low, middle)
        return low * step


def between(points: Points, count: int) -> float:
    """Interpolate linearly: constant before the first point, extrapolated after the last."""
    right = bisect_right(points, (count, float("inf")))
    if not right:
        return points[0][1]
    right = min(right, len(points) - 1)
    (low, low_seconds), (high, high_seconds) = points[right - 1], points[right]
    return max(low_seconds + (high_seconds - low_seconds) * (count - low) / (high - low), 0.0)
