"""What a scheduler has counted since it was made."""

from __future__ import annotations

from dataclasses import dataclass

from pensieve.core.iteration_draft import IterationDraft


@dataclass
class SchedulerCounters:
    iterations: int = 0
    tokens: int = 0  # positions computed
    recomputed_tokens: int = 0  # of them, positions whose KV had been there before
    repaired_ranges_max: int = 0  # most disconnected slices of one turn in one iteration
    suspensions: int = 0
    resumptions: int = 0
    readied: int = 0  # whose prompts were computed before they had a place
    streamed: int = 0  # admissions of turns whose KV stays on the host
    returned: int = 0  # of them turns, to the device
    preemptions: int = 0  # of them suspensions, for a turn that was next
    idle_tokens: int = 0  # computed for a turn that had already finished
    finished: int = 0
    failed: int = 0

    def planned(self, draft: IterationDraft) -> None:
        """An iteration is launched."""
        self.iterations += 1
        self.tokens += draft.num_tokens
        self.recomputed_tokens += draft.num_recomputed
        self.repaired_ranges_max = max(self.repaired_ranges_max, draft.num_ranges_max)
