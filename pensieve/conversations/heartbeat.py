"""Whether the engine process hangs, by the frames that come from it.

    SILENT   no frame for `silent_seconds_max`: the process was stopped, or none of its threads runs
    STUCK    frames come, but its main thread has been in one round for `round_seconds_max`

A round is an iteration or a moment of idleness (`Engine.num_rounds`).  Seconds are counted by `tick`, which
the service calls while it runs, so a service that was itself stopped for an hour counts one tick for it.
"""

from __future__ import annotations

from dataclasses import dataclass

TICK_SECONDS_MAX = 1.0


@dataclass(frozen=True)
class Patience:
    silent_seconds_max: float
    round_seconds_max: float  # 0: without end

    @property
    def tick_seconds(self) -> float:
        return min(TICK_SECONDS_MAX, self.silent_seconds_max / 4)


class Heartbeat:
    def __init__(self, patience: Patience) -> None:
        self.silent_seconds = 0.0
        self.round_seconds = 0.0
        self._patience = patience
        self._num_rounds = -1

    def published(self) -> None:
        """Events came, and only the main thread publishes."""
        self.silent_seconds = self.round_seconds = 0.0

    def alive(self, num_rounds: int) -> None:
        self.silent_seconds = 0.0
        if num_rounds != self._num_rounds:
            self._num_rounds = num_rounds
            self.round_seconds = 0.0

    def tick(self) -> str | None:
        """Why the engine is held to hang; None as long as it is not."""
        patience = self._patience
        self.silent_seconds += patience.tick_seconds
        self.round_seconds += patience.tick_seconds
        if self.silent_seconds > patience.silent_seconds_max:
            return f"the engine has been silent for {self.silent_seconds:.0f} s"
        if 0 < patience.round_seconds_max < self.round_seconds:
            return f"the engine has been in one iteration for {self.round_seconds:.0f} s"
        return None
