"""Which turns were in the engine when it died, for one of them may be what kills it.

Each turn that a killed process had is under suspicion, the queued ones too.  Clients send such turns again:

    1 death     it is tried again, beside all others
    2 deaths    it is tried again when no other such turn is in the engine
    3 deaths    it has failed, and no client sends it again by itself

A death counts only where the turn had come no further than at an earlier one, so an innocent turn is soon
cleared.  A turn that is sent again on purpose begins without a record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pensieve.conversations.live_turn import LiveTurn

DEATHS_ALONE, DEATHS_MAX = 2, 3
RECORDS_MAX = 10_000  # of turns that nobody has sent again; the oldest are forgotten


class Suspects:
    def __init__(self) -> None:
        self._records: dict[int, tuple[int, int]] = {}  # by turn id: deaths, tokens at most

    def engine_died(self, live: LiveTurn) -> bool:
        """Count it for a turn that the engine had; whether that was once too often."""
        num_deaths, num_tokens = self._records.pop(live.turn_id, (0, -1))
        num_deaths += not num_deaths or live.num_tokens <= num_tokens
        if num_deaths >= DEATHS_MAX:
            return True
        self._records[live.turn_id] = (num_deaths, max(num_tokens, live.num_tokens))
        if len(self._records) > RECORDS_MAX:
            del self._records[next(iter(self._records))]
        return False

    def must_wait(self, live: LiveTurn, all_live: Callable[[], Iterable[LiveTurn]]) -> bool:
        """Whether the engine has another turn that may be what kills it, and this one may be too."""
        return self._is_grave(live) and any(
            self._is_grave(other) for other in all_live() if other is not live
        )

    def ended(self, live: LiveTurn) -> None:
        """The engine has ended it, and lives."""
        self._records.pop(live.turn_id, None)

    def _is_grave(self, live: LiveTurn) -> bool:
        num_deaths, num_tokens = self._records.get(live.turn_id, (0, 0))
        return num_deaths >= DEATHS_ALONE and live.num_tokens <= num_tokens
