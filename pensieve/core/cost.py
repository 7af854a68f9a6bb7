"""What recomputing a chunk costs in seconds, by the length of its context.

cost(l) = cost_attention(l) + c

Attention is known at context lengths that are powers of two and interpolated linearly between them
(extrapolated along the last segment); everything else in a layer does not depend on the context and
is the constant c.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class CostProfile:
    """Seconds to recompute one chunk behind a context of so many tokens."""

    attention_seconds: tuple[tuple[int, float], ...]  # (context tokens, seconds), ascending
    other_seconds: float
    measured: bool = False  # False: computed from the model's shape, not timed on this machine
    copy_seconds: float = 0.0  # of a chunk from one tier to the other; 0: not known

    def __post_init__(self) -> None:
        contexts = [context for context, _ in self.attention_seconds]
        if len(contexts) < 2 or contexts != sorted(set(contexts)):
            raise ValueError("a cost profile needs two or more ascending context lengths")
        if any(context & (context - 1) for context in contexts):
            raise ValueError("the context lengths of a cost profile are powers of two")
        attention = [seconds for _, seconds in self.attention_seconds]
        if self.other_seconds <= 0 or min(self.copy_seconds, *attention) < 0:
            raise ValueError("the times of a cost profile are positive")

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

    def of_chunks(self, scale: float) -> CostProfile:
        """The same machine's for chunks that are so many times as large."""
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
        """From the model's shape: two operations per parameter and token, and per layer four per
        query, key and head dimension.  Only ratios matter to retention, so the rate may be rough."""
        per_context = 4.0 * num_layers * num_heads * head_size * chunk_tokens
        return cls(
            tuple(
                (1 << power, per_context * (1 << power) / operations_per_second)
                for power in range(5, 18)
            ),
            max(2.0 * num_parameters * chunk_tokens, 1.0) / operations_per_second,
        )
