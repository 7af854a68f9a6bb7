"""Whether a turn may begin now: decided before anything of it is read or written.

Refusing is the cheapest thing the daemon does.  The reasons, in this order: it is shutting down, there
is no engine, too many turns are begun and not ended, the tenant has used up what it may, or the present
queue would miss the request's deadline or the objective for the first token (`--ttft`).

Where there are several tenants, none may take all places: each may have as many turns as ROOM_SHARE times the
places that are left, so that one that floods leaves a ninth of them, and those who come later share the rest.

How long a turn would wait until its own prompt is computed follows from what is ahead of it now
(queueing.py).  It is the longest of

* the seconds that the prompts ahead take as the engine's cost model predicts, times what such seconds took;
* as many times the average time between two admissions of the engine while somebody waited, the latest
  counting an eighth, as turns ahead wait for room: there the end of running turns is what is waited for;
* where any of them waits for room, the time since the engine admitted the last one.

Where nothing is ahead there is no wait, whatever was before.  What the turn's own prompt takes is not in it:
a refusal has to help, and a prompt that takes longer than the objective by itself is no shorter when it comes
back.  So on an idle engine nobody is refused, and what is refused is told when the wait will be within the
objective, if no more comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pensieve.errors import DeadlineExceeded, Loading, PensieveError, QueueFull, Unavailable
from pensieve.service.draft import Ask
from pensieve.service.limits import Allowances, Limits
from pensieve.service.live_turn import LiveTurn
from pensieve.service.queueing import LATEST_SHARE, NOTHING, Ahead, Prompts, ahead_of, waiting

RETRY_SECONDS_MIN = 0.1
ROOM_SHARE = 8
CHARACTERS_MAX = 32 << 20  # of a tenant's turns that are about to begin


@dataclass(frozen=True)
class Load:
    """What the daemon is carrying when somebody wants another turn."""

    is_draining: bool
    engine_serves: bool
    num_turns: int  # begun or about to, and not ended; with warms
    num_turns_of_tenant: int  # with its warms
    ahead: Callable[[], Ahead] = lambda: NOTHING  # of this turn
    waiting_since: float | None = None  # the first turn for which the engine has no room yet
    num_characters_of_tenant: int = 0  # of its turns that are about to begin


class Admission:
    def __init__(
        self, turns_max: int, limits: Mapping[str, Limits], now: float, ttft_seconds: float = 0.0
    ) -> None:
        """`ttft_seconds`: what no turn may wait for longer; 0: without limit."""
        self.ttft_seconds = ttft_seconds
        self.prompts = Prompts()
        self.num_refused_for_ttft = 0
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
        if seconds_left is None and not self.ttft_seconds:
            return None
        wait = self.wait_seconds(load, now)
        refusal: PensieveError | None = None
        if seconds_left is not None and wait > seconds_left:
            allowed = seconds_left
            refusal = DeadlineExceeded(
                f"turns wait {wait:.1f} s at present; the deadline is in {seconds_left:.1f} s"
            )
        elif self.ttft_seconds and wait > self.ttft_seconds:
            allowed = self.ttft_seconds
            refusal = QueueFull(
                f"turns wait {wait:.1f} s for their first token at present, and the objective is "
                f"{allowed:g} s; try again later"
            )
            self.num_refused_for_ttft += 1
        if refusal is not None:
            refusal.retry_after_seconds = max(wait - allowed, RETRY_SECONDS_MIN)
        return refusal

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
        """How long a turn that came now would wait until its own prompt is computed."""
        ahead = load.ahead()
        wait = self.prompts.wait_seconds(ahead)
        if load.waiting_since is not None and ahead.num_turns:
            nobody_since = max(self._admitted_at, load.waiting_since)
            for_room = ahead.num_turns * self._seconds_per_admission
            wait = max(wait, for_room, now - nobody_since)
        return wait

    def ahead(
        self,
        turns: Sequence[LiveTurn],
        arriving: Iterable[Ask],
        tenant: str,
        priority: int,
        now: float,
    ) -> Ahead:
        """Of a new turn of this tenant; `turns` are those without a token, as they came."""
        known = [waiting(live) for live in turns]
        known += [self.prompts.arriving(ask, self._weight_of(ask.tenant)) for ask in arriving]
        served = self.prompts.pace.served_since(now)
        return ahead_of(known, tenant, self._weight_of(tenant), priority, served)

    def _weight_of(self, tenant: str) -> float:
        allowance = self.allowances.known(tenant)
        return allowance.limits.weight if allowance is not None else 1.0

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
        self.prompts.engine_lost()
