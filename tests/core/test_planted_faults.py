"""Would the tests notice?  Each fault is planted in the real code, and random traffic must find it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pensieve.core.cache import Admission, KVCache
from pensieve.core.chunk import Chunk
from pensieve.core.iteration import SwapIn, SwapOut
from pensieve.core.pages import PagePool
from pensieve.core.scheduler import Scheduler
from tests.core.world import Shape, run

Plant = Callable[[pytest.MonkeyPatch], None]
SHAPES = (
    Shape(),
    Shape(device_pages=8, host_pages=30, late=0.8),
    Shape(failing=0.05, conversations=8),
    Shape(device_pages=24, host_pages=6, conversations=12, late=0.9),
    Shape(overlap=True),
)
SEEDS = 200


def around(owner: type, name: str, change: Callable[..., Any]) -> Plant:
    """Replace a method by `change(original, self, *arguments)`."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, name)
        patch.setattr(owner, name, lambda self, *args: change(original, self, *args))

    return plant


def uncounted_copy(original: Any, cache: KVCache, chunk: Chunk) -> SwapOut:
    copy: SwapOut = original(cache, chunk)
    chunk.in_flight -= 1
    cache._requalify(chunk, 0.0)
    return copy


def filled_too_high(original: Any, cache: KVCache, source: Chunk, target: Chunk, n: int) -> SwapIn:
    copy: SwapIn = original(cache, source, target, n)
    target.filled = cache.config.chunk_tokens
    return copy


def swap_outs_at_any_time(original: Any, cache: KVCache, now: float, required: int) -> Any:
    swapping_in, cache._num_swapping_in = cache._num_swapping_in, 0
    try:
        return original(cache, now, required)
    finally:
        cache._num_swapping_in = swapping_in


def jump_over_holes(original: Any, scheduler: Scheduler, turn: Any, *rest: Any) -> Any:
    turn.frontier = max(turn.frontier, turn.history_tokens - 1)
    return original(scheduler, turn, *rest)


def ignore_before(original: Any, cache: KVCache, turn: Any, now: float, n: int, _: Any) -> Any:
    return original(cache, turn, now, n, {})


def leak_host_page(original: Any, cache: KVCache, chunk: Chunk) -> None:
    page, cache.host.give_back = cache.host.give_back, lambda page: None  # type: ignore[method-assign]
    try:
        original(cache, chunk)
    finally:
        cache.host.give_back = page  # type: ignore[method-assign]


def begin_with_anothers(original: Any, scheduler: Scheduler, turn: Any, now: float) -> None:
    original(scheduler, turn, now)
    name, cache = turn.conversation_id, scheduler.cache
    if name != "c1" and turn.history_tokens > 4 and "c1" in cache.conversations:
        cache.rewind(name, 0, now)
        cache.fork("c1", 4, name, now)


def append_twice(original: Any, scheduler: Scheduler, iteration: Any, *rest: Any) -> Any:
    progress = original(scheduler, iteration, *rest)
    for each in progress[:1]:
        if each.sample is not None and each.finish is None:
            each.turn.tokens.append(each.sample.token_id)
    return progress


def forget_suspended(original: Any, scheduler: Scheduler, turn: Any, now: float) -> None:
    original(scheduler, turn, now)
    if turn in scheduler.suspended:
        scheduler.suspended.remove(turn)


def release_at_once(original: Any, cache: KVCache, *rest: Any) -> Any:
    found = original(cache, *rest)
    if isinstance(found, Admission):
        for chunk in found.sources:
            chunk.in_flight -= 1
            if chunk.branch is None and not chunk.in_flight:
                cache._free_pages(chunk)
    return found


def keep_tokens(
    original: Any, cache: KVCache, conversation: Any, num_tokens: int, now: float
) -> None:
    before = conversation.num_tokens
    original(cache, conversation, num_tokens, now)
    conversation.num_tokens = max(before, num_tokens)


def reuse_latest(original: Any, pool: PagePool, page: int) -> None:
    original(pool, page)
    pool._empty.append(page)


FAULTS: dict[str, Plant] = {
    "a copy in flight is not counted": around(KVCache, "_start_swap_out", uncounted_copy),
    "a turn appends to a chunk of others": around(KVCache, "_sole", lambda f, *a: True),
    "pages of running turns are not pinned": around(KVCache, "_pin", lambda f, *a: None),
    "swap-outs start during swap-ins": around(KVCache, "plan_swap_outs", swap_outs_at_any_time),
    "holes are not recomputed": around(Scheduler, "_fill", jump_over_holes),
    "a failed turn's KV is kept": around(KVCache, "discard", lambda f, *a: []),
    "a swapped-in chunk counts as full": around(KVCache, "_start_swap_in", filled_too_high),
    "a dropped host page leaks": around(KVCache, "_free_host", leak_host_page),
    "a page is handed out twice": around(PagePool, "give_back", reuse_latest),
    "a sampled token is appended twice": around(Scheduler, "commit", append_twice),
    "a suspended turn is forgotten": around(Scheduler, "_release", forget_suspended),
    "a page copy's source is let go at once": around(KVCache, "begin", release_at_once),
    "a cut conversation keeps its length": around(KVCache, "_truncate", keep_tokens),
    "a conversation begins with another's KV": around(Scheduler, "submit", begin_with_anothers),
    "a released copy source never requalifies": around(KVCache, "_requalify", lambda f, *a: None),
}


def found_within(seeds: int) -> int | None:
    for seed in range(seeds):
        try:
            run(seed, SHAPES[seed % len(SHAPES)], actions=40)
        except Exception:
            return seed
    return None


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    assert found_within(SEEDS) is not None, f"{SEEDS} seeds did not notice that {fault}"


def test_without_a_fault_the_same_seeds_pass() -> None:
    assert found_within(SEEDS) is None
