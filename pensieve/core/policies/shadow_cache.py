"""For the policy `return`: compare three orders of eviction by shadow caches (only names and sizes).

    Order.LRU      the conversation that was active longest ago is evicted first, as by the policy `lru`
    Order.LEARNED  the conversation with the lowest learned value is evicted first
    Order.RANDOM   likewise, but the learned value is multiplied by a random factor

Order.RANDOM is for scans: conversations return one after the other, and the cache cannot hold all of them.
The learned values are equal then, and each conversation is evicted before it returns, as with lru. With
random factors, some conversations keep all of their KV, and the others give theirs up. The factor of a
conversation depends on its serial number, so the same conversations keep their KV in each round of a scan. A
conversation that lru would have served from the cache at its last HITS_MIN returns has the factor 1, so a
scan does not take memory from active conversations.

There is one shadow cache for each order. All see every turn. When a conversation returns, each shadow cache
is charged the seconds that recomputing its missing tokens would take. Charges fade with time, so the `Trial`
tells which order was better recently:

    Order.RANDOM   is followed when its charge is less than RANDOM_MARGIN times each of the other charges, and
                   as long as its charge stays the smallest
    Order.LEARNED  otherwise, when its charge is less than LEARNED_MARGIN times the charge of lru, until it
                   exceeds the charge of lru
    Order.LRU      otherwise

A random factor is at most 1, so it lowers the value of a conversation. If it raised values, old conversations
with large factors would stay in the cache when the learned values are followed again. The factors apply to
turns that end while Order.RANDOM is followed. So they act gradually after a change to Order.RANDOM, and idle
conversations need not be queued again.

A shadow cache treats a conversation as one unit, evicts its leading tokens first, and ignores that chunks may
be shared. All shadow caches have the same inaccuracy, so they can be compared. A turn costs O(buckets),
amortized.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from enum import IntEnum

from pensieve.core.policies.protocol import EndedTurn

FADE_SECONDS = 300.0
# an order's charge must be less than this fraction of another charge before the order is followed
LEARNED_MARGIN = 0.98
RANDOM_MARGIN = 0.85
# width of a bucket, in log(return_ratio); return_model.py explains the return_ratio of a conversation
BUCKET_STEP = 0.25
SPREAD = 3.0  # random factors are between exp(-SPREAD) and 1
HITS_MIN = 3  # successive hits with lru that make a conversation's factor 1
GOLDEN_RATIO = (math.sqrt(5) - 1) / 2

BucketValue = Callable[[int, float], float]  # (bucket, idle seconds) -> value


class Order(IntEnum):
    LRU = 0
    LEARNED = 1
    RANDOM = 2


def bucket_of(return_ratio: float) -> int:
    return round(math.log(return_ratio) / BUCKET_STEP)


def random_factor(draw: tuple[int, int] | None) -> float:
    """Return the random factor of a conversation from its serial number and number of hits.

    The factors of successive serial numbers are evenly spread. Conversations of batch jobs are not known
    (None), because they do not return.
    """
    if draw is None:
        return math.exp(-SPREAD)
    serial, num_hits = draw
    return 1.0 if num_hits >= HITS_MIN else math.exp(-SPREAD * (serial * GOLDEN_RATIO % 1.0))


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

    def continued(self, conversation_id: str, new_id: str) -> None:
        """Give a conversation another id. Called just before `turn_began`, which removes it under that id."""
        self.remove(new_id)
        bucket = self._bucket_of.pop(conversation_id, None)
        if bucket is not None:
            self._bucket_of[new_id] = bucket
            self._buckets[bucket][new_id] = self._buckets[bucket].pop(conversation_id)

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
    """Compare the orders by the recent charges of their shadow caches."""

    def __init__(self, learned: BucketValue, seconds_of: Callable[[int], float]) -> None:
        self.followed = Order.LRU
        self._seconds_of = seconds_of  # to compute the first n tokens of a conversation
        self._shadow_caches = {
            Order.LRU: ShadowCache(lambda _, idle: -idle),
            Order.LEARNED: ShadowCache(learned),
            Order.RANDOM: ShadowCache(learned),
        }
        self._charges = dict.fromkeys(Order, 0.0)
        self._charged_at = 0.0

    def set_capacity(self, num_tokens: int) -> None:
        for shadow_cache in self._shadow_caches.values():
            shadow_cache.tokens_max = num_tokens

    def turn_ended(
        self, conversation_id: str, return_ratio: float, factor: float, ended: EndedTurn, now: float
    ) -> None:
        """Put a conversation into all caches. For lru, an announced absence counts as idle time."""
        away_seconds = ended.away_seconds
        away_bucket = round(math.log1p(away_seconds))
        lru, learned, factored = self._shadow_caches.values()
        lru.put(conversation_id, away_bucket, ended.length, now - away_seconds)
        learned.put(conversation_id, bucket_of(return_ratio), ended.length, now)
        factored.put(conversation_id, bucket_of(return_ratio * factor), ended.length, now)

    def continued(self, conversation_id: str, new_id: str) -> None:
        for shadow_cache in self._shadow_caches.values():
            shadow_cache.continued(conversation_id, new_id)

    def turn_began(self, conversation_id: str, length: int, now: float) -> bool:
        """Charge all caches. Return whether lru would have kept the whole conversation."""
        fading = math.exp(min(self._charged_at - now, 0.0) / FADE_SECONDS)
        self._charged_at = now
        missing = {}
        for order, shadow_cache in self._shadow_caches.items():
            num_missing = shadow_cache.remove(conversation_id)
            missing[order] = length if num_missing is None else num_missing
            charge = self._seconds_of(missing[order])
            self._charges[order] = self._charges[order] * fading + charge
        self._choose()
        return not missing[Order.LRU]

    def _choose(self) -> None:
        lru, learned, factored = self._charges.values()
        others = min(lru, learned)
        if factored < (others if self.followed is Order.RANDOM else RANDOM_MARGIN * others):
            self.followed = Order.RANDOM
        elif learned < LEARNED_MARGIN * lru or (self.followed is Order.LEARNED and learned <= lru):
            self.followed = Order.LEARNED
        else:
            self.followed = Order.LRU
