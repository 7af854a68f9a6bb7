"""Choose the cells of a worker's next tasks (algorithm 1 of BatchMaker), without I/O and clock.

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
from typing import NamedTuple, Protocol

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


class Policy(Protocol):
    """Decides what runs next. `Scheduler` is cellular batching, and baselines.py has other policies."""

    def add(self, request: int, graph: Graph) -> None:
        """Add an unfolded request. Its id must be new."""

    def schedule(self, worker: int) -> list[Task]:
        """Return the next tasks of a worker that is idle. The worker runs them in this order."""

    def complete(self, task: Task, ended: Collection[int] = ()) -> list[int]:
        """Note that a task has run. Return the requests that can be answered now.

        `ended` are requests whose other nodes are not needed, such as decoders after the end token.
        """


@dataclass(eq=False, slots=True)
class _Subgraph:
    request: int
    cell: CellType
    ready: list[int]  # empty if all nodes are submitted
    unfinished: int  # nodes
    pinned: int | None = None  # the worker that runs tasks with nodes of this subgraph
    num_running: int = 0  # tasks that contain nodes of this subgraph


@dataclass(eq=False, slots=True)
class _Request:
    graph: Graph
    missing: list[int]  # per node, inputs in its own subgraph that are not submitted yet
    awaited: list[int]  # per subgraph, subgraphs that have not ended yet
    unfinished: int  # nodes
    subgraphs: dict[int, _Subgraph] = field(default_factory=dict)  # released subgraphs


class Scheduler(Policy):
    """Form the tasks of all workers. Worker ids are small integers."""

    def __init__(
        self, cells: Iterable[CellType], max_tasks_to_submit: int = MAX_TASKS_TO_SUBMIT
    ) -> None:
        self.max_tasks_to_submit = max_tasks_to_submit
        # For each type, the subgraphs that have nodes to submit, in the order of release.
        self._queues: dict[CellType, dict[_Subgraph, None]] = {cell: {} for cell in cells}
        self._requests: dict[int, _Request] = {}
        self._running: dict[Task, list[_Subgraph]] = {}
        self._last: list[CellType] = []  # the type of the tasks submitted last

    def add(self, request: int, graph: Graph) -> None:
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
        subgraph = state.subgraphs[index] = _Subgraph(request, cell, ready, len(nodes))
        self._queues[cell][subgraph] = None

    def schedule(self, worker: int) -> list[Task]:
        cell, tasks = self._choose(worker), list[Task]()
        while cell and len(tasks) < self.max_tasks_to_submit:
            batch = self._form_batch(cell, worker)
            if not batch or (tasks and _size(batch) < cell.batch_min):
                break
            tasks.append(self._submit(cell, worker, batch))
            self._last = [cell]
        return tasks

    def _choose(self, worker: int) -> CellType | None:
        """Apply the three criteria in their order. Nodes pinned to other workers do not count."""
        sizes = {cell: _size(self._form_batch(cell, worker)) for cell in self._queues}
        # If nothing runs, the last type counts as running, so that the other types get their turns.
        running = [task.cell for task in self._running] or self._last
        ready = [cell for cell, size in sizes.items() if size]
        full = [cell for cell in ready if sizes[cell] == cell.batch_max]
        idle = [cell for cell in ready if cell not in running]
        return max(full or idle or ready, key=lambda cell: cell.priority, default=None)

    def _form_batch(self, cell: CellType, worker: int) -> list[tuple[_Subgraph, int]]:
        """Return subgraphs and how many of their ready nodes to take, oldest subgraph first."""
        batch, room = [], cell.batch_max
        for subgraph in self._queues[cell]:
            if subgraph.pinned is None or subgraph.pinned == worker:
                count = min(room, len(subgraph.ready))
                batch.append((subgraph, count))
                room -= count
                if not room:
                    break
        return batch

    def _submit(self, cell: CellType, worker: int, batch: list[tuple[_Subgraph, int]]) -> Task:
        rows: list[NodeRef] = []
        for subgraph, count in batch:
            nodes, later = subgraph.ready[:count], subgraph.ready[count:]
            rows += [NodeRef(subgraph.request, node) for node in nodes]
            newly_ready = self._update_dependencies(self._requests[subgraph.request], nodes)
            subgraph.ready = later + newly_ready
            subgraph.pinned = worker
            subgraph.num_running += 1
            if not subgraph.ready:
                del self._queues[cell][subgraph]
        task = Task(cell, tuple(rows))
        self._running[task] = [subgraph for subgraph, _ in batch]
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

    def complete(self, task: Task, ended: Collection[int] = ()) -> list[int]:
        """See `Policy`. Nodes of ended requests that are already submitted still run."""
        for subgraph in self._running.pop(task):
            subgraph.num_running -= 1
            if not subgraph.num_running:
                subgraph.pinned = None
        finished = [request for request in ended if request in self._requests]
        for request in finished:
            for subgraph in self._requests.pop(request).subgraphs.values():
                self._queues[subgraph.cell].pop(subgraph, None)
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

    def check(self) -> None:
        """Raise AssertionError if the queues, the pins and the running tasks differ."""
        running = Counter(subgraph for part in self._running.values() for subgraph in part)
        for queue in self._queues.values():
            for subgraph in queue:
                assert subgraph.ready
                assert subgraph.num_running == running[subgraph]
                assert (subgraph.pinned is None) == (not subgraph.num_running)


def _size(batch: list[tuple[_Subgraph, int]]) -> int:
    return sum(count for _, count in batch)
