"""How much the scheduler puts into an iteration, and how many turns run at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulerConfig:
    batch_tokens_max: int = 512  # tokens of one iteration
    turns_max: int = 256  # running at once
    prompt_seconds_max: float = 0.0  # that prompts may add to an iteration of others; 0: no limit

    def __post_init__(self) -> None:
        if self.batch_tokens_max < 1 or self.turns_max < 1:
            raise ValueError("batch_tokens_max and turns_max are at least 1")
        if not self.prompt_seconds_max >= 0.0:
            raise ValueError("prompt_seconds_max is at least 0")
