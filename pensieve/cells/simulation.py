"""Discrete events: the policies on workers whose cells take predicted times."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count, pairwise
from math import inf
from operator import sub
from typing import NamedTuple, TypeAlias

from pensieve.cells.baselines import GraphBatching
from pensieve.cells.graph import CellType, Graph
from pensieve.cells.scheduler import Scheduler, Task


class Arrival(NamedTuple):
    seconds: float
    graph: Graph


@dataclass(frozen=True)
class Costs:
    """Seconds of a task: points of (batch size, seconds) for each type, with straight lines between.

    Beyond the last point the time grows with the batch size. `gather` and `gather_row` are added to tasks
    of cellular batching, for scheduling and for gathering inputs. `merge_node` is the time to build and
    merge the graph of one node; graph batching does this before it computes.
    """

    points: Mapping[CellType, Sequence[tuple[int, float]]]
    gather: float = 0.0
    gather_row: float = 0.0
    merge_node: float = 0.0

    def step(self, cell: CellType, size: int) -> float:
        points = self.points[cell]
        if size <= points[0][0]:
            return points[0][1]
        for (left, low), (right, high) in pairwise(points):
            if size <= right:
                return low + (high - low) * (size - left) / (right - left)
        return points[-1][1] * size / points[-1][0]

    def cellular_step(self, cell: CellType, size: int) -> float:
        return self.step(cell, size) + self.gather + self.gather_row * size


@dataclass
class Run:
    """The times of each request, in the order of arrival, and the tasks of cellular batching."""

    arrived: list[float]
    started: list[float]
    finished: list[float]
    tasks: list[tuple[float, Task]] = field(default_factory=list)

    def latency(self, part: float = 0.9) -> float:
        return quantile(map(sub, self.finished, self.arrived), part)

    def queueing(self, part: float = 0.99) -> float:
        """Return a quantile of the time from arrival to the start of the first task."""
        return quantile(map(sub, self.started, self.arrived), part)

    def throughput(self) -> float:
        """Return the requests per second that ended after a fifth of the arrivals and before the last."""
        begin, end = self.arrived[len(self.arrived) // 5], self.arrived[-1]
        return sum(begin <= each <= end for each in self.finished) / (end - begin)


def quantile(values: Iterable[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


# For each task: when it ends, and a function that returns the requests that end with it.
_Work: TypeAlias = list[tuple[float, Callable[[], Iterable[int]]]]


def simulate_cellular(
    arrivals: Sequence[Arrival], cells: Iterable[CellType], costs: Costs, num_workers: int = 1
) -> Run:
    scheduler = Scheduler(cells)

    def work(run: Run, worker: int, now: float) -> _Work:
        submitted: _Work = []
        for task in scheduler.schedule(worker):
            run.tasks.append((now, task))
            for row in task.rows:
                if row and row.node == 0:
                    run.started[row.request] = now
            now += costs.cellular_step(task.cell, len(task.rows))
            submitted.append((now, partial(scheduler.complete, task)))
        return submitted

    return _simulate(arrivals, scheduler.add, work, num_workers)


def simulate_graph_batching(
    arrivals: Sequence[Arrival], policy: GraphBatching, costs: Costs, num_workers: int = 1
) -> Run:
    def work(run: Run, worker: int, now: float) -> _Work:
        if (batch := policy.next_batch()) is None:
            return []
        for request in batch.requests:
            run.started[request] = now
        if batch.steps is None:
            seconds = sum(costs.step(task.cell, len(task.rows)) for task in batch.tasks)
        else:  # the same in less time
            size = len(batch.requests)
            seconds = sum(costs.step(cell, size) * count for cell, count in batch.steps.items())
        end = now + seconds + costs.merge_node * batch.num_merged
        return [(end, lambda: list(batch.requests))]

    return _simulate(arrivals, policy.add, work, num_workers)


def _simulate(
    arrivals: Sequence[Arrival],
    add: Callable[[int, Graph], None],
    work: Callable[[Run, int, float], _Work],
    num_workers: int,
) -> Run:
    """Handle arrivals and ends of tasks in the order of time. After each moment, idle workers get work."""
    times = [each.seconds for each in arrivals]
    run = Run(times, [0.0] * len(times), [0.0] * len(times))
    waiting = deque(enumerate(arrivals))
    # The number breaks ties. The last part is the worker.
    ends: list[tuple[float, int, Callable[[], Iterable[int]], int]] = []
    numbers, num_left = count(), [0] * num_workers
    while waiting or ends:
        now = min(waiting[0][1].seconds if waiting else inf, ends[0][0] if ends else inf)
        while ends and ends[0][0] == now:
            _, _, end, worker = heappop(ends)
            num_left[worker] -= 1
            for request in end():
                run.finished[request] = now
        while waiting and waiting[0][1].seconds == now:
            request, arrival = waiting.popleft()
            add(request, arrival.graph)
        for worker in range(num_workers):
            if not num_left[worker]:
                for seconds, end in work(run, worker, now):
                    num_left[worker] += 1
                    heappush(ends, (seconds, next(numbers), end, worker))
    return run
