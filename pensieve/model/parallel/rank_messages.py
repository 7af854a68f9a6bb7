"""Exchange messages between rank 0 and a worker, as frames of engine/pipe.py.

The socket is one of a pair, or a connection to another machine (handshake.py).  A peer that has not proved
its identity may send neither iterations nor long frames.

A control message (settings, progress, failures) has only a head, [name, values].  An iteration has a head
with its numbers, and a body with its page tables and the pages and slots of its groups.  For stages, the body
also has the token ids.

Ranks that share each layer get no token ids in these messages.  Some ids are not known when an iteration is
launched, so all ids are sent with the batch itself, from device to device (`ranks.ParallelModel`).
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from array import array
from typing import Any, NamedTuple

from pensieve.core.iteration import Iteration, PageCopy, PageGroup, Slice, SwapIn, SwapOut
from pensieve.engine import pipe

ITERATION = "iteration"


class ControlMessage(NamedTuple):
    """A message other than an iteration; leader.py describes the sequence of messages."""

    name: str
    values: dict[str, Any]


Frame = ControlMessage | Iteration


class RankPipe:
    """One end of a socket; only one thread may receive, any thread may send."""

    def __init__(self, sock: socket.socket, untrusted_bytes_max: int | None = None) -> None:
        """With `untrusted_bytes_max`, accept only control messages up to that size until `trust` runs."""
        self._socket = sock
        self._sending = threading.Lock()
        self._bytes_max = untrusted_bytes_max  # None if the other end is trusted

    def trust(self) -> None:
        """Trust the other end: it has proved to be a rank."""
        self._socket.settimeout(None)
        self._bytes_max = None

    def has_ended(self) -> bool:
        """Whether the other end is gone; call this only before it has sent anything."""
        if not select.select([self._socket], [], [], 0)[0]:
            return False
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def send(self, name: str, **values: Any) -> None:
        self.write(pipe.pack([name, values]))

    def write(self, packed: bytes) -> None:
        """Send a packed frame."""
        with self._sending:
            self._socket.sendall(packed)

    def receive(self) -> Frame | None:
        """Return the next frame, or None if the other end is gone or sends a forbidden frame."""
        try:
            num_head, num_body = pipe.lengths(self._read(pipe.LENGTHS.size))
            if self._bytes_max is not None and num_head + num_body > self._bytes_max:
                return None
            head, body = pipe.unpack(self._read(num_head), self._read(num_body))
        except (EOFError, OSError, pipe.BrokenPipe):
            return None
        if head[0] == ITERATION:
            return unpacked(head, body) if self._bytes_max is None else None
        return ControlMessage(*head)

    def close(self) -> None:
        """Close this end; a waiting `receive`, at either end, returns None."""
        with contextlib.suppress(OSError):  # the other end is already gone
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, num_bytes: int) -> bytes:
        body = bytearray(num_bytes)
        unread = memoryview(body)
        while unread:
            count = self._socket.recv_into(unread)
            if not count:
                raise EOFError
            unread = unread[count:]
        return bytes(body)


def packed(iteration: Iteration, with_tokens: bool = False) -> bytes:
    """Pack the parts of an iteration that another rank needs; with `with_tokens` all tokens must be known."""
    parts: list[array[int]] = []
    slices, groups = [], []
    for piece in iteration.slices:
        attempt_id, start, stop, token_ids, page_table, needs_token, _ = piece
        slices.append((attempt_id, start, stop, needs_token, len(page_table)))
        parts.append(page_table)
        if with_tokens:
            assert not piece.awaits_token, "a token is not known yet"
            parts.append(token_ids)
    for first, stop, *columns in iteration.groups:
        groups.append((first, stop, len(columns[0])))
        parts += columns
    moves = (iteration.copies, iteration.swap_ins, iteration.swap_outs)
    head = [ITERATION, iteration.index, with_tokens, slices, *moves, groups]
    return pipe.pack(head, b"".join([part.tobytes() for part in parts]))


def unpacked(head: list[Any], body: bytes) -> Iteration:
    """Unpack an iteration; token ids are 0 if they were not packed."""
    _, index, with_tokens, slices, copies, swap_ins, swap_outs, groups = head
    taken = 0

    def take(kind: str, count: int) -> array[int]:
        nonlocal taken
        part = body[taken : taken + 4 * count]
        taken += 4 * count
        return array(kind, part)

    read_slices = []
    for attempt_id, start, stop, needs_token, num_pages in slices:
        table, length = take("i", num_pages), stop - start
        token_ids = take("I", length) if with_tokens else array("I", bytes(4 * length))
        read_slices.append(Slice(attempt_id, start, stop, token_ids, table, needs_token))
    return Iteration(
        index,
        tuple(read_slices),
        tuple(PageCopy(*row) for row in copies),
        tuple(SwapIn(*row) for row in swap_ins),
        tuple(SwapOut(*row) for row in swap_outs),
        groups=tuple(
            PageGroup(first, stop, *(take("i", count) for _ in range(3)))
            for first, stop, count in groups
        ),
    )
