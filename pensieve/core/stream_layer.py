"""What a layer takes whose streamed turns are loaded and attend in groups: makespan, lower bound, best order.

**One layer has two lanes.**  The copy lane loads groups one after the other.  The compute lane is first busy
for `before_seconds` (the dense parts, the attention of resident turns) and attends then, group after group,
each with `group_seconds` more for its launches.  There are two staging arenas, so

    load(g)       begins when load(g - 1) and attention(g - 2) have ended
    attention(g)  begins when load(g) and attention(g - 1) have ended

From the second group on, load g + 1 and attention g therefore begin at the same moment, and what passes until
the next two begin is the longer of both.  With c a group's copying and a its attention with its launches:

    makespan = max(max(before, c[1]) + a[1], c[1] + c[2])
             + sum of max(a[g], c[g + 1]) for g = 2 .. last - 1
             + a[last]

So a group should copy as long as the group in front of it attends: neither lane waits, both end together.

**What is minimised** is this makespan.  Over many layers the first load of the next layer runs beside the
last attention of this one.  A layer then takes less than its makespan, by no more than the shorter of those
two, and by nothing where `before_seconds` covers the first two loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Item(NamedTuple):
    """A streamed turn, or turns that share pages, in one layer."""

    pages: int
    copy_seconds: float  # of its pages in and of what it writes out
    attention_seconds: float


Groups = list[list[int]]  # indexes of items


def makespan(
    groups: Groups, items: Sequence[Item], before_seconds: float = 0.0, group_seconds: float = 0.0
) -> float:
    """When the last attention of the layer ends."""
    copies, attentions = sums_of(groups, items, group_seconds)
    return end_of(copies, attentions, before_seconds)


def lower_bound(
    items: Sequence[Item], pages_max: int, before_seconds: float = 0.0, group_seconds: float = 0.0
) -> float:
    """No groups in any order have a makespan below this."""
    if not items:
        return before_seconds
    return StreamLayer(items, pages_max, before_seconds, group_seconds).lower_bound()


class StreamLayer:
    def __init__(
        self, items: Sequence[Item], pages_max: int, before_seconds: float, group_seconds: float
    ) -> None:
        self.items = items
        self.pages_max = pages_max
        self.before = before_seconds
        self.launch = group_seconds
        self.pages = [item[0] for item in items]
        self.copies = [item[1] for item in items]
        self.attentions = [item[2] for item in items]
        assert 0 < pages_max >= max(self.pages), (max(self.pages), pages_max)
        self.copying = sum(self.copies)
        self.attention = sum(self.attentions)
        self.num_groups_min = max(1, -(-sum(self.pages) // pages_max))

    def ordered(self, groups: Groups) -> tuple[Groups, float]:
        copies, attentions = sums_of(groups, self.items, self.launch)
        order, end = order_of(copies, attentions, self.before)
        return [groups[index] for index in order], end

    def lower_bound(self) -> float:
        launch, copies, attentions = self.launch, self.copies, self.attentions
        copying, attention = self.copying, self.attention
        shortest = min(attentions)
        compute = max(self.before, min(copies)) + attention + self.num_groups_min * launch
        # Of each item, its copy ends before the longest one's does, or its attention begins behind it.
        both = sum(map(min, copies, attentions)) + max(map(max, copies, attentions)) + launch
        bounds = [compute, both]
        # Beside one attention lies one load at most, so the rest of a long attention has none beside it.
        densest = sorted(
            zip(copies, self.pages, strict=True),
            key=lambda pair: pair[0] / (pair[1] or 1),
            reverse=True,
        )
        one = _divided(densest, self.pages_max)
        two = _divided(densest, 2 * self.pages_max)
        bare = sum([each - one for each in attentions if each > one])
        least = min(shortest, one)
        bounds.append(copying + bare + least + launch + max(0.0, self.before - 2 * one + least))
        if self.num_groups_min > 2:
            # Two loads lie before the first attention's end; all others behind it, and one attention then.
            gains = sorted(
                [(c - a, p) for p, c, a in self.items if c > a],
                key=lambda pair: pair[0] / (pair[1] or 1),
                reverse=True,
            )
            hidden = min(two - shortest, one + _divided(gains, self.pages_max))
            bounds.append(self.before + launch + copying - hidden + shortest + launch)
        return max(bounds)


def _divided(densest: list[tuple[float, int]], room: int) -> float:
    """The most seconds that fit into so many pages, were items divisible."""
    seconds = 0.0
    for value, pages in densest:
        if pages >= room:
            return seconds + value * room / (pages or 1)
        seconds += value
        room -= pages
    return seconds


def sums_of(
    groups: Groups, items: Sequence[Item], launch: float
) -> tuple[list[float], list[float]]:
    copies = [sum([items[index][1] for index in group]) for group in groups]
    attentions = [sum([items[index][2] for index in group]) + launch for group in groups]
    return copies, attentions


def end_of(copies: Sequence[float], attentions: Sequence[float], before: float) -> float:
    if not copies:
        return before
    first = copies[0]
    now = (first if first > before else before) + attentions[0]
    if len(copies) == 1:
        return now
    now = max(now, first + copies[1])
    last = attentions[1]
    for copy, attention in zip(copies[2:], attentions[2:], strict=True):
        now += copy if copy > last else last
        last = attention
    return now + last


def order_of(
    copies: list[float], attentions: list[float], before: float
) -> tuple[Sequence[int], float]:
    """An order of groups, and its makespan: the least there is if nothing is before the first attention."""
    every = range(len(copies))
    best = path_of(every, copies, attentions, before)
    candidates = [best]
    if before > 0 and len(copies) > 1:
        quickest = min(every, key=lambda i: max(before - copies[i], 0.0) + attentions[i])
        for first in dict.fromkeys((best[0], quickest)):
            rest = [i for i in every if i != first]
            gap = max(before - copies[first], 0.0) + attentions[first]
            candidates.append([first, *path_of(rest, copies, attentions, gap)])
    ends = [end_of([copies[i] for i in o], [attentions[i] for i in o], before) for o in candidates]
    end = min(ends)
    return candidates[ends.index(end)], end


def path_of(
    members: Sequence[int], copies: list[float], attentions: list[float], gap: float
) -> list[int]:
    """The order with the least sum of max(attention, the next one's copying), where `gap` is in front.

    Gilmore and Gomory (1964): attentions and copies matched in sorted order have the least sum; it is made
    one cycle by the cheapest exchanges of neighbours, those that lift carried out from above, the others from
    below.  Member 0 here is the start, whose attention is the gap, and the end, which copies nothing.
    """
    a = [gap, *[attentions[i] for i in members]]
    c = [0.0, *[copies[i] for i in members]]
    num = len(a)
    by_a = sorted(range(num), key=a.__getitem__)
    by_c = sorted(range(num), key=c.__getitem__)
    after = [0] * num
    for i, j in zip(by_a, by_c, strict=True):
        after[i] = j
    cycle = [-1] * num  # a forest: the root names the cycle
    for start in range(num):
        at = start
        while cycle[at] < 0:
            cycle[at] = start
            at = after[at]
    exchanges = []
    for k in range(num - 1):
        if cycle[by_a[k]] != cycle[by_a[k + 1]]:
            low, high, below, above = a[by_a[k]], a[by_a[k + 1]], c[by_c[k]], c[by_c[k + 1]]
            cost = max(low, above) + max(high, below) - max(low, below) - max(high, above)
            exchanges.append((cost, k))
    lifting: list[int] = []
    others: list[int] = []
    for _, k in sorted(exchanges):
        i, j = by_a[k], by_a[k + 1]
        while cycle[i] != i:
            i = cycle[i]
        while cycle[j] != j:
            j = cycle[j]
        if i != j:
            cycle[j] = i
            (lifting if c[by_c[k]] >= a[by_a[k]] else others).append(k)
    for k in sorted(lifting, reverse=True) + sorted(others):
        i, j = by_a[k], by_a[k + 1]
        after[i], after[j] = after[j], after[i]
    path = []
    at = after[0]
    while at:
        path.append(members[at - 1])
        at = after[at]
    return path
