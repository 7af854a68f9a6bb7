"""Simulate a batch with the schedule of vLLM 0.5.4, on the simulator's costs.

KV lies in blocks of 16 tokens. At most 256 requests run at once, in the order of the file. An iteration has

    with chunked prefills    a token of each generating request, then pieces of prompts, up to the budget
    without                  whole prompts up to the token budget, or else a token of each running request

With prefix caching, a full block of a prompt is found by its tokens and all tokens before it. Blocks that no
request uses stay in the cache. The least recently used block is evicted first. Among the blocks of one
request, the last block is evicted first. Tokens that are found in the cache do not count in the budget. If no
block is free, the latest running request gives up its blocks and begins again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from pensieve.core.cost import IterationCost
from scripts.measurements.batch_simulation import BatchFigures, DrawnRequest
from scripts.measurements.schedules import BLOCK_TOKENS, SPARE_BLOCKS_SHARE

REQUESTS_MAX = 256
DEFAULT_BUDGET = 512  # tokens per iteration with chunked prefills, if nothing is configured


@dataclass(eq=False, slots=True)
class _Request:
    prompt_tokens: int
    output_tokens: int
    keys: list[int]  # of the full blocks of its prompt
    num_outputs: int = 0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Return the number of positions with KV when it has its next token."""
        return self.prompt_tokens + self.num_outputs


class BlockCache:
    """Blocks and their numbers of users. With `keeps`, unused blocks can be found until they are evicted."""

    def __init__(self, num_blocks: int, keeps: bool) -> None:
        self._num_empty, self._keeps = num_blocks, keeps
        self._users: dict[int, int] = {}
        self._unused: dict[int, None] = {}  # least recently used first
        self.ready: set[int] = set()  # blocks whose KV is computed

    @property
    def num_available(self) -> int:
        return self._num_empty + len(self._unused)

    def lacking(self, keys: Sequence[int]) -> int:
        """Return how many of these blocks no request uses now."""
        return sum(key not in self._users for key in keys)

    def take(self, key: int) -> None:
        if key in self._users:
            self._users[key] += 1
            return
        self._users[key] = 1
        if key in self._unused:
            del self._unused[key]
        elif self._num_empty:
            self._num_empty -= 1
        else:
            evicted = next(iter(self._unused))
            del self._unused[evicted]
            self.ready.discard(evicted)

    def release(self, keys: Sequence[int]) -> None:
        for key in reversed(keys):
            self._users[key] -= 1
            if self._users[key]:
                continue
            del self._users[key]
            if self._keeps:
                self._unused[key] = None
            else:
                self._num_empty += 1


class VllmBatch:
    def __init__(
        self,
        cost: IterationCost,
        device_tokens: int,
        batch: Sequence[DrawnRequest],
        *,
        chunked: bool,
        caches: bool,
        budget: int,
    ) -> None:
        self._cost, self._chunked, self._caches, self._budget = cost, chunked, caches, budget
        num_blocks = device_tokens // BLOCK_TOKENS
        self._spare = int(SPARE_BLOCKS_SHARE * num_blocks)
        self._cache = BlockCache(num_blocks, caches)
        self._new_keys = count()
        known: dict[tuple[int, bytes], int] = {}
        self._waiting = deque(self._request(each, known) for each in batch)
        self._running: list[_Request] = []
        self.figures = BatchFigures(prompt_tokens=sum(len(each.prompt) for each in batch))

    def _request(self, drawn: DrawnRequest, known: dict[tuple[int, bytes], int]) -> _Request:
        keys: list[int] = []
        for start in range(0, len(drawn.prompt) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            if not self._caches:
                keys.append(next(self._new_keys))
                continue
            tokens = drawn.prompt[start : start + BLOCK_TOKENS].tobytes()
            parent = keys[-1] if keys else -1
            if (parent, tokens) not in known:
                known[parent, tokens] = next(self._new_keys)
            keys.append(known[parent, tokens])
        return _Request(len(drawn.prompt), drawn.output_tokens, keys)

    def finish(self) -> BatchFigures:
        while self._waiting or self._running:
            plan = (
                self._plan_mixed()
                if self._chunked
                else self._plan_prompts() or self._plan_pieces(1 << 30)
            )
            assert plan, "all requests wait for blocks"
            self._run(plan)
        return self.figures

    # -- the plan: requests, each with the end of its piece --

    def _plan_mixed(self) -> list[tuple[_Request, int]]:
        plan = self._plan_pieces(self._budget)
        left = self._budget - sum(stop - request.computed for request, stop in plan)
        while left > 0 and (request := self._admit_next()) is not None:
            stop = min(request.computed + left, request.length)
            left -= stop - request.computed
            plan.append((request, stop))
        return plan

    def _plan_prompts(self) -> list[tuple[_Request, int]]:
        plan: list[tuple[_Request, int]] = []
        left = self._budget
        while self._waiting and self._waiting[0].length <= (left if plan else 1 << 30):
            request = self._admit_next()
            if request is None:
                break
            left -= request.length - request.computed
            plan.append((request, request.length))
        return plan

    def _plan_pieces(self, left: int) -> list[tuple[_Request, int]]:
        """Return a piece of each running request; the latest give up their blocks if blocks are lacking."""
        plan = []
        queue, kept = deque(self._running), []
        while queue:
            request = queue.popleft()
            while (num_new := self._num_new(request)) > self._cache.num_available:
                latest = queue.pop() if queue else request
                self._preempt(latest)
                if latest is request:
                    break
            else:
                kept.append(request)
                self._grow(request, num_new)
                stop = min(request.computed + left, request.length)
                if stop > request.computed:
                    plan.append((request, stop))
                    left -= stop - request.computed
        self._running = kept
        return plan

    def _num_new(self, request: _Request) -> int:
        return max(-(-request.length // BLOCK_TOKENS) - len(request.blocks), 0)

    def _grow(self, request: _Request, num_new: int) -> None:
        for _ in range(num_new):
            request.blocks.append(next(self._new_keys))
            self._cache.take(request.blocks[-1])

    def _admit_next(self) -> _Request | None:
        """Give the next waiting request its blocks, or return None."""
        if not self._waiting or len(self._running) >= REQUESTS_MAX:
            return None
        request, cache = self._waiting[0], self._cache
        num_own = -(-request.length // BLOCK_TOKENS) - len(request.keys)
        spare = self._spare if self._running else 0
        if cache.lacking(request.keys) + num_own > cache.num_available - spare:
            return None
        found = next(
            (index for index, key in enumerate(request.keys) if key not in cache.ready),
            len(request.keys),
        )
        for key in request.keys:
            cache.take(key)
        request.blocks = list(request.keys)
        self._grow(request, num_own)
        request.computed = min(found * BLOCK_TOKENS, request.length - 1)
        self._running.append(self._waiting.popleft())
        return request

    def _preempt(self, request: _Request) -> None:
        self._cache.release(request.blocks)
        request.blocks, request.computed = [], 0
        self._waiting.appendleft(request)
        self.figures.suspensions += 1

    # -- an iteration --

    def _run(self, plan: Sequence[tuple[_Request, int]]) -> None:
        figures = self.figures
        spans = [(request.computed, stop) for request, stop in plan]
        figures.seconds += self._cost.iteration_seconds(spans)
        figures.tokens_by_iteration.append(sum(stop - start for start, stop in spans))
        for request, stop in plan:
            figures.computed_tokens += max(min(stop, request.prompt_tokens) - request.computed, 0)
            if self._caches and request.computed < request.prompt_tokens:
                self._cache.ready.update(request.keys[: stop // BLOCK_TOKENS])
            is_whole, request.computed = stop == request.length, stop
            if is_whole:
                request.num_outputs += 1
                figures.output_tokens += 1
            if request.num_outputs == request.output_tokens:
                self._cache.release(request.blocks)
                figures.requests += 1
        if any(stop - start > 1 for start, stop in spans):
            figures.busy_iterations, figures.busy_seconds = figures.iterations, figures.seconds
        self._running = [each for each in self._running if each.num_outputs < each.output_tokens]
