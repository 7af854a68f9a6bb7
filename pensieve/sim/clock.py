"""The virtual clock of a simulation: it moves only when it is advanced, and only forward."""

from __future__ import annotations


class VirtualClock:
    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, "time does not go back"
        self._now += seconds

    def advance_to(self, moment: float) -> None:
        """To that moment, or not at all if it has passed."""
        self._now = max(self._now, moment)
