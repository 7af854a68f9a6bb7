"""GroupFeed submits requests group by group, within memory, and again until they have a result."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pensieve.core.group_feed import (
    NUM_LEARNED_MIN,
    Action,
    DropPrefix,
    FeedConfig,
    GroupFeed,
    Submit,
)
from pensieve.core.prefix_groups import PrefixGroup

CHUNK = 4


def feed(
    groups: Sequence[tuple[int, int]],  # each: tokens of the prefix, number of requests
    pages_max: int = 100,
    own: int = 4,
    reply: int = 4,
) -> GroupFeed:
    found: list[PrefixGroup] = []
    num_tokens: list[int] = []
    for prefix_tokens, count in groups:
        first = len(num_tokens)
        num_tokens += [prefix_tokens + own] * count
        found.append(PrefixGroup(prefix_tokens, tuple(range(first, first + count))))
    config = FeedConfig(pages_max, CHUNK)
    return GroupFeed(found, num_tokens, [reply] * len(num_tokens), config)


def now(one: GroupFeed) -> list[Action]:
    found: list[Action] = []
    while (action := one.next()) is not None:
        found.append(action)
        one.check()
    return found


def requests(actions: Sequence[Action]) -> list[int]:
    return [each.request for each in actions if isinstance(each, Submit)]


def test_other_requests_are_submitted_after_one_has_computed_the_prefix() -> None:
    one = feed([(8, 3)])
    assert now(one) == [Submit(0, 0, 8, opens=True)]
    one.prefix_computed(0)
    assert now(one) == [Submit(1, 0, 8, opens=False), Submit(2, 0, 8, opens=False)]
    for request in range(3):
        assert not one.is_done
        one.ended(request, 4)
    assert now(one) == [DropPrefix(0)]
    assert one.is_done


def test_the_next_prefix_is_computed_while_the_previous_group_opens_and_drains() -> None:
    """Prefixes take 2 pages, and each request 2 of its own. The first three groups take 18 pages."""
    one = feed([(8, 2)] * 4, pages_max=19)
    assert requests(now(one)) == [0, 2, 4]
    one.prefix_computed(1)
    assert requests(now(one)) == [3]
    one.prefix_computed(0)
    assert requests(now(one)) == [1]
    one.ended(2, 4)
    assert now(one) == []  # with request 5, 16 of 19 pages are planned; group 3 needs 4
    one.ended(3, 4)
    assert now(one) == [DropPrefix(1), Submit(6, 3, 8, opens=True)]


def test_a_large_group_is_submitted_in_parts_and_no_group_passes_it() -> None:
    one = feed([(8, 5), (0, 1)], pages_max=8)
    assert requests(now(one)) == [0]
    one.prefix_computed(0)
    assert requests(now(one)) == [1, 2]
    one.ended(1, 4)
    assert requests(now(one)) == [3]
    one.ended(0, 4)
    one.ended(3, 4)
    assert requests(now(one)) == [4, 5]


def test_a_request_larger_than_memory_is_submitted_alone() -> None:
    one = GroupFeed(
        [PrefixGroup(0, (n,)) for n in range(3)], [4, 400, 4], [4] * 3, FeedConfig(10, CHUNK)
    )
    assert requests(now(one)) == [0]
    one.ended(0, 4)
    assert requests(now(one)) == [1]
    one.ended(1, 4)
    assert requests(now(one)) == [2]


def test_a_prefix_without_active_requests_is_opened_again() -> None:
    one = feed([(8, 3)])
    now(one)
    one.prefix_computed(0)
    now(one)
    one.ended(0, 4)
    one.take_back(2)
    one.take_back(1)
    assert now(one) == [Submit(1, 0, 8, opens=True)]
    one.prefix_computed(0)
    assert now(one) == [Submit(2, 0, 8, opens=False)]


def test_if_the_opener_has_no_reply_the_next_request_opens_the_prefix() -> None:
    one = feed([(8, 3)])
    assert requests(now(one)) == [0]
    one.take_back(0)
    assert now(one) == [Submit(0, 0, 8, opens=True)]
    one.ended(0, None)
    assert now(one) == [Submit(1, 0, 8, opens=True)]


def test_a_prefix_shorter_than_a_chunk_is_not_shared() -> None:
    one = feed([(3, 2), (4, 2)])
    assert now(one) == [
        Submit(0, 0, 0, opens=False),
        Submit(1, 0, 0, opens=False),
        Submit(2, 1, 4, opens=True),
    ]


def test_the_expected_reply_length_is_learned_from_ended_replies() -> None:
    """10 pages: a request with 4 + 36 tokens takes all of them, one with 4 + 4 tokens takes two."""
    one = feed([(0, 1)] * 20, pages_max=10, reply=36)
    for request in range(NUM_LEARNED_MIN):
        assert requests(now(one)) == [request]
        one.ended(request, 3)
    assert len(now(one)) == 5


def test_the_expected_reply_length_grows_with_the_variance() -> None:
    """Replies of 2 and 18 tokens: a request is expected to take 4 + 10 + 8 + 1 tokens, which are 6 pages.

    The mean alone would be 4 pages, and two requests would fit into the 10 pages.
    """
    one = feed([(0, 1)] * 40, pages_max=10, reply=36)
    for request in range(NUM_LEARNED_MIN):
        assert requests(now(one)) == [request]
        one.ended(request, 2 if request % 2 else 18)
    assert len(now(one)) == 1


def test_the_expected_reply_length_is_learned_for_each_group() -> None:
    """20 pages, and requests of 8 + 4 tokens in two groups. Replies of the first group have 36 tokens."""
    one = feed([(8, 20), (8, 40)], pages_max=20, reply=36)
    num_active = {0: 0, 1: 0}  # most at a time, by group
    active: list[Submit] = []
    while not one.is_done:
        while actions := now(one):
            submits = [each for each in actions if isinstance(each, Submit)]
            active += submits
            for each in submits:
                if each.opens:
                    one.prefix_computed(each.group)
        for group, most in num_active.items():
            num_active[group] = max(most, sum(each.group == group for each in active))
        if active:
            ended = active.pop(0)
            one.ended(ended.request, 1 if ended.group else 36)
    assert num_active == {0: 1, 1: 9}


def test_a_feed_without_requests_is_done() -> None:
    one = feed([])
    assert one.is_done
    assert one.next() is None


# -- random worlds --


class World:
    """Random groups. Submitted requests end, return or compute their prefix in any order."""

    def __init__(self, seed: int) -> None:
        self.choose = choose = random.Random(seed)
        self.prefixes = [choose.choice((0, 3, 4, 8, 9, 30)) for _ in range(choose.randint(1, 8))]
        self.groups: list[PrefixGroup] = []
        num_tokens: list[int] = []
        for prefix_tokens in self.prefixes:
            first = len(num_tokens)
            count = choose.choice((1, 1, 2, 3, 9)) if prefix_tokens else 1
            num_tokens += [prefix_tokens + choose.randint(1, 20) for _ in range(count)]
            prefix = prefix_tokens if count > 1 else 0
            self.groups.append(PrefixGroup(prefix, tuple(range(first, first + count))))
        self.num_requests = len(num_tokens)
        self.num_tokens = num_tokens
        self.max_tokens = [choose.randint(1, 40) for _ in num_tokens]
        self.config = FeedConfig(choose.randint(3, 40), CHUNK)
        self.feed = GroupFeed(self.groups, num_tokens, self.max_tokens, self.config)
        self.active: list[int] = []
        self.there: set[int] = set()  # groups whose prefix has been computed
        self.results: dict[int, int] = {}
        self.submitted: list[int] = []
        self.dropped: list[int] = []

    def run(self) -> None:
        choose, one = self.choose, self.feed
        returning = choose.choice((0.0, 0.1, 0.4))
        for _ in range(self.num_requests * 60):
            self.act()
            if one.is_done:
                break
            assert self.active, "no request is active and none is submitted"
            request = choose.choice(self.active)
            group = one.group_of(request)
            shares = self.groups[group].prefix_tokens >= CHUNK
            if shares and group not in self.there and choose.random() < 0.7:
                self.there.add(group)
                one.prefix_computed(group)
                one.check()
                continue
            self.active.remove(request)
            if choose.random() < returning:
                one.take_back(request)
            else:
                self.results[request] = self.results.get(request, 0) + 1
                one.ended(request, choose.choice((None, choose.randint(1, 20))))
            if not any(one.group_of(each) == group for each in self.active):
                self.there.discard(group)
            one.check()
        assert one.is_done, "some requests have no result"
        assert self.results == dict.fromkeys(range(self.num_requests), 1)
        shared = [n for n, each in enumerate(self.groups) if each.prefix_tokens >= CHUNK]
        assert sorted(self.dropped) == shared, "each prefix is dropped once"
        if not returning:
            by_group = [one.group_of(request) for request in self.submitted]
            firsts = [by_group.index(n) for n in range(len(self.groups))]
            assert firsts == sorted(firsts), "groups begin in their order"

    def act(self) -> None:
        one = self.feed
        while (action := one.next()) is not None:
            if isinstance(action, DropPrefix):
                members = self.groups[action.group].members
                assert all(self.results.get(each) for each in members), (
                    "a request still needs the dropped prefix"
                )
                self.dropped.append(action.group)
                continue
            request = action.request
            assert request not in self.active
            assert request not in self.results
            assert request in self.groups[action.group].members
            if action.prefix_tokens:
                assert action.opens == (action.group not in self.there)
            self.active.append(request)
            self.submitted.append(request)
            one.check()
            self.limits()
        assert one.num_active == len(self.active)
        assert one.num_left == self.num_requests - len(self.results)

    def limits(self) -> None:
        """Check the limits. Ignore the replies, whose lengths are only estimates."""
        pages = 0
        for group in {self.feed.group_of(request) for request in self.active}:
            shared = self.groups[group].prefix_tokens // CHUNK
            own = [each for each in self.active if self.feed.group_of(each) == group]
            pages += shared + sum(-(-self.num_tokens[each] // CHUNK) - shared for each in own)
        assert pages <= self.config.pages_max or len(self.active) == 1, (
            "the active requests exceed the memory"
        )


@pytest.mark.parametrize("first", range(0, 600, 150))
def test_every_request_has_its_result_within_the_limits(first: int) -> None:
    run_worlds(range(first, first + 150))


Change = Callable[..., Any]


def as_if_it_were_longer(original: Change, self: GroupFeed, group: Any) -> Any:
    return 2 * original(self, group)


def regardless_of_the_prefix(original: Change, self: GroupFeed, group: Any) -> Any:
    action = original(self, group)
    if action.opens:
        self.prefix_computed(action.group)
    return action


def always(original: Change, self: GroupFeed, group: Any) -> bool:
    return True


def never_beside_another(original: Change, self: GroupFeed, group: Any) -> Any:
    return original(self, group) and self._own_pages(group.waiting[-1], group) < 9


def forgets_who_came_back(original: Change, self: GroupFeed, request: int) -> None:
    self._deactivate(request)
    self._done.add(request)


def comes_back_in_vain(original: Change, self: GroupFeed, group: Any) -> None:
    return


def stays_open(original: Change, self: GroupFeed, request: int) -> Any:
    was_open = self._group_of[request].is_open
    group = original(self, request)
    group.is_open = was_open
    return group


def keeps_the_prefix(original: Change, self: GroupFeed, request: int, count: Any) -> None:
    original(self, request, count)
    self._dropped.clear()


def drops_it_early(original: Change, self: GroupFeed, request: int, count: Any) -> None:
    original(self, request, count)
    group = self._group_of[request]
    if group.prefix_tokens and group.num_left == 1:
        self._dropped.append(group.index)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("_prefix_pages", as_if_it_were_longer),
        ("_submit", regardless_of_the_prefix),
        ("_fits", always),
        ("_fits", never_beside_another),
        ("take_back", forgets_who_came_back),
        ("_make_ready", comes_back_in_vain),
        ("_deactivate", stays_open),
        ("ended", keeps_the_prefix),
        ("ended", drops_it_early),
    ],
)
def test_random_worlds_find_a_planted_fault(
    monkeypatch: pytest.MonkeyPatch, name: str, change: Change
) -> None:
    original = getattr(GroupFeed, name)
    monkeypatch.setattr(GroupFeed, name, lambda self, *rest: change(original, self, *rest))
    with pytest.raises((AssertionError, IndexError, KeyError)):
        run_worlds(range(150))


def run_worlds(seeds: Sequence[int]) -> None:
    for seed in seeds:
        World(seed).run()
