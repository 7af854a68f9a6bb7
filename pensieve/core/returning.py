"""A policy that learns who comes back.

    value = cost(l) · the most returns per second of waiting, having been idle so long

After each turn a conversation belongs to a group (`group_of`): how many turns it has had, how much was said
and answered, how long it stayed away before.  For each group a life table is learned from nothing but what
happens: of those that were idle for so long, how many returned within the next stretch of time?  Stretches
are geometric (`EDGES`), so a table is a few dozen pairs of counts (at risk, returned).

From a table follows, for each idle time t, the best that keeping a chunk can bring: over all times u > t,

    max  P(returns before u | idle for t) / E(time until it returns, or u)

which is what a chunk's page yields per second if it is given up at the right moment.  So no horizon has to be
guessed, and the size of the cache does not matter: it decides how far down the list is kept.

Counts begin as a few made-up conversations (`PRIOR_…`) and fade, so that tables follow a shifting workload.
Each rest of a conversation is a record that moves from stretch to stretch as time passes; that a conversation
whose KV is gone returns is learned just the same.  A record moves at most once per stretch and is forgotten
behind the last, or when there are too many: bounded memory, and a bounded amount of work per event.

Inside a class (group, cost) the value never rises with idle time, which is what lets a queue keep its order
(retention.py): where the table says otherwise, the least value so far counts.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict, deque
from itertools import islice
from typing import NamedTuple

from pensieve.core.chunk import Branch
from pensieve.core.cost import CostProfile

EDGES = tuple(2.0 * 1.25**i for i in range(40))  # seconds; the last is about four hours
COST_STEPS = 8
COST_RATIO = 1.25
RECORDS_MAX = 200_000
HOLDERS_ASKED_MAX = 8
FADE_EVERY_SECONDS = 60.0
FADE = 0.98  # half in 34 minutes
PRIOR_WEIGHT = 20.0  # conversations
PRIOR_RETURN = (0.1, 0.3, 0.25, 0.2, 0.35, 0.45, 0.5, 0.6)  # of each group, ever
PRIOR_MEDIAN_SECONDS = 120.0
# Where groups part: of first turns, and of later ones.
SHORT_LOG_TOKENS, SHORT_REPLY_TOKENS, LONG_LOG_TOKENS = 1536, 100, 8192
NEW_SUBJECT_TOKENS = 1536  # whoever brings so much is about to begin something else
QUICK_SECONDS = 60.0
OFTEN_TURNS = 5


class Turned(NamedTuple):
    """A turn that ended."""

    input_tokens: int
    output_tokens: int
    length: int  # of the log


def group_of(turns: int, turned: Turned, away_seconds: float) -> int:
    if turns == 1:
        if turned.length < SHORT_LOG_TOKENS or turned.output_tokens < SHORT_REPLY_TOKENS:
            return 0
        return 1 if turned.length < LONG_LOG_TOKENS else 2
    if turned.input_tokens >= NEW_SUBJECT_TOKENS:
        return 3
    if turns == 2:
        return 4 if away_seconds >= QUICK_SECONDS else 5
    return 6 if turns < OFTEN_TURNS else 7


class _Rest:
    """A conversation between two turns."""

    __slots__ = ("group", "returned", "since", "turns")

    def __init__(self, group: int, turns: int, since: float) -> None:
        self.group = group
        self.turns = turns
        self.since = since
        self.returned = False


class ReturnPolicy:
    name = "return"
    num_classes = len(PRIOR_RETURN) * COST_STEPS
    class_ratio = COST_RATIO
    ordered = False  # by group, then by cost

    def __init__(self, cost: CostProfile, chunk_tokens: int) -> None:
        self._cost = cost
        self._chunk_tokens = chunk_tokens
        self._steps: list[float] = []  # by chunk index
        self._cost_of_step = [COST_RATIO**step for step in range(COST_STEPS)]
        self._rests: OrderedDict[str, _Rest] = OrderedDict()
        self._stretches: list[deque[_Rest]] = [deque() for _ in EDGES]
        self._returned = [_prior_returned(share) for share in PRIOR_RETURN]
        self._at_risk = [_prior_at_risk(returned) for returned in self._returned]
        self._prior = (
            [list(each) for each in self._at_risk],
            [list(each) for each in self._returned],
        )
        self._faded_at = 0.0
        self._tables = [_worth(*each) for each in zip(self._at_risk, self._returned, strict=True)]

    # -- what happens --

    def rested(self, name: str, turned: Turned, now: float) -> None:
        """A turn of that conversation has ended."""
        self._advance(now)
        before = self._rests.pop(name, None)
        turns = 1 + (before.turns if before is not None else 0)
        away = now - before.since if before is not None else 0.0
        rest = _Rest(group_of(turns, turned, away), turns, now)
        self._rests[name] = rest
        self._stretches[0].append(rest)
        self._at_risk[rest.group][0] += 1
        if len(self._rests) > RECORDS_MAX:
            self._rests.popitem(last=False)

    def returned(self, name: str, now: float) -> None:
        """A turn of it begins."""
        self._advance(now)
        rest = self._rests.get(name)
        if rest is not None and not rest.returned:
            rest.returned = True
            stretch = min(bisect_right(EDGES, now - rest.since), len(EDGES) - 1)
            self._returned[rest.group][stretch] += 1

    def forked(self, name: str) -> None:
        """A conversation of that name begins as a fork: whatever had the name before is another."""
        self._rests.pop(name, None)

    def _advance(self, now: float) -> None:
        for index, stretch in enumerate(self._stretches):
            edge = EDGES[index]
            while stretch and (stretch[0].returned or now - stretch[0].since >= edge):
                rest = stretch.popleft()
                if not rest.returned and index + 1 < len(EDGES):
                    self._at_risk[rest.group][index + 1] += 1
                    self._stretches[index + 1].append(rest)
        if now - self._faded_at >= FADE_EVERY_SECONDS:
            self._faded_at = now
            for counts, priors in zip((self._at_risk, self._returned), self._prior, strict=True):
                for row, prior in zip(counts, priors, strict=True):
                    row[:] = [
                        least + FADE * (count - least)
                        for count, least in zip(row, prior, strict=True)
                    ]
            self._tables = [
                _worth(*each) for each in zip(self._at_risk, self._returned, strict=True)
            ]

    # -- what it is worth --

    def class_of(self, branch: Branch, chunk_index: int, now: float) -> int:
        while chunk_index >= len(self._steps):
            seconds = self._cost.chunk_seconds((len(self._steps) + 1) * self._chunk_tokens)
            self._steps.append(math.log(seconds / self._cost.chunk_seconds(0), COST_RATIO))
        steps = self._steps[chunk_index]
        if len(branch.holders) > 1:
            steps += math.log(branch.weight(now), COST_RATIO)
        group = 0
        for holder in islice(reversed(branch.holders), HOLDERS_ASKED_MAX):
            rest = self._rests.get(holder.conversation_id)
            if rest is not None:  # a fork that has not spoken yet has none
                group = rest.group
                break
        return group * COST_STEPS + min(max(int(steps), 0), COST_STEPS - 1)

    def value(self, class_index: int, idle_seconds: float) -> float:
        group, step = divmod(class_index, COST_STEPS)
        table = self._tables[group]
        return table[bisect_right(EDGES, idle_seconds)] * self._cost_of_step[step]


def _worth(at_risk: list[float], returned: list[float]) -> list[float]:
    """For each stretch of idle time, the most returns per second that keeping can bring."""
    edges = (0.0, *EDGES)
    away, waited = (
        [1.0],
        [0.0],
    )  # the share that is still away at each edge; seconds waited until then
    for index, (risk, back) in enumerate(zip(at_risk, returned, strict=True)):
        hazard = min(back / risk, 0.99) if risk > 0 else 0.0
        away.append(away[-1] * (1 - hazard))
        width = edges[index + 1] - edges[index]
        waited.append(waited[-1] + width * (away[-2] + away[-1]) / 2)
    worth: list[float] = []
    for begin in range(len(EDGES)):
        best = max(
            (away[begin] - away[end]) / (waited[end] - waited[begin])
            for end in range(begin + 1, len(away))
        )
        worth.append(min(best, worth[-1]) if worth else best)
    return [*worth, worth[-1] * 1e-3]  # behind the last edge nobody is expected


def _prior_returned(share: float) -> list[float]:
    """Of `PRIOR_WEIGHT` conversations, how many return in each stretch: gaps are log-normal."""
    found, before = [], 0.0
    for edge in EDGES:
        upto = 0.5 * (1 + math.erf(math.log(edge / PRIOR_MEDIAN_SECONDS) / math.sqrt(2)))
        found.append(PRIOR_WEIGHT * share * (upto - before))
        before = upto
    return found


def _prior_at_risk(returned: list[float]) -> list[float]:
    left, found = PRIOR_WEIGHT, []
    for back in returned:
        found.append(left)
        left -= back
    return found
