"""Write the backup of `--backup` every minute while the daemon serves.

If several daemons share a history file, the daemon that does the housekeeping writes the backup
(store/housekeeper.py). All daemons use one folder, and no daemon keeps the folder locked between two writes.
If the daemon that writes the backup exits or hangs, another daemon takes over within a minute.

Access to the folder may be slow or hang, so a separate thread writes to it. No turn and no deletion waits for
that thread. The daemon's shutdown waits at most STOP_SECONDS for it. A problem is logged when it begins and
when it ends, and the daemon's figures show the problem as long as it lasts.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from pensieve.conversations.daemon_config import BackupConfig
from pensieve.conversations.threads import Threads, in_new_thread
from pensieve.errors import PensieveError, whole_line
from pensieve.store import ConversationStore
from pensieve.store.backup import Backup

log = logging.getLogger("pensieve")
SECONDS = 60.0
PAUSE_SHARE = 9.0  # a pause is at least PAUSE_SHARE times as long as the write before it
SLOW_SECONDS = 300.0  # a write that takes longer is logged as a problem
STOP_SECONDS = 10.0


class BackupWriter:
    """Belongs to the event loop."""

    def __init__(
        self, store: ConversationStore, database: Path, config: BackupConfig, threads: Threads
    ) -> None:
        """`database`: the file of the store's history."""
        self.problem = ""  # why the backup is incomplete; "": it is complete
        self._store = store
        self._backup = Backup(config.folder, database)
        self._keep_seconds = config.keep_seconds
        self._threads = threads
        self._complete_at = threads.loop.time()  # when the folder last had every commit

    def start(self) -> None:
        self._threads.spawn(self._work())

    def figures(self) -> dict[str, float]:
        """Return figures for the operator; none while another daemon writes the backup."""
        if not self._store.is_housekeeper:
            return {}
        return {
            "backup_age_seconds": self._threads.loop.time() - self._complete_at,
            "backup_failing": bool(self.problem),
        }

    async def close(self) -> None:
        """Write the last changes. Call it after the background tasks ended and before the store closes."""
        try:
            async with asyncio.timeout(STOP_SECONDS):
                if self._store.is_housekeeper:
                    await self._write()
                await in_new_thread(self._backup.close)
        except Exception as error:  # a broken folder must not keep the daemon from ending
            problem = str(error) or "its folder does not answer"
            log.warning("the backup lacks the last changes: %s", problem)

    async def _work(self) -> None:
        now = self._threads.loop.time
        while True:
            began = now()
            try:
                if self._store.is_housekeeper:
                    await self._write()
            except PensieveError as error:
                self._report_problem(str(error))
            except Exception as error:  # a broken folder must not stop the turns
                log.error("the backup failed unexpectedly", exc_info=error)
                self._report_problem(whole_line(error))
            else:
                if self.problem and self._store.is_housekeeper:
                    log.warning("the backup is complete again")
                self.problem, self._complete_at = "", began
            await asyncio.sleep(max(SECONDS, PAUSE_SHARE * (now() - began)))

    async def _write(self) -> None:
        """Write the changes. If another write is in progress, wait for that write first.

        Cancelling this call does not stop the write.
        """
        job = self._threads.loop.create_task(in_new_thread(self._write_moment))
        job.add_done_callback(lambda job: job.cancelled() or job.exception())
        while not (await asyncio.wait({job}, timeout=SLOW_SECONDS))[0]:
            self._report_problem(f"its folder has not answered for {SLOW_SECONDS:.0f} s")
        job.result()

    def _write_moment(self) -> None:
        """Add a moment (store/backup.py) to the backup. Called in a separate thread."""
        try:
            self._backup.write(self._keep_seconds)
        finally:
            if self._store.is_shared:
                self._backup.release()

    def _report_problem(self, problem: str) -> None:
        if problem != self.problem:
            log.warning("the backup is incomplete: %s", problem)
        self.problem = problem
