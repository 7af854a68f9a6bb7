"""The loop, the store thread and the text pool, and in which order they exchange values.

    the loop           live turns, their readers, the pipe to the engine
    the store thread   the history, one job at a time
    the text pool      tokenizing long drafts; touches nothing shared

Each owns its state, and none calls a method of another's.  The loop sends a function of the history with
values as its arguments to the store thread, and gets a value back.

**Order.**  Jobs of the store thread run in the order of their `in_store` calls, and the coroutines that
wait for them go on in that order too: a job's result is handed to the loop before the next job begins,
and the loop wakes tasks in the order in which their results came.  So whoever acts on a result before
it waits for anything else acts in the order in which the store did.

**Sequences.**  What ought to follow a job follows it, also if the call that wanted it is gone: a sequence
of steps runs in a task of its own (`whole`), and the call only waits for it.

**Failures.**  A sequence that fails has a call that hears of it.  Of a background task nobody does, and
somebody may wait for what it ought to have done; so its unforeseen exception goes to `on_failure`.

`ConversationStore.verify` and `integrity_check` open a connection of their own and run in other threads
(`asyncio.to_thread`), beside the store thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pensieve.errors import PensieveError

log = logging.getLogger("pensieve")
T = TypeVar("T")


class Threads:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        text_threads: int,
        on_failure: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self.loop = loop  # also the clock, but for what is recorded
        self._store_thread = ThreadPoolExecutor(1, "store")
        self._text_pool = ThreadPoolExecutor(text_threads, "text")
        self._sequences: set[asyncio.Task[Any]] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._on_failure = on_failure

    async def in_store(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Call it in the store thread, to its end even if the caller is cancelled."""
        return await self.loop.run_in_executor(
            self._store_thread, lambda: function(*arguments, **named)
        )

    async def in_text_pool(self, function: Callable[[], T]) -> T:
        return await self.loop.run_in_executor(self._text_pool, function)

    async def whole(self, sequence: Coroutine[Any, Any, T]) -> T:
        """Run all of it, even if the call that waits for it is cancelled."""
        task = self.loop.create_task(sequence)
        self._sequences.add(task)
        task.add_done_callback(self._sequence_ended)
        return await asyncio.shield(task)

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
        self._text_pool.shutdown(cancel_futures=True)
        await asyncio.to_thread(self._store_thread.shutdown)

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
