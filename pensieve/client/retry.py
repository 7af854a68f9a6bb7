"""Decide whether and when a request is retried, and track how much of its timeout is left."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pensieve.errors import InvalidArgument, Loading, PensieveError, QueueFull, Unavailable

END_SECONDS = 2.0  # limit for waiting until the server has stopped a turn
LOADING_PAUSE_SECONDS = 1.0  # if the server sends no retry delay


@dataclass(frozen=True)
class Retry:
    """How often a request is retried, and how long the client waits before each try.

        client = Client("127.0.0.1:50051", retry=Retry(retries=12))  # a restart may take a minute
        client = Client("127.0.0.1:50051", retry=Retry(retries=0))  # no error is retried

    Only temporary errors are retried: UNAVAILABLE, and a full queue if the server sends a retry delay. The
    pause starts at `first_seconds` and doubles up to `most_seconds`. Random jitter shortens each pause to
    between 50 and 100 % of this value, but never below the server's retry delay. By default, an unreachable
    server is retried for 11 to 23 seconds, 17 on average.

    While a server is loading its model, it is asked again every one to two seconds, for `loading_seconds` in
    total. These requests do not count as retries. So a turn survives a restart if the daemon listens again
    before the retries end, even if the model is not loaded by then.

    A client with several addresses tries them one after another. It counts a failure only if all of them
    fail. After each failure of an address, the client avoids the address for a pause that grows in the same
    way.

    The timeout of a call or turn includes all pauses. If a pause would outlast the timeout, the last error is
    raised at once.

    Args:
        retries: how often a request is retried after its first failure. 0: never.
        first_seconds: the pause after the first failure.
        most_seconds: the longest pause, unless the server asks for a longer one.
        loading_seconds: how long to wait for a server that is loading its model.
        drawn: a source of random numbers in [0, 1) for the jitter.
    """

    retries: int = 8
    first_seconds: float = 0.1
    most_seconds: float = 10.0
    loading_seconds: float = 600.0
    drawn: Callable[[], float] = field(default=random.random)

    def pause(self, error: PensieveError, num_tries: int, left: float | None) -> float | None:
        """Return the seconds to wait before another try. None: give up.

        `num_tries` is the number of failures so far, including `error`. `left` is the remaining timeout in
        seconds. If the pause would outlast the timeout, the result is None.
        """
        worthwhile = isinstance(error, Unavailable) or (
            isinstance(error, QueueFull) and error.retry_after_seconds is not None
        )
        if not worthwhile or num_tries > self.retries:
            return None
        pause = max(self.backoff(num_tries), error.retry_after_seconds or 0.0)
        return None if left is not None and pause >= left else pause

    def backoff(self, num_failures: int) -> float:
        """Return the pause after `num_failures` in a row, with jitter."""
        doublings = min(num_failures - 1, 60)
        pause: float = min(self.first_seconds * 2**doublings, self.most_seconds)
        return pause * (0.5 + self.drawn() / 2)

    def loading_pause(
        self, error: PensieveError, waited: float, left: float | None
    ) -> float | None:
        """Like `pause`, for a server that is loading its model.

        `waited` is the sum of such pauses so far, in seconds. `left` is the remaining timeout in seconds.
        """
        if not self.retries or waited >= self.loading_seconds:
            return None
        pause = (error.retry_after_seconds or LOADING_PAUSE_SECONDS) * (1 + self.drawn())
        return None if left is not None and pause >= left else pause


class Deadline:
    """The timeout of one call or turn. It starts at the first call of `left`. None: no timeout."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        if seconds is not None and not seconds > 0:
            raise InvalidArgument("timeout", f"must be a number of seconds above 0, not {seconds}")
        self.seconds = seconds
        self._clock = clock
        self._end: float | None = None

    def left(self) -> float | None:
        """Return the remaining seconds, at least 0. None: no timeout. The first call starts the timeout."""
        if self.seconds is None:
            return None
        if self._end is None:
            self._end = self._clock() + self.seconds
        return max(self._end - self._clock(), 0.0)


class Tries:
    """Counts the failures of one request since its last progress.

    A server that is loading its model is reachable, so its answer resets the count of failures.
    """

    def __init__(self, retry: Retry, deadline: Deadline) -> None:
        self._retry = retry
        self._deadline = deadline
        self._num_tries = 0
        self._waited = 0.0  # seconds of waiting for a server that is loading its model

    def pause(self, error: PensieveError) -> float:
        """Count a failure. Return the seconds until the next try, or raise `error` if there is none."""
        left = self._deadline.left()
        if isinstance(error, Loading):
            self._num_tries = 0
            pause = self._retry.loading_pause(error, self._waited, left)
            self._waited += pause or 0.0
        else:
            self._num_tries += 1
            pause = self._retry.pause(error, self._num_tries, left)
        if pause is None:
            raise error
        return pause

    def made_progress(self) -> None:
        """Forget the failures so far."""
        self._num_tries = 0
        self._waited = 0.0
