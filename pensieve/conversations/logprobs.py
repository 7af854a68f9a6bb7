"""Pack the logprobs of a reply for the store, and read single tokens out of the packed form.

With 20 alternatives, a token has forty numbers in addition to its id. Writing a long reply as JSON would take
hundreds of milliseconds. Packed arrays are copied as a whole, and a replay makes objects only for the tokens
that it sends.

    n | how many alternatives each of the n tokens has | their token ids      little-endian uint32
    the n tokens' logprobs | the alternatives' logprobs                       little-endian doubles
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import overload

from pensieve.core.iteration import Logprob
from pensieve.errors import StoreCorrupt
from pensieve.store.bodies import TOKEN_BYTES, pack_tokens, unpack_tokens

Row = tuple[float, tuple[Logprob, ...]]  # a token's logprob, and its likeliest alternatives
DOUBLE_BYTES = 8


def pack(rows: Iterable[tuple[float, Sequence[Logprob]]]) -> bytes:
    """Pack the rows of a reply's tokens, without loss."""
    logprobs, counts = array("d"), array("I")
    ids, alternatives = array("I"), array("d")
    for logprob, top in rows:
        logprobs.append(logprob)
        counts.append(len(top))
        ids.extend([each.token_id for each in top])
        alternatives.extend([each.logprob for each in top])
    doubles = logprobs + alternatives
    if sys.byteorder == "big":
        doubles.byteswap()
    return pack_tokens(array("I", [len(counts)]) + counts + ids) + doubles.tobytes()


class PackedLogprobs(Sequence[Row]):
    """Rows by token number, read from the output of `pack`. The store has checked the bytes."""

    def __init__(self, packed: bytes) -> None:
        num_tokens = unpack_tokens(packed[:TOKEN_BYTES])[0]
        begin = TOKEN_BYTES * (1 + num_tokens)
        self._starts = [0, *accumulate(unpack_tokens(packed[TOKEN_BYTES:begin]))]
        end = begin + TOKEN_BYTES * self._starts[-1]
        if len(packed) != end + DOUBLE_BYTES * (num_tokens + self._starts[-1]):
            raise StoreCorrupt(f"the logprobs of {num_tokens} tokens have {len(packed)} bytes")
        self._ids = unpack_tokens(packed[begin:end])
        self._doubles = array("d")
        self._doubles.frombytes(packed[end:])
        if sys.byteorder == "big":
            self._doubles.byteswap()

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, number: int) -> Row: ...
    @overload
    def __getitem__(self, number: slice) -> list[Row]: ...
    def __getitem__(self, number: int | slice) -> Row | list[Row]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        number = range(len(self))[number]
        start, stop = self._starts[number], self._starts[number + 1]
        values = self._doubles[len(self) + start : len(self) + stop]
        return self._doubles[number], tuple(map(Logprob, self._ids[start:stop], values))
