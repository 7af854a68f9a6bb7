"""What rank 0 and a worker send each other: frames on a socket, and an iteration as numbers.

The socket is one of a pair, or a connection to another machine (handshake.py).  Of a peer that has not proved
itself yet no iterations are taken, and no long frames.

A frame is a kind, a length and a body.  A control message is JSON (settings, what was reached, what
failed).  An iteration, which is what is sent thousands of times, is written as 64-bit integers:

    index, and the numbers of slices, turns, groups, copies, swap-ins and swap-outs; whether tokens come
    each slice      its turn_id, start, stop, whether it needs a token; with tokens, their ids
    each movement   as in core.iteration
    each turn       its turn_id, the number of its pages that its slices reach, and those pages
    each group      its first slice and its end, the number of its pages; pages, slots to load, slots to store

Ranks that share each layer get no token ids this way.  Some are not known when an iteration is launched, so
all of them are sent with the batch itself, from device to device (`ranks.ParallelModel`).

Nothing is pickled, and the two sides need to agree on nothing but this module.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import threading
from array import array
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

from pensieve.core.iteration import Iteration, PageCopy, PageGroup, Slice, SwapIn, SwapOut

FRAME_BYTES_MAX = 1 << 30  # of one frame; an iteration of a million pages has 8 MB
_HEADER = struct.Struct("<BI")
_CONTROL, _ITERATION = 0, 1  # kinds of frames


class ControlMessage(NamedTuple):
    """A message other than an iteration; leader.py draws who sends which, and when."""

    name: str
    values: dict[str, Any]


Frame = ControlMessage | Iteration


class RankPipe:
    """One end of a socket; one thread receives, any may send."""

    def __init__(self, sock: socket.socket, untrusted_bytes_max: int | None = None) -> None:
        """With `untrusted_bytes_max` it takes control messages of so many bytes, until `trust`."""
        self._socket = sock
        self._sending = threading.Lock()
        self._trusted = untrusted_bytes_max is None
        self._bytes_max = FRAME_BYTES_MAX if untrusted_bytes_max is None else untrusted_bytes_max

    def trust(self) -> None:
        """The other end is a rank."""
        self._socket.settimeout(None)
        self._trusted, self._bytes_max = True, FRAME_BYTES_MAX

    def has_ended(self) -> bool:
        """Whether the other end, which sends nothing as yet, is gone."""
        if not select.select([self._socket], [], [], 0)[0]:
            return False
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def send(self, name: str, **values: Any) -> None:
        self._send(_CONTROL, json.dumps([name, values]).encode())

    def send_iteration(self, packed: array[int]) -> None:
        self._send(_ITERATION, packed.tobytes())

    def receive(self) -> Frame | None:
        """The next frame; None when the other end is gone."""
        try:
            kind, num_bytes = _HEADER.unpack(self._read(_HEADER.size))
            if num_bytes > self._bytes_max or (kind != _CONTROL and not self._trusted):
                return None
            body = self._read(num_bytes)
        except (EOFError, OSError):
            return None
        if kind == _CONTROL:
            return ControlMessage(*json.loads(bytes(body)))
        return unpack(array("q", bytes(body)))

    def close(self) -> None:
        """Close this end; a `receive` that waits, at either end, returns None."""
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


def pack(iteration: Iteration, with_tokens: bool = False) -> array[int]:
    """What another rank needs of an iteration; with its tokens, all of them are known."""
    tables: dict[int, array[int]] = {}  # by turn_id: the longest page table of its slices
    for piece in iteration.slices:
        if len(piece.page_table) >= len(tables.get(piece.turn_id, ())):
            tables[piece.turn_id] = piece.page_table
    movements = (iteration.copies, iteration.swap_ins, iteration.swap_outs)
    packed = array(
        "q", (iteration.index, len(iteration.slices), len(tables), len(iteration.groups))
    )
    packed.extend(map(len, movements))
    packed.append(with_tokens)
    for piece in iteration.slices:
        packed.extend((piece.turn_id, piece.start, piece.stop, piece.needs_token))
        if with_tokens:
            assert not piece.awaits_token, "a token is not known yet"
            packed.extend(piece.token_ids.tolist())
    for movement in movements:
        for each in movement:
            packed.extend(each)
    for turn_id, pages in tables.items():
        packed.extend((turn_id, len(pages)))
        packed.extend(pages.tolist())  # an array extends only by arrays of its own kind
    for group in iteration.groups:
        packed.extend((group.first_slice, group.stop_slice, len(group.host_pages)))
        for column in (group.host_pages, group.loaded_slots, group.stored_slots):
            packed.extend(column.tolist())
    return packed


def unpack(packed: array[int]) -> Iteration:
    """The iteration again, with 0 for every token id if they were not packed."""
    numbers = iter(packed)
    index, num_slices, num_turns, num_groups, num_copies, num_ins, num_outs = islice(numbers, 7)
    with_tokens = next(numbers)
    slices = []
    for _ in range(num_slices):
        turn_id, start, stop, needs_token = islice(numbers, 4)
        length = stop - start
        token_ids = array("I", islice(numbers, length)) if with_tokens else _blank(length)
        slices.append((turn_id, start, stop, token_ids, bool(needs_token)))
    copies = [PageCopy(*row) for row in _rows(numbers, num_copies, 3)]
    swap_ins = [SwapIn(*row) for row in _rows(numbers, num_ins, 4)]
    swap_outs = [SwapOut(*row) for row in _rows(numbers, num_outs, 4)]
    tables = {}
    for _ in range(num_turns):
        turn_id, num_pages = islice(numbers, 2)
        tables[turn_id] = array("i", islice(numbers, num_pages))
    groups = []
    for _ in range(num_groups):
        first, stop, num_pages = islice(numbers, 3)
        columns = (array("i", islice(numbers, num_pages)) for _ in range(3))
        groups.append(PageGroup(first, stop, *columns))
    return Iteration(
        index,
        tuple(
            Slice(turn_id, start, stop, token_ids, tables[turn_id], needs_token)
            for turn_id, start, stop, token_ids, needs_token in slices
        ),
        tuple(copies),
        tuple(swap_ins),
        tuple(swap_outs),
        groups=tuple(groups),
    )


def _blank(num_tokens: int) -> array[int]:
    return array("I", bytes(4 * num_tokens))


def _rows(numbers: Iterator[int], count: int, width: int) -> Iterator[tuple[int, ...]]:
    for _ in range(count):
        yield tuple(islice(numbers, width))
