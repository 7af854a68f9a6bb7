"""Algorithm 1 of BatchMaker: which cells form the next tasks of a worker. Without I/O and clock.

    add      ──> subgraphs that wait for nothing enter the queue of their type
    schedule ──> up to `max_tasks_to_submit` tasks of one type, for a worker that is idle
    complete ──> a subgraph whose last node ended releases the subgraphs that wait for it

Within a subgraph, submitting a node makes its successors ready. This is correct because a subgraph with
running tasks is pinned to its worker, and a worker runs its tasks in the order of submission. Between
subgraphs, which may run on different workers, only a completion counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from pensieve.cells.graph import CellType, Graph

MAX_TASKS_TO_SUBMIT = 5  # the default of the paper


class NodeRef(NamedTuple):
    request: int
    node: int


@dataclass(frozen=True, eq=False, slots=True)
class Task:
    """A batch of one cell type. A row that is None is padding."""

    cell: CellType
    rows: tuple[NodeRef | None, ...]


@dataclass(eq=False, slots=True)
class _Subgraph:
    request: int
    cell: CellType
    ready: list[int]
    unsubmitted: int
    unfinished: int
    pinned: int | None = None  # the worker that runs tasks with nodes of this subgraph
    num_running: int = 0  # tasks that contain nodes of this subgraph


@dataclass(eq=False, slots=True)
class _Request:
    graph: Graph
    missing: list[int]  # per node, inputs in its own subgraph that are not submitted yet
    awaited: list[int]  # per subgraph, subgraphs that have not ended yet
    unfinished: int
    subgraphs: dict[int, _Subgraph] = field(default_factory=dict)  # released ones


class _Queue:
    """The subgraphs of one type that have nodes to submit, and how many of their nodes are ready."""

    def __init__(self) -> None:
        self.subgraphs: dict[_Subgraph, None] = {}  # in the order of release
        self.num_ready: Counter[int | None] = Counter()  # by the worker of the pin
        self.num_running = 0


class Scheduler:
    """Form the tasks of all workers. Worker ids are small integers."""

    def __init__(
        self, cells: Iterable[CellType], max_tasks_to_submit: int = MAX_TASKS_TO_SUBMIT
    ) -> None:
        self.max_tasks_to_submit = max_tasks_to_submit
        self._queues = {cell: _Queue() for cell in cells}
        self._requests: dict[int, _Request] = {}
        self._running: dict[Task, list[_Subgraph]] = {}

    def add(self, request: int, graph: Graph) -> None:
        """Add an unfolded request. Its id must be new."""
        state = _Request(
            graph, list(graph.inner_inputs), [len(each) for each in graph.awaited], len(graph.nodes)
        )
        self._requests[request] = state
        for index, awaited in enumerate(state.awaited):
            if not awaited:
                self._release(request, state, index)

    def _release(self, request: int, state: _Request, index: int) -> None:
        nodes = state.graph.subgraphs[index]
        cell = state.graph.nodes[nodes[0]].cell
        ready = [node for node in nodes if not state.missing[node]]
        subgraph = _Subgraph(request, cell, ready, len(nodes), len(nodes))
        state.subgraphs[index] = subgraph
        self._queues[cell].subgraphs[subgraph] = None
        self._queues[cell].num_ready[None] += len(ready)

    def schedule(self, worker: int) -> list[Task]:
        """Submit the next tasks of a worker that is idle. Return [] if no node is ready for it."""
        cell = self._choose(worker)
        return [] if cell is None else self._batch(cell, worker)

    def _choose(self, worker: int) -> CellType | None:
        """Apply the three criteria in their order. Nodes pinned to other workers do not count."""
        ready = {
            cell: queue.num_ready[None] + queue.num_ready[worker]
            for cell, queue in self._queues.items()
        }
        found = [cell for cell, count in ready.items() if count >= cell.batch_max]
        if not found:
            found = [cell for cell, n in ready.items() if n and not self._queues[cell].num_running]
        if not found:
            found = [cell for cell, count in ready.items() if count]
        return max(found, key=lambda cell: cell.priority, default=None)

    def _batch(self, cell: CellType, worker: int) -> list[Task]:
        tasks: list[Task] = []
        while len(tasks) < self.max_tasks_to_submit:
            batch = self._form_batch(cell, worker)
            size = sum(count for _, count in batch)
            if not size or (tasks and size < cell.batch_min):
                break
            tasks.append(self._submit(cell, worker, batch))
        return tasks

    def _form_batch(self, cell: CellType, worker: int) -> list[tuple[_Subgraph, int]]:
        """Return subgraphs and how many of their ready nodes to take, oldest subgraph first."""
        batch, room = [], cell.batch_max
        for subgraph in self._queues[cell].subgraphs:
            if subgraph.pinned is None or subgraph.pinned == worker:
                count = min(room, len(subgraph.ready))
                batch.append((subgraph, count))
                room -= count
                if not room:
                    break
        return batch

    def _submit(self, cell: CellType, worker: int, batch: list[tuple[_Subgraph, int]]) -> Task:
        queue = self._queues[cell]
        rows: list[NodeRef] = []
        for subgraph, count in batch:
            self._pin(queue, subgraph, worker)
            nodes, subgraph.ready = subgraph.ready[:count], subgraph.ready[count:]
            rows += [NodeRef(subgraph.request, node) for node in nodes]
            subgraph.num_running += 1
            subgraph.unsubmitted -= count
            newly_ready = self._update_dependencies(self._requests[subgraph.request], nodes)
            subgraph.ready += newly_ready
            queue.num_ready[worker] += len(newly_ready) - count
            if not subgraph.unsubmitted:
                del queue.subgraphs[subgraph]
        task = Task(cell, tuple(rows))
        self._running[task] = [subgraph for subgraph, _ in batch]
        queue.num_running += 1
        return task

    @staticmethod
    def _update_dependencies(state: _Request, submitted: list[int]) -> list[int]:
        """Return the nodes of the same subgraph that become ready because these were submitted."""
        graph, ready = state.graph, []
        for node in submitted:
            for consumer in graph.consumers[node]:
                if graph.subgraph_of[consumer] == graph.subgraph_of[node]:
                    state.missing[consumer] -= 1
                    if not state.missing[consumer]:
                        ready.append(consumer)
        return ready

    @staticmethod
    def _pin(queue: _Queue, subgraph: _Subgraph, worker: int | None) -> None:
        if subgraph.pinned != worker:
            queue.num_ready[subgraph.pinned] -= len(subgraph.ready)
            queue.num_ready[worker] += len(subgraph.ready)
            subgraph.pinned = worker

    def complete(self, task: Task, ended: Collection[int] = ()) -> list[int]:
        """Take note that a task ran. Return the requests that are finished with it.

        `ended` are requests whose other nodes are not needed, such as decoders after the end token. Their
        nodes that are already submitted still run.
        """
        queue = self._queues[task.cell]
        queue.num_running -= 1
        for subgraph in self._running.pop(task):
            subgraph.num_running -= 1
            if not subgraph.num_running and subgraph in queue.subgraphs:
                self._pin(queue, subgraph, None)
        finished = [request for request in ended if request in self._requests]
        for request in finished:
            self._drop(request)
        for row in task.rows:
            if row and (state := self._requests.get(row.request)):
                state.unfinished -= 1
                self._end_node(row.request, state, state.graph.subgraph_of[row.node])
                if not state.unfinished:
                    del self._requests[row.request]
                    finished.append(row.request)
        return finished

    def _end_node(self, request: int, state: _Request, index: int) -> None:
        subgraph = state.subgraphs[index]
        subgraph.unfinished -= 1
        if not subgraph.unfinished:
            for other in state.graph.dependents[index]:
                state.awaited[other] -= 1
                if not state.awaited[other]:
                    self._release(request, state, other)

    def _drop(self, request: int) -> None:
        for subgraph in self._requests.pop(request).subgraphs.values():
            queue = self._queues[subgraph.cell]
            if queue.subgraphs.pop(subgraph, self) is None:
                queue.num_ready[subgraph.pinned] -= len(subgraph.ready)

    def check(self) -> None:
        """Raise AssertionError if the counts differ from the queues."""
        for cell, queue in self._queues.items():
            ready: Counter[int | None] = Counter()
            for subgraph in queue.subgraphs:
                assert subgraph.unsubmitted
                assert (subgraph.pinned is None) == (subgraph.num_running == 0)
                ready[subgraph.pinned] += len(subgraph.ready)
            assert +queue.num_ready == +ready, (cell.name, queue.num_ready, ready)
            assert queue.num_running == sum(task.cell is cell for task in self._running)
