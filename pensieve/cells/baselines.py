"""The policies that BatchMaker is compared with. They batch whole requests; none joins a running batch."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict, deque
from collections.abc import Collection, Iterator

from pensieve.cells.graph import CellType, Graph
from pensieve.cells.scheduler import NodeRef, Policy, Task

Requests = dict[int, Graph]


class GraphBatching(Policy):
    """Compute all tasks of some requests. Answer these requests together, after the last task."""

    def __init__(self, batch_max: int = 64) -> None:
        self._batch_max = batch_max
        self._waiting: defaultdict[int, deque[tuple[int, Graph]]] = defaultdict(deque)  # by bucket
        self._answered: dict[Task, list[int]] = {}  # by last task

    def add(self, request: int, graph: Graph) -> None:
        self._waiting[self._bucket(graph)].append((request, graph))

    def schedule(self, worker: int) -> list[Task]:
        filled = sorted(bucket for bucket, waiting in self._waiting.items() if waiting)
        if not filled:
            return []
        waiting = self._waiting[self._choose(filled)]
        requests = dict(waiting.popleft() for _ in range(min(self._batch_max, len(waiting))))
        tasks = list(self._tasks(requests))
        self._answered[tasks[-1]] = list(requests)
        return tasks

    def complete(self, task: Task, ended: Collection[int] = ()) -> list[int]:
        return self._answered.pop(task, [])

    def _bucket(self, graph: Graph) -> int:
        return 0

    def _choose(self, filled: list[int]) -> int:
        return filled[0]

    @abstractmethod
    def _tasks(self, requests: Requests) -> Iterator[Task]: ...


class Padding(GraphBatching):
    """Pad chains to the same length, as TensorFlow and MXNet did.

    Bucket i has the requests whose first stage is in (i * width, (i + 1) * width] cells long, and computes
    (i + 1) * width cells for all of them. Later stages, whose lengths are not known before, end with the
    longest request. The buckets take turns, and a batch starts as soon as a worker is idle. With
    `full_first`, a bucket with a full batch does not wait for its turn.
    """

    def __init__(self, width: int = 10, batch_max: int = 512, full_first: bool = False) -> None:
        super().__init__(batch_max)
        self._width, self._full_first, self._last = width, full_first, -1

    def _bucket(self, graph: Graph) -> int:
        return (len(next(iter(graph.stages.values()))) - 1) // self._width

    def _choose(self, filled: list[int]) -> int:
        full = [each for each in filled if len(self._waiting[each]) >= self._batch_max]
        if full and self._full_first:
            return min(full, key=lambda each: self._waiting[each][0])  # with the oldest request
        self._last = next((each for each in filled if each > self._last), filled[0])
        return self._last

    def _tasks(self, requests: Requests) -> Iterator[Task]:
        first = next(iter(requests.values()))
        lengths = dict.fromkeys(first.stages, 0)
        for graph in requests.values():
            for cell, nodes in graph.stages.items():
                lengths[cell] = max(lengths.get(cell, 0), len(nodes))
        lengths[next(iter(lengths))] = (self._bucket(first) + 1) * self._width
        for cell, length in lengths.items():
            nodes_by_request = [
                (each, graph.stages.get(cell, [])) for each, graph in requests.items()
            ]
            for step in range(length):
                rows = [
                    NodeRef(request, nodes[step]) if step < len(nodes) else None
                    for request, nodes in nodes_by_request
                ]
                yield Task(cell, tuple(rows))


class Merging(GraphBatching):
    """Merge the graphs of up to `batch_max` requests, as DyNet and TensorFlow Fold did.

    Each task has all ready nodes of one type: of the type whose ready nodes have the least mean depth. So a
    task may have more nodes than there are requests.
    """

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
                        successor = (depth + 1, NodeRef(request, consumer))
                        ready[graph.nodes[consumer].cell].append(successor)


class NodeByNode(GraphBatching):
    """Run the nodes one after the other, each for up to `batch_max` requests whose graphs are equal.

    `batch_max=1` means no batching. If all requests have the same tree, this is the *ideal* of the BatchMaker
    paper: a program with this one graph built in.
    """

    def _tasks(self, requests: Requests) -> Iterator[Task]:
        for index, node in enumerate(next(iter(requests.values())).nodes):
            yield Task(node.cell, tuple(NodeRef(request, index) for request in requests))
