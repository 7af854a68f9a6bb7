"""The frames of the pipe between the service and the engine process.

    frame = u32 length of the head · u32 length of the body · head (JSON, UTF-8) · body (bytes)

A head is a list whose first item names the kind of frame:

    from the service    a message of the mailbox, as codec.py writes it
    from the engine     `stage` and `ready`, while it starts
                        `events`, all events since the last frame; an event with bytes has its own frame
                        `alive`, with `Engine.num_rounds`, if nothing was published for BEAT_SECONDS
                        `died`, with the reason

No frame can run code, whoever wrote it.

Both directions are bounded. The service limits the turns in flight (`turns_max`), and refuses messages while
the engine does not read. The engine's outbox is bounded, and a full pipe blocks the thread that writes to it.
Frames larger than FRAME_BYTES_MAX are refused, because only a bug could write them.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from pensieve.engine import codec
from pensieve.engine.messages import EngineEvent, EngineMessage
from pensieve.errors import PensieveError

FRAME_BYTES_MAX = 64 << 20
BEAT_SECONDS = 0.5  # between `alive` frames of an engine that publishes nothing
LENGTHS = struct.Struct("<II")

Frame = tuple[list[Any], bytes]  # head and body


class BrokenPipe(PensieveError):
    """The other side wrote an invalid frame, or stopped within a frame."""


def pack(head: Sequence[Any], body: bytes = b"") -> bytes:
    written = json.dumps(head, separators=(",", ":")).encode("ascii")
    return b"".join((LENGTHS.pack(len(written), len(body)), written, body))


def lengths(prefix: bytes) -> tuple[int, int]:
    """Return the lengths of head and body from the first eight bytes of a frame."""
    head, body = LENGTHS.unpack(prefix)
    if head + body > FRAME_BYTES_MAX or not head:
        raise BrokenPipe(
            f"a frame with a head of {head:,} and a body of {body:,} bytes: too long, or without a head"
        )
    return head, body


def unpack(head: bytes, body: bytes) -> Frame:
    try:
        items = json.loads(head)
    except ValueError as error:
        raise BrokenPipe(f"a frame that is not JSON: {error}") from error
    if not isinstance(items, list) or not items:
        raise BrokenPipe("a frame without a kind")
    return items, body


def frames(sock: socket.socket) -> Iterator[Frame]:
    """Yield the frames that the other side writes, until it closes."""
    with sock.makefile("rb") as file:
        while prefix := file.read(LENGTHS.size):
            if len(prefix) < LENGTHS.size:
                raise BrokenPipe("the pipe ended within a frame")
            num_head, num_body = lengths(prefix)
            head, body = file.read(num_head), file.read(num_body)
            if len(head) < num_head or len(body) < num_body:
                raise BrokenPipe("the pipe ended within a frame")
            yield unpack(head, body)


def pack_message(message: EngineMessage) -> bytes:
    return pack(*codec.encode(message))


def message_of(frame: Frame) -> EngineMessage:
    """Return the message in a frame from the service."""
    message: EngineMessage = _decode(*frame)
    return message


def pack_events(events: Sequence[EngineEvent]) -> bytes:
    """Pack events into as few frames as possible. An event with bytes has a separate frame."""
    packed, items = list[bytes](), list[list[Any]]()
    for each, body in map(codec.encode, events):
        if body:
            if items:
                packed.append(pack(["events", items]))
            packed.append(pack(["events", [each]], body))
            items = []
        else:
            items.append(each)
    if items:
        packed.append(pack(["events", items]))
    return packed[0] if len(packed) == 1 else b"".join(packed)


def pack_alive(num_rounds: int) -> bytes:
    return pack(["alive", num_rounds])


def rounds_of(frame: Frame) -> int | None:
    """Return the number of rounds that the engine has begun, None if the frame is not `alive`."""
    (kind, *rest), _ = frame
    if kind != "alive":
        return None
    if len(rest) != 1 or not isinstance(rest[0], int):
        raise BrokenPipe("an `alive` frame without a number of rounds")
    return rest[0]


def events_of(frame: Frame) -> list[EngineEvent]:
    """Return the events in a frame from the engine."""
    (kind, *rest), body = frame
    if kind != "events" or len(rest) != 1 or not isinstance(rest[0], list):
        raise BrokenPipe(f"{kind!r} where events were expected")
    if body and len(rest[0]) != 1:
        raise BrokenPipe(f"{len(body)} bytes beside {len(rest[0])} events")
    return [_decode(items, body) for items in rest[0]]


def _decode(items: list[Any], body: bytes = b"") -> Any:
    try:
        return codec.decode(items, body)
    except codec.Unreadable as error:
        raise BrokenPipe(str(error)) from error
