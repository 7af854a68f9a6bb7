"""Pack streamed turns into groups. Compare few turns with all partitions, and many turns with a bound."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import chain, combinations, permutations
from statistics import mean

import pytest

from pensieve.core.stream_groups import Groups, StreamItem, cheapest_order, makespan, pack

WORST, MEAN = 1.02, 1.001  # allowed makespan, as a multiple of the least makespan
Case = tuple[list[StreamItem], int, float, float]  # arguments of `pack`


def timeline(groups: Groups, items: Sequence[StreamItem], before: float, launch: float) -> float:
    """Compute the makespan again, event by event, with two lanes (copy, attention) and two arenas."""
    loads: list[float] = []  # the end of each load
    attentions: list[float] = []
    for at, group in enumerate(groups):
        begin = max(loads[-1] if at else 0.0, attentions[at - 2] if at > 1 else 0.0)
        loads.append(begin + sum(items[i].copy_seconds for i in group))
        begin = max(loads[-1], attentions[-1] if at else before)
        attentions.append(begin + launch + sum(items[i].attention_seconds for i in group))
    return attentions[-1] if groups else before


def ordered_partitions(members: tuple[int, ...]) -> Iterator[Groups]:
    if not members:
        yield []
    for size in range(1, len(members) + 1):
        for first in combinations(members, size):
            rest = tuple(each for each in members if each not in first)
            for groups in ordered_partitions(rest):
                yield [list(first), *groups]


PARTITIONS = {num: list(ordered_partitions(tuple(range(num)))) for num in range(1, 6)}


def fits(groups: Groups, items: Sequence[StreamItem], pages_max: int) -> bool:
    return all(sum(items[i].pages for i in group) <= pages_max for group in groups)


def least_by_listing(
    items: Sequence[StreamItem], pages_max: int, before: float, launch: float
) -> float:
    return min(
        makespan(groups, items, before, launch)
        for groups in PARTITIONS[len(items)]
        if fits(groups, items, pages_max)
    )


def least(items: Sequence[StreamItem], pages_max: int, before: float, launch: float) -> float:
    """Return the least makespan. There may be more items than for `least_by_listing`."""
    all_items = (1 << len(items)) - 1

    def total(subset: int, field: int) -> float:
        return sum(item[field] for i, item in enumerate(items) if subset >> i & 1)

    fitting = [0 < total(subset, 0) <= pages_max for subset in range(all_items + 1)]
    copies = [total(subset, 1) for subset in range(all_items + 1)]
    attentions = [total(subset, 2) + launch for subset in range(all_items + 1)]

    def groups_of(left: int) -> Iterator[int]:
        group = left
        while group:
            if fitting[group]:
                yield group
            group = (group - 1) & left

    remaining: list[dict[int, float]] = []  # time left when the latest group's attention begins
    for left in range(all_items + 1):
        lengths = [
            (copies[group], remaining[left ^ group][group], group) for group in groups_of(left)
        ]
        remaining.append(
            {
                latest: min(max(attentions[latest], copy) + then for copy, then, _ in lengths)
                if left
                else attentions[latest]
                for latest in groups_of(all_items ^ left)
            }
        )
    ends = []
    for first in groups_of(all_items):
        attended = max(before, copies[first]) + attentions[first]
        left = all_items ^ first
        if not left:
            ends.append(attended)
        for second in groups_of(left):
            loaded = copies[first] + copies[second]
            ends.append(max(attended, loaded) + remaining[left ^ second][second])
    return min(ends)


def lower_bound(
    items: Sequence[StreamItem], pages_max: int, before: float = 0.0, launch: float = 0.0
) -> float:
    """Return a lower bound of the makespan, for any groups in any order."""
    if not items:
        return before
    pages, copies, attentions = zip(*items, strict=True)
    num_groups_min = max(1, -(-sum(pages) // pages_max))
    copying, attention = sum(copies), sum(attentions)
    shortest = min(attentions)
    compute = max(before, min(copies)) + attention + num_groups_min * launch
    # Each item's copy ends before the longest item's copy, or its attention begins after the longest
    # item's attention.
    both = sum(map(min, copies, attentions)) + max(map(max, copies, attentions)) + launch
    bounds = [compute, both]
    # At most one load runs beside an attention. The rest of a longer attention has no load beside it.
    densest = sorted(
        zip(copies, pages, strict=True),
        key=lambda pair: pair[0] / (pair[1] or 1),
        reverse=True,
    )
    one = _divided(densest, pages_max)
    two = _divided(densest, 2 * pages_max)
    bare = sum([each - one for each in attentions if each > one])
    least = min(shortest, one)
    bounds.append(copying + bare + least + launch + max(0.0, before - 2 * one + least))
    if num_groups_min > 2:
        # Two loads end before the first attention ends. All others come later, before one last attention.
        gains = sorted(
            [(c - a, p) for p, c, a in items if c > a],
            key=lambda pair: pair[0] / (pair[1] or 1),
            reverse=True,
        )
        hidden = min(two - shortest, one + _divided(gains, pages_max))
        bounds.append(before + launch + copying - hidden + shortest + launch)
    return max(bounds)


def _divided(densest: list[tuple[float, int]], room: int) -> float:
    """Return the most seconds that fit into `room` pages if items could be split."""
    seconds = 0.0
    for value, pages in densest:
        if pages >= room:
            return seconds + value * room / (pages or 1)
        seconds += value
        room -= pages
    return seconds


def random_case(rng: random.Random, num: int) -> Case:
    """Return decodes (short attention), prefills (long attention), or random items."""
    shape = rng.choice(
        ["decodes", "prefills", "mixed", "mixed", "anything", "equal", "two lengths", "a few long"]
    )
    pages_of_most = rng.choice([5, 20, 100, 1000])
    ratio = 10 ** rng.uniform(-1.5, 1.5)
    items = []
    for _ in range(num):
        pages = rng.randint(1, pages_of_most)
        if shape == "equal":
            pages = pages_of_most
        elif shape == "two lengths":
            pages = rng.choice([pages_of_most, max(1, pages_of_most // rng.choice([2, 5, 10]))])
        elif shape == "a few long":
            pages = min(2000, int(rng.paretovariate(1.1)))
        copy, attention = pages * 1e-4, pages * 1e-4 * ratio
        if shape == "prefills" or (shape == "mixed" and rng.random() < 0.5):
            attention *= rng.uniform(1, 50)
        elif shape == "anything":
            copy, attention = (
                pages_of_most * rng.random() * 1e-4,
                pages_of_most * rng.random() * 1e-4 * ratio,
            )
        if rng.random() < 0.05:
            copy *= rng.choice([0, 2])
        if rng.random() < 0.03:
            attention = 0.0
        items.append(StreamItem(pages, copy, attention))
    longest, total = max(item.pages for item in items), sum(item.pages for item in items)
    pages_max = rng.choice(
        [
            longest,
            longest + rng.randint(0, longest),
            max(longest, total // rng.randint(1, 8)),
            total,
            10 * total,
        ]
    )
    copying = sum(item.copy_seconds for item in items)
    lanes = max(copying, sum(item.attention_seconds for item in items))
    before = rng.choice([0, 0, 0.3 * lanes, 2 * lanes, 2 * copying / num, copying]) * rng.random()
    launch = rng.choice([0, 0, lanes / num, 0.1 * lanes / num, 0.01 * lanes]) * rng.random()
    return items, pages_max, before, launch


@pytest.mark.parametrize(("num", "cases"), [(1, 50), (2, 600), (3, 600), (4, 400), (5, 60)])
def test_few_turns_are_packed_near_the_best_partition(num: int, cases: int) -> None:
    rng, ratios = random.Random(num), []
    for case in range(cases):
        items, pages_max, before, launch = arguments = random_case(rng, num)
        groups = pack(*arguments)
        assert sorted(chain(*groups)) == list(range(num))
        assert fits(groups, items, pages_max)
        best = least_by_listing(*arguments)
        assert best == pytest.approx(least(*arguments))
        end = makespan(groups, items, before, launch)
        assert lower_bound(*arguments) <= best * (1 + 1e-9), (case, arguments)
        assert best * (1 - 1e-9) <= end <= best * WORST, (case, arguments, groups)
        ratios.append(end / best if best else 1.0)
    assert mean(ratios) <= MEAN


@pytest.mark.parametrize(("num", "cases"), [(6, 120), (7, 30)])
def test_six_and_seven_turns_are_packed_near_the_best_partition(num: int, cases: int) -> None:
    rng, ratios = random.Random(num), []
    for case in range(cases):
        items, _, before, launch = arguments = random_case(rng, num)
        groups = pack(*arguments)
        end = makespan(groups, items, before, launch)
        best = least(*arguments)
        assert lower_bound(*arguments) <= best * (1 + 1e-9), (case, arguments)
        assert end <= best * WORST, (case, arguments, groups)
        ratios.append(end / best if best else 1.0)
    assert mean(ratios) <= MEAN


def test_the_makespan_matches_a_simulation_of_two_lanes_and_two_arenas() -> None:
    rng = random.Random(3)
    for _ in range(500):
        num = rng.randint(1, 9)
        items, _, before, launch = random_case(rng, num)
        groups: Groups = [[] for _ in range(num)]
        for index in range(num):
            groups[rng.randrange(num)].append(index)
        groups = [group for group in groups if group]
        rng.shuffle(groups)
        assert makespan(groups, items, before, launch) == pytest.approx(
            timeline(groups, items, before, launch)
        )


def test_a_layer_among_many_takes_about_its_makespan() -> None:
    rng = random.Random(5)
    for _ in range(200):
        items, _, before, launch = arguments = random_case(rng, rng.randint(1, 7))
        groups = pack(*arguments)
        copies = [sum(items[i].copy_seconds for i in group) for group in groups]
        attentions = [sum(items[i].attention_seconds for i in group) + launch for group in groups]
        layers = 40
        loaded, attended = [0.0, 0.0], [0.0, 0.0]  # the ends of the latest two, in any layer
        for _ in range(layers):
            for at, (copy, attention) in enumerate(zip(copies, attentions, strict=True)):
                loaded = [loaded[1], max(loaded[1], attended[0]) + copy]
                begin = max(loaded[1], attended[1] + (before if at == 0 else 0.0))
                attended = [attended[1], begin + attention]
        end = makespan(groups, items, before, launch)
        hidden = (
            0.0 if len(groups) > 1 and before >= sum(copies[:2]) else min(copies[0], attentions[-1])
        )
        assert end - hidden - 1e-9 <= attended[1] / layers <= end + 1e-9


def test_the_cheapest_order_has_the_least_sum_of_all_orders() -> None:
    rng = random.Random(4)
    for _ in range(500):
        num = rng.randint(1, 6)
        copies = [float(rng.randint(0, 9)) for _ in range(num)]
        attentions = [float(rng.randint(0, 9)) for _ in range(num)]
        gap = float(rng.randint(0, 9))

        def passes(
            order: Sequence[int],
            copies: list[float] = copies,
            attentions: list[float] = attentions,
            gap: float = gap,
        ) -> float:
            front = [gap, *[attentions[i] for i in order]]
            return sum(map(max, front, [*[copies[i] for i in order], 0.0]))

        path = cheapest_order(range(num), copies, attentions, gap)
        assert sorted(path) == list(range(num))
        assert passes(path) == min(map(passes, permutations(range(num))))


def large_case(
    rng: random.Random, num: int, ratio: float, prefills: float, arenas: int, before: float
) -> Case:
    """Return turns that fill `arenas` arenas. `ratio`: attention time divided by copy time of a decode."""
    pages_of = [max(1, min(256, int(rng.lognormvariate(3.2, 0.8)))) for _ in range(num)]
    items = []
    for pages in pages_of:
        attention = pages * 2e-6 * ratio
        if rng.random() < prefills:
            attention *= rng.uniform(2, 30)
        items.append(StreamItem(pages, pages * 2e-6, attention))
    pages_max = max(*pages_of, sum(pages_of) // arenas)
    return items, pages_max, before * sum(pages_of) * 2e-6, 1e-6


@pytest.mark.parametrize("num", [32, 64, 128, 300, 1000])
@pytest.mark.parametrize(
    ("ratio", "limit"),
    [
        (0.02, 1.05),  # a GPU: its memory is 50 times faster than the bus
        (0.1, 1.05),
        (4.0, 1.05),  # attention on slow cores
        # Both lanes take about as long. Uneven turns then cost time that the lower bound ignores.
        (0.5, 1.2),
        (1.0, 1.12),
    ],
)
def test_many_turns_end_near_the_lower_bound(num: int, ratio: float, limit: float) -> None:
    for prefills in (0.0, 0.1):
        for arenas in (3, 10, 30):
            for before in (0.0, 0.2, 1.0):
                rng = random.Random(num)
                items, pages_max, before_seconds, launch = arguments = large_case(
                    rng, num, ratio, prefills, arenas, before
                )
                groups = pack(*arguments)
                assert sorted(chain(*groups)) == list(range(num))
                assert fits(groups, items, pages_max)
                end = makespan(groups, items, before_seconds, launch)
                assert end <= limit * lower_bound(*arguments), (prefills, arenas, before)


def test_a_long_copy_runs_beside_a_long_attention() -> None:
    """The turn with the long attention goes first, so that the long copy runs beside that attention."""
    items = [StreamItem(8, 8.0, 1.0), StreamItem(1, 1.0, 8.0)]
    assert pack(items, 100) == [[1], [0]]
    assert makespan([[1], [0]], items) == 1 + 8 + 1


def test_expensive_launches_lead_to_one_group() -> None:
    items = [StreamItem(1, 1.0, 1.0) for _ in range(4)]
    assert len(pack(items, 4, group_seconds=100.0)) == 1
    assert len(pack(items, 4, group_seconds=0.0)) == 4


def test_the_first_two_groups_are_loaded_during_the_dense_parts() -> None:
    items = [StreamItem(10, 1.0, 0.1) for _ in range(4)]
    groups = pack(items, 20, before_seconds=4.0)
    assert makespan(groups, items, 4.0) == pytest.approx(4.4)


def test_no_turns_give_no_groups() -> None:
    assert pack([], 10) == []
    assert makespan([], [], 3.0) == lower_bound([], 10, 3.0) == 3.0


def test_one_turn_is_one_group() -> None:
    assert pack([StreamItem(10, 1.0, 2.0)], 10, 0.5, 0.25) == [[0]]
    assert makespan([[0]], [StreamItem(10, 1.0, 2.0)], 0.5, 0.25) == 1.0 + 2.0 + 0.25


@pytest.mark.parametrize("num", [1, 2, 5, 7, 8, 50, 300])
def test_turns_that_take_no_time_are_packed_too(num: int) -> None:
    items = [StreamItem(3, 0.0, 0.0) for _ in range(num)]
    groups = pack(items, 7)
    assert sorted(chain(*groups)) == list(range(num))
    assert fits(groups, items, 7)


@pytest.mark.parametrize("num", [3, 7, 20, 300])
def test_turns_that_fill_an_arena_each_are_groups_of_one(num: int) -> None:
    items = [StreamItem(10, 1.0 + index % 3, 2.0 - index % 2) for index in range(num)]
    groups = pack(items, 10, 0.5, 0.1)
    assert sorted(groups) == [[index] for index in range(num)]


def test_a_turn_larger_than_an_arena_is_refused() -> None:
    with pytest.raises(AssertionError):
        pack([StreamItem(11, 1.0, 1.0)], 10)


@pytest.mark.parametrize("num", [5, 7, 30, 300])
def test_the_same_turns_are_packed_the_same_way(num: int) -> None:
    arguments = random_case(random.Random(num), num)
    assert pack(*arguments) == pack(*arguments)
