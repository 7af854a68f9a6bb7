"""Threads that run one at a time, so that concurrent store calls are deterministic.

`Fibers.run` starts each job in its own thread, but only one thread runs at any moment. A thread runs until it
waits for another fiber, yields or ends. Then the next thread is drawn at random. Store code that waits for
another thread must use the `Waiter` or `Lock` of this module. A real lock would block for ever.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pensieve.store import shared_commits
from pensieve.store.conversation_store import ConversationStore
from tests.faults.disk import ProcessDied

WAIT_SECONDS = 60.0  # a fiber that blocks longer is blocked by something outside its world


class Fiber:
    def __init__(self, fibers: Fibers, job: Callable[[], Any]) -> None:
        self.fibers = fibers
        self.result: Any = None
        self.error: BaseException | None = None
        self.has_ended = False
        self._job = job
        self._resumed, self._left = threading.Lock(), threading.Lock()
        self._resumed.acquire()
        self._left.acquire()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def resume(self) -> None:
        """Run the fiber until it calls `leave` or ends."""
        self._resumed.release()
        assert self._left.acquire(timeout=WAIT_SECONDS), (
            "a fiber waits for something outside its world"
        )
        if self.has_ended:
            self._thread.join()

    def leave(self) -> None:
        """Let other fibers run until this fiber is resumed."""
        if self.fibers.has_died:
            raise ProcessDied
        self._left.release()
        self._resumed.acquire()
        if self.fibers.has_died:
            raise ProcessDied

    def _run(self) -> None:
        _here.fiber = self
        self._resumed.acquire()
        try:
            if self.fibers.has_died:
                raise ProcessDied
            self.result = self._job()
        except BaseException as error:
            self.error = error
        self.has_ended = True
        self._left.release()


class _Here(threading.local):
    fiber: Fiber | None = None


_here = _Here()


class Fibers:
    """The fibers of one simulated process."""

    def __init__(self, seed: int) -> None:
        self.has_died = False  # the process has died; some threads may not have noticed
        self.ready: list[Fiber] = []
        self.random = random.Random(seed)

    def run(self, jobs: Sequence[Callable[[], Any]]) -> list[Fiber]:
        """Run all jobs to their ends. Raise ProcessDied if a job raised it."""
        fibers = [Fiber(self, job) for job in jobs]
        self.ready = list(fibers)
        while self.ready:
            fiber = self.ready.pop(self.random.randrange(len(self.ready)))
            fiber.resume()
            if self.has_died:
                self.ready = [each for each in fibers if not each.has_ended]
        assert all(each.has_ended for each in fibers), "all remaining fibers wait for each other"
        if self.has_died:
            raise ProcessDied
        return fibers

    def give_way(self) -> None:
        """Let another fiber run, with some probability. Does nothing in a thread that is not a fiber."""
        fiber = _here.fiber
        if fiber is not None and not self.has_died and self.random.random() < 0.3:
            self.ready.append(fiber)
            fiber.leave()


class Waiter(shared_commits.Waiter):
    def __init__(self) -> None:
        self._is_woken = False
        self._fiber: Fiber | None = None

    def wait(self) -> None:
        if not self._is_woken:
            self._fiber = _here.fiber
            assert self._fiber is not None, "a thread that is not a fiber waits for a fiber"
            self._fiber.leave()

    def wake(self) -> None:
        self._is_woken = True
        if self._fiber is not None and not self._fiber.fibers.has_died:
            self._fiber.fibers.ready.append(self._fiber)


class Lock:
    """A lock for fibers, for use in `with`."""

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: deque[Waiter] = deque()

    def __enter__(self) -> None:
        while self._is_held:
            waiter = Waiter()
            self._waiting.append(waiter)
            waiter.wait()
        self._is_held = True

    def __exit__(self, *exc: object) -> None:
        self._is_held = False
        if self._waiting:
            self._waiting.popleft().wake()


def prepare(store: ConversationStore) -> None:
    """Replace the store's locks that a thread holds while it uses the disk."""
    vars(vars(store)["_transactions"])["_repairing"] = Lock()
    vars(store.erasure)["_deleting"] = Lock()


@contextlib.contextmanager
def waiters() -> Iterator[None]:
    """Make the store's threads wait as fibers inside the block."""
    before, shared_commits.Waiter = shared_commits.Waiter, Waiter  # type: ignore[misc]
    try:
        yield
    finally:
        shared_commits.Waiter = before  # type: ignore[misc]
