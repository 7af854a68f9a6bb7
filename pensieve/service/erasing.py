"""Has the store finish, while the daemon serves, what deletions have left to do on the disk.

A deletion whose text could not be erased from the files at once (another program reads them, the disk is
full) is pending until it could; a history that has become mostly space is compacted (store/erasure.py).
Both go in jobs of a few milliseconds in the store thread, with pauses between them in which the jobs of
clients come first.  A client's deletion waits for its own erasure, but the store thread does not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pensieve.errors import ErasurePending, PensieveError
from pensieve.service.threads import Threads
from pensieve.store.backend import ErasureSteps

log = logging.getLogger("pensieve")
PAUSE_SECONDS = 0.02
NOBODY = "/erasing"  # no tenant has this name
WAIT_SECONDS = 5.0  # of a client, for those who read the history to end


class Erasing:
    """Belongs to the loop."""

    def __init__(self, erasure: ErasureSteps, threads: Threads) -> None:
        self._erasure = erasure
        self._threads = threads
        self._is_at_work = False
        self._is_late = False  # and the log says so

    def sweep(self) -> None:
        """Begin with what is due, if there is anything; called again and again."""
        if self._erasure.due and not self._is_at_work:
            self._is_at_work = True
            self._threads.spawn(self._work())

    async def _work(self) -> None:
        try:
            while await self._threads.in_store(NOBODY, self._erasure.step):
                await asyncio.sleep(PAUSE_SECONDS)
        except PensieveError as error:  # the next sweep tries again
            if not self._is_late:
                log.warning("the history cannot be cleaned of what was deleted: %s", error)
            self._is_late = True
        else:
            if self._is_late:
                log.warning("the history is clean of what was deleted")
            self._is_late = False
        finally:
            self._is_at_work = False


async def erased(finish: Callable[[], None], threads: Threads) -> None:
    """Until `finish`, a job of the store thread, has erased all, or ErasurePending after WAIT_SECONDS."""
    deadline = threads.loop.time() + WAIT_SECONDS
    while True:
        await asyncio.sleep(PAUSE_SECONDS)
        try:
            await threads.in_store(NOBODY, finish)
        except ErasurePending:
            if threads.loop.time() >= deadline:
                raise
        else:
            return
