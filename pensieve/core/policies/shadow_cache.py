"""Would it have paid to listen to what was learned?

Two ghosts of the cache hold names and sizes only: one keeps the conversations that were active last,
the other those that a learned order values most.  Both see every turn, whichever order the cache
follows, and each is charged what a returning conversation would have had to compute again.  Charges
fade, so the `Trial` says which of the two has been the better one lately:

    not trusted    the cache follows lru, until learned is charged less than `PROOF` of it
    trusted        the cache follows what was learned, until that is charged more than lru

A workload that shifts makes what was learned wrong for a while; then the cache is what it would have
been anyway.

A ghost holds conversations whole, gives up their leading tokens first, and knows nothing of chunks that
are shared: both err alike.  A turn costs it O(orders), amortised.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

FADE_SECONDS = 300.0
PROOF = 0.98

Value = Callable[[int, float], float]  # of an order and an idle time


class _Held:
    __slots__ = ("length", "missing", "since")

    def __init__(self, length: int, since: float) -> None:
        self.length = length
        self.missing = 0  # of its leading tokens
        self.since = since


class Ghost:
    """So many tokens of conversations; those in one order are given up oldest first."""

    def __init__(self, value: Value) -> None:
        self.tokens_max = 0
        self.num_tokens = 0
        self._value = value
        self._orders: dict[int, OrderedDict[str, _Held]] = {}
        self._order_of: dict[str, int] = {}

    def rest(self, name: str, order: int, length: int, now: float) -> None:
        self.take(name)
        self._orders.setdefault(order, OrderedDict())[name] = _Held(length, now)
        self._order_of[name] = order
        self.num_tokens += length
        while self.num_tokens > self.tokens_max:
            self._give_up(now)

    def take(self, name: str) -> int | None:
        """It leaves; how many of its tokens were missing, or None if it was not there."""
        order = self._order_of.pop(name, None)
        if order is None:
            return None
        held = self._orders[order].pop(name)
        if not self._orders[order]:
            del self._orders[order]
        self.num_tokens -= held.length - held.missing
        return held.missing

    def _give_up(self, now: float) -> None:
        least, victim, found = math.inf, "", None
        for order, conversations in self._orders.items():
            name, held = next(iter(conversations.items()))
            value = self._value(order, now - held.since)
            if found is None or value < least:
                least, victim, found = value, name, held
        assert found is not None, "tokens are held by nobody"
        taken = min(self.num_tokens - self.tokens_max, found.length - found.missing)
        found.missing += taken
        self.num_tokens -= taken
        if found.missing == found.length:
            self.take(victim)


class Trial:
    def __init__(self, learned: Value, seconds_of: Callable[[int], float]) -> None:
        self.trusted = False
        self._seconds_of = seconds_of  # to compute so many tokens from the beginning
        self._ghosts = (Ghost(lambda _, idle: -idle), Ghost(learned))
        self._charged = [0.0, 0.0]
        self._charged_at = 0.0

    def holds(self, num_tokens: int) -> None:
        for ghost in self._ghosts:
            ghost.tokens_max = num_tokens

    def rested(
        self, name: str, order: int, length: int, now: float, away_seconds: float = 0.0
    ) -> None:
        """Lru takes its client's word: one that will be away counts as if it had been for as long."""
        lru, learned = self._ghosts
        lru.rest(name, round(math.log1p(away_seconds)), length, now - away_seconds)
        learned.rest(name, order, length, now)

    def returned(self, name: str, length: int, now: float) -> None:
        faded = math.exp(min(self._charged_at - now, 0.0) / FADE_SECONDS)
        self._charged_at = now
        for index, ghost in enumerate(self._ghosts):
            missing = ghost.take(name)
            charge = self._seconds_of(length if missing is None else missing)
            self._charged[index] = self._charged[index] * faded + charge
        lru, learned = self._charged
        self.trusted = learned <= lru if self.trusted else learned < PROOF * lru
