"""Threads that tenants share: each tenant's jobs in their order, and the tenants by turns.

However much one tenant has put in, another one's next job comes after at most one job of each tenant that
waits.  Jobs wait in a queue for each tenant.  For each job the threads get one call of `_run_next`, which
runs the job whose turn it is; so as many calls as jobs wait, and none is left over.

The queues are behind a lock: the loop puts jobs in, and the threads take them out.  The loop alone counts
those that have not ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any, NamedTuple, TypeVar

from pensieve.service.figures import Waiting

T = TypeVar("T")


class _Job(NamedTuple):
    function: Callable[[], Any]
    done: asyncio.Future[Any]


class FairPool:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        num_threads: int,
        name: str,
        *,
        drops_abandoned: bool = False,
    ) -> None:
        """`drops_abandoned`: a job is not begun once its caller is gone."""
        self._loop = loop
        self._drops_abandoned = drops_abandoned
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._lock = Lock()
        # Of the tenants that wait, whose turn it is first.
        self._queues: dict[str, deque[_Job]] = {}
        # The jobs that have not ended, the oldest first.
        self._since: dict[asyncio.Future[Any], float] = {}

    async def run(self, tenant: str, function: Callable[[], T]) -> T:
        """Call it in a thread; once it has begun, to its end even if the caller is cancelled."""
        done = self._loop.create_future()
        self._since[done] = self._loop.time()
        with self._lock:
            self._queues.setdefault(tenant, deque()).append(_Job(function, done))
        self._loop.run_in_executor(self._threads, self._run_next)
        try:
            result: T = await done
        finally:
            del done  # as in _run_next
        return result

    @property
    def tenants(self) -> list[str]:
        """Those whose jobs wait."""
        with self._lock:
            return list(self._queues)

    @property
    def waiting(self) -> Waiting:
        """The jobs that have not ended."""
        oldest = next(iter(self._since.values()), None)
        seconds = 0.0 if oldest is None else self._loop.time() - oldest
        return Waiting(len(self._since), seconds)

    def close(self, *, drop: bool = False) -> None:
        """Wait for the jobs, or drop those that wait."""
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
            self._answer(job.done, job.function() if is_wanted else None, None)
        except Exception as error:
            self._answer(job.done, None, error)
        finally:
            # An error holds its frames: one that holds the future, too, would be a circle.
            del job

    def _answer(self, done: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
        """From the thread; if the loop is closed, nobody waits."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._give, done, value, error)

    def _give(self, done: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
        del self._since[done]
        if done.done():
            return  # its caller is gone
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(value)
