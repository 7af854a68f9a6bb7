"""Notice that the disk of the history is full, and when there is room again.

While the disk is full, the daemon is not healthy and refuses whatever would store more.  Reads and deletions
go on.  Any write of the history may find the disk full; every LOOK_SECONDS a small write finds out whether it
still is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from pensieve.errors import DiskFull, PensieveError
from pensieve.service.threads import Threads
from pensieve.store.remote.remote_store import Store

log = logging.getLogger("pensieve")
NOBODY = "/full-disk"  # no tenant has this name
LOOK_SECONDS = 2.0


class FullDisk:
    """Belongs to the loop."""

    def __init__(self, store: Store, threads: Threads, changed: Callable[[], None]) -> None:
        self.is_full = False
        self._store, self._threads, self._changed = store, threads, changed
        store.figures.on_full = self._report

    @property
    def refusal(self) -> DiskFull | None:
        """Of whatever would store more."""
        return DiskFull("the disk of the history is full") if self.is_full else None

    def _report(self) -> None:
        """Called in the store thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._threads.loop.call_soon_threadsafe(self._found)

    def _found(self) -> None:
        if self.is_full:
            return
        self.is_full = True
        log.error("the disk of the history is full: %s", self._store.folder.path)
        self._changed()
        self._threads.spawn(self._wait_for_room())

    async def _wait_for_room(self) -> None:
        while self.is_full:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                has_room = await self._threads.in_store(NOBODY, self._store.erasure.has_room)
            except PensieveError:
                continue
            self.is_full = not has_room
        log.warning("the disk of the history has room again")
        self._changed()
