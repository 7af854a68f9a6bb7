"""Choose the next request of a batch, so that requests with a common prefix run together.

All requests, and the groups that share a prefix (prefix_groups.py), are known in advance. Groups are
submitted one after another. So a prefix is computed once and stays cached while the requests of its group use
it. It is dropped after the last of these requests (BatchLLM, section 4.3.1).

**The first submitted request of a group, the *opener*, computes the prefix.** The others wait for the prefix:

    waiting ──submit the opener──> opening ──prefix_computed──> open ──the last request has ended──> done
       ^                              │                          │
       └─────────── no request of the group is active ───────────┘

No separate turn computes the prefix. So a prefix takes no pages before a request uses it. The opener queues,
waits for pages and is suspended like every turn. While no request of a group is active, the group's prefix
may be evicted. Then the next submitted request becomes the opener and uses the part of the prefix that is
still cached.

    A request is waiting, active or done.
    A group whose prefix is not computed has at most one active request, the opener.
    A request that stopped without a result (`take_back`) is submitted again, before later requests.

**The limit is memory, not a number of requests** (the paper's algorithm 2). The plan counts the pages of the
prefixes of groups with active requests. For each active request, it also counts the request's own part: the
tokens after the prefix and the expected reply. The next request is submitted if it fits into `pages_max`. No
later request overtakes it. If no other request is active, the next request is submitted even if it does not
fit. So a group with too many requests runs in parts. While a group is opening, the next group may also open
if the first group leaves enough pages. So prefixes are computed while earlier groups finish.

The expected length of a reply is the mean of the ended replies' lengths plus one standard deviation, but at
most the reply's maximum. The replies of the request's own group count, because requests with the same
instructions have replies of similar lengths. Until NUM_LEARNED_MIN replies of the group have ended, the
replies of all groups count. Until NUM_LEARNED_MIN of these have ended, the expected length is the maximum. If
the estimate is too low, the scheduler suspends turns.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import sqrt
from typing import NamedTuple

from pensieve.core.prefix_groups import PrefixGroup

NUM_LEARNED_MIN = 8  # ended replies before their lengths are used


class FeedConfig(NamedTuple):
    pages_max: int  # device pages for which the batch plans
    chunk_tokens: int


class Submit(NamedTuple):
    request: int
    group: int
    prefix_tokens: int  # tokens shared with the other requests of the group; 0: none
    opens: bool  # the request computes the prefix


class DropPrefix(NamedTuple):
    """Drop a group's prefix, because all requests of the group have ended."""

    group: int


Action = Submit | DropPrefix


@dataclass(slots=True)
class _Lengths:
    """Statistics of the lengths of ended replies."""

    count: int = 0
    total: int = 0
    squares: int = 0

    def add(self, num_tokens: int) -> None:
        self.count += 1
        self.total += num_tokens
        self.squares += num_tokens * num_tokens

    @property
    def is_known(self) -> bool:
        return self.count >= NUM_LEARNED_MIN

    def expected(self, most: int) -> int:
        if not self.is_known:
            return most
        mean = self.total / self.count
        deviation = sqrt(max(self.squares / self.count - mean * mean, 0.0))
        return min(most, int(mean + deviation) + 1)


@dataclass(slots=True)
class _Group:
    index: int
    prefix_tokens: int  # tokens that its requests share; 0: none
    num_left: int  # requests that have not ended
    waiting: list[int]  # the next request is last
    num_active: int = 0
    opener: int | None = None  # the active request that computes the prefix
    is_open: bool = False
    own_pages: int = 0  # pages planned for the requests that wait for the opener
    lengths: _Lengths = field(default_factory=_Lengths)


class GroupFeed:
    def __init__(
        self,
        groups: Sequence[PrefixGroup],
        num_tokens: Sequence[int],
        max_tokens: Sequence[int],
        config: FeedConfig,
    ) -> None:
        """`num_tokens`, `max_tokens`: each request's prompt tokens and maximum reply tokens."""
        assert config.pages_max > 0
        self._config = config
        self._num_tokens, self._max_tokens = num_tokens, max_tokens
        self._group_of: dict[int, _Group] = {}
        self._groups: list[_Group] = []
        for index, group in enumerate(groups):
            shared = group.prefix_tokens if self._is_worth_sharing(group) else 0
            waiting = sorted(group.members, reverse=True)
            self._groups.append(_Group(index, shared, len(waiting), waiting))
            for member in waiting:
                assert member not in self._group_of, f"request {member} is in two groups"
                self._group_of[member] = self._groups[-1]
        self._ready = list(range(len(self._groups)))  # a heap: every group with a request to submit
        self._planned: dict[int, int] = {}  # own pages of each active request
        self._planned_pages = 0  # for the active requests and the prefixes of their groups
        self._coming_pages = 0  # for the requests that wait for an opener
        self._lengths = _Lengths()
        self._dropped: deque[int] = deque()
        self._done: set[int] = set()

    # -- what goes next --

    def next(self) -> Action | None:
        """Return the next action; None: wait until a request has ended or a prefix is computed."""
        if self._dropped:
            return DropPrefix(self._dropped.popleft())
        group = self._first_ready()
        if group is None or not self._fits(group):
            return None
        return self._submit(group)

    @property
    def num_active(self) -> int:
        return len(self._planned)

    @property
    def num_left(self) -> int:
        """Requests that have not ended."""
        return len(self._group_of) - len(self._done)

    @property
    def is_done(self) -> bool:
        return not self.num_left and not self._dropped

    def group_of(self, request: int) -> int:
        return self._group_of[request].index

    def prefix_tokens_of(self, group: int) -> int:
        """Return the number of tokens that a group's requests share; 0: none."""
        return self._groups[group].prefix_tokens

    # -- what happened --

    def prefix_computed(self, group: int) -> None:
        """Note that a group's prefix is computed, and open the group. One of its requests must be active."""
        found = self._groups[group]
        assert found.prefix_tokens, f"group {group} has no prefix"
        assert found.num_active, f"group {group} computes nothing"
        if not found.is_open:
            self._clear_opener(found)
            found.is_open = True
            self._make_ready(found)

    def ended(self, request: int, num_output_tokens: int | None) -> None:
        """Note that a request has its result. `num_output_tokens` is None if the result is not a reply."""
        group = self._deactivate(request)
        self._done.add(request)
        group.num_left -= 1
        if num_output_tokens is not None:
            self._lengths.add(num_output_tokens)
            group.lengths.add(num_output_tokens)
        if not group.num_left and group.prefix_tokens:
            self._dropped.append(group.index)

    def take_back(self, request: int) -> None:
        """Take back a request that stopped without a result. It is submitted again."""
        group = self._deactivate(request)
        insort(group.waiting, request, key=lambda each: -each)
        self._make_ready(group)

    # -- the parts --

    def _is_worth_sharing(self, group: PrefixGroup) -> bool:
        return len(group.members) > 1 and group.prefix_tokens >= self._config.chunk_tokens

    def _first_ready(self) -> _Group | None:
        while self._ready:
            group = self._groups[self._ready[0]]
            if group.waiting and (group.is_open or group.opener is None):
                return group
            heappop(self._ready)
        return None

    def _make_ready(self, group: _Group) -> None:
        if group.waiting:
            heappush(self._ready, group.index)  # a duplicate does no harm

    def _fits(self, group: _Group) -> bool:
        """Whether there are enough pages for the group's next request.

        If that request opens the group, the requests that wait for other openers must also fit.
        """
        if not self._planned:
            return True
        pages = self._planned_pages + self._own_pages(group.waiting[-1], group)
        if not group.is_open:
            pages += self._prefix_pages(group) + self._coming_pages
        return pages <= self._config.pages_max

    def _submit(self, group: _Group) -> Submit:
        request = group.waiting.pop()
        own = self._planned[request] = self._own_pages(request, group)
        self._planned_pages += own
        if not group.num_active:
            self._planned_pages += self._prefix_pages(group)
        group.num_active += 1
        opens = bool(group.prefix_tokens) and not group.is_open
        if opens:
            group.opener = request
            group.own_pages = sum(self._own_pages(each, group) for each in group.waiting)
            self._coming_pages += group.own_pages
        return Submit(request, group.index, group.prefix_tokens, opens)

    def _deactivate(self, request: int) -> _Group:
        group = self._group_of[request]
        self._planned_pages -= self._planned.pop(request)
        group.num_active -= 1
        if group.opener == request:
            self._clear_opener(group)
            self._make_ready(group)
        if not group.num_active:
            self._planned_pages -= self._prefix_pages(group)
            group.is_open = False
        return group

    def _clear_opener(self, group: _Group) -> None:
        """Note that the group is no longer opening."""
        if group.opener is not None:
            group.opener = None
            self._coming_pages -= group.own_pages
            group.own_pages = 0

    def _prefix_pages(self, group: _Group) -> int:
        return group.prefix_tokens // self._config.chunk_tokens

    def _own_pages(self, request: int, group: _Group) -> int:
        """Return the pages that a request needs in addition to the whole pages of its prefix."""
        lengths = group.lengths if group.lengths.is_known else self._lengths
        num_tokens = self._num_tokens[request] + lengths.expected(self._max_tokens[request])
        return -(-num_tokens // self._config.chunk_tokens) - self._prefix_pages(group)

    # -- the audit --

    def check(self) -> None:
        """Recompute every invariant."""
        active = self._planned
        states = [request for group in self._groups for request in group.waiting]
        states += [*active, *self._done]
        assert sorted(states) == sorted(self._group_of), "a request has no state, or several"
        pages, ready = sum(active.values()), set(self._ready)
        coming_pages = 0
        for group in self._groups:
            active_members = {request for request in active if self._group_of[request] is group}
            assert group.num_active == len(active_members), (
                "a group's active requests are miscounted"
            )
            assert group.num_left == len(active_members) + len(group.waiting), (
                "a group's unfinished requests are miscounted"
            )
            assert group.waiting == sorted(group.waiting, reverse=True), "out of order"
            assert group.opener is None or active_members == {group.opener}, (
                "other requests are active before the prefix is computed"
            )
            assert not group.is_open or active_members, "a group without active requests is open"
            if group.prefix_tokens and not group.is_open:
                assert active_members <= {group.opener}, (
                    "other requests are active before the prefix is computed"
                )
            if active_members:
                pages += self._prefix_pages(group)
            if group.opener is not None:
                coming_pages += group.own_pages
            elif group.waiting:
                assert group.index in ready, f"group {group.index} is forgotten"
        assert pages == self._planned_pages, "pages are miscounted"
        assert pages <= self._config.pages_max or len(active) == 1, "more pages than there are"
        assert self._coming_pages == coming_pages, (
            "the pages of requests that wait for an opener are miscounted"
        )
