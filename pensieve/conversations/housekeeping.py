"""Background work on the history while the daemon serves, and the conditions under which it is read-only.

    Eraser             finish deletions whose text could not be erased from the files at once, and compact
    start_forgetting   forget old request ids and old digests of histories
    start_expiring     erase conversations that were idle for long
    Scrubber           read the whole history, a little at a time, to find damage
    Damage             a damaged history is read-only, also for the next process
    FullDisk           while the disk is full, only reads and deletions are possible

Each step is a job of a few milliseconds in a store thread or the read thread. Pauses between the steps let
clients' jobs go first. Everything here belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence

from pensieve.conversations.threads import Threads, in_new_thread
from pensieve.errors import (
    DiskFull,
    ErasurePending,
    NotFound,
    OwnedElsewhere,
    PensieveError,
    StaleRevision,
    StoreCorrupt,
)
from pensieve.store.backend import ErasureSteps, ScrubSteps
from pensieve.store.conversation_store import ConversationStore
from pensieve.store.history_reader import HistoryReader
from pensieve.store.records import StoredConversation

log = logging.getLogger("pensieve")
HOUSEKEEPING = "/housekeeping"  # passed as the tenant of this work; no real tenant has this name
ERASE_PAUSE_SECONDS = 0.02
ERASED_SECONDS_MAX = 5.0  # a client waits at most this long for other readers of the history
FORGET_PAUSE_SECONDS = 0.05
FORGET_PASSES = 24  # number of passes in the time for which an entry is kept
FORGET_SECONDS_MAX = 3600.0  # between two passes
SCRUB_PAUSE_SECONDS_MIN, SCRUB_PAUSE_SECONDS_MAX = 0.02, 60.0
FULL_DISK_CHECK_SECONDS = 2.0  # between two checks of a full disk


class Eraser:
    """Finish the work on the disk that deletions have left (store/sqlite_backend.py)."""

    def __init__(self, erasure: ErasureSteps, threads: Threads) -> None:
        self._erasure, self._threads = erasure, threads
        self._is_at_work = False
        self._failure_logged = False  # a failure was logged

    def start(self) -> None:
        """Start the erasure steps that are due, unless they already run."""
        if not self._is_at_work:
            self._is_at_work = True
            self._threads.spawn(self._work())

    async def _work(self) -> None:
        try:
            while await self._threads.in_store(HOUSEKEEPING, self._erasure.step):
                await asyncio.sleep(ERASE_PAUSE_SECONDS)
        except PensieveError as error:  # the next sweep tries again
            if not self._failure_logged:
                log.warning("deleted text cannot be erased from the history yet: %s", error)
            self._failure_logged = True
        else:
            if self._failure_logged:
                log.warning("all deleted text is erased from the history")
            self._failure_logged = False
        finally:
            self._is_at_work = False


async def wait_until_erased(finish: Callable[[], None], threads: Threads) -> None:
    """Repeat `finish` in a store thread until everything is erased. Raises ErasurePending at the deadline."""
    deadline = threads.loop.time() + ERASED_SECONDS_MAX
    while True:
        await asyncio.sleep(ERASE_PAUSE_SECONDS)
        try:
            return await threads.in_store(HOUSEKEEPING, finish)
        except ErasurePending:
            if threads.loop.time() >= deadline:
                raise


def start_forgetting(
    store: ConversationStore,
    threads: Threads,
    now: Callable[[], float],
    *,
    request_seconds: float,
    chain_seconds: float,
) -> None:
    """Forget request ids and digests of histories after these seconds (0: never). `now`: the wall clock."""

    async def work(name: str, step: Callable[[float], bool], keep_seconds: float) -> None:
        while keep_seconds:
            try:
                before = now() - keep_seconds
                while await threads.in_store(HOUSEKEEPING, step, before):
                    await asyncio.sleep(FORGET_PAUSE_SECONDS)
                await threads.in_store(HOUSEKEEPING, store.erasure.resume)
            except PensieveError as error:  # the next pass tries again
                log.warning("old %s could not be forgotten: %s", name, error)
            await asyncio.sleep(min(FORGET_SECONDS_MAX, keep_seconds / FORGET_PASSES))

    threads.spawn(work("requests", store.forgetting.step, request_seconds))
    threads.spawn(work("chains", store.chains.forget, chain_seconds))


def start_expiring(
    reader: HistoryReader,
    threads: Threads,
    delete: Callable[[str, str, StoredConversation], Awaitable[None]],
    now: Callable[[], float],
    keep_seconds: float,
) -> None:
    """Erase conversations that did not change for `keep_seconds`; 0: never.

    `delete` takes the id, the tenant and the conversation as it was read. It raises StaleRevision if the
    conversation has changed since. A conversation that another daemon owns is left to that daemon.
    """

    async def erase_idle() -> int:
        num_erased, after = 0, 0
        while True:
            idle, last = await threads.in_read_thread(
                HOUSEKEEPING, reader.idle_conversations, now() - keep_seconds, after
            )
            for each in idle:
                with contextlib.suppress(NotFound, StaleRevision, OwnedElsewhere, ErasurePending):
                    await delete(each.conversation_id, each.tenant, each)
                    num_erased += 1
                await asyncio.sleep(FORGET_PAUSE_SECONDS)
            if last is None:
                return num_erased
            after = last
            await asyncio.sleep(FORGET_PAUSE_SECONDS)

    async def work() -> None:
        while True:
            try:
                if num_erased := await erase_idle():
                    log.info("erased %s idle conversations", f"{num_erased:,}")
            except PensieveError as error:  # the next pass tries again
                log.warning("idle conversations could not be erased: %s", error)
            await asyncio.sleep(min(FORGET_SECONDS_MAX, keep_seconds / FORGET_PASSES))

    if keep_seconds:
        threads.spawn(work())


class Scrubber:
    """Read the whole history repeatedly, each time in about `seconds` (store/verify.py); 0: never.

    Pauses while deleted text waits to be erased. Stops at the first damage, which an operator must repair.
    """

    def __init__(
        self,
        scrub: ScrubSteps,
        threads: Threads,
        seconds: float,
        is_pending: Callable[[], bool],
        on_damage: Callable[[Sequence[str]], Awaitable[None]],
    ) -> None:
        self._scrub, self._threads, self._seconds = scrub, threads, seconds
        self._is_pending, self._on_damage = is_pending, on_damage
        self._failure_logged = False  # a failure was logged

    @property
    def num_passes(self) -> int:
        return self._scrub.num_passes

    def start(self) -> None:
        if self._seconds:
            self._threads.spawn(self._work())

    async def _work(self) -> None:
        pause_min, pause_max = SCRUB_PAUSE_SECONDS_MIN, SCRUB_PAUSE_SECONDS_MAX
        while True:
            num_passes, pause_seconds = self.num_passes, pause_max
            try:
                num_steps = await self._threads.in_read_thread(HOUSEKEEPING, self._scrub.num_steps)
                pause_seconds = min(max(self._seconds / num_steps, pause_min), pause_max)
                while num_passes == self.num_passes:
                    await asyncio.sleep(pause_seconds)
                    if self._is_pending():
                        continue
                    if problems := await self._threads.in_read_thread(
                        HOUSEKEEPING, self._scrub.step
                    ):
                        return await self._on_damage(problems)
                    self._failure_logged = False
            except PensieveError as error:  # such as an unreadable sector, or no free descriptor
                if not self._failure_logged:
                    log.error("the history could not be checked for damage: %s", error)
                self._failure_logged = True
                await asyncio.sleep(pause_seconds)


class Damage:
    """Whether the history is damaged. A check that finds nothing clears the damage."""

    def __init__(
        self, store: ConversationStore, threads: Threads, on_change: Callable[[], None]
    ) -> None:
        known_problem = "an earlier check found it damaged"
        self.problems: tuple[str, ...] = (known_problem,) if store.marks.is_damaged else ()
        self._store, self._threads, self._on_change = store, threads, on_change

    @property
    def refusal(self) -> StoreCorrupt | None:
        """The error for calls that would change the history; None if the history is not damaged."""
        if not self.problems:
            return None
        return StoreCorrupt(
            "the history is damaged: it can be read, but not changed. The daemon's log says more"
        )

    def check(self, report: Callable[[str], None]) -> None:
        """Run SQLite's integrity check while the daemon serves. Called after an unclean stop."""

        async def check() -> None:
            try:
                problems = await in_new_thread(self._store.integrity_check)
            except StoreCorrupt as error:
                problems = [str(error)]
            except PensieveError as error:  # the next start tries again
                log.error("the history could not be checked: %s", error)
                return
            if problems:
                await self.record(problems)
            else:
                report("the history is not damaged")
                self.problems = ()
                self._on_change()

        self._threads.spawn(check())

    async def record(self, problems: Sequence[str]) -> None:
        """Record that the history is damaged, for this process and the next process."""
        log.error("the history is damaged: %s", problems[0])
        self.problems = tuple(problems)
        self._store.integrity_check_due = True
        self._on_change()
        try:
            await asyncio.to_thread(self._store.marks.mark_damaged, True)
        except (
            PensieveError
        ) as error:  # this process knows of the damage, and the next process checks again
            log.error("could not record for the next start that the history is damaged: %s", error)


class FullDisk:
    """Whether the disk of the history is full.

    The disk counts as full from the first write that fails for lack of space until a small test write
    succeeds.
    """

    def __init__(
        self, store: ConversationStore, threads: Threads, on_change: Callable[[], None]
    ) -> None:
        self.is_full = False
        self._store, self._threads, self._on_change = store, threads, on_change
        store.figures.watch(on_full=self._report)

    @property
    def refusal(self) -> DiskFull | None:
        """The error for calls that would store more; None if there is room."""
        return DiskFull("the disk of the history is full") if self.is_full else None

    def _report(self) -> None:
        """Called in the store thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._threads.loop.call_soon_threadsafe(self._note_full)

    def _note_full(self) -> None:
        if self.is_full:
            return
        self.is_full = True
        log.error("the disk of the history is full: %s", self._store.folder.path)
        self._on_change()
        self._threads.spawn(self._wait_for_room())

    async def _wait_for_room(self) -> None:
        while self.is_full:
            await asyncio.sleep(FULL_DISK_CHECK_SECONDS)
            with contextlib.suppress(PensieveError):
                has_room = await self._threads.in_store(HOUSEKEEPING, self._store.erasure.has_room)
                self.is_full = not has_room
        log.warning("the disk of the history has room again")
        self._on_change()
