"""Runs the service's threads one move at a time: nothing happens unless somebody makes it happen.

`Threads` is an event loop on a virtual clock, without sockets.  `spin` runs what is ready in the loop
until nothing is.  What the service hands to another thread (a store thread, the text pool, a check) waits
here until `work` carries it out, or `work_together` where several store threads are at work at once.
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

Job = tuple[Callable[[], Any], "asyncio.Future[Any]", object]  # the last is its thread
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
        self.problems: list[str] = []  # what the loop had to swallow
        self.caller = "loop"  # whose move it is; clients call from the loop
        self.set_exception_handler(self._complain)

    def time(self) -> float:
        return self._clock.now()

    def spin(self) -> None:
        """Run everything that is ready, and timers whose moment has come."""
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
        """The loop's move, though a job of another thread is in the middle of its own."""
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
        """Carry out the oldest of these, and tell the loop; a death of the process passes through."""
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
        """At most so many jobs of the store at once: the oldest one of each thread that has any."""
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
        """The process is gone: whatever still waits in here ends without a word."""
        self.store_jobs.clear()
        self.other_jobs.clear()
        self.set_exception_handler(lambda loop, context: None)
        for task in sorted(asyncio.all_tasks(self), key=asyncio.Task.get_name):
            task.cancel()
        self.spin()
        self.close()

    def _complain(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        told = traceback.format_exception(error) if error is not None else []
        self.problems.append("".join([context["message"], "\n", *told]))

    def _process_events(self, events: list[Any]) -> None:
        return

    def _write_to_self(self) -> None:
        return
