"""vLLM's schedule for batches: known iterations, blocks that are found, evicted and given up."""

from __future__ import annotations

from array import array

import pytest

from pensieve.core.cost import IterationCost
from scripts.measurements.batch_simulation import (
    BatchFigures,
    BatchShape,
    DrawnRequest,
    drawn_batch,
)
from scripts.measurements.schedules import BLOCK_TOKENS
from scripts.measurements.vllm_batch import BlockCache, VllmBatch

BY_ITERATION = IterationCost(0.0, 1.0, 0.0, 0.0, 0.0)  # a second for each iteration
SHARED = array("I", range(64))


def prompt(first: int, num_own: int = 32, shared: array[int] = SHARED) -> array[int]:
    return shared + array("I", range(first, first + num_own))


def run(
    batch: list[DrawnRequest],
    chunked: bool,
    caches: bool = False,
    budget: int = 64,
    tokens: int = 100_000,
) -> BatchFigures:
    found = VllmBatch(BY_ITERATION, tokens, batch, chunked=chunked, caches=caches, budget=budget)
    return found.finish()


def test_chunked_prefills_join_the_generating_requests() -> None:
    """Pieces of 64 and 32 tokens; the second prompt begins in the rest of the second iteration."""
    batch = [DrawnRequest(prompt(1000 * index), 3) for index in range(2)]
    found = run(batch, chunked=True)
    assert found.tokens_by_iteration == [64, 64, 64, 2, 1, 1]
    assert (found.requests, found.output_tokens, found.seconds) == (2, 6, 6.0)
    assert found.computed_tokens == found.prompt_tokens == 2 * 96


def test_without_chunks_whole_prompts_go_before_decodes() -> None:
    batch = [DrawnRequest(prompt(1000 * index), 3) for index in range(3)]
    assert run(batch, chunked=False, budget=200).tokens_by_iteration == [192, 96, 3, 3]
    assert run(batch, chunked=False, budget=10).tokens_by_iteration == [96, 96, 96, 3, 3]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_prefix_is_a_cache_hit_once_it_is_computed(chunked: bool) -> None:
    batch = [DrawnRequest(prompt(1000 * index), 2) for index in range(3)]
    assert run(batch, chunked, caches=True, budget=96).computed_tokens == 96 + 2 * 32
    assert run(batch, chunked, caches=False, budget=96).computed_tokens == 3 * 96
    again = [DrawnRequest(SHARED, 1)] * 2
    assert run(again, chunked, caches=True).computed_tokens == 64 + 1, "the last token is computed"


def test_the_least_recently_used_block_is_evicted_and_a_requests_last_block_first() -> None:
    cache = BlockCache(4, keeps=True)
    for keys in ([1, 2], [3, 4]):
        for key in keys:
            cache.take(key)
        cache.ready.update(keys)
        cache.release(keys)
    assert cache.num_available == 4
    cache.take(1)  # used again
    cache.take(9)
    assert cache.ready == {1, 3, 4}
    cache.release([1])
    cache.take(10)
    assert cache.ready == {1, 3}
    assert cache.lacking([1, 9, 10]) == 1


def test_the_latest_request_gives_up_its_blocks() -> None:
    batch = [DrawnRequest(prompt(1000 * index, 0), 40) for index in range(2)]
    found = run(batch, chunked=True, budget=512, tokens=10 * BLOCK_TOKENS)
    assert found.suspensions >= 1
    assert found.requests == 2
    assert found.output_tokens == 80
    assert found.computed_tokens > found.prompt_tokens


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("caches", [False, True])
def test_every_request_gets_its_reply(chunked: bool, caches: bool) -> None:
    shape = BatchShape(60, 96, 32, 4, output_tokens=30, output_tokens_max=60, apart=3.0)
    batch = drawn_batch(shape, 1)
    found = run(batch, chunked, caches, budget=128, tokens=1000)
    assert found.requests == 60
    assert found.output_tokens == sum(each.output_tokens for each in batch)
