"""Run the service's process in a fault simulation: the real store and daemon, from start to crash."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator
from typing import Any

from pensieve import gc_pause
from pensieve.conversations.daemon import Daemon
from pensieve.store.connection import preferred_driver
from pensieve.store.conversation_store import ConversationStore
from tests.conversations.owner_threads import OwnerThreads
from tests.faults.fibers import Fibers, prepare, waiters
from tests.faults.machine import Link, Machine
from tests.faults.threads import Threads
from tests.store.faulty import writer_of


class Process:
    def __init__(
        self, store: ConversationStore, loop: Threads, fibers: Fibers, threads_max: int
    ) -> None:
        """`threads_max`: number of store threads that run at once."""
        self.store = store
        self.loop = loop
        self.fibers = fibers
        self._threads_max = threads_max
        prepare(store)
        self.inspector = open_inspector(store.folder.database_path)
        self.daemon: Daemon | None = None  # None before the start
        self.link: Link | None = None
        self.in_job = False
        self.owners = OwnerThreads(lambda: loop.caller)

    @property
    def machine(self) -> Machine | None:
        return self.link.machine if self.link is not None else None

    @property
    def is_settled(self) -> bool:
        """Return whether each running request is visible as a live turn or as an open call."""
        return not self.in_job and not (
            self.daemon is not None and self.daemon.conversations.arriving.num_turns
        )

    def deliver(self, num_frames: int) -> None:
        if self.link is not None:
            self.link.deliver(num_frames)

    def work(self, other: bool) -> None:
        """Run one job on each of several store threads. With `other`, prefer a job of a non-store thread."""
        loop = self.loop
        if loop.other_jobs and (other or not loop.store_jobs):
            loop.work(loop.other_jobs)
        elif loop.store_jobs:
            self.in_job = True
            try:
                if self._threads_max > 1 and len(loop.store_jobs) > 1:
                    loop.work_together(self._threads_max, self.fibers)
                else:
                    loop.work(loop.store_jobs)
            finally:
                self.in_job = False

    def check(self) -> None:
        """Check that no task, callback or future has failed unnoticed."""
        assert not self.loop.problems, "\n".join(self.loop.problems)
        assert not LOGGED.errors, "\n".join(LOGGED.errors)
        assert not self.owners.violations, self.owners.violations

    def bury(self) -> None:
        """Release what the operating system releases when a process ends."""
        if self.machine is not None:
            self.machine.alive = False
        if self.daemon is not None:
            self.daemon.engine._spare.release()
        self.loop.abandon()
        self.inspector.close()
        writer_of(self.store)._discard()
        self.store.folder.close(clean=False)


def open_inspector(path: Any) -> Any:
    """Return a read-only connection that bypasses the faults of the simulated disk."""
    return preferred_driver.connect(
        f"file:{path}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
    )


class _Errors(logging.Handler):
    """Collect errors that the daemon only logs, such as a failed background task."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.errors.append(f"{record.getMessage()}: {record.exc_info[1]!r}")


LOGGED = _Errors()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Disable garbage collection and log output inside the block, to run many small worlds fast."""
    log = logging.getLogger("pensieve")
    freeze, collect, propagate = gc_pause.freeze, gc_pause.collect, log.propagate
    gc_pause.freeze = gc_pause.collect = lambda: None
    log.propagate = False
    log.addHandler(LOGGED)
    collecting = gc.isenabled()
    gc.disable()
    try:
        with waiters():
            yield
    finally:
        gc_pause.freeze, gc_pause.collect, log.propagate = freeze, collect, propagate
        log.removeHandler(LOGGED)
        LOGGED.errors.clear()
        if collecting:
            gc.enable()
