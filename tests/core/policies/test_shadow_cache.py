"""Shadow caches: what another order of eviction would have lost, and when to follow that order."""

from __future__ import annotations

import itertools
import math

from pensieve.core.policies.protocol import EndedTurn
from pensieve.core.policies.shadow_cache import (
    BUCKET_STEP,
    SPREAD,
    ShadowCache,
    Trial,
    random_factor,
)


def likely(bucket: int, idle_seconds: float) -> float:
    return bucket - idle_seconds / 1000


def test_a_shadow_cache_evicts_leading_tokens_of_the_least_valuable_conversation() -> None:
    cache = ShadowCache(likely)
    cache.tokens_max = 100
    cache.put("a", 1, 60, 0.0)
    cache.put("b", 0, 30, 1.0)
    cache.put("c", 0, 30, 2.0)
    assert cache.num_tokens == 100
    assert cache.remove("b") == 20, "the older one of the lower bucket"
    assert cache.remove("c") == 0
    assert cache.remove("a") == 0
    assert cache.remove("a") is None
    assert cache.num_tokens == 0


def test_a_shadow_cache_forgets_fully_evicted_conversations() -> None:
    cache = ShadowCache(likely)
    cache.tokens_max = 50
    for number in range(100):
        cache.put(f"{number}", number % 3, 20, float(number))
        assert cache.num_tokens <= 50
    assert len(cache._bucket_of) == 3
    assert sum(map(len, cache._buckets.values())) == 3
    cache.put("large", 9, 80, 100.0)
    assert cache.num_tokens == 50
    assert cache.remove("large") == 30


def test_putting_a_conversation_again_replaces_its_entry() -> None:
    cache = ShadowCache(likely)
    cache.tokens_max = 100
    cache.put("a", 0, 40, 0.0)
    cache.put("a", 1, 50, 1.0)
    assert cache.num_tokens == 50


def play(trial: Trial, now: float, rounds: int, good: int, after: int) -> float:
    """Run conversations of 40 tokens in buckets 0 and 1, alternately. Only bucket `good` returns later."""
    for number in range(rounds):
        ratio = math.exp(BUCKET_STEP * (number % 2))
        trial.turn_ended(f"{now}", ratio, 1.0, EndedTurn(0, 0, 40), now)
        if number >= after and (number - after) % 2 == good:
            trial.turn_began(f"{now - after}", 40, now)
        now += 1.0
    return now


def test_learned_values_are_followed_only_when_they_pay() -> None:
    """There is room for four conversations.

    If bucket 1 returns after six turns, its conversations are kept only with the learned values. If
    bucket 0 returns after two turns, its conversations are kept only with lru.
    """
    trial = Trial(likely, float)
    trial.set_capacity(160)
    assert trial.followed.name == "LRU"
    now = play(trial, 0.0, 100, good=1, after=6)
    assert trial.followed.name == "LEARNED"
    now = play(trial, now, 400, good=0, after=2)
    assert trial.followed.name == "LRU"
    play(trial, now, 400, good=1, after=6)
    assert trial.followed.name == "LEARNED"


def test_lru_is_followed_if_nothing_is_evicted() -> None:
    trial = Trial(likely, float)
    trial.set_capacity(10_000)
    play(trial, 0.0, 100, good=1, after=6)
    assert trial.followed.name == "LRU"


def scan(trial: Trial, now: float, rounds: int) -> float:
    """Let eight conversations of 40 tokens return, one after the other."""
    for number in range(8 * rounds):
        name = f"scan {number % 8}"
        if number >= 8:
            trial.turn_began(name, 40, now)
        trial.turn_ended(name, 1.0, random_factor((number % 8, 0)), EndedTurn(0, 0, 40), now)
        now += 1.0
    return now


def test_the_trial_follows_random_factors_in_a_scan_and_lru_after_it() -> None:
    """There is room for four conversations."""
    trial = Trial(lambda bucket, idle: math.exp(BUCKET_STEP * bucket) * (idle < 20.0), float)
    trial.set_capacity(160)
    now = scan(trial, 0.0, 10)
    assert trial.followed.name == "RANDOM"
    now = play(trial, now, 400, good=0, after=2)
    assert trial.followed.name == "LRU"
    play(trial, now, 400, good=1, after=6)
    assert trial.followed.name == "LEARNED"


def test_random_factors_are_spread_evenly() -> None:
    logs = sorted(math.log(random_factor((serial, 0))) for serial in range(1000, 1020))
    assert -SPREAD <= logs[0] < 0.3 - SPREAD
    assert -0.3 < logs[-1] <= 0.0
    assert max(after - before for before, after in itertools.pairwise(logs)) < 0.1 * SPREAD


def test_the_random_factor_is_one_for_lru_and_lowest_for_batch_jobs() -> None:
    assert {random_factor((serial, 3)) for serial in range(100)} == {1.0}
    assert random_factor((1, 2)) < 1.0
    assert random_factor(None) == math.exp(-SPREAD)


def test_a_return_is_a_hit_if_lru_would_have_kept_the_whole_conversation() -> None:
    trial = Trial(likely, float)
    trial.set_capacity(100)
    for name in ("a", "b", "c"):
        trial.turn_ended(name, 1.0, 1.0, EndedTurn(0, 0, 40), 0.0)
    assert [trial.turn_began(name, 40, 1.0) for name in ("a", "b", "c", "d")] == [
        False,  # a part was evicted
        True,
        True,
        False,
    ]
