"""Compare lru with learned values by two shadow caches, which hold only names and sizes.

One shadow cache keeps the conversations that were active last, as `lru` does. The other keeps the
conversations with the highest learned values. Both see every turn. When a conversation returns, each shadow
cache is charged the seconds that recomputing its missing tokens would take. Charges fade with time, so the
`Trial` tells which shadow cache was better recently:

    not trusted    the real cache follows lru, until the charge of the learned values is less than PROOF times
                   the charge of lru
    trusted        the real cache follows the learned values, until their charge exceeds the charge of lru

A shadow cache treats a conversation as one unit, evicts its leading tokens first, and ignores that chunks may
be shared. Both shadow caches have the same inaccuracy, so they can be compared. A turn costs O(buckets),
amortized.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

from pensieve.core.policies.protocol import EndedTurn

FADE_SECONDS = 300.0
PROOF = 0.98

BucketValue = Callable[[int, float], float]  # of a bucket and an idle time


class _Cached:
    __slots__ = ("length", "num_missing", "since")

    def __init__(self, length: int, since: float) -> None:
        self.length = length
        self.num_missing = 0  # leading tokens that were evicted
        self.since = since


class ShadowCache:
    """Conversations with at most `tokens_max` tokens in total, in buckets.

    Conversations of one bucket have the same value at the same idle time. The oldest conversations of all
    buckets are compared, and the least valuable of these is evicted first.
    """

    def __init__(self, value: BucketValue) -> None:
        self.tokens_max = 0
        self.num_tokens = 0
        self._value = value
        self._buckets: dict[int, OrderedDict[str, _Cached]] = {}
        self._bucket_of: dict[str, int] = {}

    def put(self, conversation_id: str, bucket: int, length: int, now: float) -> None:
        self.remove(conversation_id)
        self._buckets.setdefault(bucket, OrderedDict())[conversation_id] = _Cached(length, now)
        self._bucket_of[conversation_id] = bucket
        self.num_tokens += length
        while self.num_tokens > self.tokens_max:
            self._evict(now)

    def remove(self, conversation_id: str) -> int | None:
        """Remove a conversation; return how many of its tokens were missing; None: all of them."""
        bucket = self._bucket_of.pop(conversation_id, None)
        if bucket is None:
            return None
        cached = self._buckets[bucket].pop(conversation_id)
        if not self._buckets[bucket]:
            del self._buckets[bucket]
        self.num_tokens -= cached.length - cached.num_missing
        return cached.num_missing

    def _evict(self, now: float) -> None:
        """Evict tokens of the least valuable conversation: the excess, or all that it has."""
        least, victim_id, victim = math.inf, "", None
        for bucket, conversations in self._buckets.items():
            conversation_id, cached = next(iter(conversations.items()))
            value = self._value(bucket, now - cached.since)
            if victim is None or value < least:
                least, victim_id, victim = value, conversation_id, cached
        assert victim is not None, "tokens are counted that no conversation holds"
        num_evicted = min(self.num_tokens - self.tokens_max, victim.length - victim.num_missing)
        victim.num_missing += num_evicted
        self.num_tokens -= num_evicted
        if victim.num_missing == victim.length:
            self.remove(victim_id)


class Trial:
    """Compare lru and the learned values by the recent charges of their shadow caches."""

    def __init__(self, learned: BucketValue, seconds_of: Callable[[int], float]) -> None:
        self.trusted = False
        self._seconds_of = seconds_of  # to compute the first n tokens of a conversation
        self._shadow_caches = (ShadowCache(lambda _, idle: -idle), ShadowCache(learned))
        self._charges = [0.0, 0.0]
        self._charged_at = 0.0

    def set_capacity(self, num_tokens: int) -> None:
        for shadow_cache in self._shadow_caches:
            shadow_cache.tokens_max = num_tokens

    def turn_ended(self, conversation_id: str, bucket: int, ended: EndedTurn, now: float) -> None:
        """Put a conversation into both caches. For lru, an announced absence counts as idle time."""
        lru, learned = self._shadow_caches
        away_seconds = ended.away_seconds
        away_bucket = round(math.log1p(away_seconds))
        lru.put(conversation_id, away_bucket, ended.length, now - away_seconds)
        learned.put(conversation_id, bucket, ended.length, now)

    def turn_began(self, conversation_id: str, length: int, now: float) -> None:
        faded = math.exp(min(self._charged_at - now, 0.0) / FADE_SECONDS)
        self._charged_at = now
        for index, shadow_cache in enumerate(self._shadow_caches):
            num_missing = shadow_cache.remove(conversation_id)
            charge = self._seconds_of(length if num_missing is None else num_missing)
            self._charges[index] = self._charges[index] * faded + charge
        lru, learned = self._charges
        self.trusted = learned <= lru if self.trusted else learned < PROOF * lru
