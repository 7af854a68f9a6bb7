"""Detect, from token ids alone, that a reply only repeats itself."""

from __future__ import annotations

from array import array

REPEATS = 4  # of a pattern, at least
STRIDE = 16  # tokens between two looks: a look costs about a microsecond


class RepetitionDetector:
    """Watch one reply, and tell when its end is a single pattern, repeated.

    Let p be the length of the pattern. The reply repeats itself if its last max(`num_tokens`, REPEATS · p)
    tokens have the period p: each token equals the token p positions earlier. Only exact repetition counts:
    numbered lists, tables and code with any variation never match.
    """

    def __init__(self, num_tokens: int) -> None:
        assert num_tokens > 0
        self._num_tokens = num_tokens
        self._tokens = array("I")

    def push(self, token_id: int) -> bool:
        """Add a token; return whether the reply repeats itself. Looks at every STRIDE-th token."""
        self._tokens.append(token_id)
        length = len(self._tokens)
        if length % STRIDE or length < self._num_tokens:
            return False
        return period_of_end(self._tokens[-REPEATS * self._num_tokens :], self._num_tokens) > 0


def period_of_end(tokens: array[int], num_tokens: int) -> int:
    """Return the period of the last max(num_tokens, REPEATS * period) tokens; 0 without one.

    Periods above `num_tokens` are not looked for. If there is a period p, the last few tokens also occur p
    positions earlier. So only distances at which `bytes.rfind` finds a copy of them are checked.
    """
    data, width = tokens.tobytes(), tokens.itemsize
    end = data[-max(num_tokens // REPEATS, 1) * width :]
    where = len(data) - len(end)
    at = data.rfind(end, 0, len(data) - width)
    while at >= 0:
        period, rest = divmod(where - at, width)
        if period > num_tokens:
            return 0
        size = max(num_tokens, REPEATS * period)
        if not rest and size <= len(tokens):
            last = data[-size * width :]
            if last[period * width :] == last[: -period * width]:
                return period
        at = data.rfind(end, 0, at + len(end) - 1)
    return 0
