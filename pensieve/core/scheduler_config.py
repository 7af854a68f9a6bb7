"""Limits of the scheduler: the size of an iteration, and how many turns run at once."""

from __future__ import annotations

from dataclasses import dataclass

from pensieve.core.cost import IterationCost

# A generic machine, on which reading the weights takes as long as computing 20 tokens. Measurements correct
# the predictions (time_budget.py).
SOME_COST = IterationCost(0.001, 0.02, 1e-7, 2.5e-6, 0.0)
STREAM = ("auto", "on", "off")
COPY_SECONDS = 1e-4  # for `copy_seconds`, on a generic machine
GROUP_SECONDS = 1e-3  # for `group_seconds`, on a generic machine


@dataclass(frozen=True)
class SchedulerConfig:
    batch_tokens_max: int = 512  # maximum tokens in an iteration
    turns_max: int = 256  # maximum number of running turns
    prompt_seconds_max: float = 0.0  # limit for prompts while other turns generate; 0: no limit
    tbt_seconds: float = 0.0  # objective for the time between two tokens of a reply; 0: none
    cost: IterationCost = SOME_COST  # predicts the time of iterations
    # After this many reply tokens, a waiting turn may preempt a running turn. 0: never.
    time_share: int = 0

    stream: str = "auto"  # one of STREAM: whether turns run with their KV on the host; streaming.py
    copy_seconds: float = COPY_SECONDS  # to copy a chunk from the host to the device
    group_seconds: float = GROUP_SECONDS  # added to an iteration by a group of streamed turns
    stages: int = 1  # pipeline stages, and iterations in flight (pipeline_stages.py)
    # Order of prompts of one share and level. True: by arrival. False: shortest first; see fair_queue.py.
    first_come: bool = False

    def __post_init__(self) -> None:
        if self.stream not in STREAM:
            raise ValueError(f"stream must be one of {', '.join(STREAM)}, not {self.stream!r}")
        if self.batch_tokens_max < 1 or self.turns_max < 1:
            raise ValueError("batch_tokens_max and turns_max must be at least 1")
        if self.stages < 1:
            raise ValueError("stages must be at least 1")
        if self.stages > 1 and self.stream == "on":
            raise ValueError("turns cannot be streamed with pipeline stages")
        for name in (
            *("prompt_seconds_max", "tbt_seconds", "time_share"),
            *("copy_seconds", "group_seconds"),
        ):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"{name} must be at least 0")
