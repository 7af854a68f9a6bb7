"""Choose the iterations that a profile measures.

    decodes      1, 2, 4, … generating turns, each with several lengths of context
    prompts      pieces of 2, 4, 8, … tokens, at the beginning and after contexts
    mixes        decodes and prompts in one iteration
    chunks       one chunk after contexts of 2^n tokens: the cost to recompute it (core/cost.py)
    held out     random decodes, prompts and mixes with a different context per turn; not used for the fit

All iterations fit into the engine's pages, context and token budget.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pensieve.core.cost import Work, work_of
from pensieve.sim.observed import Observation

CONTEXT_MIN = 64
MIX_PIECES = (16, 64, 256)  # tokens of the pieces in mixes
CONTEXT_MAX = 32_768  # costs of longer contexts are extrapolated
PIECES = (2, 4, 8, 16, 32, 64, 128, 256, 512)
DECODES = "decodes"
PROMPTS = "prompts"
MIXES = "decodes and prompts"
CHUNKS = "chunks"


@dataclass(frozen=True)
class ProfilePoint:
    kind: str
    spans: tuple[tuple[int, int], ...]  # [start, stop) of each slice; one position: a decode
    held_out: bool = False

    @property
    def work(self) -> Work:
        return work_of(self.spans)

    def observed(self, seconds: float) -> Observation:
        work = self.work
        return Observation(work.tokens, work.pairs, work.keys, 0, seconds, work.decodes)


@dataclass(frozen=True)
class IterationLimits:
    """The limits of an iteration of this engine."""

    turns: int
    tokens: int
    context: int
    pages: int  # pages of the device tier
    chunk_tokens: int

    def allows(self, point: ProfilePoint) -> bool:
        spans = point.spans
        return (
            bool(spans)
            and max(stop for _, stop in spans) <= self.context
            and point.work.tokens <= self.tokens
            and sum(stop - start == 1 for start, stop in spans) <= self.turns
            and self.pages_of(point) <= self.pages
        )

    def pages_of(self, point: ProfilePoint) -> int:
        return sum(-(-stop // self.chunk_tokens) for _, stop in point.spans)

    @property
    def context_max(self) -> int:
        return min(self.context, CONTEXT_MAX, self.pages * self.chunk_tokens)


def points_of(limits: IterationLimits, quick: bool, seed: int = 0) -> list[ProfilePoint]:
    """Return all points, each once."""
    num_held_out = 12 if quick else 36
    candidates = [*_designed_points(limits, quick), *_chunk_points(limits)]
    fitting = dict.fromkeys(point for point in candidates if limits.allows(point))
    return [*fitting, *held_out_points(limits, num_held_out, seed)]


def held_out_points(limits: IterationLimits, count: int, seed: int) -> list[ProfilePoint]:
    """Return random points, a third of each kind."""
    draw, found = random.Random(seed), list[ProfilePoint]()
    for index in range(count):
        kind = (DECODES, MIXES, PROMPTS)[index % 3]
        for _ in range(100):
            point = ProfilePoint(kind, tuple(_random_spans(limits, kind, draw)), held_out=True)
            if limits.allows(point):
                found.append(point)
                break
    return found


def _designed_points(limits: IterationLimits, quick: bool) -> Iterator[ProfilePoint]:
    contexts = _powers(CONTEXT_MIN, limits.context_max, 16 if quick else 4)
    batches = _powers(1, limits.turns, 4 if quick else 2)
    for context in contexts:
        for batch in batches:
            yield ProfilePoint(DECODES, _decodes(batch, context))
    pieces = [each for each in (*PIECES, limits.tokens) if each <= min(limits.tokens, 512)]
    starts = [0, *contexts[1:]]
    for start in starts:
        for piece in pieces[:: 2 if start else 1]:
            yield ProfilePoint(PROMPTS, ((start, start + piece),))
        yield ProfilePoint(PROMPTS, ((start, start + pieces[-1]),))
    for batch in batches[1::2]:
        for piece in MIX_PIECES:
            for context in contexts[:2]:
                yield ProfilePoint(MIXES, (*_decodes(batch, context), (0, piece)))
                yield ProfilePoint(
                    MIXES, (*_decodes(batch, CONTEXT_MIN), (context, context + piece))
                )


def _chunk_points(limits: IterationLimits) -> Iterator[ProfilePoint]:
    size = limits.chunk_tokens
    if size > 1:
        for context in _powers(32, limits.context_max - size, 2):
            yield ProfilePoint(CHUNKS, ((context, context + size),))


def _decodes(batch: int, context: int) -> tuple[tuple[int, int], ...]:
    return ((context - 1, context),) * batch


def _powers(first: int, most: int, factor: int) -> list[int]:
    powers = []
    while first <= most:
        powers.append(first)
        first *= factor
    return powers


def _random_spans(
    limits: IterationLimits, kind: str, draw: random.Random
) -> Iterator[tuple[int, int]]:
    def log_uniform(least: int, most: int) -> int:
        return max(least, min(most, round(least * math.pow(most / least, draw.random()))))

    most = limits.context_max
    if kind != PROMPTS:
        batch = log_uniform(1, limits.turns)
        share = max(min(most, limits.pages * limits.chunk_tokens // batch - limits.chunk_tokens), 2)
        for _ in range(batch):
            stop = log_uniform(min(16, share), share)
            yield stop - 1, stop
    if kind != DECODES:
        for _ in range(draw.choice((1, 1, 2))):
            piece = log_uniform(2, min(limits.tokens, 512))
            start = draw.choice((0, log_uniform(1, most)))
            yield start, start + piece


def longest(points: Sequence[ProfilePoint]) -> int:
    return max(stop for point in points for _, stop in point.spans)
