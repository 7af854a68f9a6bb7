"""Group the requests of a batch by common prefixes so that as many tokens as possible are saved.

All requests are known in advance. If several requests begin with the same tokens, that prefix is computed
once, and each request continues from the prefix (as a fork of a conversation). Prefixes may be nested. For
example, all requests share instructions, and ten of them also share a document after the instructions. A
batch attends to one shared run of pages for each group of requests (BatchLLM, section 4.2), so each request
has only one prefix. In the example, the instructions are computed again for each document.

**The choice.** In the compact prefix tree, a node is a run of tokens that some requests share, and a leaf is
a request. Some nodes are *chosen*. A request's prefix ends at the lowest chosen node above it. The tokens
to compute are

    the depth of each chosen node  +  each request's tokens after the lowest chosen node above it

Depths are numbers of tokens from the root. This module finds the smallest sum. (The paper's algorithm 1
compares each node with its grandchildren, from the leaves up, and finds a sum close to the smallest one.
tests/core/test_prefix_groups.py compares both algorithms with the best choice in small trees.)

**How.** Let d be the depth of the lowest chosen node above a node. The cost of the requests under the node
depends only on d.

* If the node is not chosen, the cost is `F(d)`, the sum of its children's costs. If d grows by one, each
  request without a chosen node between this node and the request computes one token less. As d grows, fewer
  nodes are worth choosing, so F falls more steeply. So F is concave and piecewise linear.
* If the node is chosen, the cost is the node's depth plus F at that depth, whatever d is.

So there is a *threshold*: the node is chosen if d is below the threshold. The cost is constant up to the
threshold, and F(d) after it. So the threshold becomes a corner of the cost function, and the corners of F
before it are removed. The functions are added from the leaves up. The shorter list of corners is inserted
into the longer list. Then the nodes are chosen from the root down. With sorting, this takes O(n log n) steps
and memory proportional to the number of requests.
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
RUN = 2048  # number of requests that are sorted at once


class PrefixGroup(NamedTuple):
    """Requests that share their first `prefix_tokens` tokens. A single request shares none."""

    prefix_tokens: int
    members: tuple[int, ...]  # indices of requests

    def num_computed(self, requests: Sequence[array[int]]) -> int:
        """Return the prompt tokens to compute: the prefix once, and the rest of each request."""
        distinct = sum(len(requests[each]) - self.prefix_tokens for each in self.members)
        return self.prefix_tokens + distinct


def prefix_groups(requests: Sequence[array[int]]) -> list[PrefixGroup]:
    """Group requests (`array('I')` of token ids); each request is in one group.

    Groups with the fewest tokens to compute come first. Such groups spend most of their time on replies. If
    they run early, their decodes share iterations with the prompts of later groups (the paper's equation 4).
    """
    return sorted(
        _chosen_groups(_tree(requests)),
        key=lambda group: (group.num_computed(requests), group.members),
    )


def saving(groups: Iterable[PrefixGroup], requests: Sequence[array[int]]) -> float:
    """Return the fraction of the prompts' tokens that need not be computed (the paper's equation 2)."""
    total = sum(map(len, requests))
    saved = sum((len(group.members) - 1) * group.prefix_tokens for group in groups)
    return saved / total if total else 0.0


def saving_of_tree(requests: Sequence[array[int]]) -> float:
    """Return the fraction of prompt tokens that would be saved if requests could use nested prefixes.

    This is an upper bound for `saving`.
    """
    total = sum(map(len, requests))
    keys = sorted(map(_sortable, requests))
    saved = sum(_num_common(first, second) for first, second in pairwise(keys))
    return saved / total if total else 0.0


# -- the tree --


@dataclass(slots=True)
class _Node:
    depth: int  # tokens from the root to its end
    children: list[_Node] = field(default_factory=list)
    ending: list[int] = field(default_factory=list)  # requests that end here
    threshold: float = 0.0  # the node is chosen if d is below this; see the module's docstring


def _tree(requests: Sequence[array[int]]) -> _Node:
    """Build the compact tree.

    A node has at least two children, or one child and a request that ends there, or it is a leaf.
    """
    keys = [_sortable(request) for request in requests]
    # Sorted in runs that are then merged, because one long sort would block other threads.
    runs = (range(at, min(at + RUN, len(keys))) for at in range(0, len(keys), RUN))
    order = merge(*(sorted(run, key=keys.__getitem__) for run in runs), key=keys.__getitem__)
    root = _Node(0)
    path = [root]  # from the root to the previous request
    last = b""
    for index in order:
        key = keys[index]
        common = _num_common(last, key)
        below: _Node | None = None
        while path[-1].depth > common:
            below = path.pop()
        if path[-1].depth < common:  # the branch point is within a node
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
    """Return bytes that sort as the tokens do."""
    assert request.itemsize == TOKEN_BYTES
    if sys.byteorder == "big":
        return request.tobytes()
    swapped = request[:]
    swapped.byteswap()
    return swapped.tobytes()


def _num_common(first: bytes, second: bytes) -> int:
    """Return the length of the common prefix in tokens."""
    least, most = 0, min(len(first), len(second)) // TOKEN_BYTES
    while least < most:
        middle = (least + most + 1) // 2
        part = slice(least * TOKEN_BYTES, middle * TOKEN_BYTES)
        if first[part] == second[part]:
            least = middle
        else:
            most = middle - 1
    return least


# -- the choice --


@dataclass(slots=True)
class _Cost:
    """The cost of the requests under a node, by the depth (0 to `top`) of the lowest chosen node above.

    Between two corners, the cost falls by one token per token of depth for each request whose prefix ends
    above this node.
    """

    top: float
    at_top: float
    slope_at_top: int
    at_zero: float
    slope_at_zero: int
    corners: list[tuple[float, int]]  # ascending: (depth, increase of the slope at this depth)

    def restrict(self, top: int) -> None:
        """Restrict the function to depths up to `top`."""
        while self.corners and self.corners[-1][0] > top:
            position, bend = self.corners.pop()
            self.at_top += self.slope_at_top * (self.top - position)
            self.slope_at_top -= bend
            self.top = position
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
        """Limit the cost to `most`; return the depth from which the cost is less."""
        if most > self.at_zero - 0.5:  # both are whole numbers, up to rounding
            return 0.0
        position, cost, slope, num_removed = 0.0, self.at_zero, self.slope_at_zero, 0
        for corner, bend in self.corners:
            at_corner = cost - slope * (corner - position)
            if at_corner <= most:
                break
            position, cost, slope = corner, at_corner, slope + bend
            num_removed += 1
        most = round(most)
        threshold = position + (cost - most) / slope
        self.corners[:num_removed] = [(threshold, slope)]
        self.at_zero, self.slope_at_zero = most, 0
        return threshold


def _chosen_groups(root: _Node) -> list[PrefixGroup]:
    _find_thresholds(root)
    groups: list[PrefixGroup] = []
    members: dict[int, list[int]] = {}  # by number of the chosen node
    prefixes: dict[int, int] = {}
    # (node, depth and number of the lowest chosen node above it)
    stack: list[tuple[_Node, int, int]] = [(root, 0, 0)]
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
    for chosen, own in members.items():
        groups.append(PrefixGroup(prefixes[chosen] if len(own) > 1 else 0, tuple(sorted(own))))
    return groups


def _find_thresholds(root: _Node) -> None:
    """Set the thresholds from the leaves up. Not recursive, because a thousand prefixes may be nested."""
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
            cost.restrict(depth)
        for part in parts:
            if part is not cost:
                part.restrict(depth)
                cost.add(part)
        cost.slope_at_top += count
        cost.slope_at_zero += count
        cost.at_zero += count * depth
        node.threshold = cost.cut(depth + cost.at_top)
        costs[id(node)] = cost
