"""What rank 0 and a follower say to each other: frames on a pipe, and an iteration as numbers.

A frame is a kind, a length and a body.  Words are JSON (settings, what was reached, what failed);
an order is an iteration as 64-bit integers, which is what is sent thousands of times:

    index, and the numbers of slices, turns, copies, swap-ins and swap-outs
    each slice      id of its turn, start, stop, whether it needs a token
    each movement   as in core.iteration
    each turn       its id, the number of its pages that its slices reach, and those pages

There are no token ids in it.  Some are not known when an iteration is launched, so all of them come
with the batch itself, from device to device (`ranks.ParallelModel`).  What a follower unpacks is an
Iteration whose slices have pages, and 0 for every token id.

Nothing is pickled, and no class has to agree with anything but this module.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from array import array
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

from pensieve.core.iteration import Iteration, PageCopy, Slice, SwapIn, SwapOut

FRAME_BYTES_MAX = 1 << 30  # of one frame; an order of a million pages has 8 MB
_HEADER = struct.Struct("<BI")
_WORDS, _ORDER = 0, 1


class Words(NamedTuple):
    """Something said once in a while."""

    what: str
    values: dict[str, Any]


Frame = Words | Iteration


class Pipe:
    """One end of a socket pair; one thread receives, any may send."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()

    def say(self, what: str, **values: Any) -> None:
        self._send(_WORDS, json.dumps([what, values]).encode())

    def order(self, packed: array[int]) -> None:
        self._send(_ORDER, packed.tobytes())

    def receive(self) -> Frame | None:
        """The next frame; None when the other end is gone."""
        try:
            kind, num_bytes = _HEADER.unpack(self._read(_HEADER.size))
            body = self._read(num_bytes)
        except (EOFError, OSError):
            return None
        if kind == _WORDS:
            return Words(*json.loads(bytes(body)))
        return unpack(array("q", bytes(body)))

    def close(self) -> None:
        """Also wakes whoever receives, at both ends."""
        with contextlib.suppress(OSError):  # the other end is gone already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send(self, kind: int, body: bytes) -> None:
        assert len(body) <= FRAME_BYTES_MAX, len(body)
        with self._sending:
            self._socket.sendall(_HEADER.pack(kind, len(body)) + body)

    def _read(self, num_bytes: int) -> bytearray:
        body = bytearray(num_bytes)
        rest = memoryview(body)
        while rest:
            count = self._socket.recv_into(rest)
            if not count:
                raise EOFError
            rest = rest[count:]
        return body


def pack(iteration: Iteration) -> array[int]:
    """What another rank needs of an iteration."""
    tables: dict[int, array[int]] = {}  # by turn_id: the longest page table of its slices
    for piece in iteration.slices:
        if len(piece.page_table) >= len(tables.get(piece.turn_id, ())):
            tables[piece.turn_id] = piece.page_table
    movements = (iteration.copies, iteration.swap_ins, iteration.swap_outs)
    packed = array("q", (iteration.index, len(iteration.slices), len(tables)))
    packed.extend(map(len, movements))
    for piece in iteration.slices:
        packed.extend((piece.turn_id, piece.start, piece.stop, piece.needs_token))
    for movement in movements:
        for each in movement:
            packed.extend(each)
    for turn_id, pages in tables.items():
        packed.extend((turn_id, len(pages)))
        packed.extend(pages.tolist())
    return packed


def unpack(packed: array[int]) -> Iteration:
    """The iteration again, with token 0 for all token ids: rank 0's device sends those."""
    numbers = iter(packed)
    index, num_slices, num_turns, num_copies, num_ins, num_outs = islice(numbers, 6)
    slices = list(_rows(numbers, num_slices, 4))
    copies = [PageCopy(*row) for row in _rows(numbers, num_copies, 3)]
    swap_ins = [SwapIn(*row) for row in _rows(numbers, num_ins, 4)]
    swap_outs = [SwapOut(*row) for row in _rows(numbers, num_outs, 4)]
    tables = {}
    for _ in range(num_turns):
        turn_id, num_pages = islice(numbers, 2)
        tables[turn_id] = array("i", islice(numbers, num_pages))
    return Iteration(
        index,
        tuple(
            Slice(turn_id, start, stop, _blank(stop - start), tables[turn_id], bool(needs_token))
            for turn_id, start, stop, needs_token in slices
        ),
        tuple(copies),
        tuple(swap_ins),
        tuple(swap_outs),
    )


def _blank(num_tokens: int) -> array[int]:
    return array("I", bytes(4 * num_tokens))


def _rows(numbers: Iterator[int], count: int, width: int) -> Iterator[tuple[int, ...]]:
    for _ in range(count):
        yield tuple(islice(numbers, width))
