"""Has the whole history read in the background, a little at a time, and reports what is damaged.

A pass is spread over `seconds` (store/scrub.py takes its steps in the read thread, where the reads of clients
come between), but a small history is read at least a little every minute.  It waits while deleted text
waits to be erased.  After the first damage there is no further step: the history takes no changes from then
on, as after the check that follows an unclean stop, and an operator must act.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from pensieve.errors import PensieveError
from pensieve.service.threads import Threads
from pensieve.store.backend import ScrubSteps

log = logging.getLogger("pensieve")
NOBODY = "/scrubbing"  # no tenant has this name
PAUSE_SECONDS_MIN = 0.02
PAUSE_SECONDS_MAX = 60.0


class Scrubbing:
    """Belongs to the loop."""

    def __init__(
        self,
        scrub: ScrubSteps,
        threads: Threads,
        seconds: float,
        is_pending: Callable[[], bool],
        on_damage: Callable[[Sequence[str]], Awaitable[None]],
    ) -> None:
        self._scrub = scrub
        self._threads = threads
        self._seconds = seconds
        self._is_pending = is_pending
        self._on_damage = on_damage
        self._is_late = False  # and the log says so

    @property
    def num_passes(self) -> int:
        return self._scrub.num_passes

    def start(self) -> None:
        if self._seconds:
            self._threads.spawn(self._work())

    async def _work(self) -> None:
        while True:
            num_passes, pause_seconds = self.num_passes, PAUSE_SECONDS_MAX
            try:
                num_steps = await self._threads.in_reader(NOBODY, self._scrub.num_steps)
                pause_seconds = min(
                    max(self._seconds / num_steps, PAUSE_SECONDS_MIN), PAUSE_SECONDS_MAX
                )
                while num_passes == self.num_passes:
                    await asyncio.sleep(pause_seconds)
                    if self._is_pending():
                        continue
                    if problems := await self._threads.in_reader(NOBODY, self._scrub.step):
                        await self._on_damage(problems)
                        return
                    self._is_late = False
            except PensieveError as error:  # a sector that cannot be read, or no descriptor
                if not self._is_late:
                    log.error("the history could not be looked through: %s", error)
                self._is_late = True
                await asyncio.sleep(pause_seconds)
