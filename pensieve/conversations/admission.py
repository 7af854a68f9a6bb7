"""Decide whether a turn may begin now, before it is stored or tokenized. Belongs to the event loop.

A turn is refused for one of these reasons, in this order:

* the daemon is shutting down;
* there is no engine;
* too many turns are in flight;
* the tenant has used up its limits;
* the queue is too long for the request's deadline or for the first-token objective (`--ttft`).

The daemon takes at most `live_turns_max` turns at a time, queued turns included. With several tenants, a turn
is refused if its tenant has more than ROOM_SHARE (8) turns for each turn that the daemon can still take. So a
tenant that floods the daemon leaves a ninth of `live_turns_max` to the others.

**The wait** until the engine starts on a turn's prompt is the longest of

* the predicted seconds of the prompts ahead, times the pace (both are defined below);
* the number of turns ahead that wait for room, times the average time between two admissions by the engine
  while turns waited;
* if any turn ahead waits for room, the time since the engine's latest admission.

With nothing ahead there is no wait, so an idle engine refuses no turn. The turn's own prompt does not count,
because a retry would need the same time for it. A refusal tells the client when to retry. By then, the wait
is within the objective if no more turns arrive.

**Ahead** of a new turn are the turns that have no token yet and that the engine would serve first:

* turns of the same tenant that the engine has admitted;
* waiting turns of the same tenant, if their priority is the same or higher;
* turns of other tenants that fair queueing (core/fair_queue.py) serves in the meantime, in proportion to the
  tenants' weights;
* turns that are about to begin. Without these, a burst of requests would find nothing ahead. Their tokens are
  estimated from their characters.

The part of a prompt that is already computed is subtracted.

**The pace** is the measured time of prompts, divided by their predicted time. The measured time counts only
while a prompt is being computed. The pace is a moving average in which the latest prompt counts an eighth.
While the pace is unknown, nothing is predicted, and no turn is refused for its wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pensieve.conversations.draft import TurnRequest
from pensieve.conversations.live_turn import LiveTurn
from pensieve.core.cost import IterationCost
from pensieve.errors import DeadlineExceeded, Loading, PensieveError, QueueFull, Unavailable
from pensieve.guard.limits import Allowances, Limits

RETRY_SECONDS_MIN = 0.1
ROOM_SHARE = 8
CHARACTERS_MAX = 32 << 20  # of a tenant's turns that are about to begin
LATEST_SHARE = 1 / 8  # weight of the latest value in a moving average


class WorkAhead(NamedTuple):
    num_turns: float = 0.0  # turns that wait for room
    seconds: float = 0.0  # predicted for the prompts of all turns ahead


NO_WORK = WorkAhead()


@dataclass(frozen=True)
class DaemonLoad:
    """The daemon's load at the moment when a client asks for another turn."""

    is_draining: bool
    engine_serves: bool
    num_turns: int  # in flight or about to begin, warms included
    num_turns_of_tenant: int  # warms included
    ahead: Callable[[], WorkAhead] = lambda: NO_WORK  # the work ahead of this turn
    waiting_since: float | None = None  # when the turn began that has waited longest for the engine
    num_characters_of_tenant: int = 0  # in the tenant's turns that are about to begin


class Admission:
    def __init__(
        self,
        live_turns_max: int,
        limits: Mapping[str, Limits],
        now: float,
        ttft_seconds: float = 0.0,
    ) -> None:
        """`ttft_seconds`: the longest time that a turn may wait; 0: without limit."""
        self.ttft_seconds = ttft_seconds
        self.prompts = PromptTimes()
        self.num_refused_for_ttft = 0
        self._seconds_per_admission = 0.0
        self._admitted_at = now  # the latest admission by the engine
        self._live_turns_max = live_turns_max
        self.allowances = Allowances(limits, now)

    def refusal(
        self, tenant: str, load: DaemonLoad, seconds_left: float | None, now: float
    ) -> PensieveError | None:
        """Return the error for a turn of this tenant that may not begin now, or None if it may."""
        if load.is_draining:
            return Unavailable("the daemon is shutting down")
        if not load.engine_serves:
            return Loading("the engine is restarting and loads the model; retry in a few seconds")
        if (exceeded := self.exceeded(tenant, load, now)) is not None:
            return exceeded
        if seconds_left is None and not self.ttft_seconds:
            return None
        wait = self.wait_seconds(load, now)
        refusal: PensieveError | None = None
        if seconds_left is not None and wait > seconds_left:
            allowed = seconds_left
            refusal = DeadlineExceeded(
                f"turns wait {wait:.1f} s now, and the request's deadline is in {seconds_left:.1f} s"
            )
        elif self.ttft_seconds and wait > self.ttft_seconds:
            allowed = self.ttft_seconds
            refusal = QueueFull(
                f"turns wait {wait:.1f} s for their first token now, and the objective (--ttft) is "
                f"{allowed:g} s; retry later"
            )
            self.num_refused_for_ttft += 1
        if refusal is not None:
            refusal.retry_after_seconds = max(wait - allowed, RETRY_SECONDS_MIN)
        return refusal

    def exceeded(self, tenant: str, load: DaemonLoad, now: float) -> QueueFull | None:
        """Return an error if another turn or warm of this tenant would exceed a limit, otherwise None."""
        if load.num_turns >= self._live_turns_max:
            return QueueFull(f"{load.num_turns} turns are waiting or running; retry later")
        num_left = self._live_turns_max - load.num_turns
        if len(self.allowances) > 1 and load.num_turns_of_tenant > ROOM_SHARE * num_left:
            return QueueFull(
                f"{load.num_turns_of_tenant} of your turns are waiting or running, and other clients "
                "need room; retry later"
            )
        if load.num_characters_of_tenant > CHARACTERS_MAX:
            return QueueFull("too many of your messages wait to be tokenized; retry later")
        allowance = self.allowances.of(tenant, now)
        return allowance.exceeded(load.num_turns_of_tenant, now) or allowance.calls_exceeded()

    def wait_seconds(self, load: DaemonLoad, now: float) -> float:
        """Return how long a turn that came now would wait until the engine starts on its prompt."""
        ahead = load.ahead()
        wait = self.prompts.wait_seconds(ahead)
        if load.waiting_since is not None and ahead.num_turns:
            none_admitted_since = max(self._admitted_at, load.waiting_since)
            room_wait = ahead.num_turns * self._seconds_per_admission
            wait = max(wait, room_wait, now - none_admitted_since)
        return wait

    def ahead(
        self,
        turns: Sequence[LiveTurn],
        arriving: Iterable[TurnRequest],
        tenant: str,
        priority: int,
        now: float,
    ) -> WorkAhead:
        """Return the work ahead of a new turn; `turns` have no token yet, in order of arrival."""
        known = [waiting(live) for live in turns]
        known += [
            self.prompts.arriving(request, self._weight_of(request.tenant)) for request in arriving
        ]
        served = self.prompts.pace.served_since(now)
        return ahead_of(known, tenant, self._weight_of(tenant), priority, served)

    def _weight_of(self, tenant: str) -> float:
        allowance = self.allowances.known(tenant)
        return allowance.limits.weight if allowance is not None else 1.0

    def weight_of(self, tenant: str, now: float) -> float:
        """Return the tenant's weight in fair queueing."""
        return self.allowances.of(tenant, now).limits.weight

    def turn_admitted(self, begun_at: float, now: float) -> None:
        """Record that the engine has room for a turn that began at `begun_at`."""
        between = now - max(self._admitted_at, begun_at)
        self._seconds_per_admission += (between - self._seconds_per_admission) * LATEST_SHARE
        self._admitted_at = now

    def charge(self, tenant: str, num_tokens: int, now: float) -> None:
        self.allowances.of(tenant, now).spend(num_tokens, now)

    def engine_started(self, cost: IterationCost | None) -> None:
        """`cost`: the engine's prediction of its iteration times; None if it has none."""
        self.prompts.cost = cost

    def engine_lost(self) -> None:
        """Forget the measured times: the next engine may be faster."""
        self._seconds_per_admission = 0.0
        self.prompts.engine_lost()


class WaitingTurn(NamedTuple):
    """The values that `ahead_of` needs of a turn that has no token yet."""

    tenant: str
    weight: float
    priority: int
    prompt_seconds: float  # as predicted
    admitted: bool = False


class _Share:
    """The work of one tenant that is ahead of a new turn."""

    def __init__(self) -> None:
        self.weight = 1.0
        self.num_waiting = 0
        self.seconds = 0.0
        self.begun: list[WaitingTurn] = []


def ahead_of(
    turns: Sequence[WaitingTurn],
    tenant: str,
    weight: float,
    priority: int,
    seconds_served: float = 0.0,
) -> WorkAhead:
    """Return the work ahead of a new turn; `turns` have no token yet, in order of arrival.

    `seconds_served`: how many of the predicted seconds of begun prompts are already computed.
    """
    shares: dict[str, _Share] = {}
    for turn in turns:
        share = shares.setdefault(turn.tenant, _Share())
        share.weight = turn.weight
        if not turn.admitted:
            if turn.tenant == tenant and turn.priority < priority:
                continue
            share.num_waiting += 1
        else:
            share.begun.append(turn)
        share.seconds += turn.prompt_seconds
    num_begun = sum(bool(share.begun) for share in shares.values())
    for share in shares.values():
        if share.begun:
            first = share.begun[0].prompt_seconds
            share.seconds -= min(first, seconds_served / num_begun)
    own = shares.pop(tenant, _Share())
    num_turns, seconds = float(own.num_waiting), own.seconds
    for other in shares.values():
        if other.seconds:
            served = min(other.seconds, own.seconds * other.weight / weight)
            seconds += served
            num_turns += other.num_waiting * served / other.seconds
    return WorkAhead(num_turns, seconds)


def waiting(live: LiveTurn) -> WaitingTurn:
    """Describe a live turn that has no token yet."""
    return WaitingTurn(live.tenant, live.weight, live.priority, live.prompt_seconds, live.admitted)


class PromptPace:
    """Measure how many seconds a predicted second of prompt takes."""

    def __init__(self) -> None:
        self._busy = self._predicted = 0.0
        # The time when the latest prompt was completed or, after a pause, the next prompt began.
        # None: no prompt has begun yet.
        self._since: float | None = None

    @property
    def ratio(self) -> float | None:
        """Seconds per predicted second; None while no prompt was measured."""
        return self._busy / self._predicted if self._predicted else None

    def begun(self, now: float, is_only: bool) -> None:
        """Record that a prompt has begun; `is_only`: no other prompt is being computed."""
        if is_only or self._since is None:
            self._since = now

    def ended(self, predicted: float, now: float) -> None:
        """Record that a prompt was completed; `predicted`: the seconds that were predicted for it."""
        since, self._since = self._since, now
        if since is not None and predicted > 0.0:
            self._busy += (now - since - self._busy) * LATEST_SHARE
            self._predicted += (predicted - self._predicted) * LATEST_SHARE

    def served_since(self, now: float) -> float:
        """Return how many predicted seconds of prompts were computed since `_since`."""
        ratio = self.ratio
        return (now - self._since) / ratio if self._since is not None and ratio else 0.0


class PromptTimes:
    """Predict how long the prompts of live turns take, and learn how long they took."""

    def __init__(self) -> None:
        self.cost: IterationCost | None = None  # of the current engine
        self.pace = PromptPace()
        self._characters = self._tokens = 0.0  # averages over the latest prompts

    def submitted(self, live: LiveTurn) -> None:
        live.prompt_seconds = self._seconds(live, live.prompt_tokens)
        if live.request is not None:
            self._characters += (live.request.num_characters - self._characters) * LATEST_SHARE
            self._tokens += (live.prompt_tokens - self._tokens) * LATEST_SHARE

    def arriving(self, request: TurnRequest, weight: float) -> WaitingTurn:
        """Describe a turn that is about to begin. Its time is 0 until the first prompt was tokenized."""
        seconds = 0.0
        if self.cost is not None and self._characters:
            num_tokens = round(request.num_characters * self._tokens / self._characters)
            seconds = self.cost.iteration_seconds([(0, num_tokens)])
        return WaitingTurn(request.tenant, weight, request.options.priority, seconds)

    def admitted(self, live: LiveTurn, missing_tokens: int, now: float, is_only: bool) -> None:
        """Record that the engine begins with a prompt and has `missing_tokens` to compute."""
        live.prompt_seconds = self._seconds(live, missing_tokens)
        self.pace.begun(now, is_only)

    def ended(self, live: LiveTurn, now: float) -> None:
        """Record the first token of a turn."""
        self.pace.ended(live.prompt_seconds, now)

    def wait_seconds(self, ahead: WorkAhead) -> float:
        """Return the seconds that the prompts ahead take at the measured pace; 0 if the pace is unknown."""
        return ahead.seconds * (self.pace.ratio or 0.0)

    def engine_lost(self) -> None:
        """Forget the pace: the next engine may be faster."""
        self.cost, self.pace = None, PromptPace()

    def _seconds(self, live: LiveTurn, num_tokens: int) -> float:
        """Predict the time of an iteration with the last `num_tokens` of a turn's context."""
        if self.cost is None:
            return 0.0
        context = live.history_tokens + live.prompt_tokens
        return self.cost.iteration_seconds([(context - num_tokens, context)])
