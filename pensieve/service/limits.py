"""What a tenant may take of the daemon: turns at once, and tokens per second.

Tokens are paid for when a turn has ended: those it brought and those of its reply (what was found in the
cache costs nothing).  A tenant may save up BURST_SECONDS of its rate; one that is in debt is refused
until it is out of it, and the refusal says when that will be.
"""

from __future__ import annotations

from dataclasses import dataclass

from pensieve.errors import QueueFull

BURST_SECONDS = 10.0


@dataclass(frozen=True)
class Limits:
    turns_max: int | None = None
    tokens_per_second: float | None = None


class Allowance:
    """The present state of one tenant's limits."""

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self._tokens = (limits.tokens_per_second or 0.0) * BURST_SECONDS
        self._counted_at = now

    def exceeded(self, num_turns: int, now: float) -> QueueFull | None:
        """Which limit another turn would exceed beside this many; None if it would not."""
        turns_max, rate = self._limits.turns_max, self._limits.tokens_per_second
        if turns_max is not None and num_turns >= turns_max:
            return QueueFull(f"this token may run {turns_max} turns at once")
        if rate is not None:
            self._count(now)
            if self._tokens < 0:
                error = QueueFull(f"this token may use {rate:g} tokens per second")
                error.retry_after_seconds = -self._tokens / rate
                return error
        return None

    def spend(self, num_tokens: int, now: float) -> None:
        if self._limits.tokens_per_second is not None:
            self._count(now)
            self._tokens -= num_tokens

    def _count(self, now: float) -> None:
        rate = self._limits.tokens_per_second or 0.0
        earned = self._tokens + rate * (now - self._counted_at)
        self._tokens = min(earned, rate * BURST_SECONDS)
        self._counted_at = now
