"""Whether a turn may begin now: decided before anything of it is read or written.

Refusing is the cheapest thing the daemon does.  The reasons, in this order: it is shutting down, there
is no engine, too many turns are begun and not ended, the tenant has used up what it may, or the present
queue would miss the request's deadline.

Where there are several tenants, none may take all places: each may have as many turns as ROOM_SHARE times the
places that are left, so that one that floods leaves a ninth of them, and those who come later share the rest.

How long a turn would wait follows from those that wait now: as many times the average time between two
admissions of the engine while somebody waited, the latest counting an eighth; and at least as long as none
has been admitted by now.  Where nobody waits there is no wait, whatever was before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pensieve.errors import DeadlineExceeded, Loading, PensieveError, QueueFull, Unavailable
from pensieve.service.limits import Allowances, Limits

LATEST_SHARE = 1 / 8  # of the latest admission in the average
ROOM_SHARE = 8
CHARACTERS_MAX = 32 << 20  # of a tenant's turns that are about to begin


@dataclass(frozen=True)
class Load:
    """What the daemon is carrying when somebody wants another turn."""

    is_draining: bool
    engine_serves: bool
    num_turns: int  # begun or about to, and not ended; with warms
    num_turns_of_tenant: int  # with its warms
    num_waiting: int  # of those begun: for which the engine has no room yet
    waiting_since: float | None  # the first of them
    num_characters_of_tenant: int = 0  # of its turns that are about to begin


class Admission:
    def __init__(self, turns_max: int, limits: Mapping[str, Limits], now: float) -> None:
        self._seconds_per_admission = 0.0
        self._admitted_at = now  # the latest
        self._turns_max = turns_max
        self.allowances = Allowances(limits, now)

    def refusal(
        self, tenant: str, load: Load, seconds_left: float | None, now: float
    ) -> PensieveError | None:
        """Why a turn of this tenant may not begin; None if it may."""
        if load.is_draining:
            return Unavailable("the daemon is shutting down")
        if not load.engine_serves:
            return Loading(
                "the engine is starting again and loads the model; try again in a moment"
            )
        if (exceeded := self.exceeded(tenant, load, now)) is not None:
            return exceeded
        wait = self.wait_seconds(load, now)
        if seconds_left is not None and wait > seconds_left:
            return DeadlineExceeded(
                f"turns wait {wait:.1f} s at present; the deadline is in {seconds_left:.1f} s"
            )
        return None

    def exceeded(self, tenant: str, load: Load, now: float) -> QueueFull | None:
        """Which limit another turn or warm of this tenant would exceed; None if it would not."""
        if load.num_turns >= self._turns_max:
            return QueueFull(f"{load.num_turns} turns are waiting or running; try again later")
        num_left = self._turns_max - load.num_turns
        if len(self.allowances) > 1 and load.num_turns_of_tenant > ROOM_SHARE * num_left:
            return QueueFull(
                f"{load.num_turns_of_tenant} turns of yours are waiting or running, and others need "
                "room, too; try again later"
            )
        if load.num_characters_of_tenant > CHARACTERS_MAX:
            return QueueFull("messages of yours wait to be tokenized; try again later")
        allowance = self.allowances.of(tenant, now)
        return allowance.exceeded(load.num_turns_of_tenant, now) or allowance.calls_exceeded()

    def wait_seconds(self, load: Load, now: float) -> float:
        """How long a turn that came now would wait."""
        if load.waiting_since is None:
            return 0.0
        nobody_since = max(self._admitted_at, load.waiting_since)
        return max(load.num_waiting * self._seconds_per_admission, now - nobody_since)

    def turn_admitted(self, begun_at: float, now: float) -> None:
        """The engine had room for a turn that began then."""
        between = now - max(self._admitted_at, begun_at)
        self._seconds_per_admission += (between - self._seconds_per_admission) * LATEST_SHARE
        self._admitted_at = now

    def charge(self, tenant: str, num_tokens: int, now: float) -> None:
        """Count what a turn has cost its tenant."""
        self.allowances.of(tenant, now).spend(num_tokens, now)

    def engine_lost(self) -> None:
        """The next one may be faster."""
        self._seconds_per_admission = 0.0
