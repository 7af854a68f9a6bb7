"""Who comes back, and when: learned from nothing but who came back, and when.

A *rest* is the time that a conversation is away between two turns.  It passes through stretches of time
(`EDGES`, geometric).  Of those that reach stretch i some return within it,

    P(returns in i | still away when it begins) = rate_i · ratio        ratio = exp(weights · traits)

so the *rate* says when people return, and the *ratio* of one conversation how much likelier than others it
does.  Time and traits are learned apart, and a few hundred rests tell something about all.  Each rest that
leaves a stretch, by returning (y = 1) or by staying away (y = 0), is one observation:

    rate_i    = returned_i / sum of the ratios of those that reached i
    weight_j += x_j (y - rate_i · ratio) / sum of x_j² rate_i · ratio      (Newton's step, traits one by one)

Sums begin as `PRIOR_RESTS` made-up rests, and `PRIOR_CERTAINTY` of them for a weight, and fade towards those,
so the table follows a workload that shifts.  A rest moves from queue to queue, once per stretch at most: a
bounded amount of work per rest, and no more than twice `RESTS_MAX` of them.  That a conversation whose KV is
long gone returns teaches just as much.

What it yields to keep something whose conversation has been away for t, per second that it is kept:

    worth(t) = max over u > t of   P(returns before u | away at t) / E[seconds until it returns, or u]

if it is given up at the best moment.  No horizon has to be guessed, and how far down the list things are kept
follows from the size of the cache.  Where this would rise with t, the least so far counts (retention.py).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict, deque
from typing import NamedTuple

EDGES = tuple(4.0 * 1.3**i for i in range(30))  # seconds; the last is two hours
RESTS_MAX = 200_000
RATE_MAX = 0.95
RATIO_STEPS_MAX = 2.0  # exp of it, either way, is as far as traits make a conversation differ
FADE_EVERY_SECONDS = 60.0
FADE = 0.95  # half in 14 minutes
# Half of all conversations return, after times that are log-normal: a rounded fit to a quarter of an
# hour of a public chat service.  Of traits nothing is believed at first but what clients say themselves.
PRIOR_RESTS, PRIOR_SHARE, PRIOR_MEDIAN_SECONDS, PRIOR_SPREAD = 100.0, 0.5, 120.0, 0.9
PRIOR_WEIGHTS = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0)
PRIOR_CERTAINTY = 15.0
MESSAGE_TOKENS, SHORT_MESSAGE_TOKENS, REPLY_TOKENS = 3000, 1500, 250


class Turned(NamedTuple):
    """A turn that ended."""

    input_tokens: int
    output_tokens: int
    length: int = 0  # of the conversation's log
    away_seconds: float = 0.0  # how long its client expects to be away; 0: it did not say


def traits_of(turns: int, turned: Turned) -> tuple[float, ...]:
    """How a conversation differs from others: what `PRIOR_WEIGHTS` are weights of.

    For a first turn, and apart from that for later ones, how many there were, how much was said (with the
    short apart) and answered; and what the client said about its return.
    """
    said = _clipped(math.log(max(turned.input_tokens, 1) / MESSAGE_TOKENS), -0.7, 2.5)
    short = float(turned.input_tokens < SHORT_MESSAGE_TOKENS)
    answered = _clipped(math.log(max(turned.output_tokens, 1) / REPLY_TOKENS), -3.0, 1.5)
    away = 0.0
    if turned.away_seconds:
        away = _clipped(math.log(turned.away_seconds / PRIOR_MEDIAN_SECONDS), -3.0, 6.0)
    if turns == 1:
        return (1.0, said, short, answered, 0.0, 0.0, 0.0, 0.0, away)
    often = min(math.log(turns / 2), 2.5)
    return (0.0, 0.0, 0.0, 0.0, often, said, short, answered, away)


def _clipped(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)


class _Rest:
    __slots__ = ("length", "over", "since", "traits", "turns")

    def __init__(self, turns: int, traits: tuple[float, ...], length: int, since: float) -> None:
        self.turns = turns
        self.length = length
        self.traits = traits
        self.since = since
        self.over = False  # it returned, or nobody will know


class LifeTable:
    def __init__(self) -> None:
        self._rests: OrderedDict[str, _Rest] = OrderedDict()  # each conversation's last
        self._stretches: list[deque[_Rest]] = [deque() for _ in EDGES]
        self._num_waiting = 0  # in all of them
        self._prior_returned, self._prior_reached = _made_up()
        self._returned, self._reached = list(self._prior_returned), list(self._prior_reached)
        self.weights = list(PRIOR_WEIGHTS)
        self._certainty = [PRIOR_CERTAINTY] * len(PRIOR_WEIGHTS)
        self._faded_at = 0.0
        self._worth = self._yields()

    def rested(self, name: str, turned: Turned, now: float) -> float:
        """A turn of that conversation has ended; its ratio."""
        self._pass(now)
        before = self._rests.pop(name, None)
        turns = 1 + (before.turns if before is not None else 0)
        rest = self._keep(name, _Rest(turns, traits_of(turns, turned), turned.length, now))
        self._stretches[0].append(rest)
        self._num_waiting += 1
        if self._num_waiting > 2 * RESTS_MAX:  # most of them are over
            for index, stretch in enumerate(self._stretches):
                self._stretches[index] = deque(each for each in stretch if not each.over)
            self._num_waiting = sum(map(len, self._stretches))
        return self._ratio(rest)

    def returned(self, name: str, now: float) -> int | None:
        """A turn of it begins; how long it was, if it rested."""
        self._pass(now)
        rest = self._rests.get(name)
        if rest is None or rest.over:
            return None
        rest.over = True
        if now - rest.since < EDGES[-1]:  # else it counts as one that stayed away
            self._learn(rest, bisect_right(EDGES, now - rest.since), 1.0)
        return rest.length

    def forked(self, source: str, target: str, now: float) -> None:
        """A conversation of that name begins with another's turns; what had the name is another."""
        if (gone := self._rests.pop(target, None)) is not None:
            gone.over = True
        known = self._rests.get(source)
        if known is not None:
            twin = self._keep(target, _Rest(known.turns, known.traits, 0, now))
            twin.over = True  # nothing is learned from how soon it is used

    def worth(self, idle_seconds: float) -> float:
        """Of keeping what belongs to a conversation of ratio 1: returns per second."""
        return self._worth[bisect_right(EDGES, idle_seconds)]

    def likelihood(self, ratio: float, idle_seconds: float) -> float:
        """That it returns at all (within the table's hours)."""
        away = 1.0
        for index in range(min(bisect_right(EDGES, idle_seconds), len(EDGES)), len(EDGES)):
            away *= 1.0 - min(self._rate(index) * ratio, RATE_MAX)
        return 1.0 - away

    def _keep(self, name: str, rest: _Rest) -> _Rest:
        self._rests[name] = rest
        if len(self._rests) > RESTS_MAX:
            self._rests.popitem(last=False)[1].over = True
        return rest

    def _ratio(self, rest: _Rest) -> float:
        steps = [w * x for w, x in zip(self.weights, rest.traits, strict=True)]
        said = min(steps.pop(), 0.0)  # by the client: no word makes one count for more than it is
        return math.exp(said + _clipped(sum(steps), -RATIO_STEPS_MAX, RATIO_STEPS_MAX))

    def _rate(self, index: int) -> float:
        return self._returned[index] / self._reached[index]

    def _learn(self, rest: _Rest, index: int, outcome: float) -> None:
        ratio = self._ratio(rest)
        expected = min(self._rate(index) * ratio, RATE_MAX)
        self._returned[index] += outcome
        self._reached[index] += ratio
        for j, trait in enumerate(rest.traits):
            if trait:
                self._certainty[j] += trait * trait * expected
                self.weights[j] += trait * (outcome - expected) / self._certainty[j]

    def _pass(self, now: float) -> None:
        """Time passes: rests go on to their next stretches."""
        for index, (edge, stretch) in enumerate(zip(EDGES, self._stretches, strict=True)):
            while stretch and (stretch[0].over or now - stretch[0].since >= edge):
                rest = stretch.popleft()
                if not rest.over:
                    self._learn(rest, index, 0.0)
                if not rest.over and index + 1 < len(EDGES):
                    self._stretches[index + 1].append(rest)
                else:
                    self._num_waiting -= 1
        if now - self._faded_at >= FADE_EVERY_SECONDS:
            self._faded_at = now
            self._returned = _faded(self._returned, self._prior_returned)
            self._reached = _faded(self._reached, self._prior_reached)
            self._certainty = _faded(self._certainty, [PRIOR_CERTAINTY] * len(self._certainty))
            self._worth = self._yields()

    def _yields(self) -> list[float]:
        away, waited, before = [1.0], [0.0], 0.0  # shares at each edge, and seconds until then
        for index, edge in enumerate(EDGES):
            away.append(away[-1] * (1 - min(self._rate(index), RATE_MAX)))
            waited.append(waited[-1] + (edge - before) * (away[-2] + away[-1]) / 2)
            before = edge
        found, least = [], math.inf
        for begin in range(len(EDGES)):
            best = max(
                (away[begin] - away[end]) / (waited[end] - waited[begin])
                for end in range(begin + 1, len(away))
            )
            least = min(least, best)
            found.append(least)
        return [*found, least * 1e-3]  # behind the last edge nobody is expected


def _faded(sums: list[float], priors: list[float]) -> list[float]:
    return [prior + FADE * (each - prior) for each, prior in zip(sums, priors, strict=True)]


def _made_up() -> tuple[list[float], list[float]]:
    """The prior: rests that returned in each stretch, and that reached it."""
    returned, reached, before, left = [], [], 0.0, PRIOR_RESTS
    for edge in EDGES:
        steps = math.log(edge / PRIOR_MEDIAN_SECONDS) / PRIOR_SPREAD
        share = PRIOR_SHARE * 0.5 * (1 + math.erf(steps / math.sqrt(2)))
        returned.append(PRIOR_RESTS * (share - before))
        reached.append(left)
        left -= returned[-1]
        before = share
    return returned, reached
