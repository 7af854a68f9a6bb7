"""Divide the streamed turns of an iteration into groups. The turns of a group attend together.

The pages of a group must fit into a staging arena. `pack` chooses the turns of each group and the order of
the groups. Turns that begin with the same chunks stay together if an arena can hold them, so that shared
chunks are copied once.

Packing takes milliseconds. So groups are kept from one iteration to the next and *mended*: turns that no
longer stream are removed. New turns, and turns that no longer fit into their group, are added to the group
with the fewest pages, or to a new group. Mended groups are as correct as packed groups, but less balanced.
Groups are packed again every PACK_EVERY iterations. They are also packed again when the number of added and
removed turns reaches half of the turns that stream now.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import permutations
from typing import NamedTuple

from pensieve.core.cost import work_of
from pensieve.core.iteration import PageGroup, Slice
from pensieve.core.prefix_tree import Branch, Chunk
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.core.tiers import CacheConfig
from pensieve.core.turn import Turn

PACK_EVERY = 512
CHANGED_SHARE = 0.5
MENDS_MAX = 2  # once for added and removed turns, once for contexts that have grown
GROWING = 8  # a group is full if its free pages are fewer than its turns / GROWING
SLACK = 1 / 16  # fraction of an arena that is left free when a full group is mended
MANY_GROUPS = 40  # more groups gain little: the idle time at both ends is 1 / MANY_GROUPS of a lane
SOME_GROUPS = 12
FEW_ITEMS = 7  # up to this many items, all divisions are tried: at most 877, in about 8 ms
FEW_GROUPS = 4  # up to this many groups, all orders are tried
ITEMS_TRIED_MAX = 16  # items that are tried, the longest first, until one fits into the group
PathOf = Callable[[Turn], list[Branch]]


class StreamGroups:
    def __init__(self, cache: CacheConfig, config: SchedulerConfig, path_of: PathOf) -> None:
        chunk_tokens, pages_max = cache.chunk_tokens, cache.staging_pages
        self.size, self._pages_max = chunk_tokens, pages_max
        self._cost = config.cost
        self._copy_seconds, self._group_seconds = config.copy_seconds, config.group_seconds
        self.path_of = path_of
        self.indexes = array("i", range(pages_max))
        self.full = array("i", [chunk_tokens]) * pages_max
        self.none = array("i", [0]) * pages_max
        self._kept: list[list[int]] = []  # the turn ids of each group
        self._sizes: list[int] = []  # number of pages of each group in the previous iteration
        self._age = self._num_changed = 0  # iterations, and changed turns, since the last packing

    def arrange(
        self,
        slices: Sequence[Slice],
        streamed: Mapping[int, Turn],
        filled_before: Mapping[Chunk, int],
    ) -> tuple[tuple[Slice, ...], tuple[PageGroup, ...]]:
        """Return the iteration's slices (those of streamed turns last), and the groups."""
        resident: list[Slice] = []
        pieces: dict[int, list[Slice]] = {attempt_id: [] for attempt_id in streamed}
        for piece in slices:
            turn_pieces = pieces.get(piece.attempt_id)
            (resident if turn_pieces is None else turn_pieces).append(piece)
        self._age += 1
        num_changed_max = CHANGED_SHARE * len(pieces)
        if self._kept and self._age < PACK_EVERY:
            known: dict[tuple[int, ...], _GroupBuilder] = {}
            for _ in range(MENDS_MAX):
                self._mend(streamed, pieces)
                made = self._make_groups(resident, streamed, pieces, filled_before, known)
                if self._num_changed > num_changed_max:
                    break
                if max(self._sizes) <= self._pages_max:
                    return made
        turns = [streamed[attempt_id] for attempt_id in pieces]
        self._kept = self._pack(turns, pieces, resident)
        self._age = self._num_changed = 0
        return self._make_groups(resident, streamed, pieces, filled_before, {})

    def _mend(self, streamed: Mapping[int, Turn], pieces: Mapping[int, list[Slice]]) -> None:
        """Adapt the groups to the turns that stream now. This may separate turns that share chunks."""
        kept = [[each for each in group if each in pieces] for group in self._kept]
        sizes = [size for size, group in zip(self._sizes, kept, strict=True) if group]
        groups = [group for group in kept if group]
        loose = pieces.keys() - {each for group in groups for each in group}
        self._num_changed += len(loose) + sum(map(len, self._kept)) - sum(map(len, groups))
        for number, group in enumerate(groups):
            is_full = sizes[number] > self._pages_max - len(group) // GROWING
            for attempt_id in reversed(group) if is_full else ():
                if sizes[number] > self._pages_max * (1 - SLACK):
                    sizes[number] -= self._num_own_pages(streamed[attempt_id], pieces[attempt_id])
                    loose.add(attempt_id)
        groups = [[each for each in group if each not in loose] for group in groups]
        for attempt_id in sorted(loose, key=lambda each: (-self.num_pages(pieces[each]), each)):
            num_pages = self.num_pages(pieces[attempt_id])
            number = min(range(len(sizes)), key=sizes.__getitem__, default=-1)
            if number < 0 or sizes[number] + num_pages > self._pages_max:
                number = len(groups)
                groups.append([])
                sizes.append(0)
            groups[number].append(attempt_id)
            sizes[number] += num_pages
        self._kept = [group for group in groups if group]

    def _make_groups(
        self,
        resident: Sequence[Slice],
        streamed: Mapping[int, Turn],
        pieces: Mapping[int, list[Slice]],
        filled_before: Mapping[Chunk, int],
        known: dict[tuple[int, ...], _GroupBuilder],
    ) -> tuple[tuple[Slice, ...], tuple[PageGroup, ...]]:
        """Make the groups. `known`: groups already made for this iteration, by their turns."""
        ordered, made = list(resident), []
        for attempt_ids in map(tuple, self._kept):
            group = known.get(attempt_ids)
            if group is None:
                group = known[attempt_ids] = _GroupBuilder(self, filled_before)
                for attempt_id in attempt_ids:
                    group.add(streamed[attempt_id], pieces[attempt_id])
            made.append(group.finish(len(ordered)))
            ordered += group.slices
        self._sizes = [len(each.host_pages) for each in made]
        return tuple(ordered), tuple(made)

    def _pack(
        self, turns: Sequence[Turn], pieces: Mapping[int, list[Slice]], resident: Sequence[Slice]
    ) -> list[list[int]]:
        """Pack the turns into groups of turn ids."""
        clusters = self._clusters(turns, pieces)
        items = [self._item(cluster, pieces) for cluster in clusters]
        before = self._cost.iteration_seconds((each.start, each.stop) for each in resident)
        groups = pack(items, self._pages_max, before, self._group_seconds)
        return [[turn.attempt_id for i in group for turn in clusters[i]] for group in groups]

    def _clusters(
        self, turns: Sequence[Turn], pieces: Mapping[int, list[Slice]]
    ) -> list[list[Turn]]:
        """Cluster turns that share their first chunks, split where an arena cannot hold them all."""
        by_root: dict[int, list[Turn]] = {}
        for turn in turns:
            branch = turn.chunks[0].branch
            is_shared = branch is not None and len(branch.holders) > 1
            by_root.setdefault(id(branch if is_shared else turn), []).append(turn)
        clusters: list[list[Turn]] = []
        for sharing in by_root.values():
            if len(sharing) == 1:
                clusters.append(sharing)
                continue
            left = 0
            seen: set[Branch] = set()
            for turn in sharing:
                path, stop = self.path_of(turn), self.num_pages(pieces[turn.attempt_id])
                own = sum(_num_chunks(each, stop) for each in path if each not in seen)
                if own > left:
                    clusters.append([])
                    left, own = self._pages_max, stop
                    seen.clear()
                clusters[-1].append(turn)
                seen.update(path)
                left -= own
        return clusters

    def _item(self, cluster: Sequence[Turn], pieces: Mapping[int, list[Slice]]) -> StreamItem:
        spans = [(each.start, each.stop) for turn in cluster for each in pieces[turn.attempt_id]]
        if len(cluster) == 1:
            num_pages = self.num_pages(pieces[cluster[0].attempt_id])
        else:
            stops = {
                branch: self.num_pages(pieces[turn.attempt_id])
                for turn in cluster
                for branch in self.path_of(turn)
            }
            num_pages = sum(_num_chunks(branch, stop) for branch, stop in stops.items())
        work = work_of(spans)
        attention = self._cost.attention_seconds(work.pairs, work.keys)
        return StreamItem(num_pages, self._copy_seconds * num_pages, attention)

    def _num_own_pages(self, turn: Turn, pieces: Sequence[Slice]) -> int:
        """Return the pages of chunks that no other conversation holds."""
        stop = self.num_pages(pieces)
        if _is_alone(turn):
            return stop
        own = (branch for branch in self.path_of(turn) if len(branch.holders) == 1)
        return sum(_num_chunks(branch, stop) for branch in own)

    def num_pages(self, pieces: Sequence[Slice]) -> int:
        return -(-pieces[-1].stop // self.size)


class _GroupBuilder:
    """A group to which turns are being added."""

    def __init__(self, groups: StreamGroups, filled_before: Mapping[Chunk, int]) -> None:
        self._groups, self._filled_before = groups, filled_before
        self._host_pages, self._loaded, self._stored = array("i"), array("i"), array("i")
        self._begins: dict[Branch, int] = {}  # index of the first page of each shared branch
        self.slices: list[Slice] = []  # with page tables that are indexes into the pages

    def add(self, turn: Turn, pieces: Sequence[Slice]) -> None:
        groups, first = self._groups, pieces[0]
        is_decode = len(pieces) == 1 and first.stop - first.start == 1
        stop, count = groups.num_pages(pieces), len(turn.chunks)
        if is_decode and stop == count and _is_alone(turn):
            begin = len(self._host_pages)
            self._add(turn.page_table, turn.chunks, True)
            table = groups.indexes[begin : begin + count]
            self.slices.append(_with_table(first, table))
            return
        table = array("i")
        for branch in groups.path_of(turn):
            count = _num_chunks(branch, stop)
            if not count:
                break
            is_shared = len(branch.holders) > 1
            begins = self._begins.get(branch) if is_shared else None
            if begins is None:
                begins = len(self._host_pages)
                if is_shared:
                    self._begins[branch] = begins
                pages = turn.page_table[branch.start : branch.start + count]
                self._add(pages, branch.chunks, is_decode and branch.start + count == stop)
            table += groups.indexes[begins : begins + count]
        if is_decode:
            self.slices.append(_with_table(first, table))
            return
        for each in pieces:
            self.slices.append(_with_table(each, table[: -(-each.stop // groups.size)]))

    def _add(self, pages: array[int], chunks: Sequence[Chunk], is_decode: bool) -> None:
        """Add the pages of a branch's first chunks. A decode writes only to the last page."""
        groups, before = self._groups, self._filled_before
        self._host_pages += pages
        if is_decode:
            last = chunks[len(pages) - 1]
            self._loaded += groups.full[: len(pages) - 1]
            self._loaded.append(before[last])
            self._stored += groups.none[: len(pages) - 1]
            self._stored.append(last.filled)
            return
        for chunk in chunks[: len(pages)]:
            self._loaded.append(before.get(chunk, chunk.filled))
            self._stored.append(chunk.filled if chunk in before else 0)

    def finish(self, first_slice: int) -> PageGroup:
        """Return the group; `first_slice` is the index of its first slice in the iteration."""
        stop_slice = first_slice + len(self.slices)
        return PageGroup(first_slice, stop_slice, self._host_pages, self._loaded, self._stored)


def _with_table(piece: Slice, page_table: array[int]) -> Slice:
    """Replace the page table, for every generating turn. `_replace` is slower."""
    return Slice(*piece[:4], page_table, *piece[5:])


def _is_alone(turn: Turn) -> bool:
    """Whether no other conversation holds the turn's chunks."""
    first, last = turn.chunks[0].branch, turn.chunks[-1].branch
    return first is last and first is not None and len(first.holders) == 1


def _num_chunks(branch: Branch, stop: int) -> int:
    """Return how many of a branch's chunks are among the first `stop` of a context."""
    return max(min(branch.end, stop) - branch.start, 0)


# -- which turns make a group: the packing --


class StreamItem(NamedTuple):
    """A streamed turn, or several turns that share pages, with the costs in one layer."""

    pages: int
    copy_seconds: float  # to copy its pages in and its written slots out
    attention_seconds: float


Groups = list[list[int]]  # indexes of items


def pack(
    items: Sequence[StreamItem],
    pages_max: int,
    before_seconds: float = 0.0,
    group_seconds: float = 0.0,
) -> Groups:
    """Return groups of at most `pages_max` pages each, in an order that makes a layer short.

    A layer has two lanes. The copy lane loads one group after the other. The compute lane is first busy for
    `before_seconds` (the dense parts, and the attention of resident turns). Then it attends to one group
    after the other; launching a group takes another `group_seconds`. There are two staging arenas, so

        load(g)       begins when load(g - 1) and attention(g - 2) have ended
        attention(g)  begins when load(g) and attention(g - 1) have ended

    From the second group on, load(g + 1) and attention(g) begin at the same moment. The next load and
    attention begin when both have ended. So the copies of a group should take as long as the attention of the
    group before it.

    For few items, all divisions are tried, each in its best order (`_order`). For more items, four
    candidates are tried: groups filled by this rule (`_Filling`), groups filled by this rule after two full
    arenas, each item alone, and all items together.
    """
    if not items:
        return []
    assert 0 < pages_max >= max(item.pages for item in items)
    num, fewest = len(items), -(-sum(item.pages for item in items) // pages_max)
    if num <= FEW_ITEMS:
        all_divisions = _partitions(num, [item.pages for item in items], pages_max)
        ordered = (_order(each, items, before_seconds, group_seconds) for each in all_divisions)
        return min(ordered, key=lambda found: found[1])[0]
    copying = sum(item.copy_seconds for item in items)
    attention = sum(item.attention_seconds for item in items)
    most = MANY_GROUPS
    if group_seconds > 0:  # more groups: less idle time at the ends, but more launches
        most = min(most, int((min(copying, attention) / group_seconds) ** 0.5))
    most = min(num, max(most, fewest))
    copying_is_longer = copying > before_seconds + attention + fewest * group_seconds
    filling = _Filling(items, pages_max, before_seconds, leader=0 if copying_is_longer else 1)
    divisions = [
        filling.groups(most),
        filling.groups(min(most, max(fewest, SOME_GROUPS)), full_ahead=2),
        [[index] for index in range(num)],
    ]
    if fewest == 1:
        divisions.append([list(range(num))])
    ordered = (_order(each, items, before_seconds, group_seconds) for each in divisions)
    return min(ordered, key=lambda found: found[1])[0]


def _partitions(num: int, pages: Sequence[int], pages_max: int) -> Iterator[Groups]:
    """Yield every division of the first `num` items into groups of at most `pages_max` pages."""
    if num == 0:
        yield []
        return
    item = num - 1
    for groups in _partitions(item, pages, pages_max):
        yield [*groups, [item]]
        for at, group in enumerate(groups):
            if sum([pages[i] for i in group]) + pages[item] <= pages_max:
                yield [*groups[:at], [*group, item], *groups[at + 1 :]]


class _Filling:
    """Fill groups one by one: the longest item first, then the longest item that fits the gap.

    This is figure 9 of the FluidInfer paper. The length of an item in the copy lane is its fraction of all
    copying. Its length in the compute lane is its fraction of all attention. Lane 0 lists the items that are
    longer in the copy lane or equally long, lane 1 lists the other items. A gap is the length that a group
    still lacks in a lane. The next item comes from the lane with the larger gap.
    """

    def __init__(
        self, items: Sequence[StreamItem], pages_max: int, before_seconds: float, leader: int
    ) -> None:
        """`leader`: the lane that takes longer.

        A group's length in the other lane should equal the previous group's length in the leader.
        """
        self._pages_max, self._leader = pages_max, leader
        self._pages_min = min(item.pages for item in items)
        copying = sum(item.copy_seconds for item in items) or 1.0
        attention = sum(item.attention_seconds for item in items) or 1.0
        self._attention_per_copying = attention / copying
        # The first two loads come before the end of the first attention. With this length, the second load
        # and the first attention end together.
        self._head = before_seconds / copying / (2.0 - min(1.0, attention / copying))
        self._lanes: tuple[list[tuple[float, int, int, float]], ...] = ([], [])
        for index, item in enumerate(items):
            c, a = item.copy_seconds / copying, item.attention_seconds / attention
            if c * (1 + 1e-9) >= a:
                self._lanes[0].append((c, -index, item.pages, a))
            else:
                self._lanes[1].append((a, -index, item.pages, c))
        for lane in self._lanes:
            lane.sort()

    def groups(self, count: int, full_ahead: int = 0) -> Groups:
        """Return about `count` groups; the first `full_ahead` of them fill their arenas."""
        lanes = [list(lane) for lane in self._lanes]
        lengths = [[entry[0] for entry in lane] for lane in lanes]
        left = [1.0, 1.0]
        last = [0.0, 0.0]  # the lengths that the previous group took
        groups: Groups = []
        while lanes[0] or lanes[1]:
            is_full = len(groups) < full_ahead and bool(lanes[0])
            share = 1.0 / max(1, count - len(groups))
            gap = [left[0] * share, left[1] * share]
            sides: tuple[int, ...] = (0, 1)
            if is_full:
                sides, gap[1] = (0,), 0.0
            elif full_ahead:
                if gap[0] > 0:  # copy as long as the previous group attends
                    factor = max(1.0, last[1] * self._attention_per_copying / gap[0])
                    gap = [gap[0] * factor, gap[1] * factor]
            else:
                sides, gap = self._next_lanes(count, len(groups), lanes, gap, last)
            left_before = list(left)
            group: list[int] = []
            room = self._pages_max
            while not group or room >= self._pages_min:
                first = sides[0] if gap[0] >= gap[1] else sides[-1]
                for lane in (first, 1 - first) if len(sides) == 2 else sides:
                    keys, entries = lengths[lane], lanes[lane]
                    at = len(keys) - 1
                    if group and not is_full:
                        at = bisect_right(keys, gap[lane] * 1.0001) - 1
                    stop = max(-1, at - ITEMS_TRIED_MAX)
                    while at > stop and entries[at][2] > room:
                        at -= 1
                    if at > stop:
                        break
                else:
                    break
                length, negative, pages, other = entries.pop(at)
                del keys[at]
                group.append(-negative)
                room -= pages
                gap[lane] -= length
                gap[1 - lane] -= other
                left[lane] -= length
                left[1 - lane] -= other
            last = [left_before[0] - left[0], left_before[1] - left[1]]
            groups.append(group)
        return groups

    def _next_lanes(
        self,
        count: int,
        at: int,
        lanes: Sequence[Sequence[object]],
        gap: list[float],
        last: Sequence[float],
    ) -> tuple[tuple[int, ...], list[float]]:
        """Return the lanes from which the next group is filled, and the gaps of this group."""
        leader = self._leader
        if at == 0 and lanes[leader]:
            gap[1 - leader] = 0.0
            return (leader,), gap
        if at < 3 and 0 < gap[0] < self._head:
            return (0, 1), [self._head, gap[1] * self._head / gap[0]]
        if lanes[leader]:
            gap[1 - leader] *= last[leader] * count
        return (0, 1), gap


def makespan(
    groups: Groups,
    items: Sequence[StreamItem],
    before_seconds: float = 0.0,
    group_seconds: float = 0.0,
) -> float:
    """Return the time when the last attention of the layer ends."""
    copies, attentions = _sums(groups, items, group_seconds)
    return _end(range(len(groups)), copies, attentions, before_seconds)


def _sums(
    groups: Groups, items: Sequence[StreamItem], group_seconds: float
) -> tuple[list[float], list[float]]:
    copies = [sum([items[index][1] for index in group]) for group in groups]
    attentions = [sum([items[index][2] for index in group]) + group_seconds for group in groups]
    return copies, attentions


def _end(
    order: Sequence[int], copies: Sequence[float], attentions: Sequence[float], before: float
) -> float:
    if not order:
        return before
    first = copies[order[0]]
    now = max(first, before) + attentions[order[0]]
    if len(order) == 1:
        return now
    now = max(now, first + copies[order[1]])
    last = attentions[order[1]]
    for each in order[2:]:
        copy = copies[each]
        now += copy if copy > last else last
        last = attentions[each]
    return now + last


def _order(
    groups: Groups, items: Sequence[StreamItem], before: float, group_seconds: float
) -> tuple[Groups, float]:
    """Return the groups in a good order, and the makespan of this order.

    The order is optimal if there are few groups, or if nothing comes before the first attention.
    """
    copies, attentions = _sums(groups, items, group_seconds)
    every = range(len(groups))
    orders: list[Sequence[int]]
    if len(groups) <= FEW_GROUPS:
        orders = list(permutations(every))
    else:
        orders = [cheapest_order(every, copies, attentions, before)]
    if before > 0 and len(groups) > FEW_GROUPS:
        quickest = min(every, key=lambda i: max(before - copies[i], 0.0) + attentions[i])
        for first in dict.fromkeys((orders[0][0], quickest)):
            rest = [i for i in every if i != first]
            gap = max(before - copies[first], 0.0) + attentions[first]
            orders.append([first, *cheapest_order(rest, copies, attentions, gap)])
    ends = [_end(order, copies, attentions, before) for order in orders]
    end = min(ends)
    return [groups[index] for index in orders[ends.index(end)]], end


def cheapest_order(
    members: Sequence[int], copies: list[float], attentions: list[float], gap: float
) -> list[int]:
    """Return the order with the least sum of max(attention, copying of the next group), after a `gap`.

    This is the algorithm of Gilmore and Gomory (1964). First, attentions and copies are matched in sorted
    order, which gives the least sum. This matching may consist of several cycles. The cheapest exchanges join
    the cycles into one, which is the order. Exchange k swaps the successors of the k-th and the next
    attention. The exchanges whose k-th copy is at least as long as the k-th attention (`lifting`) are made
    first, from the highest k to the lowest. The other exchanges follow, from the lowest k to the highest.
    Member 0 stands for the start and the end: its attention is the gap, and it copies nothing.
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
