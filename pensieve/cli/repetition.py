"""Notices a reply that says the same over and over, while it streams.

For each period p it counts for how long each token has been the one p tokens before.  A reply repeats
itself once that has lasted for two more periods (so the same came three times) and for REPEATED_TOKENS_MIN
tokens (so that a row of dashes or zeros is none).  Lists and tables that differ in an item break every
count.  PERIOD_TOKENS_MAX bounds what a token costs: a comparison for each period.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

PERIOD_TOKENS_MAX = 200  # a long paragraph
REPEATED_TOKENS_MIN = 40


class Repetition:
    """The last tokens of one reply."""

    def __init__(self) -> None:
        self._last: deque[int] = deque(maxlen=PERIOD_TOKENS_MAX)  # the newest first
        self._lasted = [0] * PERIOD_TOKENS_MAX  # of period p at p - 1: equal tokens in a row

    def push(self, token_ids: Iterable[int]) -> bool:
        """Whether the reply repeats itself, with these tokens."""
        found = False
        for token in token_ids:
            for index, before in enumerate(self._last):
                lasted = self._lasted[index] + 1 if before == token else 0
                self._lasted[index] = lasted
                found |= lasted >= max(2 * (index + 1), REPEATED_TOKENS_MIN)
            self._last.appendleft(token)
        return found
