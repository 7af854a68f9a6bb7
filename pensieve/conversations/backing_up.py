"""Writes the backup of `--backup` every minute while the daemon serves.

Of several daemons that share the file of a history, the one that cleans up does it (store/housekeeper.py).
All of them have the same folder, and none keeps it locked between two moments. So another one goes on at its
next look when the first is gone or stands still.

The folder may be slow or hang, so it is written to in a thread for which nobody waits: no turn, no deletion,
and the end of the daemon only for STOP_SECONDS. A problem is logged when it begins and when it is over,
and it is in the figures as long as it lasts.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from pensieve.conversations.daemon_config import BackupConfig
from pensieve.conversations.threads import Threads, aside
from pensieve.errors import PensieveError, whole_line
from pensieve.store import ConversationStore
from pensieve.store.backup import Backup

log = logging.getLogger("pensieve")
SECONDS = 60.0
PAUSE_SHARE = 9.0  # a pause is at least so many times as long as the writing before it
SLOW_SECONDS = 300.0  # after which a moment that is still being written is worth a warning
STOP_SECONDS = 10.0


class BackingUp:
    """Belongs to the loop."""

    def __init__(
        self, store: ConversationStore, database: Path, config: BackupConfig, threads: Threads
    ) -> None:
        """`database`: the file of the store's history."""
        self.problem = ""  # why the folder lacks what it should have
        self._store = store
        self._backup = Backup(config.folder, database)
        self._keep_seconds = config.keep_seconds
        self._threads = threads
        self._whole_at = threads.loop.time()  # when all that was committed was in the folder

    def start(self) -> None:
        self._threads.spawn(self._work())

    def figures(self) -> dict[str, float]:
        """For the operator; nothing while another daemon writes the backup."""
        if not self._store.keeps_house:
            return {}
        return {
            "backup_age_seconds": self._threads.loop.time() - self._whole_at,
            "backup_failing": bool(self.problem),
        }

    async def close(self) -> None:
        """After the background tasks have ended, and before the store closes: write the last moment."""
        try:
            async with asyncio.timeout(STOP_SECONDS):
                if self._store.keeps_house:
                    await self._write()
                await aside(self._backup.close)
        except Exception as error:  # whatever the folder holds, the daemon ends
            problem = str(error) or "its folder does not answer"
            log.warning("the backup lacks the last changes: %s", problem)

    async def _work(self) -> None:
        now = self._threads.loop.time
        while True:
            began = now()
            try:
                if self._store.keeps_house:
                    await self._write()
            except PensieveError as error:
                self._has_problem(str(error))
            except Exception as error:  # whatever the folder holds, turns go on
                log.error("the backup failed unexpectedly", exc_info=error)
                self._has_problem(whole_line(error))
            else:
                if self.problem and self._store.keeps_house:
                    log.warning("the backup is whole again")
                self.problem, self._whole_at = "", began
            await asyncio.sleep(max(SECONDS, PAUSE_SHARE * (now() - began)))

    async def _write(self) -> None:
        """Write a moment, behind one that is being written. It goes on if this is cancelled."""
        job = self._threads.loop.create_task(aside(self._moment))
        job.add_done_callback(lambda job: job.cancelled() or job.exception())
        while not (await asyncio.wait({job}, timeout=SLOW_SECONDS))[0]:
            self._has_problem(f"its folder has not answered for {SLOW_SECONDS:.0f} s")
        job.result()

    def _moment(self) -> None:
        try:
            self._backup.write(self._keep_seconds)
        finally:
            if self._store.is_shared:
                self._backup.release()

    def _has_problem(self, problem: str) -> None:
        if problem != self.problem:
            log.warning("the backup is not whole: %s", problem)
        self.problem = problem
