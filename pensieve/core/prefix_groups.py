"""Which requests of a batch share which prefix: one prefix for each, chosen so that most tokens are saved.

All requests are known ahead.  Where many begin alike, what they begin with is computed once, and each goes on
from there (a fork of a conversation).  Prefixes may lie within one another: instructions that all requests
share, a document behind them that ten share.  A batch attends to one shared run of pages for each group of
requests (BatchLLM, section 4.2), so each request has one prefix, and where the tree of prefixes branches one
has to choose: the instructions are computed once more for each document.

**The choice.**  In the compact prefix tree (a node is a run of tokens that the same requests share, a leaf a
request) some nodes are *chosen*.  A request's prefix ends at the lowest chosen node above it, and what is
computed is

    the depth of each chosen node  +  each request's tokens behind the lowest chosen node above it

in tokens from the root.  This finds the least sum there is.  (The paper's algorithm 1 compares each node with
its grandchildren one by one, from the leaves up, and comes close; tests/core/test_prefix_groups.py holds
both against all choices in small trees.)

How: what the requests under a node cost depends only on the depth d of the lowest chosen node above them.
If the node is not chosen, it is `F(d)`, the sum of its children's costs.  Each request that has no lower
chosen node costs one token less for each token of d, so F falls, the steeper the larger d is: it is concave,
and made of straight pieces.  If the node is chosen, the cost is the same whatever d is: its own depth and F
there.  So there is a *threshold*, and the node is chosen where d lies below it; that is one more corner of a
concave function, and the corners below it are gone.  Going up, functions are added, the smaller list of
corners into the larger; going down, d says who is chosen.  With sorting, the whole takes n log n steps and
memory in proportion to the requests.
"""

from __future__ import annotations

import sys
from array import array
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import pairwise
from typing import NamedTuple

TOKEN_BYTES = 4
RUN = 2048  # requests that are sorted at once


class PrefixGroup(NamedTuple):
    """Requests that share their first `prefix_tokens` tokens; one alone shares none."""

    prefix_tokens: int
    members: tuple[int, ...]  # indices of requests

    def num_computed(self, requests: Sequence[array[int]]) -> int:
        """Tokens of prompts, the prefix once."""
        distinct = sum(len(requests[each]) - self.prefix_tokens for each in self.members)
        return self.prefix_tokens + distinct


def prefix_groups(requests: Sequence[array[int]]) -> list[PrefixGroup]:
    """Each request is in one group; `array('I')` of token ids.

    The groups with the fewest tokens to compute come first: their replies take a larger part of their time,
    so later prompts have more of them to run beside (the paper's equation 4).
    """
    return sorted(
        _chosen(_tree(requests)),
        key=lambda group: (group.num_computed(requests), group.members),
    )


def saving(groups: Iterable[PrefixGroup], requests: Sequence[array[int]]) -> float:
    """The share of the prompts' tokens that need not be computed (the paper's equation 2)."""
    total = sum(map(len, requests))
    saved = sum((len(group.members) - 1) * group.prefix_tokens for group in groups)
    return saved / total if total else 0.0


def saving_of_tree(requests: Sequence[array[int]]) -> float:
    """The same where prefixes may lie within one another: no system can save more."""
    total = sum(map(len, requests))
    keys = sorted(map(_sortable, requests))
    saved = sum(_num_common(one, other) for one, other in pairwise(keys))
    return saved / total if total else 0.0


# -- the tree --


@dataclass(slots=True)
class _Node:
    depth: int  # tokens from the root to its end
    children: list[_Node] = field(default_factory=list)
    ending: list[int] = field(default_factory=list)  # requests that end with it
    threshold: float = 0.0  # it is chosen if the lowest chosen node above it ends before


def _tree(requests: Sequence[array[int]]) -> _Node:
    """Compact: a node has two children, or one and a request that ends with it, or it is a leaf."""
    keys = [_sortable(request) for request in requests]
    # In runs, then merged: sorting all at once would keep other threads waiting for its whole time.
    runs = (range(at, min(at + RUN, len(keys))) for at in range(0, len(keys), RUN))
    order = merge(*(sorted(run, key=keys.__getitem__) for run in runs), key=keys.__getitem__)
    root = _Node(0)
    path = [root]  # from the root to the request before
    last = b""
    for index in order:
        key = keys[index]
        common = _num_common(last, key)
        below: _Node | None = None
        while path[-1].depth > common:
            below = path.pop()
        if path[-1].depth < common:  # it branches within a node
            assert below is not None
            above = path[-1]
            branch = _Node(common, [below])
            above.children[-1] = branch
            path.append(branch)
        if len(requests[index]) > common:
            leaf = _Node(len(requests[index]))
            path[-1].children.append(leaf)
            path.append(leaf)
        path[-1].ending.append(index)
        last = key
    return root


def _sortable(request: array[int]) -> bytes:
    """Bytes that are in the order of the tokens."""
    assert request.itemsize == TOKEN_BYTES
    if sys.byteorder == "big":
        return request.tobytes()
    swapped = request[:]
    swapped.byteswap()
    return swapped.tobytes()


def _num_common(one: bytes, other: bytes) -> int:
    """Tokens that both begin with."""
    least, most = 0, min(len(one), len(other)) // TOKEN_BYTES
    while least < most:
        middle = (least + most + 1) // 2
        part = slice(least * TOKEN_BYTES, middle * TOKEN_BYTES)
        if one[part] == other[part]:
            least = middle
        else:
            most = middle - 1
    return least


# -- the choice --


@dataclass(slots=True)
class _Cost:
    """What the requests under a node cost, by the depth of the lowest chosen node above: from 0 to `top`.

    Between two corners it falls by one token for each request whose prefix ends above.
    """

    top: float
    at_top: float
    slope_at_top: int
    at_zero: float
    slope_at_zero: int
    corners: list[tuple[float, int]]  # ascending: where, and by how much it is steeper behind

    def lower(self, top: int) -> None:
        """Nothing is asked of it behind that depth any more."""
        while self.corners and self.corners[-1][0] > top:
            where, bend = self.corners.pop()
            self.at_top += self.slope_at_top * (self.top - where)
            self.slope_at_top -= bend
            self.top = where
        self.at_top += self.slope_at_top * (self.top - top)
        self.top = top

    def add(self, other: _Cost) -> None:
        self.at_top += other.at_top
        self.slope_at_top += other.slope_at_top
        self.at_zero += other.at_zero
        self.slope_at_zero += other.slope_at_zero
        if len(self.corners) < len(other.corners):
            self.corners, other.corners = other.corners, self.corners
        for corner in other.corners:
            insort(self.corners, corner)

    def cut(self, most: float) -> float:
        """It is no more than that; from which depth on it is less."""
        if most > self.at_zero - 0.5:  # both are whole numbers, but for rounding
            return 0.0
        where, cost, slope, num_gone = 0.0, self.at_zero, self.slope_at_zero, 0
        for corner, bend in self.corners:
            at_corner = cost - slope * (corner - where)
            if at_corner <= most:
                break
            where, cost, slope = corner, at_corner, slope + bend
            num_gone += 1
        most = round(most)
        threshold = where + (cost - most) / slope
        self.corners[:num_gone] = [(threshold, slope)]
        self.at_zero, self.slope_at_zero = most, 0
        return threshold


def _chosen(root: _Node) -> list[PrefixGroup]:
    _find_thresholds(root)
    groups: list[PrefixGroup] = []
    members: dict[int, list[int]] = {}  # of the chosen nodes, by their order
    prefixes: dict[int, int] = {}
    stack: list[tuple[_Node, int, int]] = [
        (root, 0, 0)
    ]  # with the depth of the lowest chosen above, and which
    while stack:
        node, depth, chosen = stack.pop()
        if depth < node.threshold:
            depth, chosen = node.depth, len(prefixes) + 1
            prefixes[chosen] = depth
        if node.ending:
            if chosen:
                members.setdefault(chosen, []).extend(node.ending)
            else:
                groups += (PrefixGroup(0, (each,)) for each in node.ending)
        stack += ((child, depth, chosen) for child in node.children)
    for chosen, of_it in members.items():
        groups.append(PrefixGroup(prefixes[chosen] if len(of_it) > 1 else 0, tuple(sorted(of_it))))
    return groups


def _find_thresholds(root: _Node) -> None:
    """From the leaves up, without recursion: prompts may be prefixes of one another a thousand times over."""
    order = [root]
    for node in order:
        order += node.children
    costs: dict[int, _Cost] = {}
    for node in reversed(order):
        depth, count = node.depth, len(node.ending)
        parts = [costs.pop(id(child)) for child in node.children]
        cost = max(parts, key=lambda each: len(each.corners), default=None)
        if cost is None:
            cost = _Cost(depth, 0.0, 0, 0.0, 0, [])
        else:
            cost.lower(depth)
        for part in parts:
            if part is not cost:
                part.lower(depth)
                cost.add(part)
        cost.slope_at_top += count
        cost.slope_at_zero += count
        cost.at_zero += count * depth
        node.threshold = cost.cut(depth + cost.at_top)
        costs[id(node)] = cost
