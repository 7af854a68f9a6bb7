"""Has the store forget, from time to time, the request_ids of turns that ended long ago.

A pass begins when the daemon does and then every hour, or more often where requests are kept for less than a
day.  Its steps are jobs of a few milliseconds of the store thread (store/forgetting.py), with pauses in
between.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pensieve.errors import PensieveError
from pensieve.service.threads import Threads
from pensieve.store.conversation_store import ConversationStore

log = logging.getLogger("pensieve")
PAUSE_SECONDS = 0.05
NOBODY = "/forgetting"  # no tenant has this name
PASSES = 24  # in the time that a request is kept
PASS_SECONDS_MAX = 3600.0


class ForgettingRequests:
    """Belongs to the loop."""

    def __init__(
        self,
        store: ConversationStore,
        threads: Threads,
        keep_seconds: float,
        now: Callable[[], float],
    ) -> None:
        """`now`: the clock of the records."""
        self._now = now
        self._store = store
        self._threads = threads
        self._keep_seconds = keep_seconds

    def start(self) -> None:
        if self._keep_seconds:
            self._threads.spawn(self._work())

    async def _work(self) -> None:
        while True:
            try:
                before = self._now() - self._keep_seconds
                while await self._threads.in_store(NOBODY, self._store.forgetting.step, before):
                    await asyncio.sleep(PAUSE_SECONDS)
                await self._threads.in_store(NOBODY, self._store.erasure.resume)
            except PensieveError as error:  # the next pass tries again
                log.warning("old requests could not be forgotten: %s", error)
            await asyncio.sleep(min(PASS_SECONDS_MAX, self._keep_seconds / PASSES))
