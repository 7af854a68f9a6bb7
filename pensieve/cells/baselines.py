"""The policies that BatchMaker is compared with. They batch whole requests, and nothing joins a batch.

When a worker is idle, `next_batch` returns requests and the tasks that compute them all. The requests are
answered together, after the last task.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from pensieve.cells.graph import CellType, Graph
from pensieve.cells.scheduler import NodeRef, Task

Requests = dict[int, Graph]


@dataclass(frozen=True)
class Batch:
    requests: Requests
    tasks: Iterator[Task]
    num_merged: int = 0  # nodes of graphs that were merged, which takes time
    steps: dict[CellType, int] | None = None  # if all tasks of a type have a row for each request


class GraphBatching(Protocol):
    def add(self, request: int, graph: Graph) -> None: ...
    def next_batch(self) -> Batch | None: ...


class Padding:
    """Pad chains to the same length, as TensorFlow and MXNet did.

    Bucket i has the requests whose first stage is in (i * width, (i + 1) * width] cells long, and computes
    (i + 1) * width cells for all of them. Later stages, whose lengths are not known before, end with the
    longest request. The buckets take turns, and a batch starts as soon as a worker is idle. With
    `full_first`, a bucket with a full batch does not wait for its turn.
    """

    def __init__(self, width: int = 10, batch_max: int = 512, full_first: bool = False) -> None:
        self._width, self._batch_max, self._full_first = width, batch_max, full_first
        self._buckets: defaultdict[int, deque[tuple[int, Graph]]] = defaultdict(deque)
        self._last = -1

    def add(self, request: int, graph: Graph) -> None:
        first = next(iter(graph.stages.values()))
        self._buckets[(len(first) - 1) // self._width].append((request, graph))

    def next_batch(self) -> Batch | None:
        filled = sorted(bucket for bucket, waiting in self._buckets.items() if waiting)
        if not filled:
            return None
        full = [each for each in filled if len(self._buckets[each]) >= self._batch_max]
        if full and self._full_first:
            bucket = min(full, key=lambda each: self._buckets[each][0])  # with the oldest request
        else:
            bucket = self._last = next((each for each in filled if each > self._last), filled[0])
        requests = _take(self._buckets[bucket], self._batch_max)
        steps: dict[CellType, int] = {}
        for graph in requests.values():
            for cell, nodes in graph.stages.items():
                steps[cell] = max(steps.get(cell, 0), len(nodes))
        steps[next(iter(steps))] = (bucket + 1) * self._width
        return Batch(requests, _pad(requests, steps), steps=steps)


def _pad(requests: Requests, steps: dict[CellType, int]) -> Iterator[Task]:
    for cell, length in steps.items():
        nodes_of = {request: graph.stages.get(cell, []) for request, graph in requests.items()}
        for step in range(length):
            yield Task(
                cell,
                tuple(
                    NodeRef(request, nodes[step]) if step < len(nodes) else None
                    for request, nodes in nodes_of.items()
                ),
            )


class Merging:
    """Merge the graphs of up to `batch_max` requests, as DyNet and TensorFlow Fold did.

    Each task has all ready nodes of one type: of the type whose ready nodes have the least mean depth. So a
    task may have more nodes than there are requests.
    """

    def __init__(self, batch_max: int = 64) -> None:
        self._batch_max = batch_max
        self._waiting: deque[tuple[int, Graph]] = deque()

    def add(self, request: int, graph: Graph) -> None:
        self._waiting.append((request, graph))

    def next_batch(self) -> Batch | None:
        if not (requests := _take(self._waiting, self._batch_max)):
            return None
        return Batch(
            requests, self._tasks(requests), sum(len(graph.nodes) for graph in requests.values())
        )

    def _tasks(self, requests: Requests) -> Iterator[Task]:
        ready: defaultdict[CellType, list[tuple[int, NodeRef]]] = defaultdict(list)  # with depths
        missing = {}
        for request, graph in requests.items():
            missing[request] = [len(node.inputs) for node in graph.nodes]
            for index, node in enumerate(graph.nodes):
                if not node.inputs:
                    ready[node.cell].append((0, NodeRef(request, index)))
        while ready:
            cell = min(
                ready, key=lambda each: sum(depth for depth, _ in ready[each]) / len(ready[each])
            )
            rows = ready.pop(cell)
            yield Task(cell, tuple(row for _, row in rows))
            for depth, (request, index) in rows:
                graph = requests[request]
                for consumer in graph.consumers[index]:
                    missing[request][consumer] -= 1
                    if not missing[request][consumer]:
                        found = (depth + 1, NodeRef(request, consumer))
                        ready[graph.nodes[consumer].cell].append(found)


class NodeByNode(Merging):
    """Run the nodes one after the other, each for up to `batch_max` requests whose graphs are equal.

    `batch_max=1` is no batching. With identical trees, this is the ideal that has their graph built in.
    """

    def _tasks(self, requests: Requests) -> Iterator[Task]:
        for index, node in enumerate(next(iter(requests.values())).nodes):
            yield Task(node.cell, tuple(NodeRef(request, index) for request in requests))


def _take(waiting: deque[tuple[int, Graph]], count: int) -> Requests:
    return dict(waiting.popleft() for _ in range(min(count, len(waiting))))
