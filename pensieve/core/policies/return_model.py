"""For the policy `return`: learn which conversations return, and when, from earlier returns.

A *gap* is the time between two turns of a conversation. The time since the last turn is divided into
intervals of growing length (`EDGES`). The model predicts the probability that a conversation returns in
interval i, if it has not returned before that interval:

    P(returns in i | not before i) = rate_i · ratio        ratio = exp(weights · traits)

The *rate* says when conversations return. The *ratio* of a conversation (its `return_ratio`) says how much
likelier than others it is to return. (This is a discrete proportional-hazards model.) Times and traits are
learned separately, so a few hundred gaps are enough to learn from. A gap that reaches interval i gives one
observation: y = 1 if the gap ends in the interval, y = 0 if it lasts longer.

    rate_i    = returned_i / sum of the ratios of the gaps that reached i
    weight_j += x_j (y - rate_i · ratio) / sum of x_j² rate_i · ratio      (Newton's step, traits one by one)

The sums start with a prior (`PRIOR_GAPS` made-up gaps, and `PRIOR_CERTAINTY` for a weight) and fade towards
it, so the model follows a changing workload. A gap moves through each interval at most once, so the work per
gap is bounded. There are never more than 2 · `GAPS_MAX` gaps. A conversation whose KV was dropped long before
its return counts as much as any other.

The model also gives the worth of keeping KV for another second when its conversation has been away for t. The
formula assumes that the KV is dropped at the best time u:

    worth(t) = max over u > t of   P(returns before u | away at t) / E[seconds until the return, or until u]

Only this formula uses u. How long KV is really kept depends on the size of the cache. Where the formula
rises with t, its lowest value up to t is used, because a queue needs values that fall with the idle time
(queue.py).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict, deque

from pensieve.core.policies.protocol import EndedTurn

EDGES = tuple(4.0 * 1.3**i for i in range(30))  # seconds; the last is two hours
GAPS_MAX = 200_000
RATE_MAX = 0.95
RATIO_STEPS_MAX = 2.0  # limit of |log(ratio)|
FADE_EVERY_SECONDS = 60.0
FADE = 0.95  # the weight of an observation halves in 14 minutes
# The prior: half of all conversations return, and the times are log-normal. The numbers are rounded from 15
# minutes of a public chat service's traffic. At the start, the only trait with a weight is the client's
# announced absence.
PRIOR_GAPS, PRIOR_SHARE, PRIOR_MEDIAN_SECONDS, PRIOR_SPREAD = 100.0, 0.5, 120.0, 0.9
PRIOR_WEIGHTS = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0)
PRIOR_CERTAINTY = 15.0
MESSAGE_TOKENS, SHORT_MESSAGE_TOKENS, REPLY_TOKENS = 3000, 1500, 250


def traits_of(num_turns: int, ended: EndedTurn) -> tuple[float, ...]:
    """Return the traits of a conversation; each has a weight.

    The traits are the number of turns, the length of the message, whether the message was short, the length
    of the reply, and the client's expected absence. All but the last are separate for first and later turns.
    """
    message = _clipped(math.log(max(ended.input_tokens, 1) / MESSAGE_TOKENS), -0.7, 2.5)
    short = float(ended.input_tokens < SHORT_MESSAGE_TOKENS)
    reply = _clipped(math.log(max(ended.output_tokens, 1) / REPLY_TOKENS), -3.0, 1.5)
    away = 0.0
    if ended.away_seconds:
        away = _clipped(math.log(ended.away_seconds / PRIOR_MEDIAN_SECONDS), -3.0, 6.0)
    if num_turns == 1:
        return (1.0, message, short, reply, 0.0, 0.0, 0.0, 0.0, away)
    often = min(math.log(num_turns / 2), 2.5)
    return (0.0, 0.0, 0.0, 0.0, often, message, short, reply, away)


def _clipped(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)


class _Gap:
    __slots__ = ("length", "num_hits", "num_turns", "over", "serial", "since", "traits")

    def __init__(
        self, serial: int, num_turns: int, traits: tuple[float, ...], length: int, since: float
    ) -> None:
        self.serial = serial  # of the conversation
        self.num_hits = 0  # latest successive returns that lru would have served from the cache
        self.num_turns = num_turns
        self.length = length
        self.traits = traits
        self.since = since
        self.over = False  # the conversation has returned, or is no longer watched


class ReturnModel:
    def __init__(self) -> None:
        self._gaps: OrderedDict[str, _Gap] = OrderedDict()  # the latest gap of each conversation
        self._intervals: list[deque[_Gap]] = [deque() for _ in EDGES]
        self._num_waiting = 0  # gaps in all intervals
        self._num_seen = 0  # conversations
        self._prior_returned, self._prior_reached = _prior_sums()
        self._returned, self._reached = list(self._prior_returned), list(self._prior_reached)
        self.weights = list(PRIOR_WEIGHTS)
        self._certainty = [PRIOR_CERTAINTY] * len(PRIOR_WEIGHTS)
        self._faded_at = 0.0
        self._worth = self._worth_by_interval()

    def turn_ended(self, conversation_id: str, ended: EndedTurn, now: float) -> float:
        """Begin a gap; return the conversation's return_ratio."""
        self._advance(now)
        previous = self._gaps.pop(conversation_id, None)
        num_turns = 1 + (previous.num_turns if previous is not None else 0)
        serial = previous.serial if previous is not None else self._next_serial()
        gap = _Gap(serial, num_turns, traits_of(num_turns, ended), ended.length, now)
        gap.num_hits = previous.num_hits if previous is not None else 0
        self._keep(conversation_id, gap)
        self._intervals[0].append(gap)
        self._num_waiting += 1
        if self._num_waiting > 2 * GAPS_MAX:  # most of these gaps are over
            for index, interval in enumerate(self._intervals):
                self._intervals[index] = deque(each for each in interval if not each.over)
            self._num_waiting = sum(map(len, self._intervals))
        return self._ratio(gap)

    def turn_began(self, conversation_id: str, now: float) -> int | None:
        """End a gap; return the conversation's tokens, or None if its gap was not watched."""
        self._advance(now)
        gap = self._gaps.get(conversation_id)
        if gap is None or gap.over:
            return None
        gap.over = True
        if now - gap.since < EDGES[-1]:  # a longer gap counts as a conversation that stayed away
            self._learn(gap, bisect_right(EDGES, now - gap.since), 1.0)
        return gap.length

    def count_hits(self, conversation_id: str, is_hit: bool) -> None:
        """Count a return after `turn_began`. `is_hit`: whether lru would have served it from the cache."""
        gap = self._gaps[conversation_id]
        gap.num_hits = gap.num_hits + 1 if is_hit else 0

    def forked(self, source_id: str, target_id: str, now: float) -> None:
        """Give a fork the source's serial number, turn count and traits.

        Forget an earlier conversation with the fork's id.
        """
        if (earlier := self._gaps.pop(target_id, None)) is not None:
            earlier.over = True
        known = self._gaps.get(source_id)
        if known is not None:
            gap = _Gap(known.serial, known.num_turns, known.traits, 0, now)
            gap.over = True  # the time until the fork's first turn is not learned
            self._keep(target_id, gap)

    def continued(self, conversation_id: str, new_id: str) -> None:
        if (gap := self._gaps.pop(conversation_id, None)) is not None:
            if (earlier := self._gaps.pop(new_id, None)) is not None:
                earlier.over = True
            self._gaps[new_id] = gap

    def draw_of(self, conversation_id: str) -> tuple[int, int] | None:
        """Return a conversation's serial number and `num_hits`; None if it is not known."""
        gap = self._gaps.get(conversation_id)
        return None if gap is None else (gap.serial, gap.num_hits)

    def worth(self, idle_seconds: float) -> float:
        """Return the worth per second of keeping the KV of a conversation of ratio 1."""
        return self._worth[bisect_right(EDGES, idle_seconds)]

    def likelihood(self, ratio: float, idle_seconds: float) -> float:
        """Return the probability that a conversation returns (before the last edge)."""
        away = 1.0
        for index in range(min(bisect_right(EDGES, idle_seconds), len(EDGES)), len(EDGES)):
            away *= 1.0 - min(self._rate(index) * ratio, RATE_MAX)
        return 1.0 - away

    def _next_serial(self) -> int:
        self._num_seen += 1
        return self._num_seen

    def _keep(self, conversation_id: str, gap: _Gap) -> None:
        self._gaps[conversation_id] = gap
        if len(self._gaps) > GAPS_MAX:
            self._gaps.popitem(last=False)[1].over = True

    def _ratio(self, gap: _Gap) -> float:
        steps = [w * x for w, x in zip(self.weights, gap.traits, strict=True)]
        announced = min(steps.pop(), 0.0)  # a client cannot raise its value by what it announces
        return math.exp(announced + _clipped(sum(steps), -RATIO_STEPS_MAX, RATIO_STEPS_MAX))

    def _rate(self, index: int) -> float:
        return self._returned[index] / self._reached[index]

    def _learn(self, gap: _Gap, index: int, outcome: float) -> None:
        ratio = self._ratio(gap)
        expected = min(self._rate(index) * ratio, RATE_MAX)
        self._returned[index] += outcome
        self._reached[index] += ratio
        for j, trait in enumerate(gap.traits):
            if trait:
                self._certainty[j] += trait * trait * expected
                self.weights[j] += trait * (outcome - expected) / self._certainty[j]

    def _advance(self, now: float) -> None:
        """Move gaps on to their next intervals, and let old observations fade."""
        for index, (edge, interval) in enumerate(zip(EDGES, self._intervals, strict=True)):
            while interval and (interval[0].over or now - interval[0].since >= edge):
                gap = interval.popleft()
                if not gap.over:
                    self._learn(gap, index, 0.0)
                if not gap.over and index + 1 < len(EDGES):
                    self._intervals[index + 1].append(gap)
                else:
                    self._num_waiting -= 1
        if now - self._faded_at >= FADE_EVERY_SECONDS:
            self._faded_at = now
            self._returned = _faded(self._returned, self._prior_returned)
            self._reached = _faded(self._reached, self._prior_reached)
            self._certainty = _faded(self._certainty, [PRIOR_CERTAINTY] * len(self._certainty))
            self._worth = self._worth_by_interval()

    def _worth_by_interval(self) -> list[float]:
        """Compute `worth` at the beginning of each interval, and after the last."""
        away, waited, before = [1.0], [0.0], 0.0  # at each edge: fraction away, seconds waited
        for index, edge in enumerate(EDGES):
            away.append(away[-1] * (1 - min(self._rate(index), RATE_MAX)))
            waited.append(waited[-1] + (edge - before) * (away[-2] + away[-1]) / 2)
            before = edge
        worths, least = [], math.inf
        for begin in range(len(EDGES)):
            best = max(
                (away[begin] - away[end]) / (waited[end] - waited[begin])
                for end in range(begin + 1, len(away))
            )
            least = min(least, best)
            worths.append(least)
        return [*worths, least * 1e-3]  # after the last edge no return is expected


def _faded(sums: list[float], priors: list[float]) -> list[float]:
    return [prior + FADE * (each - prior) for each, prior in zip(sums, priors, strict=True)]


def _prior_sums() -> tuple[list[float], list[float]]:
    """Return the prior: how many gaps ended in each interval, and how many reached it."""
    returned, reached, before, left = [], [], 0.0, PRIOR_GAPS
    for edge in EDGES:
        steps = math.log(edge / PRIOR_MEDIAN_SECONDS) / PRIOR_SPREAD
        share = PRIOR_SHARE * 0.5 * (1 + math.erf(steps / math.sqrt(2)))
        returned.append(PRIOR_GAPS * (share - before))
        reached.append(left)
        left -= returned[-1]
        before = share
    return returned, reached
