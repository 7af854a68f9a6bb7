"""Which of several addresses a conversation is at home at, by its id alone: rendezvous hashing.

Each address gets a score for a key, and the key is at home where the score is highest; the further scores
say who is next when that address is out of reach.  No ring, no state: whoever knows the same names agrees,
in any language, process or version.  When an address leaves, only its own keys move, to the next of each;
when one is added, each of N takes 1/N of its keys from all others alike.

    score = the first 8 bytes, big-endian, of SHA-256(name + "\\n" + key), in UTF-8

No name holds a newline, so two pairs never hash the same bytes.  A name is the address as it is written: all
clients must write it alike (`gpu1:50051` and its IP address are two names).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def score(key: str, name: str) -> int:
    """How much an address attracts a key: a whole number below 2 ** 64."""
    digest = hashlib.sha256(f"{name}\n{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def ranked(key: str, names: Iterable[str]) -> list[str]:
    """The addresses for a key, its home first; the order in which they are given does not matter."""
    return sorted(names, key=lambda name: (score(key, name), name), reverse=True)
