"""Emulate the service's event loop and threads. A callback or job runs when the fault world says so.

`Threads` is an event loop on a virtual clock, without sockets. `spin` runs callbacks until none is ready.
Jobs for other threads (a store thread, the text pool, a check) wait until `work` runs them. If several store
threads work at once, `work_together` runs their jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pensieve.sim.executor import VirtualClock
from tests.faults.fibers import Fibers

Job = tuple[Callable[[], Any], "asyncio.Future[Any]", object]  # function, result, thread of the job
SPINS_MAX = 10_000


class _NoSockets:
    def select(self, timeout: float | None = None) -> list[Any]:
        return []


class Threads(asyncio.BaseEventLoop):
    _ready: deque[Any]
    _scheduled: list[asyncio.TimerHandle]
    _run_once: Callable[[], None]

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._selector = _NoSockets()
        self._clock = clock
        self._clock_resolution = 1e-9
        self.store_jobs: deque[Job] = deque()
        self.other_jobs: deque[Job] = deque()
        self.problems: list[str] = []  # exceptions that nothing handled
        self.caller = "loop"  # name of the running thread; clients call from the loop
        self.set_exception_handler(self._complain)

    def time(self) -> float:
        return self._clock.now()

    def spin(self) -> None:
        """Run all ready callbacks and due timers."""
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            for _ in range(SPINS_MAX):
                due = self._scheduled and self._scheduled[0].when() <= self.time()
                if not self._ready and not due:
                    return
                self._run_once()
        finally:
            asyncio._set_running_loop(before)
        raise AssertionError("the loop never comes to rest")

    @contextlib.contextmanager
    def on_the_loop(self) -> Iterator[None]:
        """Let the loop run while a job of another thread is half done."""
        caller, self.caller = self.caller, "loop"
        try:
            yield
        finally:
            self.caller = caller

    def run_in_executor(  # type: ignore[override]
        self, executor: ThreadPoolExecutor | None, function: Callable[..., Any], *arguments: Any
    ) -> asyncio.Future[Any]:
        future = self.create_future()
        in_store = getattr(executor, "_thread_name_prefix", "") == "store"
        jobs = self.store_jobs if in_store else self.other_jobs
        jobs.append((lambda: function(*arguments), future, executor))
        return future

    def work(self, jobs: deque[Job]) -> None:
        """Run the oldest of these jobs and set its result. ProcessDied is passed on to the caller."""
        job, future, _ = jobs.popleft()
        self.caller = "store" if jobs is self.store_jobs else "another thread"
        try:
            result = job()
        except Exception as error:
            if not future.cancelled():
                future.set_exception(error)
        else:
            if not future.cancelled():
                future.set_result(result)
        finally:
            self.caller = "loop"

    def work_together(self, num_jobs: int, fibers: Fibers) -> None:
        """Run up to `num_jobs` store jobs at once: the oldest job of each thread."""
        first: dict[object, Job] = {}
        for job in self.store_jobs:
            first.setdefault(job[2], job)
        jobs = list(first.values())[:num_jobs]
        for job in jobs:
            self.store_jobs.remove(job)
        self.caller = "store"
        try:
            ended = fibers.run([job for job, _, _ in jobs])
        finally:
            self.caller = "loop"
        for fiber, (_, future, _) in zip(ended, jobs, strict=True):
            if future.cancelled():
                continue
            if fiber.error is None:
                future.set_result(fiber.result)
            elif isinstance(fiber.error, Exception):
                future.set_exception(fiber.error)
            else:
                raise fiber.error

    def abandon(self) -> None:
        """Cancel all tasks and jobs that still wait, because the process is gone."""
        self.store_jobs.clear()
        self.other_jobs.clear()
        self.set_exception_handler(lambda loop, context: None)
        for task in sorted(asyncio.all_tasks(self), key=asyncio.Task.get_name):
            task.cancel()
        self.spin()
        self.close()

    def _complain(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        lines = traceback.format_exception(error) if error is not None else []
        self.problems.append("".join([context["message"], "\n", *lines]))

    def _process_events(self, events: list[Any]) -> None:
        return

    def _write_to_self(self) -> None:
        return
