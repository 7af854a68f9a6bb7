"""The threads of the service process, and the order in which they exchange values.

    event loop     live turns, their followers, the pipe to the engine
    store threads  writes to the history, one job at a time in each; waiting jobs share a commit of SQLite
    read thread    clients' reads of the history, on a separate connection
    text pool      tokenizing long drafts; uses no shared state

Each thread owns its state. The event loop sends a *job* (a function with values as arguments) and gets a
value back.

**Order.** Each conversation has a *lane*, which is one of the store threads. A tenant's jobs in a lane run in
the order of their `in_store` calls. Waiting tenants alternate (`FairPool`). The coroutines that wait for the
jobs of a lane resume in the order of the jobs. So if a coroutine acts on its result before it waits for
anything else, all actions on a conversation happen in the order of the store.

**Sequences.** Sometimes further steps must follow a job even if the caller is cancelled. Then the job and
these steps run in a separate task, a *sequence* (`run_to_end`).

**Failures.** An unexpected exception in a background task is passed to `on_failure`, because other code may
be waiting for that task.

Jobs that read a whole history run in separate threads (`in_new_thread`). The process does not wait for these
threads when it exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import zlib
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple, TypeVar

from pensieve.errors import PensieveError

log = logging.getLogger("pensieve")
T = TypeVar("T")
LAG_TIMER_SECONDS = 0.1  # between two measurements of LoopLag
WINDOW_SECONDS = 60.0  # for which LoopLag keeps measurements


class _OwnThreads(Executor):
    """Run each call in a new daemon thread, for which the process does not wait when it exits."""

    def submit(self, call: Callable[..., T], /, *arguments: Any, **named: Any) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = call(*arguments, **named)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=run, name="in_new_thread", daemon=True).start()
        return future


async def in_new_thread(function: Callable[..., T], /, *arguments: Any) -> T:
    """Call a function in a new thread. The process can exit while the thread still runs."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_OwnThreads(), function, *arguments)


@dataclass(frozen=True)
class Quantiles:
    """Quantiles of seconds; zeros if there are no values."""

    p50: float = 0.0
    p99: float = 0.0
    most: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles:
        found = sorted(values)
        if not found:
            return cls()
        return cls(_quantile(found, 0.5), _quantile(found, 0.99), found[-1])


class WaitingJobs(NamedTuple):
    """The jobs of a thread pool that have not ended."""

    num_jobs: int
    oldest_seconds: float  # since the oldest unfinished job was added


class LoopLag:
    """Measure how late the event loop runs a timer of LAG_TIMER_SECONDS. Every stream has the same delay.

    Belongs to the event loop.
    """

    def __init__(self) -> None:
        self._late: deque[tuple[float, float]] = deque()  # (time, seconds late)

    async def measure(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(LAG_TIMER_SECONDS)
            self.add(loop.time(), max(loop.time() - before - LAG_TIMER_SECONDS, 0.0))

    def add(self, now: float, late: float) -> None:
        self._late.append((now, late))
        while self._late[0][0] < now - WINDOW_SECONDS:
            self._late.popleft()

    def quantiles(self) -> Quantiles:
        return Quantiles.of([late for _, late in self._late])


def _quantile(found: Sequence[float], share: float) -> float:
    return found[max(math.ceil(share * len(found)) - 1, 0)]


class Threads:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        text_threads: int,
        on_failure: Callable[[BaseException], None] = lambda error: None,
        num_lanes: int = 1,
    ) -> None:
        self.loop = loop  # also the clock; stored times are wall-clock times
        self._lanes = [FairPool(loop, 1, "store") for _ in range(num_lanes)]
        self._read_thread = FairPool(loop, 1, "read")
        self._text_pool = FairPool(loop, text_threads, "text", drops_abandoned=True)
        self._sequences: set[asyncio.Task[Any]] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._on_failure = on_failure

    async def in_store(
        self,
        tenant: str,
        function: Callable[..., T],
        /,
        *arguments: Any,
        lane: str = "",
        **named: Any,
    ) -> T:
        """Call a function in a store thread, after this tenant's earlier calls in the same lane.

        `lane`: the id of the conversation that the call is about. Calls without a lane share a thread.
        """
        number = zlib.crc32(f"{tenant}\0{lane}".encode()) % len(self._lanes) if lane else 0
        return await self._lanes[number].run(tenant, lambda: function(*arguments, **named))

    async def wait_for_store(self) -> None:
        """Return once every store thread has run a job."""
        await asyncio.gather(*(each.run("", lambda: None) for each in self._lanes))

    @property
    def store_waiting(self) -> WaitingJobs:
        waiting = [each.waiting for each in self._lanes]
        return WaitingJobs(
            sum(each.num_jobs for each in waiting), max(each.oldest_seconds for each in waiting)
        )

    async def in_read_thread(
        self, tenant: str, function: Callable[..., T], /, *arguments: Any, **named: Any
    ) -> T:
        return await self._read_thread.run(tenant, lambda: function(*arguments, **named))

    async def in_text_pool(self, tenant: str, function: Callable[[], T]) -> T:
        return await self._text_pool.run(tenant, function)

    async def run_to_end(self, sequence: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end, even if the caller is cancelled."""
        task = self.loop.create_task(sequence)
        self._sequences.add(task)
        task.add_done_callback(self._sequence_ended)
        try:
            return await asyncio.shield(task)
        finally:
            # The traceback of the task's error refers to this frame. A reference from the frame to the task
            # would make a cycle.
            del task

    def spawn(self, work: Coroutine[Any, Any, None], *, is_sequence: bool = False) -> None:
        """Run a coroutine in the background. A sequence runs to its end even when the daemon closes."""
        task = self.loop.create_task(work)
        (self._sequences if is_sequence else self._background).add(task)
        task.add_done_callback(self._background_ended)

    async def end_tasks(self) -> None:
        """Cancel the background tasks, and wait for the sequences."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, *self._sequences, return_exceptions=True)

    async def close(self) -> None:
        """Take no more jobs, and wait for the jobs of the store threads."""
        self._text_pool.close(drop=True)
        await asyncio.to_thread(self._read_thread.close)
        for each in self._lanes:
            await asyncio.to_thread(each.close)

    def _sequence_ended(self, task: asyncio.Task[Any]) -> None:
        self._sequences.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, PensieveError):
            log.error("a call failed with an unexpected error", exc_info=error)

    def _background_ended(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        self._sequences.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("a background task failed", exc_info=error)
            self._on_failure(error)


class _PoolJob(NamedTuple):
    function: Callable[[], Any]
    done: asyncio.Future[Any]


class FairPool:
    """A thread pool that tenants share: each tenant's jobs run in order, and waiting tenants alternate.

    Before a tenant's next job, at most one job of each other waiting tenant runs. Each new job adds one call
    of `_run_next` to the thread pool. The call runs the next job in the tenants' order, which may be another
    job than the new one. A lock protects the queues: the event loop adds jobs, and the threads take them out.
    Only the event loop counts the jobs that have not ended.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        num_threads: int,
        name: str,
        *,
        drops_abandoned: bool = False,
    ) -> None:
        """`drops_abandoned`: skip a job whose caller is gone before the job has begun."""
        self._loop = loop
        self._drops_abandoned = drops_abandoned
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._lock = Lock()
        self._queues: dict[str, deque[_PoolJob]] = {}  # of waiting tenants, the next one first
        self._since: dict[asyncio.Future[Any], float] = {}  # jobs that have not ended, oldest first

    async def run(self, tenant: str, function: Callable[[], T]) -> T:
        """Call a function in a thread. A call that has begun is completed even if the caller is cancelled."""
        done = self._loop.create_future()
        self._since[done] = self._loop.time()
        with self._lock:
            self._queues.setdefault(tenant, deque()).append(_PoolJob(function, done))
        self._loop.run_in_executor(self._threads, self._run_next)
        try:
            result: T = await done
        finally:
            del done  # as in _run_next
        return result

    @property
    def waiting(self) -> WaitingJobs:
        oldest = next(iter(self._since.values()), None)
        seconds = 0.0 if oldest is None else self._loop.time() - oldest
        return WaitingJobs(len(self._since), seconds)

    def close(self, *, drop: bool = False) -> None:
        self._threads.shutdown(cancel_futures=drop)

    def _run_next(self) -> None:
        with self._lock:
            tenant = next(iter(self._queues))
            queue = self._queues.pop(tenant)
            job = queue.popleft()
            if queue:
                self._queues[tenant] = queue  # behind all others
        try:
            is_wanted = not (self._drops_abandoned and job.done.cancelled())
            self._report_result(job.done, job.function() if is_wanted else None, None)
        except Exception as error:
            self._report_result(job.done, None, error)
        finally:
            # An error refers to its frames. A reference from a frame to the future would make a cycle.
            del job

    def _report_result(
        self, done: asyncio.Future[Any], value: Any, error: Exception | None
    ) -> None:
        """Called in the pool's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no caller waits
            self._loop.call_soon_threadsafe(self._set_result, done, value, error)

    def _set_result(self, done: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
        del self._since[done]
        if done.done():
            return  # the caller is gone
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(value)
