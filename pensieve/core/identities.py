"""Identities of chunks: digests of everything that the KV of a chunk depends on.

The KV of a chunk depends on all tokens up to its end. Its identity is a digest of its tokens and of the
previous chunk's identity. Before the first identity comes the *root*. The root names everything else that the
KV depends on. It also names the owner that shares KV with no other owner, for example the tenant. So chunks
with the same identity have the same KV.

    root ──> identity of chunk 0 ──> identity of chunk 1 ──> …

A partly filled chunk has no identity.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

IDENTITY_BYTES = 16


class Identities:
    """The identities of the whole chunks of a growing sequence of tokens."""

    __slots__ = ("_size", "known", "root")

    def __init__(self, root: str, chunk_tokens: int, identities: Sequence[bytes] = ()) -> None:
        self.root = root
        self.known = list(identities)
        self._size = chunk_tokens

    def extend(self, tokens: array[int]) -> None:
        """Add the identities of the whole chunks of `tokens`, which is the sequence from its beginning."""
        size, identities = self._size, self.known
        previous = identities[-1] if identities else _digest(self.root.encode())
        packed, step = memoryview(tokens).cast("B"), size * tokens.itemsize
        for start in range(len(identities) * step, len(packed) - step + 1, step):
            previous = _digest(previous + packed[start : start + step])
            identities.append(previous)

    def cut(self, num_tokens: int) -> None:
        del self.known[num_tokens // self._size :]

    def beginning(self, num_tokens: int) -> Identities:
        """Return a copy that covers the first `num_tokens` tokens at most."""
        known = self.known[: num_tokens // self._size]
        return Identities(self.root, self._size, known)


def salted(root: str, cache_salt: str) -> str:
    """Return the root of chunks that only turns with this `cache_salt` share."""
    if not cache_salt:
        return root
    return blake2b(f"{root} {cache_salt}".encode(), digest_size=IDENTITY_BYTES).hexdigest()


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=IDENTITY_BYTES).digest()
