"""GroupFeed submits requests group by group, within a memory limit, and repeats those without a result."""

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


def make_feed(
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


def next_actions(feed: GroupFeed) -> list[Action]:
    found: list[Action] = []
    while (action := feed.next()) is not None:
        found.append(action)
        feed.check()
    return found


def requests(actions: Sequence[Action]) -> list[int]:
    return [each.request for each in actions if isinstance(each, Submit)]


def test_other_requests_are_submitted_after_one_has_computed_the_prefix() -> None:
    feed = make_feed([(8, 3)])
    assert next_actions(feed) == [Submit(0, 0, 8, opens=True)]
    feed.prefix_computed(0)
    assert next_actions(feed) == [Submit(1, 0, 8, opens=False), Submit(2, 0, 8, opens=False)]
    for request in range(3):
        assert not feed.is_done
        feed.ended(request, 4)
    assert next_actions(feed) == [DropPrefix(0)]
    assert feed.is_done


def test_the_next_prefix_is_computed_while_the_previous_group_opens_and_drains() -> None:
    """Prefixes take 2 pages, and each request 2 of its own. The first three groups take 18 pages."""
    feed = make_feed([(8, 2)] * 4, pages_max=19)
    assert requests(next_actions(feed)) == [0, 2, 4]
    feed.prefix_computed(1)
    assert requests(next_actions(feed)) == [3]
    feed.prefix_computed(0)
    assert requests(next_actions(feed)) == [1]
    feed.ended(2, 4)
    assert next_actions(feed) == []  # with request 5, 16 of 19 pages are planned; group 3 needs 4
    feed.ended(3, 4)
    assert next_actions(feed) == [DropPrefix(1), Submit(6, 3, 8, opens=True)]


def test_a_large_group_is_submitted_in_parts_and_no_group_passes_it() -> None:
    feed = make_feed([(8, 5), (0, 1)], pages_max=8)
    assert requests(next_actions(feed)) == [0]
    feed.prefix_computed(0)
    assert requests(next_actions(feed)) == [1, 2]
    feed.ended(1, 4)
    assert requests(next_actions(feed)) == [3]
    feed.ended(0, 4)
    feed.ended(3, 4)
    assert requests(next_actions(feed)) == [4, 5]


def test_a_request_larger_than_memory_is_submitted_alone() -> None:
    feed = GroupFeed(
        [PrefixGroup(0, (n,)) for n in range(3)], [4, 400, 4], [4] * 3, FeedConfig(10, CHUNK)
    )
    assert requests(next_actions(feed)) == [0]
    feed.ended(0, 4)
    assert requests(next_actions(feed)) == [1]
    feed.ended(1, 4)
    assert requests(next_actions(feed)) == [2]


def test_a_prefix_without_active_requests_is_opened_again() -> None:
    feed = make_feed([(8, 3)])
    next_actions(feed)
    feed.prefix_computed(0)
    next_actions(feed)
    feed.ended(0, 4)
    feed.take_back(2)
    feed.take_back(1)
    assert next_actions(feed) == [Submit(1, 0, 8, opens=True)]
    feed.prefix_computed(0)
    assert next_actions(feed) == [Submit(2, 0, 8, opens=False)]


def test_if_the_opener_has_no_reply_the_next_request_opens_the_prefix() -> None:
    feed = make_feed([(8, 3)])
    assert requests(next_actions(feed)) == [0]
    feed.take_back(0)
    assert next_actions(feed) == [Submit(0, 0, 8, opens=True)]
    feed.ended(0, None)
    assert next_actions(feed) == [Submit(1, 0, 8, opens=True)]


def test_a_prefix_shorter_than_a_chunk_is_not_shared() -> None:
    feed = make_feed([(3, 2), (4, 2)])
    assert next_actions(feed) == [
        Submit(0, 0, 0, opens=False),
        Submit(1, 0, 0, opens=False),
        Submit(2, 1, 4, opens=True),
    ]


def test_the_expected_reply_length_is_learned_from_ended_replies() -> None:
    """10 pages: a request with 4 + 36 tokens takes all of them, a request with 4 + 4 takes two."""
    feed = make_feed([(0, 1)] * 20, pages_max=10, reply=36)
    for request in range(NUM_LEARNED_MIN):
        assert requests(next_actions(feed)) == [request]
        feed.ended(request, 3)
    assert len(next_actions(feed)) == 5


def test_the_expected_reply_length_grows_with_the_variance() -> None:
    """Replies of 2 and 18 tokens: a request is expected to take 4 + 10 + 8 + 1 tokens, which are 6 pages.

    The mean alone would be 4 pages, and two requests would fit into the 10 pages.
    """
    feed = make_feed([(0, 1)] * 40, pages_max=10, reply=36)
    for request in range(NUM_LEARNED_MIN):
        assert requests(next_actions(feed)) == [request]
        feed.ended(request, 2 if request % 2 else 18)
    assert len(next_actions(feed)) == 1


def test_the_expected_reply_length_is_learned_for_each_group() -> None:
    """20 pages, and requests of 8 + 4 tokens in two groups. Replies of the first group have 36 tokens."""
    feed = make_feed([(8, 20), (8, 40)], pages_max=20, reply=36)
    num_active = {0: 0, 1: 0}  # largest number at a time, by group
    active: list[Submit] = []
    while not feed.is_done:
        while actions := next_actions(feed):
            submits = [each for each in actions if isinstance(each, Submit)]
            active += submits
            for each in submits:
                if each.opens:
                    feed.prefix_computed(each.group)
        for group, most in num_active.items():
            num_active[group] = max(most, sum(each.group == group for each in active))
        if active:
            ended = active.pop(0)
            feed.ended(ended.request, 1 if ended.group else 36)
    assert num_active == {0: 1, 1: 9}


def test_a_feed_without_requests_is_done() -> None:
    feed = make_feed([])
    assert feed.is_done
    assert feed.next() is None


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
        self.computed: set[int] = set()  # groups whose prefix has been computed
        self.results: dict[int, int] = {}
        self.submitted: list[int] = []
        self.dropped: list[int] = []

    def run(self) -> None:
        choose, feed = self.choose, self.feed
        returning = choose.choice((0.0, 0.1, 0.4))
        for _ in range(self.num_requests * 60):
            self.act()
            if feed.is_done:
                break
            assert self.active, "no request is active and none is submitted"
            request = choose.choice(self.active)
            group = feed.group_of(request)
            shares = self.groups[group].prefix_tokens >= CHUNK
            if shares and group not in self.computed and choose.random() < 0.7:
                self.computed.add(group)
                feed.prefix_computed(group)
                feed.check()
                continue
            self.active.remove(request)
            if choose.random() < returning:
                feed.take_back(request)
            else:
                self.results[request] = self.results.get(request, 0) + 1
                feed.ended(request, choose.choice((None, choose.randint(1, 20))))
            if not any(feed.group_of(each) == group for each in self.active):
                self.computed.discard(group)
            feed.check()
        assert feed.is_done, "some requests have no result"
        assert self.results == dict.fromkeys(range(self.num_requests), 1)
        shared = [n for n, each in enumerate(self.groups) if each.prefix_tokens >= CHUNK]
        assert sorted(self.dropped) == shared, "each prefix is dropped once"
        if not returning:
            by_group = [feed.group_of(request) for request in self.submitted]
            firsts = [by_group.index(n) for n in range(len(self.groups))]
            assert firsts == sorted(firsts), "groups begin in their order"

    def act(self) -> None:
        feed = self.feed
        while (action := feed.next()) is not None:
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
                assert action.opens == (action.group not in self.computed)
            self.active.append(request)
            self.submitted.append(request)
            feed.check()
            self.check_limits()
        assert feed.num_active == len(self.active)
        assert feed.num_left == self.num_requests - len(self.results)

    def check_limits(self) -> None:
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


def double_prefix_pages(original: Change, self: GroupFeed, group: Any) -> Any:
    return 2 * original(self, group)


def assume_prefix_computed(original: Change, self: GroupFeed, group: Any) -> Any:
    action = original(self, group)
    if action.opens:
        self.prefix_computed(action.group)
    return action


def always_fit(original: Change, self: GroupFeed, group: Any) -> bool:
    return True


def refuse_large_requests(original: Change, self: GroupFeed, group: Any) -> Any:
    return original(self, group) and self._own_pages(group.waiting[-1], group) < 9


def forget_returned(original: Change, self: GroupFeed, request: int) -> None:
    self._deactivate(request)
    self._done.add(request)


def never_make_ready(original: Change, self: GroupFeed, group: Any) -> None:
    return


def stay_open(original: Change, self: GroupFeed, request: int) -> Any:
    was_open = self._group_of[request].is_open
    group = original(self, request)
    group.is_open = was_open
    return group


def keep_prefix(original: Change, self: GroupFeed, request: int, count: Any) -> None:
    original(self, request, count)
    self._dropped.clear()


def drop_prefix_early(original: Change, self: GroupFeed, request: int, count: Any) -> None:
    original(self, request, count)
    group = self._group_of[request]
    if group.prefix_tokens and group.num_left == 1:
        self._dropped.append(group.index)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("_prefix_pages", double_prefix_pages),
        ("_submit", assume_prefix_computed),
        ("_fits", always_fit),
        ("_fits", refuse_large_requests),
        ("take_back", forget_returned),
        ("_make_ready", never_make_ready),
        ("_deactivate", stay_open),
        ("ended", keep_prefix),
        ("ended", drop_prefix_early),
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
