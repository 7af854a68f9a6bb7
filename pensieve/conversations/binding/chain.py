"""A history as a client sends it, as a chain of digests: one for each of its beginnings.

    digest 0   of the tools and the template's options
    digest k   of digest k - 1 and message k in its canonical form

Messages are compared as the client sends them, never by their tokens.  The canonical form leaves out what
clients change when they send back what they were given:

    white space around a text    some trim it
    thinking                     most drop it
    text beside calls            many send null in its place
    the order and form of JSON   arguments are parsed and written again: keys in any order, 1.0 for 1
    ids of calls                 some make their own; an answer names its call by its place in the message
    the name of the tool         that answers: the call has it

Everything else counts.  Each part stands behind its length, so no two histories have the same bytes.

A bound turn carries a `ChainEnd`: the digest of all before its reply.  With the reply that makes the *state*,
which the store records in the transaction that stores the reply.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pensieve.store.records import ChainState
from pensieve.text import Message, Part
from pensieve.text.message import plain

log = logging.getLogger("pensieve")
DIGEST_BYTES = 16
LENGTH_BYTES = 8
UNKNOWN_CALL = b"?"

Piece = tuple[Part, str]  # of a reply: the text of consecutive tokens of one part
ReplyReader = Callable[[Sequence[Piece]], Message | None]  # None: no client sends this back


def plain_reply(pieces: Sequence[Piece]) -> Message:
    """A reply as a client gets it that knows of no calls: all its text but the thinking."""
    return Message("assistant", "".join(text for part, text in pieces if part != Part.THINKING))


@dataclass(frozen=True, slots=True)
class ChainEnd:
    """Where a turn stands in its client's history."""

    digest: bytes = b""  # of all before the reply
    session: bytes = b""  # the digest of the client's own name for the conversation; empty: none
    reply_reader: ReplyReader = plain_reply

    def state(self, text: str, stream: Mapping[str, Any]) -> ChainState | None:
        """After the reply, which is stored as this.

        None where it cannot be read: then the reply is stored all the same, and only not found again.
        """
        try:
            message = self.reply_reader(pieces_of(text, stream))
            return (
                None if message is None else ChainState(after(self.digest, message), self.session)
            )
        except (
            Exception
        ) as error:  # whatever a reader of replies does to one, the reply is not lost
            log.error("a reply could not be bound to its history: %s", type(error).__name__)
            return None


def pieces_of(text: str, stream: Mapping[str, Any]) -> list[Piece]:
    """A stored reply by its parts; see `stream_of` in live_turn.py."""
    runs = stream.get("parts") or [[Part.TEXT.value, 0, len(text)]]
    pieces, start = [], 0
    for number, (part, _, num_characters) in enumerate(runs, 1):
        stop = start + num_characters if number < len(runs) else len(text)
        pieces.append((Part(part), text[start:stop]))
        start = stop
    return pieces


def digests(
    tools: Sequence[Mapping[str, Any]],
    template_options: Mapping[str, Any],
    messages: Sequence[Message],
) -> list[bytes]:
    """Of each beginning of a history, the empty one and the whole one included."""
    found = [_digest(b"", _written(_canonical_json([list(tools), dict(template_options)])))]
    calls: dict[str, int] = {}  # of the latest message that has any, by their ids
    for message in messages:
        found.append(after(found[-1], message, calls))
        if message.tool_calls:
            calls = {call.id: place for place, call in enumerate(message.tool_calls) if call.id}
    return found


def after(digest: bytes, message: Message, calls: Mapping[str, int] | None = None) -> bytes:
    """The digest of a history with one more message; `calls` has the places of those that it may answer."""
    return _digest(digest, _written(*_canonical(message, calls or {})))


def session_digest(session_key: str) -> bytes:
    """Of the client's own name for a conversation, which is private and may be long."""
    return _digest(b"session", session_key.encode(errors="surrogatepass")) if session_key else b""


def prefix_id(system_prompt: str, tools: Sequence[Mapping[str, Any]]) -> str:
    """For conversations that begin with exactly these, so that they share KV; empty where there is nothing.

    The text counts as it is, since it is what such conversations have in common.
    """
    if not (system_prompt or tools):
        return ""
    text = system_prompt.encode(errors="surrogatepass")
    return f"chat-{_digest(b'prefix', _written(text, _canonical_json(list(tools)))).hex()}"


def _canonical(message: Message, calls: Mapping[str, int]) -> list[bytes]:
    if message.role == "tool":
        place = calls.get(message.tool_call_id or "")
        answered = UNKNOWN_CALL if place is None else str(place).encode()
        return [b"tool", answered, _text(message.content)]
    if message.tool_calls:
        made = [
            part
            for call in message.tool_calls
            for part in (_text(call.name), _canonical_json(call.arguments))
        ]
        return [_text(message.role), b"calls", *made]
    return [_text(message.role), b"text", _text(message.content), _text(message.name or "")]


def _text(text: str) -> bytes:
    return text.strip().encode(errors="surrogatepass")


def _canonical_json(value: Any) -> bytes:
    """The same for equal values; the keys of objects in their order, whole numbers as integers."""
    checked = _whole_numbers(plain(value, "messages"))
    return json.dumps(checked, sort_keys=True, separators=(",", ":")).encode()


def _whole_numbers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _whole_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole_numbers(item) for item in value]
    return value


def _written(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(LENGTH_BYTES) + part for part in parts)


def _digest(before: bytes, rest: bytes) -> bytes:
    return hashlib.blake2b(
        before + rest, digest_size=DIGEST_BYTES, person=b"pensieve-chain"
    ).digest()
