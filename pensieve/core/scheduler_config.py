"""How much the scheduler puts into an iteration, and how many turns run at once."""

from __future__ import annotations

from dataclasses import dataclass

from pensieve.core.cost import IterationCost

# Of no machine in particular: the weights are read in the time of 20 tokens.  Predictions are corrected by
# what is measured (time_budget.py).
SOME_COST = IterationCost(0.001, 0.02, 1e-7, 2.5e-6, 0.0)
STREAM = ("auto", "on", "off")
COPY_SECONDS = 1e-4  # of no machine in particular
GROUP_SECONDS = 1e-3


@dataclass(frozen=True)
class SchedulerConfig:
    batch_tokens_max: int = 512  # tokens of one iteration
    turns_max: int = 256  # running at once
    prompt_seconds_max: float = 0.0  # that prompts may add to an iteration of others; 0: no limit
    tbt_seconds: float = 0.0  # objective for the time between two tokens of a reply; 0: none
    cost: IterationCost = SOME_COST  # of iterations
    time_share: int = (
        0  # tokens of a reply, after which one that waits may have its place; 0: never
    )

    stream: str = "auto"  # of STREAM: whether turns run whose KV lies on the host; see streaming.py
    copy_seconds: float = COPY_SECONDS  # of a chunk from the host to the device
    group_seconds: float = GROUP_SECONDS  # that a group of streamed turns adds to an iteration
    stages: int = (
        1  # of a pipeline: so many iterations are uncommitted at once; see pipeline_stages.py
    )

    def __post_init__(self) -> None:
        if self.stream not in STREAM:
            raise ValueError(f"stream is one of {', '.join(STREAM)}, not {self.stream!r}")
        if self.batch_tokens_max < 1 or self.turns_max < 1:
            raise ValueError("batch_tokens_max and turns_max are at least 1")
        if self.stages < 1:
            raise ValueError("stages is at least 1")
        if self.stages > 1 and self.stream == "on":
            raise ValueError("no turn is streamed through pipeline stages")
        for name in (
            *("prompt_seconds_max", "tbt_seconds", "time_share"),
            *("copy_seconds", "group_seconds"),
        ):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"{name} is at least 0")
