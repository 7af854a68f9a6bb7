"""What a turn that came now would find ahead of it, and how fast the engine gets through prompts.

**Ahead** of a turn of a share (a tenant's; see core/fair_queue.py) are the turns that have no token yet and
that the engine would serve before it:

* of its own share, those that have begun, and those of no lower priority that wait;
* of another share, as much as fair queueing gives that one meanwhile: by their weights, and never more than
  it has.  So a tenant that floods is ahead of itself, and of others by a part of what they have ahead anyway;
* nobody else: whoever is next is given a place where others hold more (core/preemption.py).

Turns that are about to begin (arriving.py) count as if they waited already, or all of a burst that comes at
once would find nothing ahead.  Their tokens are not known yet: they are what characters made lately.

It is counted in turns that wait for room, and in the seconds that their prompts take as the engine's own
cost model predicts them (core/iteration_cost.py): by new tokens at first, and with what has to be recomputed
once the engine has admitted the turn and says so.  Of a prompt that has begun what was computed meanwhile
is taken off; begun prompts of several shares are computed in turn.

**The pace** is what seconds of prompts take in fact: the time in which any prompt was being computed, over
the predicted seconds of those that came to an end, the latest counting an eighth.  Everything is in it that
the cost model does not know: a slower machine, turns that generate beside, small pieces for their sake.
While nothing is known of it nothing is predicted: an estimate that no measurement has confirmed
refuses nobody.

All of it belongs to the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pensieve.core.iteration_cost import IterationCost
from pensieve.service.draft import Ask
from pensieve.service.live_turn import LiveTurn

LATEST_SHARE = 1 / 8


class Waiting(NamedTuple):
    """What is asked of a turn without a token."""

    tenant: str
    weight: float
    priority: int
    prompt_seconds: float  # as predicted
    admitted: bool = False


class Ahead(NamedTuple):
    num_turns: float = 0.0  # that wait for room
    seconds: float = 0.0  # of prompts, as predicted


NOTHING = Ahead()


class _Share:
    def __init__(self) -> None:
        self.weight = 1.0
        self.num_waiting = 0
        self.seconds = 0.0
        self.begun: list[Waiting] = []


def ahead_of(
    turns: Sequence[Waiting],
    tenant: str,
    weight: float,
    priority: int,
    seconds_served: float = 0.0,
) -> Ahead:
    """What is ahead of a new turn; `turns` are those without a token, in the order in which they came.

    `seconds_served`: of prompts that have begun and not ended, predicted seconds that were computed already.
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
    return Ahead(num_turns, seconds)


def waiting(live: LiveTurn) -> Waiting:
    """A turn that has begun, and has no token yet."""
    return Waiting(live.tenant, live.weight, live.priority, live.prompt_seconds, live.admitted)


class Pace:
    """Seconds that predicted seconds of prompts take."""

    def __init__(self) -> None:
        self._busy = self._predicted = 0.0
        self._since: float | None = None  # prompts are computed, and none has come to its end

    @property
    def ratio(self) -> float | None:
        """None: nothing is known."""
        return self._busy / self._predicted if self._predicted else None

    def begun(self, now: float, is_only: bool) -> None:
        """A prompt has begun; whether no other is being computed."""
        if is_only or self._since is None:
            self._since = now

    def ended(self, predicted: float, now: float) -> None:
        """A prompt was computed that was predicted to take so long."""
        since, self._since = self._since, now
        if since is not None and predicted > 0.0:
            self._busy += (now - since - self._busy) * LATEST_SHARE
            self._predicted += (predicted - self._predicted) * LATEST_SHARE

    def served_since(self, now: float) -> float:
        """Predicted seconds that were computed since a prompt came to its end, or the first one began."""
        ratio = self.ratio
        return (now - self._since) / ratio if self._since is not None and ratio else 0.0


class Prompts:
    """Predicts what the prompts of live turns take, and learns what they took."""

    def __init__(self) -> None:
        self.cost: IterationCost | None = None  # of the present engine
        self.pace = Pace()
        self._characters = self._tokens = 0.0  # of the latest prompts

    def submitted(self, live: LiveTurn) -> None:
        live.prompt_seconds = self._seconds(live, live.prompt_tokens)
        if live.ask is not None:
            self._characters += (live.ask.num_characters - self._characters) * LATEST_SHARE
            self._tokens += (live.prompt_tokens - self._tokens) * LATEST_SHARE

    def arriving(self, ask: Ask, weight: float) -> Waiting:
        """A turn that is about to begin; 0 seconds while nothing is known of the tokens."""
        seconds = 0.0
        if self.cost is not None and self._characters:
            num_tokens = round(ask.num_characters * self._tokens / self._characters)
            seconds = self.cost.iteration_seconds([(0, num_tokens)])
        return Waiting(ask.tenant, weight, ask.options.priority, seconds)

    def admitted(self, live: LiveTurn, missing_tokens: int, now: float, is_only: bool) -> None:
        """The engine begins with it, and has so many tokens to compute."""
        live.prompt_seconds = self._seconds(live, missing_tokens)
        self.pace.begun(now, is_only)

    def ended(self, live: LiveTurn, now: float) -> None:
        """Its first token is there."""
        self.pace.ended(live.prompt_seconds, now)

    def wait_seconds(self, ahead: Ahead) -> float:
        """What these prompts take, by what others took; 0 while nothing is known."""
        return ahead.seconds * (self.pace.ratio or 0.0)

    def engine_lost(self) -> None:
        """The next one may be faster."""
        self.cost, self.pace = None, Pace()

    def _seconds(self, live: LiveTurn, num_tokens: int) -> float:
        """Of an iteration with the last tokens of a turn's context, as the engine predicts it."""
        if self.cost is None:
            return 0.0
        context = live.history_tokens + live.prompt_tokens
        return self.cost.iteration_seconds([(context - num_tokens, context)])
