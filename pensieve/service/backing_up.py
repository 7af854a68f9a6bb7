"""Has the history backed up while the daemon serves, into the folder of `--backup` or once on request.

    begin    a feed in the store thread, a base in a thread of the backup (store/backup)
    ship     every `seconds`: collect in the store thread, a few milliseconds; append in the other one
    broken   what could not be written became too much, or the history was opened anew after an error of
             the disk: the feed is gone, and another generation begins
    rotate   a generation has a day; while the base of the next one is copied, it goes on
    stop     what was committed up to the end is shipped, if the folder answers within STOP_SECONDS

The store thread never waits for the folder, and neither does a turn, a deletion or the loop: each job of
the folder has a thread of its own, which may hang for ever with it, and is given up when the daemon stops.
What goes wrong is said in the log when it begins and when it is over, and in the figures all the time.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pensieve.errors import PensieveError, StoreUnavailable, whole_line
from pensieve.service.daemon_config import BackupConfig
from pensieve.service.threads import Threads
from pensieve.store.backend import Source
from pensieve.store.backup.capture import Feed
from pensieve.store.backup.writing import BackupFolder, BaseCopy, Chain

log = logging.getLogger("pensieve")
T = TypeVar("T")
NOBODY = "/backup"  # no tenant has this name
GENERATION_SECONDS = 86_400.0
SLOW_SECONDS = 30.0  # of a folder, that are worth a warning
STOP_SECONDS = 10.0


class BackingUp:
    """Belongs to the loop."""

    def __init__(
        self, source: Source, threads: Threads, config: BackupConfig | None = None
    ) -> None:
        self.problem = ""  # why the folder lacks what it should have
        self._source = source
        self._threads = threads
        self._config = config
        self._folder: BackupFolder | None = None
        self._feed: Feed | None = None
        self._chain: Chain | None = None
        self._jobs: set[asyncio.Future[Any]] = set()
        self._copies: set[BaseCopy] = set()
        self._requests: set[asyncio.Task[Chain]] = set()
        self._whole_at = threads.loop.time()  # when all that was committed was in the folder

    def start(self) -> None:
        if self._config is not None:
            self._threads.spawn(self._work(self._config))

    def figures(self) -> dict[str, float]:
        """For the operator; nothing where no folder was named."""
        if self._config is None:
            return {}
        return {
            "backup_age_seconds": self._threads.loop.time() - self._whole_at,
            "backup_failing": bool(self.problem),
        }

    async def copy(self, path: Path) -> Chain:
        """A generation of its own in another folder."""
        request = self._threads.loop.create_task(self._copy(path))
        self._requests.add(request)
        request.add_done_callback(self._requests.discard)
        return await asyncio.shield(request)  # it goes on to its end if the caller is gone

    def stop(self) -> None:
        """Give up what was requested, even if its folder does not answer."""
        for request in self._requests:
            request.cancel()

    async def close(self) -> None:
        """After the background tasks have ended, and before the store closes: ship the rest."""
        try:
            async with asyncio.timeout(STOP_SECONDS):
                if self._jobs:
                    await asyncio.wait(self._jobs)
                await self._ship()
        except (PensieveError, TimeoutError) as error:
            problem = str(error) or "its folder does not answer"
            log.warning("the backup lacks the last changes: %s", problem)
        else:
            if self._folder is not None:
                self._folder.close()

    # -- inside --

    async def _work(self, config: BackupConfig) -> None:
        while True:
            try:
                await self._round(config)
            except PensieveError as error:
                self._has_problem(str(error))
            except Exception as error:  # whatever the folder holds, turns go on
                log.error("the backup failed unexpectedly", exc_info=error)
                self._has_problem(whole_line(error))
            else:
                if self.problem:
                    log.warning("the backup is whole again")
                self.problem = ""
                self._whole_at = self._threads.loop.time()
            await asyncio.sleep(config.seconds)

    async def _round(self, config: BackupConfig) -> None:
        if self._feed is not None and self._feed.failure:
            self._has_problem(f"{self._feed.failure}; another generation begins")
            self._feed = self._chain = None
            if self._folder is not None:  # it may be another one by now
                self._folder.close()
                self._folder = None
        if self._folder is None:
            identity = await self._in_store(lambda: self._source.identity)
            self._folder = await self._job(lambda: BackupFolder.open(config.folder, identity))
        folder, chain = self._folder, self._chain
        await self._ship()
        now = self._source.now()
        if self._chain is None or (
            chain is not None
            and chain.time > chain.generation.time
            and not 0 <= now - chain.generation.time < config.generation_seconds
        ):
            before, (self._feed, self._chain) = self._feed, await self._generation(folder)
            log.info("the backup has a new generation, %d", self._chain.generation.number)
            if before is not None:
                await self._in_store(lambda: self._source.end(before))
        if config.keep_seconds:
            await self._job(lambda: folder.drop_old(now - config.keep_seconds))

    async def _ship(self) -> None:
        chain, feed = self._chain, self._feed
        if chain is None or feed is None:
            return
        await self._in_store(self._source.collect)
        await self._job(lambda: chain.ship(feed))
        if feed.failure:
            raise StoreUnavailable(feed.failure)

    async def _copy(self, path: Path) -> Chain:
        identity = await self._in_store(lambda: self._source.identity)
        folder = await self._job(lambda: BackupFolder.open(path, identity))
        try:
            feed, chain = await self._generation(folder, ships=False)
            await self._in_store(lambda: self._source.end(feed))
            return chain
        finally:
            folder.close()

    async def _generation(self, folder: BackupFolder, *, ships: bool = True) -> tuple[Feed, Chain]:
        """A new one with its base; what the present one has to ship goes on meanwhile, here or elsewhere."""
        feed = await self._in_store(self._source.begin)
        copy: BaseCopy | None = None
        copying: asyncio.Task[None] | None = None
        try:
            copy = await self._job(lambda: folder.begin(self._source, feed))
            self._copies.add(copy)
            copying = self._threads.loop.create_task(self._job(copy.run))
            pause_seconds = self._config.seconds if ships and self._config else None
            while not (await asyncio.wait({copying}, timeout=pause_seconds))[0]:
                with suppress(PensieveError):  # it is tried again
                    await self._ship()
            copying.result()
            await self._in_store(self._source.collect)
            return feed, await self._job(copy.finish)
        except Exception:
            await self._in_store(lambda: self._source.end(feed))
            if copy is not None:
                await self._job(copy.discard)
            raise
        finally:  # which matters where this task was cancelled
            if copy is not None:
                copy.stopped = True
                self._copies.discard(copy)
            if copying is not None:
                copying.cancel()

    def _has_problem(self, problem: str) -> None:
        if problem != self.problem:
            log.warning("the backup is not whole: %s", problem)
        self.problem = problem

    def _in_store(self, function: Callable[[], T]) -> Awaitable[T]:
        return self._threads.in_store(NOBODY, function)

    async def _job(self, function: Callable[[], T]) -> T:
        """Call it in a thread of its own."""
        job: asyncio.Future[T] = in_own_thread(self._threads.loop, function)
        self._jobs.add(job)
        job.add_done_callback(self._ended)
        while not (await asyncio.wait({job}, timeout=SLOW_SECONDS))[0]:
            if not self._copies:
                self._has_problem(f"its folder has not answered for {SLOW_SECONDS:.0f} s")
        return job.result()

    def _ended(self, job: asyncio.Future[Any]) -> None:
        self._jobs.discard(job)
        if not job.cancelled():
            job.exception()  # of one that nobody waits for any more


def in_own_thread(loop: asyncio.AbstractEventLoop, function: Callable[[], T]) -> asyncio.Future[T]:
    """The process does not wait for this thread when it exits."""
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            value = function()
        except Exception as error:
            hand_over(done.set_exception, error)
        else:
            hand_over(done.set_result, value)

    def hand_over(take: Callable[[Any], None], what: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: it was given up
            loop.call_soon_threadsafe(take, what)

    threading.Thread(target=run, name="backup", daemon=True).start()
    return done
