"""Which replica is a conversation's home: rendezvous hashing with bounded load, as a pure function.

Every router computes the same answer from the same names and loads.  A replica that goes away moves its own
conversations only; one that comes takes an even share of new ones.  No replica gets more than BOUND times the
mean: a key whose first choice is full goes to its next one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping

BOUND = 1.25


def ranked(key: str, names: Iterable[str]) -> list[str]:
    """The names in the order in which this key prefers them."""
    start = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8)

    def weight(name: str) -> bytes:
        digest = start.copy()
        digest.update(b"\0" + name.encode())
        return digest.digest()

    return sorted(names, key=lambda name: (weight(name), name), reverse=True)


def home(key: str, loads: Mapping[str, int]) -> str:
    """The replica for a key that has none; `loads` has the number of conversations of each running one."""
    limit = math.ceil(BOUND * (sum(loads.values()) + 1) / len(loads))
    return next(name for name in ranked(key, loads) if loads[name] < limit)
