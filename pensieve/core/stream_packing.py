"""Which streamed turns make up which group: packed so that copying and attention end together.

(draft)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

GOOD_ENOUGH = 1.01  # times the lower bound: nothing more is tried


class Item(NamedTuple):
    """A streamed turn, or turns that share pages, in one layer."""

    pages: int
    copy_seconds: float  # of its pages in and of what it writes out
    attention_seconds: float


def packed(
    items: Sequence[Item], pages_max: int, before_seconds: float = 0.0, group_seconds: float = 0.0
) -> list[list[int]]:
    if not items:
        return []
    assert all(item.pages <= pages_max for item in items)
    good = lower_bound(items, pages_max, before_seconds, group_seconds) * GOOD_ENOUGH
    fill = _Filling(items, pages_max)
    best: list[list[int]] = []
    best_end = float("inf")
    tries = TRIES if len(items) <= 200 else TRIES_OF_MANY
    for count, num_ends, by_time in _shapes(items, pages_max, before_seconds, group_seconds)[
        :tries
    ]:
        groups = fill.groups(count, num_ends, by_time, copy_bound=True)
        groups = _ordered(groups, items, before_seconds, group_seconds)
        end = makespan(groups, items, before_seconds, group_seconds)
        if end < best_end:
            best, best_end = groups, end
            if end <= good:
                return best
    if len(items) <= SEARCHED:
        found = _searched(items, pages_max, before_seconds, group_seconds, best_end)
        return found or best
    return _improved(best, items, pages_max, before_seconds, group_seconds, good)


TRIES = 8
TRIES_OF_MANY = 4
SEARCHED = 7
MARGIN = 1.02
STATS = {"nodes": 0}


def _shapes(items, pages_max, before, group_seconds):
    num = len(items)
    copying = sum([i.copy_seconds for i in items])
    attention = sum([i.attention_seconds for i in items])
    fewest = max(1, -(-sum([i.pages for i in items]) // pages_max))
    lesser = min(copying, attention)
    many = 40 if group_seconds <= 0 else min(40, int((lesser / group_seconds) ** 0.5))
    many = min(num, max(many, fewest))
    shapes = []
    for shape in [
        (many, 0, True),
        (fewest, 1, True),
        (many, 1, True),
        (fewest, 2, False),
        (fewest, 0, False),
        (min(num, 2), 0, True),
        (min(num, fewest + 1), 1, True),
        (min(num, 2 * fewest), 1, True),
        (num, 0, True),
    ]:
        if shape not in shapes and shape[0] >= fewest:
            shapes.append(shape)
    return shapes


def _searched(items, pages_max, before, group_seconds, best_end):
    num = len(items)
    every = (1 << num) - 1
    pages = [0]
    copies = [0.0]
    attentions = [0.0]
    for p, c, a in items:
        pages += [x + p for x in pages]
        copies += [x + c for x in copies]
        attentions += [x + a for x in attentions]
    least = [0.0] * (every + 1)
    for m in range(1, every + 1):
        low = m & -m
        rest = m ^ low
        a = attentions[low]
        least[m] = a if not rest or a < least[rest] else least[rest]
    # what is still to pass after the attention of a group begun, at least
    tail_a = [a + group_seconds * -(-p // pages_max) for a, p in zip(attentions, pages)]
    tail_c = [c + l + (group_seconds if c or l else 0) for c, l in zip(copies, least)]
    fits = [0 < p <= pages_max for p in pages]
    fits[0] = False
    seen = {}
    best = None
    limit = best_end / MARGIN
    nodes = 0
    # a state: (attention of the last group begins at, mask of the rest, mask of the last, path)
    stack = []
    for f in range(1, every + 1):
        if fits[f]:
            c = copies[f]
            now = before if before > c else c
            a = attentions[f] + group_seconds
            rest = every ^ f
            if not rest:
                if now + a < limit:
                    best, limit = (f,), (now + a) / MARGIN
            elif max(now + a + tail_a[rest], c + tail_c[rest]) < limit:
                stack.append(
                    (
                        max(now + a + tail_a[rest], c + tail_c[rest]),
                        max(now + a - c, 0.0),
                        c,
                        rest,
                        (f,),
                    )
                )
    stack.sort(reverse=True)
    while stack and nodes < 6000:
        bound, gap, now, rest, path = stack.pop()
        if bound >= limit:
            continue
        s = rest
        children = []
        while s:
            nodes += 1
            if fits[s]:
                c = copies[s]
                t = now + (c if c > gap else gap)
                a = attentions[s] + group_seconds
                left = rest ^ s
                if left:
                    lower = t + max(a + tail_a[left], tail_c[left])
                    if lower < limit:
                        key = left << num | s
                        if t < seen.get(key, limit):
                            seen[key] = t
                            children.append((lower, a, t, left, (*path, s)))
                elif t + a < limit:
                    best, limit = (*path, s), (t + a) / MARGIN
            s = (s - 1) & rest
        children.sort(reverse=True)
        stack += children
    STATS["nodes"] = max(STATS["nodes"], nodes)
    return best and [[i for i in range(num) if m >> i & 1] for m in best]


def makespan(groups, items, before_seconds=0.0, group_seconds=0.0) -> float:
    copies = [sum([items[i].copy_seconds for i in g]) for g in groups]
    attentions = [sum([items[i].attention_seconds for i in g]) + group_seconds for g in groups]
    return _end(copies, attentions, before_seconds)


def _end(copies, attentions, before) -> float:
    if not copies:
        return before
    first = copies[0]
    now = before if before > first else first
    if len(copies) == 1:
        return now + attentions[0]
    now = max(now + attentions[0], first + copies[1])
    last = attentions[1]
    for copy, attention in zip(copies[2:], attentions[2:]):
        now += copy if copy > last else last
        last = attention
    return now + last


def lower_bound(items, pages_max, before_seconds=0.0, group_seconds=0.0) -> float:
    if not items:
        return before_seconds
    copying = sum(i.copy_seconds for i in items)
    attention = sum(i.attention_seconds for i in items)
    pages = sum(i.pages for i in items)
    fewest = max(1, -(-pages // pages_max))
    one = _most_copied(items, pages_max)
    two = _most_copied(items, 2 * pages_max)
    shortest = min(i.attention_seconds for i in items) + group_seconds
    compute = (
        max(before_seconds, min(i.copy_seconds for i in items)) + attention + fewest * group_seconds
    )
    bare = sum(max(0.0, i.attention_seconds - one) for i in items)
    least = min(min(i.attention_seconds, one) for i in items)
    copy = copying + bare + least + group_seconds + max(0.0, before_seconds - 2 * one + least)
    late = 0.0
    if fewest > 2:
        late = before_seconds + shortest + (copying - two) + shortest
    return max(compute, copy, late)


def _most_copied(items, pages):
    seconds = 0.0
    for item in sorted(items, key=lambda i: -i.copy_seconds / max(i.pages, 1)):
        if item.pages >= pages:
            return seconds + item.copy_seconds * pages / max(item.pages, 1)
        seconds += item.copy_seconds
        pages -= item.pages
    return seconds


class _Filling:
    def __init__(self, items, pages_max):
        copying = sum([i.copy_seconds for i in items]) or 1.0
        attention = sum([i.attention_seconds for i in items]) or 1.0
        self.pages_max = pages_max
        self.lanes = ([], [])
        for index, (pages, c, a) in enumerate(items):
            c /= copying
            a /= attention
            if c * (1 + 1e-9) >= a:
                self.lanes[0].append((c, -index, pages, a))
            else:
                self.lanes[1].append((a, -index, pages, c))
        for lane in self.lanes:
            lane.sort()

    def groups(self, count, num_ends, by_time, copy_bound):
        lanes = [list(lane) for lane in self.lanes]
        left = [1.0, 1.0]
        groups = []
        while lanes[0] or lanes[1]:
            share = 1.0 / max(1, count - len(groups))
            gap = [left[0] * share, left[1] * share]
            sides = (0, 1)
            if len(groups) < num_ends and lanes[0]:
                gap[1] = 0.0
                sides = (0,)
            room = self.pages_max
            group = []
            while True:
                first = sides[0] if gap[0] >= gap[1] else sides[-1]
                for lane in (first, 1 - first) if len(sides) == 2 else sides:
                    entries = lanes[lane]
                    if not entries:
                        continue
                    limit = gap[lane] * 1.0001 if by_time and group else 2.0
                    at = bisect_right(entries, (limit, 1)) - 1
                    stop = max(-1, at - 16)
                    while at > stop and entries[at][2] > room:
                        at -= 1
                    if at > stop:
                        break
                else:
                    break
                length, negative, pages, other = entries.pop(at)
                group.append(-negative)
                room -= pages
                gap[lane] -= length
                gap[1 - lane] -= other
                left[lane] -= length
                left[1 - lane] -= other
            groups.append(group)
        return groups


def _ordered(groups, items, before, group_seconds):
    copies = [sum([items[i].copy_seconds for i in g]) for g in groups]
    attentions = [sum([items[i].attention_seconds for i in g]) + group_seconds for g in groups]
    order = _order_of(copies, attentions, before)
    return [groups[i] for i in order]


def _order_of(copies, attentions, before):
    every = range(len(copies))
    if len(copies) == 1:
        return [0]
    best = _path(every, copies, attentions, before)
    if before <= 0:
        return best
    best_end = _end([copies[i] for i in best], [attentions[i] for i in best], before)
    hidden = [i for i in every if copies[i] <= before] or every
    for first in {best[0], max(hidden, key=lambda i: copies[i])}:
        gap = max(before - copies[first], 0) + attentions[first]
        order = [first, *_path([i for i in every if i != first], copies, attentions, gap)]
        end = _end([copies[i] for i in order], [attentions[i] for i in order], before)
        if end < best_end:
            best, best_end = order, end
    return best


def _path(members, copies, attentions, gap):
    """Gilmore and Gomory: least sum of max(attention, next copy)."""
    a = [gap] + [attentions[i] for i in members]
    c = [0.0] + [copies[i] for i in members]
    num = len(a)
    by_a = sorted(range(num), key=a.__getitem__)
    by_c = sorted(range(num), key=c.__getitem__)
    after = [0] * num
    for i, j in zip(by_a, by_c):
        after[i] = j
    cycle = [-1] * num
    for start in range(num):
        at = start
        while cycle[at] < 0:
            cycle[at] = start
            at = after[at]
    swaps = []
    for k in range(num - 1):
        i, j = by_a[k], by_a[k + 1]
        x, y = by_c[k], by_c[k + 1]
        if cycle[i] != cycle[j]:
            cost = max(a[i], c[y]) + max(a[j], c[x]) - max(a[i], c[x]) - max(a[j], c[y])
            swaps.append((cost, k))
    swaps.sort()
    up, down = [], []
    for _, k in swaps:
        i, j = cycle[by_a[k]], cycle[by_a[k + 1]]
        while cycle[i] != i:
            i = cycle[i]
        while cycle[j] != j:
            j = cycle[j]
        if i != j:
            cycle[j] = i
            (down if c[by_c[k]] >= a[by_a[k]] else up).append(k)
    for k in sorted(down, reverse=True) + sorted(up):
        i, j = by_a[k], by_a[k + 1]
        after[i], after[j] = after[j], after[i]
    path = []
    at = after[0]
    while at:
        path.append(members[at - 1])
        at = after[at]
    return path


class _Search:
    """Moves single items, as long as that ends the layer sooner."""

    def __init__(self, groups, items, pages_max, before, group_seconds, good, budget):
        self.groups = [list(g) for g in groups]
        self.items = items
        self.pages_max = pages_max
        self.before = before
        self.launch = group_seconds
        self.good = good
        self.budget = budget
        self.pages = [sum([items[i].pages for i in g]) for g in groups]
        self.copies = [sum([items[i].copy_seconds for i in g]) for g in groups]
        self.attentions = [
            sum([items[i].attention_seconds for i in g]) + group_seconds for g in groups
        ]
        self.end = _end(self.copies, self.attentions, before)

    def run(self):
        improved = True
        while improved and self.end > self.good and self.budget > 0:
            improved = False
            for index in range(len(self.items)):
                if self.budget <= 0 or self.end <= self.good:
                    break
                if self.moved(index) or self.exchanged(index):
                    improved = True
            groups = _ordered(self.groups, self.items, self.before, self.launch)
            end = makespan(groups, self.items, self.before, self.launch)
            if end < self.end * (1 - 1e-9):
                left = self.budget
                self.__init__(
                    groups, self.items, self.pages_max, self.before, self.launch, self.good, left
                )
                improved = True
        return self.groups

    def moved(self, index):
        """To the group where it ends soonest, or to one of its own."""
        items, groups, copies, attentions = self.items, self.groups, self.copies, self.attentions
        pages, copy, attention = items[index]
        home = next(g for g, group in enumerate(groups) if index in group)
        alone = len(groups[home]) == 1
        best, best_end = None, self.end * (1 - 1e-9)
        copies[home] -= copy
        attentions[home] -= attention
        if alone:
            without_c = copies[:home] + copies[home + 1 :]
            without_a = attentions[:home] + attentions[home + 1 :]
        else:
            without_c, without_a = copies, attentions
        self.budget -= 2 * len(groups) + 1
        for at in range(len(without_c)):
            real = at + (alone and at >= home)
            if real == home or self.pages[real] + pages > self.pages_max:
                continue
            without_c[at] += copy
            without_a[at] += attention
            end = _end(without_c, without_a, self.before)
            without_c[at] -= copy
            without_a[at] -= attention
            if end < best_end:
                best, best_end = (real, False), end
        for at in range(len(without_c) + 1):
            end = _end(
                [*without_c[:at], copy, *without_c[at:]],
                [*without_a[:at], attention + self.launch, *without_a[at:]],
                self.before,
            )
            if end < best_end:
                best, best_end = (at, True), end
        if best is None:
            copies[home] += copy
            attentions[home] += attention
            return False
        at, new = best
        groups[home].remove(index)
        if new:
            if alone:
                del groups[home]
            groups.insert(at, [index])
        else:
            groups[at].append(index)
            if alone:
                del groups[home]
        self.recount()
        return True

    def recount(self):
        self.__init__(
            self.groups,
            self.items,
            self.pages_max,
            self.before,
            self.launch,
            self.good,
            self.budget,
        )

    def exchanged(self, index):
        items, groups, copies, attentions = self.items, self.groups, self.copies, self.attentions
        pages, copy, attention = items[index]
        home = next(g for g, group in enumerate(groups) if index in group)
        best, best_end = None, self.end * (1 - 1e-9)
        for g, group in enumerate(groups):
            if g == home:
                continue
            for other in group:
                p, c, a = items[other]
                if (
                    self.pages[home] - pages + p > self.pages_max
                    or self.pages[g] - p + pages > self.pages_max
                ):
                    continue
                self.budget -= 1
                hc, ha, gc, ga = copies[home], attentions[home], copies[g], attentions[g]
                copies[home] = hc - copy + c
                attentions[home] = ha - attention + a
                copies[g] = gc + copy - c
                attentions[g] = ga + attention - a
                end = _end(copies, attentions, self.before)
                copies[home], attentions[home], copies[g], attentions[g] = hc, ha, gc, ga
                if end < best_end:
                    best, best_end = (g, other), end
        if best is None:
            return False
        g, other = best
        groups[g].remove(other)
        groups[home].remove(index)
        groups[g].append(index)
        groups[home].append(other)
        self.recount()
        return True


def _improved(groups, items, pages_max, before, group_seconds, good):
    return _Search(groups, items, pages_max, before, group_seconds, good, BUDGET).run()


BUDGET = 400
