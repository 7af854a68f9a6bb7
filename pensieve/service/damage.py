"""Whether the history is damaged: then it is read, and not written to, also by the next process.

It is known from the process before, or found by SQLite's own check beside the serving (after an unclean stop)
or by the scrub.  A check that finds nothing ends it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from pensieve.errors import PensieveError, StoreCorrupt
from pensieve.service.threads import Threads, aside
from pensieve.store.remote.remote_store import Store

log = logging.getLogger("pensieve")
FOUND_BEFORE = "it was when it was looked at before"


class Damage:
    """Belongs to the loop."""

    def __init__(self, store: Store, threads: Threads, changed: Callable[[], None]) -> None:
        self.problems: tuple[str, ...] = (FOUND_BEFORE,) if store.marks.is_damaged else ()
        self._store, self._threads, self._changed = store, threads, changed

    @property
    def refusal(self) -> StoreCorrupt | None:
        """Of whatever would change the history."""
        if not self.problems:
            return None
        return StoreCorrupt(
            "the history is damaged and takes no changes; it can be read. The operator's log says more"
        )

    def check(self, report: Callable[[str], None]) -> None:
        """After an unclean stop: SQLite's own check, beside the serving."""

        async def check() -> None:
            try:
                problems = await aside(self._store.integrity_check)
            except StoreCorrupt as error:
                problems = [str(error)]
            except PensieveError as error:  # the next start tries again
                log.error("the history could not be checked: %s", error)
                return
            if problems:
                await self.found(problems)
            else:
                report("the history is sound")
                self.problems = ()
                self._changed()

        self._threads.spawn(check())

    async def found(self, problems: Sequence[str]) -> None:
        """From now on the history is read, and not written to."""
        log.error("the history is damaged: %s", problems[0])
        self.problems = tuple(problems)
        self._store.integrity_check_due = True
        self._changed()
        try:
            await asyncio.to_thread(self._store.marks.mark_damaged, True)
        except (
            PensieveError
        ) as error:  # of a server; this process knows it, and the next looks again
            log.error("that the history is damaged could not be written down: %s", error)
