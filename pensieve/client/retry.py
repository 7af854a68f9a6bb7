"""Whether and when a failed request is sent again, and how much of its timeout is left."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pensieve.errors import InvalidArgument, PensieveError, QueueFull, Unavailable


@dataclass(frozen=True)
class Retry:
    """How often a request is sent again, and how long the client waits before each try.

    Only errors that may pass by themselves are retried: UNAVAILABLE, and a full queue when the server
    names a time to come back.  The pause doubles from `first_seconds` up to `most_seconds`, is shortened
    by random jitter to between half and all of that, and is never shorter than the server asks for.

    Args:
        retries: how often a request is sent again after its first failure; 0 never retries.
        first_seconds: the pause after the first failure.
        most_seconds: the longest pause that this client chooses by itself.
        drawn: a source of random numbers in [0, 1) for the jitter.
    """

    retries: int = 8
    first_seconds: float = 0.1
    most_seconds: float = 10.0
    drawn: Callable[[], float] = field(default=random.random)

    def pause(self, error: PensieveError, num_tries: int, left: float | None) -> float | None:
        """Seconds to wait before another try, or None to give up.

        `num_tries` counts the failures so far, this one included; `left` is what remains of the timeout
        in seconds.  A pause that would outlast the timeout is not begun.
        """
        worthwhile = isinstance(error, Unavailable) or (
            isinstance(error, QueueFull) and error.retry_after_seconds is not None
        )
        if not worthwhile or num_tries > self.retries:
            return None
        grown = min(self.first_seconds * 2 ** (num_tries - 1), self.most_seconds)
        pause = max(grown * (0.5 + self.drawn() / 2), error.retry_after_seconds or 0.0)
        return None if left is not None and pause >= left else pause


class Deadline:
    """The timeout of one call or turn, which starts with the first look at it; None has no end."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        if seconds is not None and not seconds > 0:
            raise InvalidArgument("timeout", f"is a number of seconds above 0, not {seconds}")
        self.seconds = seconds
        self._clock = clock
        self._end: float | None = None

    def left(self) -> float | None:
        """The seconds that remain, at least 0; the first call starts the clock."""
        if self.seconds is None:
            return None
        if self._end is None:
            self._end = self._clock() + self.seconds
        return max(self._end - self._clock(), 0.0)


class Tries:
    """Counts the failures of one request since it last made progress."""

    def __init__(self, retry: Retry, deadline: Deadline) -> None:
        self._retry = retry
        self._deadline = deadline
        self._num_tries = 0

    def pause(self, error: PensieveError) -> float:
        """Count a failure; the seconds to wait before the next try.  Raises the error to give up."""
        self._num_tries += 1
        pause = self._retry.pause(error, self._num_tries, self._deadline.left())
        if pause is None:
            raise error
        return pause

    def made_progress(self) -> None:
        """Forget the failures so far."""
        self._num_tries = 0
