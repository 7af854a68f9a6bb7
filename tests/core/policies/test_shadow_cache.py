"""Shadow caches: what another order of eviction would have lost, and when to follow that order."""

from __future__ import annotations

from pensieve.core.policies.protocol import EndedTurn
from pensieve.core.policies.shadow_cache import ShadowCache, Trial


def likely(bucket: int, idle_seconds: float) -> float:
    return bucket - idle_seconds / 1000


def test_a_shadow_cache_evicts_the_leading_tokens_of_the_least_valuable() -> None:
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


def test_a_shadow_cache_forgets_what_it_evicted_whole() -> None:
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


def test_a_conversation_that_is_put_again_is_held_once() -> None:
    cache = ShadowCache(likely)
    cache.tokens_max = 100
    cache.put("a", 0, 40, 0.0)
    cache.put("a", 1, 50, 1.0)
    assert cache.num_tokens == 50


def play(trial: Trial, now: float, rounds: int, good: int, after: int) -> float:
    """Run conversations of 40 tokens in buckets 0 and 1, alternately. Only bucket `good` returns later."""
    for number in range(rounds):
        trial.turn_ended(f"{now}", number % 2, EndedTurn(0, 0, 40), now)
        if number >= after and (number - after) % 2 == good:
            trial.turn_began(f"{now - after}", 40, now)
        now += 1.0
    return now


def test_what_was_learned_is_trusted_when_it_pays_and_only_then() -> None:
    """There is room for four conversations.

    If bucket 1 returns after six turns, its conversations are kept only if the learned order is trusted. If
    bucket 0 returns after two turns, its conversations are kept only if that order is not trusted.
    """
    trial = Trial(likely, float)
    trial.set_capacity(160)
    assert not trial.trusted
    now = play(trial, 0.0, 100, good=1, after=6)
    assert trial.trusted
    now = play(trial, now, 400, good=0, after=2)
    assert not trial.trusted
    play(trial, now, 400, good=1, after=6)
    assert trial.trusted


def test_nothing_is_trusted_where_nothing_is_lost() -> None:
    trial = Trial(likely, float)
    trial.set_capacity(10_000)
    play(trial, 0.0, 100, good=1, after=6)
    assert not trial.trusted
