"""Simulate a batch of requests through the daemon's own engine, with and without shared prefixes.

The simulation compares the ways to share (engine/batch_run.py): `groups`, like a job of the daemon; `lru`, in
the order of the file with an LRU cache; `off`, each request by itself. The engine, its cache and the limits
on concurrent turns are the same.

The shapes come from BatchLLM's evaluation (section 6), as far as the paper describes them:

    snippets     3,000 requests; 1,100 tokens of prefix and 400 of their own; share degree 7
    ranking      1,000 requests; 770 tokens of prefix and 978 of their own; share degree 11.36
    2000/200x16  prefix, own tokens and share degree of one of the microbenchmarks

The share degree is the number of requests with the same prefix (a group). The rest is assumed:

* A share degree is a mean over requests. Group sizes are geometric, so a mean of 7 over requests is a mean of
  4 over groups. Then 55 % of the tokens of `snippets` need not be computed, as reported. With groups of
  exactly 7, it would be 63 %. The groups of the microbenchmarks have one size.
* All requests of `snippets` begin with the same 60 tokens of instructions. These tokens, one per cent, are
  not saved if each request shares only one prefix.
* Lengths are uniform between 0.5 and 1.5 times their mean. Replies have 100 tokens, which reproduces the
  reported rate of `snippets` without sharing. The limit of a request is 256 tokens.
* The file has no order, but requests with the same prefix are near each other: their distances from the
  group's centre are normally distributed, with a deviation of `apart` requests. `APART` is chosen so that an
  LRU cache of the reported machine's size saves 44 % of `snippets`, as reported.

With `reads_once`, a shared page is charged once per iteration, as with a kernel that reads the page once for
a group. Otherwise the page is charged to each request that reads it.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from pensieve.core.cache import CacheConfig
from pensieve.core.cost import CostProfile, work_of
from pensieve.core.group_feed import FeedConfig
from pensieve.core.iteration import Iteration, Outcome, Slice
from pensieve.core.policies.registry import policy_named
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.core.turn import TurnOptions
from pensieve.engine.batch_run import BatchRequest, BatchRun, PrefixSharing
from pensieve.engine.engine import Engine, EngineConfigs
from pensieve.engine.mailbox import Mailbox
from pensieve.engine.messages import EngineEvent, SubmitTurn
from pensieve.engine.ports import Ports
from pensieve.sampling import Sampling
from pensieve.sim.cost import CostModel
from pensieve.sim.executor import ModelledExecutor, VirtualClock

VOCABULARY = 32_000
APART = 575.0  # requests
TOKEN_BUDGET = 2048
TURNS_MAX = 256  # vLLM's default
TURNS_BY_MEMORY = 1536  # the daemon's maximum for this token budget; memory is the limit
SHARINGS: tuple[PrefixSharing, ...] = ("groups", "lru", "off")


@dataclass(frozen=True)
class BatchShape:
    """The requests of a batch; lengths and the share degree are means."""

    requests: int
    prefix_tokens: int
    own_tokens: int
    share_degree: float  # mean over requests
    instructions_tokens: int = 0  # first part of the prefix, common to all requests
    output_tokens: int = 100
    output_tokens_max: int = 256  # limit of a request
    varies: bool = True  # False: all groups and lengths are equal
    apart: float = math.inf  # distance in the file between requests of one prefix


SHAPES = {
    "snippets": BatchShape(3000, 1100, 400, 7.0, instructions_tokens=60, apart=APART),
    "ranking": BatchShape(1000, 770, 978, 11.36, apart=APART),
}


def shape_named(name: str) -> BatchShape:
    """Return one of `SHAPES`, or the shape PREFIX/OWNxDEGREE. Raises ValueError for other names."""
    if name in SHAPES:
        return SHAPES[name]
    lengths, _, degree = name.partition("x")
    prefix, _, own = lengths.partition("/")
    shape = BatchShape(1000, int(prefix), int(own), int(degree), varies=False)
    if min(shape.own_tokens, shape.prefix_tokens, shape.share_degree) < 1:
        raise ValueError(f"{name!r}: lengths and the share degree must be at least 1")
    return shape


@dataclass(frozen=True)
class DrawnRequest:
    prompt: array[int]  # 'I'
    output_tokens: int


def drawn_batch(shape: BatchShape, seed: int) -> list[DrawnRequest]:
    """Draw the requests in the order of the file."""
    choose = random.Random(seed)

    def length(mean: int) -> int:
        return choose.randint(max(mean // 2, 1), mean + mean // 2) if shape.varies else mean

    def words(num_tokens: int) -> array[int]:
        return array("I", choose.choices(range(VOCABULARY), k=num_tokens))

    instructions = words(shape.instructions_tokens)
    found: list[tuple[float, DrawnRequest]] = []
    while len(found) < shape.requests:
        prefix = instructions + words(length(shape.prefix_tokens - shape.instructions_tokens))
        middle = choose.uniform(0, shape.requests)
        for _ in range(min(_group_size(shape, choose), shape.requests - len(found))):
            place = choose.gauss(middle, shape.apart) if shape.apart < math.inf else choose.random()
            prompt = prefix + words(length(shape.own_tokens))
            found.append((place, DrawnRequest(prompt, length(shape.output_tokens))))
    return [request for _, request in sorted(found, key=lambda each: each[0])]


def _group_size(shape: BatchShape, choose: random.Random) -> int:
    """Draw a group size. Geometric sizes with mean m have a mean of 2 m - 1 over their members."""
    if not shape.varies:
        return int(shape.share_degree)
    mean = (shape.share_degree + 1) / 2
    if mean <= 1:
        return 1
    return 1 + int(math.log(1 - choose.random()) / math.log(1 - 1 / mean))


class _Executor(ModelledExecutor):
    """An executor whose replies end before the limit of their requests.

    With `reads_once`, slices that share a page read the page together, as some attention kernels do.
    """

    def __init__(
        self, cost: CostModel, clock: VirtualClock, watch: Any, chunk_tokens: int, reads_once: bool
    ) -> None:
        super().__init__(cost, clock, watch)
        self._chunk_tokens, self._reads_once = chunk_tokens, reads_once
        self.output_tokens: dict[int, int] = {}  # attempt_id -> tokens that are left

    def _compute_seconds(self, slices: Sequence[Slice]) -> float:
        if not self._reads_once:
            return super()._compute_seconds(slices)
        work = work_of((piece.start, piece.stop) for piece in slices)
        pages = {page for piece in slices for page in piece.page_table}
        keys = min(work.keys, len(pages) * self._chunk_tokens)
        return self._cost.pass_seconds(work.tokens, work.pairs, keys, work.decodes)

    def collect(self) -> Outcome:
        outcome = super().collect()
        samples = []
        for sample in outcome.samples:
            left = self.output_tokens[sample.attempt_id] = self.output_tokens[sample.attempt_id] - 1
            samples.append(sample if left else replace(sample, stopped=True))
        return replace(outcome, samples=tuple(samples))


@dataclass
class BatchFigures:
    requests: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0  # computed tokens of prompts
    output_tokens: int = 0
    seconds: float = 0.0
    suspensions: int = 0
    tokens_by_iteration: list[int] = field(default_factory=list)
    busy_iterations: int = 0  # until the last prompt token: without the cool-down
    busy_seconds: float = 0.0

    @property
    def iterations(self) -> int:
        return len(self.tokens_by_iteration)

    @property
    def iteration_tokens(self) -> int:
        return sum(self.tokens_by_iteration)

    @property
    def valleys(self) -> float:
        """The fraction of iterations before the cool-down with less than half of the token budget."""
        busy = self.tokens_by_iteration[: self.busy_iterations]
        return sum(each < TOKEN_BUDGET / 2 for each in busy) / len(busy)

    @property
    def saving(self) -> float:
        return 1 - self.computed_tokens / self.prompt_tokens


@dataclass(frozen=True)
class BatchSetting:
    cost: CostModel
    recompute: CostProfile
    cache: CacheConfig
    scheduler: SchedulerConfig
    reorders: bool = True  # groups with the fewest tokens to compute come first
    reads_once: bool = False  # KV that slices share is read once per iteration


class BatchSimulator:
    """The simulation of one batch, from its first message to its last event."""

    def __init__(
        self,
        setting: BatchSetting,
        batch: Sequence[DrawnRequest],
        output_max: int,
        sharing: PrefixSharing,
    ) -> None:
        cache = setting.cache
        self.clock, self.mailbox = VirtualClock(), Mailbox(1 << 20)
        self.executor = _Executor(
            setting.cost, self.clock, self._watch, cache.chunk_tokens, setting.reads_once
        )
        configs = EngineConfigs.fitted(cache, setting.scheduler, None, 1 << 20)
        policy = policy_named("lru", setting.recompute, cache.chunk_tokens)
        ports = Ports(self.clock, self.mailbox, self)
        self.engine = Engine(configs, policy, self.executor, ports)
        options = TurnOptions(Sampling(max_tokens=output_max))
        numbers = count(1)
        self._batch = batch
        self.run = BatchRun(
            "simulated",
            [BatchRequest(each.prompt, options) for each in batch],
            FeedConfig(cache.device_pages, cache.chunk_tokens),
            lambda: next(numbers),
            root="r",
            sharing=sharing,
            reorders=setting.reorders,
        )
        self.figures = BatchFigures()

    def finish(self) -> BatchFigures:
        figures = self.figures
        while not self.run.is_done:
            num_put = self._put()
            busy = self.engine.step()
            assert busy or num_put, f"{self.run.num_left} requests wait for nothing"
        figures.suspensions = self.engine.scheduler.counters.suspensions
        figures.output_tokens = self.run.output_tokens
        figures.prompt_tokens = self.run.prompt_tokens
        return figures

    def _put(self) -> int:
        messages = self.run.go()
        for message in messages:
            if isinstance(message, SubmitTurn):
                request = self.run.request_of(message.attempt_id)
                assert request is not None
                outputs = self._batch[request].output_tokens
                self.executor.output_tokens[message.attempt_id] = outputs
            self.mailbox.put(message)
        return len(messages)

    def publish(self, events: Sequence[EngineEvent]) -> None:
        for event in events:
            finished = self.run.take(event)
            if finished is not None:
                assert finished.failure is None, finished.failure
                self.figures.requests += 1
                self.figures.seconds = self.clock.now()

    def _watch(self, iteration: Iteration, begun: float, ended: float) -> None:
        figures = self.figures
        figures.tokens_by_iteration.append(iteration.num_tokens)
        if any(piece.stop - piece.start > 1 for piece in iteration.slices):
            figures.busy_iterations, figures.busy_seconds = figures.iterations, ended
        for piece in iteration.slices:
            request = self.run.request_of(piece.attempt_id)
            if request is not None:
                prompt_end = len(self._batch[request].prompt)
                figures.computed_tokens += max(min(piece.stop, prompt_end) - piece.start, 0)
