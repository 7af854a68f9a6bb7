"""Run tasks with torch: state slots, gathers, CUDA graphs, and the threads of manager and workers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from queue import SimpleQueue
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from pensieve.cells.graph import Graph
from pensieve.cells.models import Cell, Model, States, rows_of
from pensieve.cells.scheduler import NodeRef, Policy, Scheduler, Task


class Slot(NamedTuple):
    """The place of a node's outputs: one row of the outputs of its task."""

    states: States
    row: int


@dataclass(eq=False)
class Live:
    """A request that is being served. Its reply is token ids, or the state of the last node."""

    graph: Graph
    future: Future[list[int] | States] = field(default_factory=Future)
    slots: dict[int, Slot] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    num_running: int = 0  # nodes

    def take(self, token: int, eos: int | None) -> bool:
        """Take the next token. Return whether it ends the reply. Tokens after the end are ignored."""
        if eos in self.tokens[-1:]:
            return False
        self.tokens.append(token)
        return token == eos

    def answer(self, eos: int | None) -> None:
        if eos is None:
            states, row = self.slots[len(self.graph.nodes) - 1]
            self.future.set_result(tuple(part[row] for part in states))
        else:
            self.future.set_result(self.tokens)


class Launched(NamedTuple):
    task: Task
    emitted: Tensor | None  # a token for each row, in host memory
    event: Any = None  # of CUDA

    def done(self) -> bool:
        return self.event is None or bool(self.event.query())

    def tokens(self) -> list[int]:
        """Wait for the end of the task. Return the token of each row, or [] if the task makes no tokens."""
        if self.event is not None:
            self.event.synchronize()
        return [] if self.emitted is None else self.emitted.tolist()


class Runner:
    """Run the tasks of one worker in order, on one stream.

    The inputs of a task are copied together (a gather) only if they are not already the first rows of an
    earlier task's outputs. On a GPU, each cell is captured as a CUDA graph for each power of two of rows.
    """

    def __init__(self, model: Model, lives: dict[int, Live], device: str = "cpu") -> None:
        self.lives, self._device = lives, torch.device(device)
        self._cells = {kind: cell.to_device(self._device) for kind, cell in model.cells.items()}
        self._stream: Any = None  # on the CPU
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._captured: dict[tuple[Cell, int], _CapturedCell] = {}
        self.num_gathers = 0

    def launch(self, task: Task) -> Launched:
        """Run the task, or on a GPU push its kernels to the stream. Fill the slots of its nodes."""
        cell = self._cells[task.cell]
        size = len(task.rows)
        if self._stream is not None:
            size = max(size, min(1 << (size - 1).bit_length(), task.cell.batch_max))
        on_stream = torch.cuda.stream(self._stream) if self._stream else nullcontext()
        with torch.inference_mode(), on_stream:
            inputs = [self._inputs(cell, task, at, size) for at in range(cell.arity)]
            payload = self._payload(cell, task, size)
            run = cell if self._stream is None else self._capture(cell, size)
            outputs: States = run(payload, *chain.from_iterable(inputs))
            for at, row in enumerate(task.rows):
                if row is not None:
                    self.lives[row.request].slots[row.node] = Slot(outputs, at)
            emitted = None if cell.emits is None else outputs[cell.emits]
            if self._stream is None:
                return Launched(task, emitted)
            if emitted is not None:
                pinned = torch.empty(emitted.shape, dtype=emitted.dtype, pin_memory=True)
                emitted = pinned.copy_(emitted, non_blocking=True)
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return Launched(task, emitted, event)

    def _inputs(self, cell: Cell, task: Task, at: int, size: int) -> States:
        """Return the outputs of input node number `at` of each row's node."""
        slots: list[tuple[int, Slot]] = []
        for index, row in enumerate(task.rows):
            if row is not None:
                live = self.lives[row.request]
                inputs = live.graph.nodes[row.node].inputs
                slots.append((index, live.slots[inputs[at]] if inputs else Slot(cell.initial, 0)))
        states = slots[0][1].states if slots else cell.initial
        in_place = all(slot.states is states and slot.row == index for index, slot in slots)
        if in_place and len(states[0]) >= size:
            return tuple(part[:size] for part in states)
        return self._gather(cell, slots, size)

    def _gather(self, cell: Cell, slots: Sequence[tuple[int, Slot]], size: int) -> States:
        self.num_gathers += 1
        sources: dict[int, tuple[States, list[int], list[int]]] = {}
        for index, slot in slots:
            _, rows, targets = sources.setdefault(id(slot.states), (slot.states, [], []))
            rows.append(slot.row)
            targets.append(index)
        gathered = rows_of(cell.initial, size)
        for states, rows, targets in sources.values():
            if states is not cell.initial:
                source, target = self._tensor(rows), self._tensor(targets)
                for part, out in zip(states, gathered, strict=True):
                    out.index_copy_(0, target, part.index_select(0, source))
        return gathered

    def _payload(self, cell: Cell, task: Task, size: int) -> Tensor:
        rows = [[cell.pad] * cell.payload for _ in range(size)]
        for index, row in enumerate(task.rows):
            if row is not None:
                tokens = self.lives[row.request].graph.nodes[row.node].payload
                rows[index][: len(tokens)] = tokens
        return self._tensor(rows)

    def _tensor(self, values: list[Any]) -> Tensor:
        """Copy integers to the device without waiting for its stream."""
        tensor = torch.tensor(values, dtype=torch.long)
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._stream else tensor

    def _capture(self, cell: Cell, size: int) -> _CapturedCell:
        if (cell, size) not in self._captured:
            self._captured[cell, size] = _CapturedCell(cell, size, self._device)
        return self._captured[cell, size]


class _CapturedCell:
    """A cell as a CUDA graph for one batch size, captured on the current stream."""

    def __init__(self, cell: Cell, size: int, device: torch.device) -> None:
        stream = torch.cuda.current_stream(device)
        payload = torch.full((size, cell.payload), cell.pad, device=device)
        self._inputs = (payload, *rows_of(cell.initial * cell.arity, size))
        cell(*self._inputs)  # initialises libraries, which must happen outside the capture
        stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self._outputs: States = cell(*self._inputs)

    def __call__(self, *inputs: Tensor) -> States:
        for static, part in zip(self._inputs, inputs, strict=True):
            static.copy_(part)
        self._graph.replay()
        return tuple(part.clone() for part in self._outputs)


# A request; a worker with a task that has ended and its tokens; a worker's error; or None at the end.
Message = Live | tuple[int, Task, list[int]] | BaseException | None


class CellServer:
    """Serve a model by a policy: cellular batching, if no policy is given. Use it as a context manager.

    Any thread may submit requests. One thread runs the policy, and each worker has a thread.
    """

    def __init__(
        self, model: Model, policy: Policy | None = None, num_workers: int = 1, device: str = "cpu"
    ) -> None:
        self.model = model
        self.lives: dict[int, Live] = {}
        self.runners = [Runner(model, self.lives, device) for _ in range(num_workers)]
        self._policy = policy or Scheduler(model.cells)
        self._num_requests = 0
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._arrived = deque[Message]()  # taken from the inbox, but not handled yet
        self._fifos: list[SimpleQueue[list[Task]]] = [SimpleQueue() for _ in self.runners]
        works = [partial(self._work, each) for each in range(num_workers)]
        targets: list[Callable[[], None]] = [self._manage, *works]
        self._threads = [threading.Thread(target=each, daemon=True) for each in targets]
        for thread in self._threads:
            thread.start()

    def submit(self, graph: Graph) -> Future[list[int] | States]:
        """Serve an unfolded request. The future gets the reply, or the error that has ended the server."""
        live = Live(graph)
        self._inbox.put(live)
        return live.future

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Finish all requests and end the threads."""
        self._inbox.put(None)
        # For `_manage`, if the server fails after it has taken the first None.
        self._inbox.put(None)
        for thread in self._threads:
            thread.join()

    def _manage(self) -> None:
        """Serve until the end. After an error of any thread, all requests fail with this error."""
        try:
            self._serve()
        except BaseException as error:
            for live in chain(self.lives.values(), self._arrived, iter(self._inbox.get, None)):
                if isinstance(live, Live) and not live.future.done():
                    live.future.set_exception(error)
        finally:
            for fifo in self._fifos:
                fifo.put([])

    def _serve(self) -> None:
        """Handle all messages that have arrived, then give work to each worker that is idle."""
        num_tasks, closing, inbox = [0] * len(self._fifos), False, self._inbox  # tasks per worker
        while self.lives or not closing:
            self._arrived += [inbox.get(), *(inbox.get() for _ in range(inbox.qsize()))]
            while self._arrived:
                message = self._arrived.popleft()
                if message is None:
                    closing = True
                elif isinstance(message, BaseException):
                    raise message
                elif isinstance(message, Live):
                    self._num_requests += 1
                    self.lives[self._num_requests] = message
                    self._policy.add(self._num_requests, message.graph)
                else:
                    worker, task, tokens = message
                    num_tasks[worker] -= 1
                    self._complete(task, tokens)
            for worker, fifo in enumerate(self._fifos):
                if not num_tasks[worker] and (tasks := self._policy.schedule(worker)):
                    num_tasks[worker] = len(tasks)
                    for row in (row for task in tasks for row in task.rows if row):
                        self.lives[row.request].num_running += 1
                    fifo.put(tasks)

    def _complete(self, task: Task, tokens: Sequence[int]) -> None:
        """Answer the requests that end with this task, and free the slots that no node will read."""
        ended = {
            row.request
            for row, token in zip(task.rows, tokens, strict=False)
            if row and self.lives[row.request].take(token, self.model.eos)
        }
        finished = self._policy.complete(task, ended)
        for request in finished:
            self.lives[request].answer(self.model.eos)
        rows = [row for row in task.rows if row]
        for request, node in rows:
            live = self.lives[request]
            live.num_running -= 1
            for source in live.graph.nodes[node].inputs:
                if len(live.graph.consumers[source]) == 1:
                    del live.slots[source]
        for request in {*finished, *(row.request for row in rows)}:
            if self.lives[request].future.done() and not self.lives[request].num_running:
                del self.lives[request]

    def _work(self, worker: int) -> None:
        """Launch tasks in their order, and report each as soon as it has ended."""
        try:
            while tasks := self._fifos[worker].get():
                waiting, launched = deque(tasks), deque[Launched]()
                while waiting or launched:
                    if waiting:
                        launched.append(self.runners[worker].launch(waiting.popleft()))
                    while launched and (launched[0].done() or not waiting):
                        first = launched.popleft()
                        self._inbox.put((worker, first.task, first.tokens()))
        except BaseException as error:
            self._inbox.put(error)


def run_alone(model: Model, graph: Graph, device: str = "cpu") -> list[int] | States:
    """Return the reply to one request without any batching."""
    live = Live(graph)
    runner = Runner(model, {0: live}, device)
    for index, node in enumerate(graph.nodes):
        for token in runner.launch(Task(node.cell, (NodeRef(0, index),))).tokens():
            if live.take(token, model.eos):
                break
    live.answer(model.eos)
    return live.future.result()
