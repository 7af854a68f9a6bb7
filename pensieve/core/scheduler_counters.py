"""What a scheduler has counted since it was made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SchedulerCounters:
    iterations: int = 0
    tokens: int = 0  # positions computed
    recomputed_tokens: int = 0  # of them, positions whose KV had been there before
    repaired_ranges_max: int = 0  # most disconnected slices of one turn in one iteration
    suspensions: int = 0
    resumptions: int = 0
    preemptions: int = 0
    preempted_seconds: float = 0.0  # for how long, of those that run again or have ended
    idle_tokens: int = 0  # computed for a turn that had already finished
    finished: int = 0
    failed: int = 0
