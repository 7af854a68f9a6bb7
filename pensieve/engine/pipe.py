"""The pipe between the service and the engine process: frames of plain values, nothing else.

    frame = u32 length of the head · u32 length of the body · head (JSON, UTF-8) · body (bytes)

A head is a list whose first item names what follows.  From the service come the mailbox's messages,
one a frame; the body of a SubmitTurn is its tokens.  From the engine come `stage` and `ready` while it
starts, then `events`: everything that one or more iterations published since the last frame, so a
stream gets the tokens of an iteration as one message.  JSON writes what a dataclass holds and can do
nothing else when it is read: a frame never becomes code, whoever wrote it.

Both directions are bounded.  The service counts the turns it has submitted and refuses more before
anything is written (`turns_max`); the engine's outbox is bounded, and a pipe that is not read stops
its writer.  Frames above FRAME_BYTES_MAX are refused: they can only be a mistake.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, fields
from typing import Any

from pensieve.core.iteration import Logprob
from pensieve.core.sampling import Sampling
from pensieve.core.turn import FinishReason, Usage
from pensieve.engine import messages as box
from pensieve.errors import PensieveError

FRAME_BYTES_MAX = 64 << 20
LENGTHS = struct.Struct("<II")

Frame = tuple[list[Any], bytes]  # head and body

MESSAGES: dict[str, type[Any]] = {
    each.__name__: each
    for each in (
        box.SubmitTurn,
        box.CancelTurn,
        box.ForkConversation,
        box.RewindConversation,
        box.DeleteConversation,
        box.EvictConversation,
        box.ListCached,
        box.Explain,
        box.GetStats,
        box.CheckIntegrity,
    )
}


class BrokenChannel(PensieveError):
    """The other side wrote what is no frame, or stopped within one."""


def pack(head: Sequence[Any], body: bytes = b"") -> bytes:
    written = json.dumps(head, separators=(",", ":")).encode("ascii")
    return b"".join((LENGTHS.pack(len(written), len(body)), written, body))


def lengths(prefix: bytes) -> tuple[int, int]:
    """Of head and body, from the first eight bytes of a frame."""
    head, body = LENGTHS.unpack(prefix)
    if head + body > FRAME_BYTES_MAX or not head:
        raise BrokenChannel(f"a frame of {head:,} + {body:,} bytes")
    return head, body


def unpack(head: bytes, body: bytes) -> Frame:
    try:
        items = json.loads(head)
    except ValueError as error:
        raise BrokenChannel(f"a frame that is not JSON: {error}") from error
    if not isinstance(items, list) or not items:
        raise BrokenChannel("a frame without a kind")
    return items, body


def frames(sock: socket.socket) -> Iterator[Frame]:
    """What the other side writes, until it closes."""
    with sock.makefile("rb") as file:
        while prefix := file.read(LENGTHS.size):
            if len(prefix) < LENGTHS.size:
                raise BrokenChannel("the pipe ended within a frame")
            num_head, num_body = lengths(prefix)
            head, body = file.read(num_head), file.read(num_body)
            if len(head) < num_head or len(body) < num_body:
                raise BrokenChannel("the pipe ended within a frame")
            yield unpack(head, body)


# -- messages: service to engine --


def pack_message(message: box.Message) -> bytes:
    name = type(message).__name__
    if isinstance(message, box.SubmitTurn):
        head = [
            name,
            message.turn_id,
            message.conversation_id,
            message.history_tokens,
            astuple(message.sampling),
            message.warm,
            message.away_seconds,
            message.priority,
            message.prefix_of,
            message.prefix_tokens,
        ]
        return pack(head, message.tokens)
    return pack([name, *(getattr(message, each.name) for each in fields(message))])


def message_of(frame: Frame) -> box.Message:
    (name, *values), body = frame
    kind = MESSAGES.get(name)
    if kind is None:
        raise BrokenChannel(f"a message of the unknown kind {name!r}")
    try:
        if kind is box.SubmitTurn:
            turn_id, conversation_id, history_tokens, sampling, *rest = values
            return box.SubmitTurn(
                turn_id,
                conversation_id,
                body,
                history_tokens,
                _sampling(sampling),
                *rest,
            )
        message: box.Message = kind(*values)
    except (TypeError, ValueError) as error:
        raise BrokenChannel(f"a {name} that cannot be read: {error}") from error
    return message


def _sampling(values: list[Any]) -> Sampling:
    return Sampling(*(_tuples(value) for value in values))


def _tuples(value: Any) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value


# -- events: engine to service --


def pack_events(events: Sequence[box.Event]) -> bytes:
    return pack(["events", [_PACK[type(event)](event) for event in events]])


def events_of(frame: Frame) -> list[box.Event]:
    (kind, *rest), _ = frame
    if kind != "events":
        raise BrokenChannel(f"{kind!r} where events were expected")
    try:
        return [_UNPACK[event[0]](event) for event in rest[0]]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise BrokenChannel(f"an event that cannot be read: {error}") from error


def _pack_delta(event: box.TurnDelta) -> list[Any]:
    packed = ["d", event.turn_id, event.conversation_id, event.token_id, event.text]
    if event.logprob is not None:
        packed += [event.logprob, event.top_logprobs]
    return packed


def _delta(event: list[Any]) -> box.TurnDelta:
    if len(event) == 5:
        return box.TurnDelta(event[1], event[2], event[3], event[4])
    _, turn_id, conversation_id, token_id, text, logprob, top = event
    alternatives = tuple(Logprob(*each) for each in top)
    return box.TurnDelta(turn_id, conversation_id, token_id, text, logprob, alternatives)


def _pack_ended(event: box.TurnEnded) -> list[Any]:
    finish, usage = event.finish.value, astuple(event.usage)
    return ["e", event.turn_id, event.conversation_id, finish, usage, event.failure]


def _ended(event: list[Any]) -> box.TurnEnded:
    _, turn_id, conversation_id, finish, usage, failure = event
    return box.TurnEnded(turn_id, conversation_id, FinishReason(finish), Usage(*usage), failure)


def _pack_answer(event: box.Answer) -> list[Any]:
    return ["a", event.query_id, event.figures, event.problems, event.rows]


def _answer(event: list[Any]) -> box.Answer:
    _, query_id, figures, problems, rows = event
    return box.Answer(query_id, figures, tuple(problems), tuple(tuple(row) for row in rows))


_PACK: dict[type[Any], Callable[[Any], list[Any]]] = {
    box.TurnDelta: _pack_delta,
    box.TurnEnded: _pack_ended,
    box.Answer: _pack_answer,
}
_UNPACK: dict[str, Callable[[list[Any]], box.Event]] = {"d": _delta, "e": _ended, "a": _answer}
