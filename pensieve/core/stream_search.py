"""Better groups for few streamed turns: an exhaustive search with pruning, or moves of single turns.

Both end after a number of steps, whatever they are given.
"""

from __future__ import annotations

from itertools import chain

from pensieve.core.stream_layer import Groups, StreamLayer, end_of, sums_of

SEARCHED_ITEMS = 7  # so few are searched exhaustively
SEARCH_STEPS = 6000  # subsets looked at; 5 turns never take 400
SEARCH_MARGIN = 1.03  # the search may end with so many times the best makespan
IMPROVEMENT_STEPS = 2000  # groups looked at
GAIN = 1 - 1e-9  # less is rounding


def searched(layer: StreamLayer, limit: float) -> Groups | None:
    """Groups that end before `limit`, if there are any worth it: within `SEARCH_MARGIN` of the best, as long
    as `SEARCH_STEPS` are enough.

    A state is the set of items left, the group that begins to attend, and when it does; the next group is any
    subset of those left.  The most promising is followed first.  A state is left where its lower bound shows
    that it cannot gain enough, or where the same was reached no later.
    """
    num, launch = len(layer.items), layer.launch
    every = (1 << num) - 1
    pages, copies, attentions = [0], [0.0], [0.0]  # of each subset
    for p, c, a in layer.items:
        pages += [each + p for each in pages]
        copies += [each + c for each in copies]
        attentions += [each + a for each in attentions]
    shortest = [0.0] * (every + 1)  # attention of a subset's members
    for subset in range(1, every + 1):
        lowest = subset & -subset
        rest = subset ^ lowest
        shortest[subset] = min(attentions[lowest], shortest[rest] if rest else attentions[lowest])
    attending = [
        a + launch * -(-p // layer.pages_max) for a, p in zip(attentions, pages, strict=True)
    ]
    loading = [
        c + a + launch for c, a in zip(copies, shortest, strict=True)
    ]  # and the last attention
    best: tuple[int, ...] | None = None
    limit /= SEARCH_MARGIN
    reached: dict[int, float] = {}  # when
    # Of a state: bound, seconds until the next may attend, now, items left, groups.
    stack: list[tuple[float, float, float, int, tuple[int, ...]]] = [(0.0, 0.0, 0.0, every, ())]
    steps = 0
    while stack and steps < SEARCH_STEPS:
        bound, gap, now, left, path = stack.pop()
        if bound >= limit:
            continue
        children = []
        group = left
        while group:
            steps += 1
            if pages[group] <= layer.pages_max:
                copy, attention, rest = copies[group], attentions[group] + launch, left ^ group
                if path:
                    begins = now + (copy if copy > gap else gap)
                    wait = attention
                else:  # the second load begins when the first has ended
                    begins = copy
                    wait = max(layer.before - copy, 0.0) + attention
                if not rest:
                    if begins + wait < limit:
                        best, limit = (*path, group), (begins + wait) / SEARCH_MARGIN
                else:
                    bound = begins + max(wait + attending[rest], loading[rest])
                    key = rest << num | group
                    if bound < limit and begins < reached.get(key, limit):
                        reached[key] = begins
                        children.append((bound, wait, begins, rest, (*path, group)))
            group = (group - 1) & left
        children.sort(reverse=True)
        stack += children
    if best is None:
        return None
    return [[i for i in range(num) if group >> i & 1] for group in best]


class Improvement:
    """Moves and exchanges single items, as long as that ends the layer sooner."""

    def __init__(self, layer: StreamLayer, groups: Groups, good: float) -> None:
        self.layer = layer
        self.good = good
        self.steps = IMPROVEMENT_STEPS
        self._take(groups)

    def run(self) -> Groups:
        improved = True
        while improved and self._goes_on():
            improved = False
            for index in range(len(self.layer.items)):
                if not self._goes_on():
                    break
                improved |= self._moved(index) or self._exchanged(index)
            groups, end = self.layer.ordered(self.groups)
            if end < self.end * GAIN:
                self._take(groups)
                improved = True
        return self.groups

    def _goes_on(self) -> bool:
        return self.steps > 0 and self.end > self.good

    def _take(self, groups: Groups) -> None:
        self.groups = [list(group) for group in groups if group]
        self.pages = [sum([self.layer.pages[i] for i in group]) for group in self.groups]
        self.copies, self.attentions = sums_of(self.groups, self.layer.items, self.layer.launch)
        self.end = end_of(self.copies, self.attentions, self.layer.before)
        self.home = {index: at for at, group in enumerate(self.groups) for index in group}

    def _moved(self, index: int) -> bool:
        """To the group where it ends soonest, or to one of its own."""
        home = self.home[index]
        pages, copy, attention = self.layer.items[index]
        others = [list(group) for group in self.groups]
        others[home].remove(index)
        copies, attentions, room = list(self.copies), list(self.attentions), list(self.pages)
        copies[home] -= copy
        attentions[home] -= attention
        room[home] = self.layer.pages_max  # not back where it was
        if not others[home]:
            for each in (others, copies, attentions, room):
                del each[home]
        best, best_end = None, self.end * GAIN
        self.steps -= (2 * len(others) + 1) * (len(others) + 3)
        for at in range(len(others)):
            if room[at] + pages <= self.layer.pages_max:
                was = copies[at], attentions[at]
                copies[at] += copy
                attentions[at] += attention
                end = end_of(copies, attentions, self.layer.before)
                copies[at], attentions[at] = was
                if end < best_end:
                    best, best_end = (at, at + 1), end
        for at in range(len(others) + 1):
            end = end_of(
                [*copies[:at], copy, *copies[at:]],
                [*attentions[:at], attention + self.layer.launch, *attentions[at:]],
                self.layer.before,
            )
            if end < best_end:
                best, best_end = (at, at), end
        if best is None:
            return False
        start, stop = best
        others[start:stop] = [[*chain(*others[start:stop]), index]]
        self._take(others)
        return True

    def _exchanged(self, index: int) -> bool:
        """For the item of another group with which it ends soonest."""
        home = self.home[index]
        pages, copy, attention = self.layer.items[index]
        copies, attentions = self.copies, self.attentions
        room = self.layer.pages_max - self.pages[home] + pages
        best, best_end = None, self.end * GAIN
        for at, group in enumerate(self.groups):
            other_room = self.layer.pages_max - self.pages[at] - pages
            for other in group if at != home else ():
                p, c, a = self.layer.items[other]
                if p > room or other_room + p < 0:
                    continue
                self.steps -= len(copies) + 3
                was = copies[home], attentions[home], copies[at], attentions[at]
                copies[home] += c - copy
                attentions[home] += a - attention
                copies[at] += copy - c
                attentions[at] += attention - a
                end = end_of(copies, attentions, self.layer.before)
                copies[home], attentions[home], copies[at], attentions[at] = was
                if end < best_end:
                    best, best_end = other, end
        if best is None:
            return False
        exchange = {index: best, best: index}
        self._take([[exchange.get(each, each) for each in group] for group in self.groups])
        return True
