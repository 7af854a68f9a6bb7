"""vLLM's schedule, of 2023: paged KV, first come first served, prompts first, the latest is preempted.

KV lies in blocks of 16 tokens, of which a request takes one when its last one is full.  An iteration is of
one kind:

    prompts    of those who wait, in their order, as long as blocks for them are free (and 1 % of all blocks
               beyond) and their tokens are at most `batch_tokens_max` together; whole ones
    decodes    of all who run, when no prompt can be admitted

When a decode needs a block and there is none, the latest of those who run is preempted: it gives up its KV,
waits in front of all, and computes its prompt and what it has written again (recomputation, vLLM's default
for requests with one reply; nothing goes to the host).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from pensieve.sim.schedules.serving import Request

BLOCK_TOKENS = 16
SPARE_SHARE = 0.01  # of the blocks, that a prompt leaves free


class VllmSchedule:
    def __init__(
        self, device_tokens: int, context_max: int, batch_tokens_max: int, requests_max: int
    ) -> None:
        self.num_blocks = device_tokens // BLOCK_TOKENS
        self._spare = int(SPARE_SHARE * self.num_blocks)
        assert self.num_blocks - self._spare >= _blocks(context_max), "not one longest request fits"
        self._batch_tokens_max = max(batch_tokens_max, context_max)
        self._requests_max = requests_max
        self._free = self.num_blocks
        self._blocks: dict[Request, int] = {}  # of those who run
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # in the order in which they came
        self.num_preemptions = 0

    def arrive(self, request: Request) -> None:
        self._waiting.append(request)

    def plan(self, now: float) -> Sequence[Request]:
        prompts = self._admitted()
        return prompts if prompts else self._decodes()

    def _admitted(self) -> list[Request]:
        admitted: list[Request] = []
        tokens = 0
        while self._waiting and len(self._running) < self._requests_max:
            request = self._waiting[0]
            tokens += request.length
            if self._free - _blocks(request.length) < self._spare:
                break
            if tokens > self._batch_tokens_max:
                break
            self._take(request)
            self._running.append(self._waiting.popleft())
            admitted.append(request)
        return admitted

    def _decodes(self) -> list[Request]:
        """All who run; the latest give up their blocks to earlier ones that lack one."""
        kept: list[Request] = []
        left = deque(self._running)
        while left:
            request = left.popleft()
            while self._lacking(request) > self._free:
                latest = left.pop() if left else request
                self._preempt(latest)
                if latest is request:
                    break
            else:
                self._take(request)
                kept.append(request)
        self._running = kept
        return kept

    def _lacking(self, request: Request) -> int:
        return _blocks(request.length) - self._blocks.get(request, 0)

    def _take(self, request: Request) -> None:
        self._free -= self._lacking(request)
        self._blocks[request] = _blocks(request.length)

    def _preempt(self, request: Request) -> None:
        self._free += self._blocks.pop(request)
        request.computed = 0
        self._waiting.appendleft(request)
        self.num_preemptions += 1

    def ran(self, requests: Sequence[Request], begun: float, ended: float) -> None:
        for request in requests:
            if request.has_ended:
                self._free += self._blocks.pop(request)
        self._running = [each for each in self._running if not each.has_ended]

    def wakes_at(self) -> float:
        return math.inf

    def check(self) -> None:
        assert set(self._blocks) == set(self._running)
        assert self._free == self.num_blocks - sum(self._blocks.values()) >= 0
        for request in self._running:
            assert request.computed <= self._blocks[request] * BLOCK_TOKENS
        numbers = [each.number for each in (*self._running, *self._waiting)]
        assert numbers == sorted(numbers), "first come, first served"


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
