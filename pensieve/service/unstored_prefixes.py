"""Which KV of unstored turns the next prompt may begin with: found by digests of whole chunks, in RAM alone.

A client that keeps its own past sends all of it with each request, so the next prompt begins with an earlier
one and its reply.  The KV of an unstored turn that has ended therefore stays in the engine for a while, as
that of an idle conversation, and may be given up there like any other.  What is kept here says where to look:

    digest of a chunk    of the digest before it (of the tenant, before the first) and the chunk's tokens
    digest ──> holder    the name of the latest turn that has computed this chunk, and all before it

So the holder of the last digest that is known has every chunk before it, too, and tenants never meet.

* A holder whose digests have all gone to later ones holds nothing that these do not, and is no longer needed.
* A holder is `whole` to a prompt if that begins with all that is known of it: then the prompt goes on from
  there, as the next turn of the same conversation would; else it begins as a fork.
* Of more digests than the engine has pages, some lead nowhere.  The holder registered first goes then.
  What a later one has in common with it is the later one's, so nothing becomes unreachable by that.

Plain values, without a clock and without the engine; they belong to the loop.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

DIGEST_BYTES = 16


class Chain:
    """The digests of a sequence's whole chunks, as far as it is known."""

    def __init__(self, tenant: str, chunk_tokens: int) -> None:
        self.digests: list[bytes] = []
        self._size = chunk_tokens
        self._latest = _digest(tenant.encode())
        self._rest = array("I")  # tokens behind the last whole chunk

    def extend(self, tokens: array[int]) -> None:
        rest, size = self._rest + tokens, self._size
        num_whole = len(rest) // size * size
        for start in range(0, num_whole, size):
            self._latest = _digest(self._latest + rest[start : start + size].tobytes())
            self.digests.append(self._latest)
        self._rest = rest[num_whole:]


class Found(NamedTuple):
    holder: str
    num_chunks: int
    is_whole: bool


class UnstoredPrefixes:
    def __init__(self, chunks_max: int) -> None:
        self._chunks_max = chunks_max
        self._holder: dict[bytes, str] = {}  # by digest
        self._digests: OrderedDict[str, set[bytes]] = OrderedDict()  # by holder, the latest last
        self._lengths: dict[str, int] = {}  # chunks that a holder has, shared ones included

    def __contains__(self, holder: str) -> bool:
        return holder in self._digests

    def find(self, digests: Sequence[bytes]) -> Found | None:
        """Who has the most of these chunks, from the first on."""
        num_chunks = 0
        while num_chunks < len(digests) and digests[num_chunks] in self._holder:
            num_chunks += 1
        if not num_chunks:
            return None
        holder = self._holder[digests[num_chunks - 1]]
        return Found(holder, num_chunks, self._lengths[holder] == num_chunks)

    def register(self, holder: str, digests: Sequence[bytes]) -> list[str]:
        """It has computed these chunks; which holders are not needed any more, perhaps this one."""
        if not digests:
            return []
        left: dict[str, None] = {}
        own = self._digests.setdefault(holder, set())
        self._digests.move_to_end(holder)
        self._lengths[holder] = len(digests)
        for digest in digests:
            before = self._holder.get(digest, holder)
            if before != holder:
                self._digests[before].discard(digest)
                left[before] = None
            self._holder[digest] = holder
            own.add(digest)
        gone = [each for each in left if not self._digests[each]]
        for each in gone:
            self.forget(each)
        while len(self._holder) > self._chunks_max:
            first = next(iter(self._digests))
            self.forget(first)
            gone.append(first)
        return gone

    def forget(self, holder: str) -> None:
        """It has nothing any more, or is not needed."""
        self._lengths.pop(holder, None)
        for digest in self._digests.pop(holder, ()):
            del self._holder[digest]

    def clear(self) -> None:
        self._holder.clear()
        self._digests.clear()
        self._lengths.clear()

    def check(self) -> None:
        pairs = {(digest, holder) for holder, own in self._digests.items() for digest in own}
        assert pairs == set(self._holder.items())
        assert all(self._digests.values()), "a holder holds nothing"
        assert self._lengths.keys() == self._digests.keys()
        assert len(self._holder) <= self._chunks_max


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()
