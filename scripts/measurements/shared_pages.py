"""Measure attention over pages that slices share.

Each row of the table is one shape: slices of one query each, whose contexts begin with the same pages and
continue with different pages. The attention is computed twice: with the shared pages read once for many
slices, and with all pages read by each slice. Before anything is timed, both results must be equal to the
last bit. The two computations alternate, on several copies of the inputs, and the ratio is the median of the
pairs' ratios. A second measurement has no shared pages. It times LAYERS attentions with and without a search
for shared pages before them, as in an iteration.
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

import torch

from pensieve.bench.attention import COPIES_BYTES, SLOTS
from pensieve.bench.report import machine
from pensieve.core.iteration import Slice
from pensieve.errors import PensieveError
from pensieve.kernels import multi_token_attention
from pensieve.kernels.attention.input import (
    AttentionInput,
    AttentionKind,
    PageIndex,
    SharedPages,
)
from pensieve.model.shared_pages import SHARED_MIN, shared_pages

LAYERS = 16
HEADS = ((16, 16), (16, 4))
OWN = 128  # tokens


class Shape(NamedTuple):
    batch: int
    shared: int  # tokens
    own: int
    heads: int
    kv_heads: int
    head_size: int
    dtype: str


class Times(NamedTuple):
    seconds: float
    alone_seconds: float
    ratio: float
    unshared_ratio: float  # without shared pages: time with the search, over time without it
    search_seconds: float  # once for all layers of an iteration


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="scripts/measure shared_pages", description=__doc__)
    parser.add_argument("--shared", type=int, default=2048, help="tokens (default: 2048)")
    parser.add_argument("--batch", type=int, default=32, help="slices (default: 32)")
    parser.add_argument("--repeats", type=int, default=9, help="for each median (default: 9)")
    arguments = parser.parse_args(given)
    if arguments.shared < SHARED_MIN * SLOTS:
        parser.error(
            f"--shared must be at least {SHARED_MIN * SLOTS}: fewer tokens are never shared"
        )
    print(machine())
    for dtype, (heads, kv_heads), size in product(("bfloat16", "float32"), HEADS, (64, 128)):
        shape = Shape(arguments.batch, arguments.shared, OWN, heads, kv_heads, size, dtype)
        found = measure(shape, arguments.repeats)
        print(
            f"{dtype:8} {heads}/{kv_heads:<2} of {size:3}: shared {found.seconds * 1e3:6.2f} ms, "
            f"separate {found.alone_seconds * 1e3:6.2f} ms, ratio {found.ratio:.2f}; without shared pages, "
            f"with the search {found.unshared_ratio:.3f} x; one search {found.search_seconds * 1e3:.2f} ms"
        )


class Inputs:
    def __init__(self, shape: Shape, seed: int, *, share: bool) -> None:
        draw = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, shape.dtype)
        front, own = shape.shared // SLOTS, -(-shape.own // SLOTS)
        num_fronts = 1 if share else shape.batch
        order = torch.randperm(front * num_fronts + own * shape.batch, generator=draw).int()
        fronts = order[: front * num_fronts].view(num_fronts, front)
        tails = order[front * num_fronts :].view(shape.batch, own)
        self.page_table = torch.cat([fronts.expand(shape.batch, front), tails], dim=1).contiguous()
        arena = torch.randn(
            (len(order), 2, shape.kv_heads, SLOTS, shape.head_size), generator=draw
        ).to(dtype)
        self.key_pages, self.value_pages = arena[:, 0], arena[:, 1]
        start = front * SLOTS + shape.own - 1
        self.slices = [
            Slice(index, start, start + 1, array("I", [0]), array("i", pages), True, False)
            for index, pages in enumerate(self.page_table.tolist())
        ]
        self.slices_index = (
            torch.arange(shape.batch + 1, dtype=torch.int32),
            torch.arange(shape.batch, dtype=torch.int32),
            torch.full((shape.batch,), start, dtype=torch.int32),
        )
        rows = (shape.batch, shape.heads, shape.head_size)
        self.query = torch.randn(rows, generator=draw).to(dtype)
        self.out = torch.empty_like(self.query)
        self.kind = AttentionKind.plain(shape.head_size)
        self.shared = shared_pages(self.slices, SLOTS)

    def run(self, shared: SharedPages | None) -> torch.Tensor:
        page_index = PageIndex(self.page_table, *self.slices_index, shared=shared)
        pages = (self.key_pages, self.value_pages)
        inputs = AttentionInput(self.query, *pages, page_index, self.kind)
        multi_token_attention(inputs, self.out)
        return self.out


@torch.inference_mode()
def measure(shape: Shape, repeats: int) -> Times:
    size = getattr(torch, shape.dtype).itemsize
    per_token = 2 * shape.kv_heads * shape.head_size * int(size)
    kv_bytes = (shape.shared + shape.own * shape.batch) * per_token
    alone_bytes = (shape.shared + shape.own) * shape.batch * per_token
    inputs = _copies(shape, kv_bytes, share=True)
    for one in inputs:
        if one.shared is None:
            raise PensieveError(f"no shared pages were found at {shape}")
        if not torch.equal(one.run(None).clone(), one.run(one.shared)):
            raise PensieveError(f"sharing changes a result at {shape}")
    alone, shared = _alternating(inputs, repeats, lambda one: None, lambda one: one.shared)
    unshared = _copies(shape, alone_bytes, share=False)
    without, searched = _alternating(unshared, repeats, lambda one: None, _search, layers=LAYERS)
    began = time.perf_counter()
    shared_pages(inputs[0].slices, SLOTS)
    return Times(
        seconds=statistics.median(shared),
        alone_seconds=statistics.median(alone),
        ratio=_ratio(shared, alone),
        unshared_ratio=_ratio(searched, without),
        search_seconds=time.perf_counter() - began,
    )


def _copies(shape: Shape, num_bytes: int, *, share: bool) -> list[Inputs]:
    return [
        Inputs(shape, seed, share=share)
        for seed in range(max(2, min(16, COPIES_BYTES // num_bytes)))
    ]


def _alternating(
    inputs: list[Inputs],
    repeats: int,
    *ways: Callable[[Inputs], SharedPages | None],
    layers: int = 1,
) -> list[list[float]]:
    seconds: list[list[float]] = [[] for _ in ways]
    turn = 0
    for _ in range(repeats):
        for way, times in zip(ways, seconds, strict=True):
            turn += 1
            one = inputs[turn // len(ways) % len(inputs)]
            began = time.perf_counter()
            shared = way(one)
            for _ in range(layers):
                one.run(shared)
            times.append(time.perf_counter() - began)
    return seconds


def _search(one: Inputs) -> SharedPages | None:
    return shared_pages(one.slices, SLOTS)


def _ratio(times: list[float], others: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(times, others, strict=True))


if __name__ == "__main__":
    main()
