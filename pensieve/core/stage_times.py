"""Estimate when pipeline stages become free, and how long the next iteration may take.

With S stages, S iterations are in flight.  An iteration that takes c seconds per stage leaves stage i at

    left[i] = max(left[i-1], free[i]) + c

where left[-1] is when it was planned, and free[i] when the iteration before has left stage i.

`committed` infers c from the time between two commits: the largest c with which the iteration would have left
by then.  So a pipeline bubble is not mistaken for slow compute.  `longest` returns the largest c with which
this iteration meets the objective, and those behind it do, as many as are in flight, if they take c as well.
Without those behind it one micro-batch would take all that the objective has room for.

The longest way from stage i to where the j-th iteration behind leaves the last stage is S - i + j times c, so
both answers are the least of a few quotients.  All stages are assumed equally fast; c is the slowest stage's.
"""

from __future__ import annotations

from collections import deque
from itertools import islice


class StageTimes:
    def __init__(self, num_stages: int) -> None:
        self._free = [float("-inf")] * num_stages  # after the iterations that are committed
        self._uncommitted: deque[tuple[float, float]] = deque()  # planned at; seconds in each stage

    def planned(self, now: float, seconds: float) -> None:
        """An iteration is launched that is thought to take so long in each stage."""
        self._uncommitted.append((now, seconds))

    def committed(self, now: float) -> float:
        """The oldest iteration has left the last stage; what it took in each."""
        at, _ = self._uncommitted.popleft()
        num_stages = len(self._free)
        ways = [(at, num_stages)]
        ways += [(free, num_stages - index) for index, free in enumerate(self._free)]
        seconds = max(min((now - begin) / number for begin, number in ways), 0.0)
        self._free = self._left(self._free, at, seconds)
        self._free[-1] = now
        return seconds

    def longest(self, now: float, since: float, limit: float) -> float:
        """What an iteration that is planned now may take in each stage, if nobody is to wait for longer than
        `limit` from one token to the next; its turns have waited `since` then."""
        free, num_stages = self._free, len(self._free)
        leaves = [min(since, now)]  # for each iteration, the one that had its turns' last tokens
        for at, seconds in self._uncommitted:
            free = self._left(free, at, seconds)
            leaves.append(max(free[-1], now))
        begins = [now, *islice(leaves, 1, None)]
        most = float("inf")
        for behind, last in enumerate(leaves):
            until = last + limit
            ways = [(at, num_stages - index + behind) for index, at in enumerate(free)]
            ways += [
                (at, num_stages + behind - number) for number, at in enumerate(begins[: behind + 1])
            ]
            most = min(most, *((until - begin) / number for begin, number in ways))
        return max(most, 0.0)

    @staticmethod
    def _left(free: list[float], at: float, seconds: float) -> list[float]:
        found = []
        for each in free:
            at = max(at, each) + seconds
            found.append(at)
        return found
