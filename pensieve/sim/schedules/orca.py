"""Orca's schedule: iterations, first come first served, KV reserved for the longest context.

An iteration is composed anew each time, of all who run: prompts and turns that generate in one batch
(selective batching).  A request is admitted when a contiguous piece of KV for its longest length is free, and
keeps it until it ends.  A request names no limit of its own here, so the longest length is the model's
context: all pieces are of one size, and there are `device tokens / context` of them.  Nobody overtakes and
nobody is preempted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from pensieve.sim.schedules.serving import Request


class OrcaSchedule:
    def __init__(self, device_tokens: int, context_max: int, requests_max: int) -> None:
        self.num_places = min(device_tokens // context_max, requests_max)
        assert self.num_places >= 1, "not one longest request fits"
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # in the order in which they came

    def arrive(self, request: Request) -> None:
        self._waiting.append(request)

    def plan(self, now: float) -> Sequence[Request]:
        while self._waiting and len(self._running) < self.num_places:
            self._running.append(self._waiting.popleft())
        return self._running

    def ran(self, requests: Sequence[Request], begun: float, ended: float) -> None:
        self._running = [each for each in self._running if not each.has_ended]

    def wakes_at(self) -> float:
        return math.inf

    def check(self) -> None:
        assert len(self._running) <= self.num_places
        numbers = [each.number for each in (*self._running, *self._waiting)]
        assert numbers == sorted(numbers), "first come, first served"
