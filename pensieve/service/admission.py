"""Whether a turn may begin now: decided before anything of it is read or written.

Refusing is the cheapest thing the daemon does.  The reasons, in this order: it is shutting down, there
is no engine, too many turns are begun and not ended, the tenant has used up what it may, or the present
queue would miss the request's deadline.

How long turns wait at present is an average over recent ones, the latest counting an eighth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pensieve.errors import DeadlineExceeded, PensieveError, QueueFull, Unavailable
from pensieve.service.limits import Allowance, Limits

LATEST_SHARE = 1 / 8  # of the latest turn in the average wait


@dataclass(frozen=True)
class Load:
    """What the daemon is carrying when somebody wants another turn."""

    is_draining: bool
    engine_serves: bool
    num_turns: int  # begun or about to, and not ended
    num_turns_of_tenant: int


class Admission:
    def __init__(self, turns_max: int, limits: Mapping[str, Limits], now: float) -> None:
        self.queue_seconds = 0.0  # that recent turns have waited
        self._turns_max = turns_max
        self._allowances = {tenant: Allowance(each, now) for tenant, each in limits.items()}

    def refusal(
        self, tenant: str, load: Load, seconds_left: float | None, now: float
    ) -> PensieveError | None:
        """Why a turn of this tenant may not begin; None if it may."""
        if load.is_draining:
            return Unavailable("the daemon is shutting down")
        if not load.engine_serves:
            return Unavailable("the engine is starting again; try again in a moment")
        if load.num_turns >= self._turns_max:
            return QueueFull(f"{load.num_turns} turns are waiting or running; try again later")
        if (allowance := self._allowances.get(tenant)) is not None:
            exceeded = allowance.exceeded(load.num_turns_of_tenant, now)
            if exceeded is not None:
                return exceeded
        if seconds_left is not None and self.queue_seconds > seconds_left:
            return DeadlineExceeded(
                f"turns wait {self.queue_seconds:.1f} s at present; the deadline is in {seconds_left:.1f} s"
            )
        return None

    def turn_ended(self, tenant: str, figures: Mapping[str, Any], now: float) -> None:
        """Count what a turn has cost; one that failed has no figures, and cost nothing."""
        if (allowance := self._allowances.get(tenant)) is not None:
            allowance.spend(figures.get("new_tokens", 0) + figures.get("output_tokens", 0), now)
        waited = figures.get("queue_seconds", 0.0)
        self.queue_seconds += (waited - self.queue_seconds) * LATEST_SHARE

    def engine_lost(self) -> None:
        """Nobody waits any more."""
        self.queue_seconds = 0.0
