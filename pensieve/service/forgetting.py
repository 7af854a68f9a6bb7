"""Has the store forget, from time to time, what it need not know any more: requests, and chains of histories.

A pass begins when the daemon does and then every hour, or more often where a thing is kept for less than a
day.  Its steps are jobs of a few milliseconds of the store thread (store/forgetting.py, store/chains.py),
with pauses in between.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pensieve.errors import PensieveError
from pensieve.service.threads import Threads
from pensieve.store.remote.remote_store import Store

log = logging.getLogger("pensieve")
PAUSE_SECONDS = 0.05
NOBODY = "/forgetting"  # no tenant has this name
PASSES = 24  # in the time that a thing is kept
PASS_SECONDS_MAX = 3600.0
Step = Callable[
    [float], bool
]  # forgets some of what is from before that time; whether the pass goes on


class Forgetting:
    """Belongs to the loop."""

    def __init__(self, store: Store, threads: Threads, now: Callable[[], float]) -> None:
        """`now`: the clock of the records."""
        self._now = now
        self._store = store
        self._threads = threads

    def start(self, name: str, step: Step, keep_seconds: float) -> None:
        """Keep things of this name for so long; 0: for ever."""
        if keep_seconds:
            self._threads.spawn(self._work(name, step, keep_seconds))

    async def _work(self, name: str, step: Step, keep_seconds: float) -> None:
        while True:
            try:
                before = self._now() - keep_seconds
                while await self._threads.in_store(NOBODY, step, before):
                    await asyncio.sleep(PAUSE_SECONDS)
                await self._threads.in_store(NOBODY, self._store.erasure.resume)
            except PensieveError as error:  # the next pass tries again
                log.warning("old %s could not be forgotten: %s", name, error)
            await asyncio.sleep(min(PASS_SECONDS_MAX, keep_seconds / PASSES))
