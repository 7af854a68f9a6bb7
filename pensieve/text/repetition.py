"""Detect from token ids that a reply only repeats itself."""

from __future__ import annotations

from array import array

REPEATS = 4  # a pattern must occur at least this often
STRIDE = 16  # tokens between two checks; a check costs about a microsecond


class RepetitionDetector:
    """Detects that the end of one reply is a single repeated pattern.

    Let p be the length of the pattern. The reply repeats itself if its last max(`num_tokens`, REPEATS · p)
    tokens have the period p: each token equals the token p positions earlier. Only exact repetition counts.
    Numbered lists, tables or code with any variation never match.
    """

    def __init__(self, num_tokens: int) -> None:
        assert num_tokens > 0
        self._num_tokens = num_tokens
        self._tokens = array("I")

    def push(self, token_id: int) -> bool:
        """Add a token. Return whether the reply repeats itself; this is checked at every STRIDE-th token."""
        self._tokens.append(token_id)
        length = len(self._tokens)
        if length % STRIDE or length < self._num_tokens:
            return False
        return period_of_end(self._tokens[-REPEATS * self._num_tokens :], self._num_tokens) > 0


def period_of_end(tokens: array[int], num_tokens: int) -> int:
    """Return the period of the last max(num_tokens, REPEATS * period) tokens, or 0 if they have none.

    Periods above `num_tokens` are not considered. If there is a period p, the last few tokens also occur p
    positions earlier. So `bytes.rfind` searches for earlier copies of the last few tokens, and only the
    distances of these copies are checked.
    """
    data, width = tokens.tobytes(), tokens.itemsize
    end = data[-max(num_tokens // REPEATS, 1) * width :]
    end_position = len(data) - len(end)
    copy_position = data.rfind(end, 0, len(data) - width)
    while copy_position >= 0:
        period, remainder = divmod(end_position - copy_position, width)
        if period > num_tokens:
            return 0
        size = max(num_tokens, REPEATS * period)
        if not remainder and size <= len(tokens):
            last = data[-size * width :]
            if last[period * width :] == last[: -period * width]:
                return period
        copy_position = data.rfind(end, 0, copy_position + len(end) - 1)
    return 0
