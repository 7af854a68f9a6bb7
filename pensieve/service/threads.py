"""The loop, the store thread and the text pool, and in which order they exchange values.

    the loop           live turns, their readers, the pipe to the engine
    the store thread   the history, one job at a time
    the read thread    what clients read of the history, on a connection of its own
    the text pool      tokenizing long drafts; touches nothing shared

Each owns its state.  The loop sends a function with values as arguments to a thread, and gets a value back.

**Order.**  A tenant's jobs of the store thread run in the order of their `in_store` calls (the tenants by
turns, see fair_pool.py), and the coroutines that wait for them resume in that order.  So a coroutine that
acts on a result before it waits for anything else acts in the order of the store.

**Sequences.**  Steps that must follow a job, even if the call that wanted it is gone, run in a task of their
own (`whole`).

**Failures.**  An unforeseen exception of a background task goes to `on_failure`, since something may wait for
what the task ought to have done.

Jobs that read all of a history run `aside`, in a thread that ends with the process.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from pensieve.errors import OwnedElsewhere, PensieveError
from pensieve.service.fair_pool import FairPool
from pensieve.service.figures import Waiting

log = logging.getLogger("pensieve")
T = TypeVar("T")


class _OwnThreads(Executor):
    """A thread for each call, for whose end no process waits that ends."""

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

        threading.Thread(target=run, name="aside", daemon=True).start()
        return future


async def aside(function: Callable[..., T], /, *arguments: Any) -> T:
    """Call it in a thread of its own, which ends with the process."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_OwnThreads(), function, *arguments)


async def _not_taken(elsewhere: OwnedElsewhere, tenant: str) -> bool:
    return False


class Threads:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        text_threads: int,
        on_failure: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self.loop = loop  # also the clock, but for what is recorded
        self._store_thread = FairPool(loop, 1, "store")
        self._read_thread = FairPool(loop, 1, "read")
        self._text_pool = FairPool(loop, text_threads, "text", drops_abandoned=True)
        self._sequences: set[asyncio.Task[Any]] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._on_failure = on_failure
        self.is_taken: Callable[[OwnedElsewhere, str], Awaitable[bool]] = _not_taken  # owning.py

    async def in_store(
        self, tenant: str, function: Callable[..., T], /, *arguments: Any, **named: Any
    ) -> T:
        """Call it in the store thread, behind what this tenant waits for there."""
        try:
            return await self._store_thread.run(tenant, lambda: function(*arguments, **named))
        except OwnedElsewhere as elsewhere:  # and it has written nothing
            if not await self.is_taken(elsewhere, tenant):
                raise
        return await self._store_thread.run(tenant, lambda: function(*arguments, **named))

    @property
    def store_waiting(self) -> Waiting:
        """The jobs of the store thread that have not ended."""
        return self._store_thread.waiting

    async def behind_the_store(self) -> None:
        """Until every job that waits for the store thread now is done."""
        waits = [self.in_store(each, lambda: None) for each in ["", *self._store_thread.tenants]]
        await asyncio.gather(*waits)

    async def in_reader(
        self, tenant: str, function: Callable[..., T], /, *arguments: Any, **named: Any
    ) -> T:
        return await self._read_thread.run(tenant, lambda: function(*arguments, **named))

    async def in_text_pool(self, tenant: str, function: Callable[[], T]) -> T:
        return await self._text_pool.run(tenant, function)

    async def whole(self, sequence: Coroutine[Any, Any, T]) -> T:
        """Run all of it, even if the call that waits for it is cancelled."""
        task = self.loop.create_task(sequence)
        self._sequences.add(task)
        task.add_done_callback(self._sequence_ended)
        try:
            return await asyncio.shield(task)
        finally:
            del task  # its error's traceback holds this frame: a cycle if the frame held the task

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it in the background; nobody waits for it."""
        task = self.loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background_ended)

    async def end_tasks(self) -> None:
        """Cancel what runs in the background, and wait for the sequences."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, *self._sequences, return_exceptions=True)

    async def close(self) -> None:
        """Wait for the jobs of the store; no other is taken."""
        self._text_pool.close(drop=True)
        await asyncio.to_thread(self._read_thread.close)
        await asyncio.to_thread(self._store_thread.close)

    def _sequence_ended(self, task: asyncio.Task[Any]) -> None:
        self._sequences.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, PensieveError):
            log.error("a call failed unexpectedly", exc_info=error)

    def _background_ended(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("a task of the daemon failed", exc_info=error)
            self._on_failure(error)
