"""Which streamed turns make up which group, and in which order, so that copying and attention end together.

What is minimised is the makespan of a layer (core/stream_layer.py).

**How.**  Groups are filled one by one, the longest turn first and then the longest that fits the gap (figure
9 of the FluidInfer paper), from two sorted lists: turns that take more than their share of the copying, and
turns that take more than theirs of the attention.  The lane that lags further behind its gap chooses the next
turn.  A handful of ways to set the gaps is tried (`_ways`), and each result is brought into the order with
the least makespan (Gilmore and Gomory's, for two machines with nothing between them; exact but for
`before_seconds`).  The trying ends as soon as one is within `GOOD_ENOUGH` of the lower bound.  If none is,
few turns are searched for more (core/stream_search.py).

tests/core/test_stream_packing.py holds it against all ordered partitions of few turns, and against the lower
bound for many.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from itertools import islice

from pensieve.core.stream_layer import Groups, Item, StreamLayer, lower_bound, makespan
from pensieve.core.stream_search import SEARCHED_ITEMS, Improvement, searched

__all__ = ["Groups", "Item", "lower_bound", "makespan", "packed"]

GOOD_ENOUGH = 1.02  # times the lower bound: nothing more is tried
MANY_GROUPS = (
    40  # finer groups gain nothing: what the ends of the lanes cost is one part in so many
)
SOME_GROUPS = 12
LOOKED_AT = 16  # turns that are looked at for one with few enough pages, from the longest down
MANY_ITEMS = 200  # more are not improved one by one, and fewer ways are tried
WAYS = 8
WAYS_OF_MANY = 3


def packed(
    items: Sequence[Item], pages_max: int, before_seconds: float = 0.0, group_seconds: float = 0.0
) -> Groups:
    """The groups in their order; each has at most `pages_max` pages, as each item must."""
    if not items:
        return []
    layer = StreamLayer(items, pages_max, before_seconds, group_seconds)
    good = layer.lower_bound() * GOOD_ENOUGH
    filling = _Filling(layer)
    best: Groups = []
    best_end = float("inf")
    for count, way in islice(_ways(layer), WAYS if len(items) <= MANY_ITEMS else WAYS_OF_MANY):
        groups, end = layer.ordered(filling.groups(count, way))
        if end < best_end:
            best, best_end = groups, end
            if end <= good:
                return best
    if len(items) <= SEARCHED_ITEMS:
        return searched(layer, best_end) or best
    if len(items) <= MANY_ITEMS:
        return Improvement(layer, best, good).run()
    return best


class _Way(Enum):
    """How the gaps are set that a group fills; `count` is the number of groups aimed at."""

    EVEN = auto()  # each group takes an equal part of what is left
    END = auto()  # so, but one has little attention: it is the last where copying takes longer
    FULL_ENDS = (
        auto()
    )  # arenas are filled to the brim: the fewest groups; two have little attention
    HEADS = (
        auto()
    )  # two are filled so: they load before the first attention; then as long as those attend
    LOADS_FOLLOW = (
        auto()
    )  # attention takes longer: a group copies in proportion to the one before's attention
    ATTENTIONS_FOLLOW = auto()  # copying does: the same, with time reversed


def _ways(layer: StreamLayer) -> Iterable[tuple[int, _Way]]:
    """Those most likely to come near the bound first."""
    num, fewest = len(layer.items), layer.num_groups_min
    lesser = min(layer.copying, layer.attention)
    many = MANY_GROUPS
    if layer.launch > 0:  # what the ends cost falls with the number of groups, and launches rise
        many = min(many, int((lesser / layer.launch) ** 0.5))
    many = min(num, max(many, fewest))
    some = min(num, max(fewest, min(many, SOME_GROUPS)))
    copies_longer = layer.copying > layer.before + layer.attention + fewest * layer.launch
    follow, other = _Way.ATTENTIONS_FOLLOW, _Way.LOADS_FOLLOW
    if not copies_longer:
        follow, other = other, follow
    late = fewest > 2 and layer.before > 0.1 * layer.copying
    ways = [
        (some, _Way.HEADS) if late else (many, follow),
        (many, follow),
        (fewest, _Way.END),
        (some, other),
        (some, follow),
        (fewest, _Way.FULL_ENDS),
        (min(num, 2 * fewest), follow),
        (min(num, fewest + 1), _Way.END),
        (some, _Way.HEADS),
        (num, _Way.EVEN),
    ]
    return dict.fromkeys(ways)


class _Filling:
    """Fills groups one by one: the longest first, then the longest that fits the gap.

    Lengths are shares of all copying and of all attention.  Lane 0 has the items whose share of the copying
    is the larger one (or equal), lane 1 the others; a gap is what a group still lacks in each.
    """

    def __init__(self, layer: StreamLayer) -> None:
        self.pages_max = layer.pages_max
        self.pages_min = min(layer.pages)
        copying, attention = layer.copying or 1.0, layer.attention or 1.0
        self.attention_per_copying = attention / copying
        # Two loads lie before the end of the first attention: so long each, to end with it.
        self.head = layer.before / copying / (2.0 - min(1.0, layer.attention / copying))
        lanes: tuple[list[tuple[float, int, int, float]], ...] = ([], [])
        for index, (pages, copy, attending) in enumerate(layer.items):
            c, a = copy / copying, attending / attention
            if c * (1 + 1e-9) >= a:
                lanes[0].append((c, -index, pages, a))
            else:
                lanes[1].append((a, -index, pages, c))
        for lane in lanes:
            lane.sort()
        self.lanes = lanes
        self.lengths = tuple([entry[0] for entry in lane] for lane in lanes)

    def groups(self, count: int, way: _Way) -> Groups:
        lanes = [list(lane) for lane in self.lanes]
        lengths = [list(lane) for lane in self.lengths]
        left = [1.0, 1.0]
        last = [0.0, 0.0]  # what the group before took
        groups: Groups = []
        while lanes[0] or lanes[1]:
            sides, gap, brim = self._gap(count, way, len(groups), lanes, left, last)
            was = list(left)
            group: list[int] = []
            room = self.pages_max
            while not group or room >= self.pages_min:
                first = sides[0] if gap[0] >= gap[1] else sides[-1]
                for lane in (first, 1 - first) if len(sides) == 2 else sides:
                    keys, entries = lengths[lane], lanes[lane]
                    at = len(keys) - 1
                    if group and not brim:
                        at = bisect_right(keys, gap[lane] * 1.0001) - 1
                    stop = max(-1, at - LOOKED_AT)
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
            last = [was[0] - left[0], was[1] - left[1]]
            groups.append(group)
        return groups

    def _gap(
        self,
        count: int,
        way: _Way,
        at: int,
        lanes: Sequence[Sequence[object]],
        left: list[float],
        last: list[float],
    ) -> tuple[tuple[int, ...], list[float], bool]:
        """From which lanes the next group is filled, with how much, and whether its arena shall be full."""
        share = 1.0 / max(1, count - at)
        gap = [left[0] * share, left[1] * share]
        num_ends = {_Way.END: 1, _Way.FULL_ENDS: 2, _Way.HEADS: 2}.get(way, 0)
        if at < num_ends and lanes[0]:
            return (0,), [gap[0], 0.0], way is not _Way.END
        if way is _Way.HEADS:
            # as long as the one before attends
            factor = max(1.0, last[1] * self.attention_per_copying / gap[0]) if gap[0] > 0 else 1.0
            return (0, 1), [gap[0] * factor, gap[1] * factor], False
        if way in (_Way.LOADS_FOLLOW, _Way.ATTENTIONS_FOLLOW):
            driver = 1 if way is _Way.LOADS_FOLLOW else 0
            if at == 0 and lanes[driver]:
                gap[1 - driver] = 0.0
                return (driver,), gap, False
            if at < 3 and 0 < gap[0] < self.head:
                return (0, 1), [self.head, gap[1] * self.head / gap[0]], False
            if not lanes[driver]:
                return (0, 1), gap, False
            gap[1 - driver] *= last[driver] * count
        return (0, 1), gap, way is _Way.FULL_ENDS
