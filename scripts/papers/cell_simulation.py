"""Simulate a batching policy with discrete events: workers run cells, whose times are predicted."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, pairwise
from math import inf
from operator import sub
from typing import NamedTuple

from pensieve.cells.graph import CellType, Graph
from pensieve.cells.scheduler import Policy, Task


class Arrival(NamedTuple):
    seconds: float
    graph: Graph


@dataclass(frozen=True)
class Costs:
    """Seconds of a task: points of (batch size, seconds) for each type, with straight lines between.

    Beyond the last point, the time is proportional to the batch size. A task of n rows takes
    `per_task + n * per_row` in addition. With cellular batching, this is the time to schedule and to gather
    inputs. With graph merging, it is the time to build the graph.
    """

    points: Mapping[CellType, Sequence[tuple[int, float]]]
    per_task: float = 0.0
    per_row: float = 0.0

    def seconds(self, cell: CellType, size: int) -> float:
        return self._compute(cell, size) + self.per_task + self.per_row * size

    def _compute(self, cell: CellType, size: int) -> float:
        points = self.points[cell]
        if size <= points[0][0]:
            return points[0][1]
        for (left, low), (right, high) in pairwise(points):
            if size <= right:
                return low + (high - low) * (size - left) / (right - left)
        return points[-1][1] * size / points[-1][0]


class Run(NamedTuple):
    """The times of each request, in the order of arrival."""

    arrived: list[float]
    started: list[float]  # when the task with the request's first node starts
    finished: list[float]

    def latency(self, part: float = 0.9) -> float:
        return quantile(map(sub, self.finished, self.arrived), part)

    def queueing(self, part: float = 0.99) -> float:
        """Return a quantile of the time from arrival to start."""
        return quantile(map(sub, self.started, self.arrived), part)

    def computation(self, part: float = 0.5) -> float:
        """Return a quantile of the time from start to end."""
        return quantile(map(sub, self.finished, self.started), part)

    def throughput(self) -> float:
        """Return the requests per second that ended after a fifth of the arrivals and before the last."""
        begin, end = self.arrived[len(self.arrived) // 5], self.arrived[-1]
        return sum(begin <= each <= end for each in self.finished) / (end - begin)


def quantile(values: Iterable[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def simulate(
    arrivals: Sequence[Arrival], policy: Policy, costs: Costs, num_workers: int = 1
) -> Run:
    """Handle arrivals and ends of tasks in the order of time. After each moment, idle workers get work."""
    times = [each.seconds for each in arrivals]
    run = Run(times, [0.0] * len(times), [0.0] * len(times))
    waiting = deque(enumerate(arrivals))
    ends: list[tuple[float, int, int, Task]] = []  # time, a number that breaks ties, worker
    numbers, num_left = count(), [0] * num_workers
    while waiting or ends:
        now = min(waiting[0][1].seconds if waiting else inf, ends[0][0] if ends else inf)
        while ends and ends[0][0] == now:
            _, _, worker, task = heappop(ends)
            num_left[worker] -= 1
            for request in policy.complete(task):
                run.finished[request] = now
        while waiting and waiting[0][1].seconds == now:
            request, arrival = waiting.popleft()
            policy.add(request, arrival.graph)
        for worker in range(num_workers):
            if not num_left[worker]:
                time = now
                for task in policy.schedule(worker):
                    for row in task.rows:
                        if row and row.node == 0:
                            run.started[row.request] = time
                    time += costs.seconds(task.cell, len(task.rows))
                    num_left[worker] += 1
                    heappush(ends, (time, next(numbers), worker, task))
    return run
