"""Digest a client's history into a chain, with one digest for each prefix of the history.

    digest 0   of the tools, the template's options, and the cache_salt if there is one
    digest k   of digest k - 1 and message k in its canonical form

Messages are compared as the client sends them, never by their tokens. The canonical form leaves out details
that clients change when they send a reply back:

    white space around a text    some clients trim it
    thinking                     most clients drop it
    text beside tool calls       many clients send null instead
    the order and form of JSON   clients parse and rewrite arguments: keys in any order, 1.0 for 1
    ids of tool calls            some clients make new ids, so a tool result refers to its call by position
    the tool's name in a result  the call has the name, too

Everything else counts. Each part is preceded by its length, so different histories have different bytes.

A turn that the binder begins has a `ChainEnd`: the digest of everything before its reply. This digest and the
reply give the *state*. The store records the state in the transaction that stores the reply.
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

Piece = tuple[Part, str]  # text of consecutive tokens that belong to one part of a reply
ReplyReader = Callable[[Sequence[Piece]], Message | None]  # None: no client sends this reply back


def plain_reply(pieces: Sequence[Piece]) -> Message:
    """Return a reply as a client without tools gets it: all text except the thinking."""
    return Message("assistant", "".join(text for part, text in pieces if part != Part.THINKING))


@dataclass(frozen=True, slots=True)
class ChainEnd:
    """The position of a turn in its client's history."""

    digest: bytes = b""  # of everything before the reply
    client_session: bytes = (
        b""  # the digest of the client's own name for the conversation; empty: none
    )
    reply_reader: ReplyReader = plain_reply

    def state(self, text: str, stream: Mapping[str, Any]) -> ChainState | None:
        """Return the state after this reply; None if `reply_reader` cannot read the reply.

        A reply without a state is stored, but later requests do not find its conversation.
        """
        try:
            message = self.reply_reader(pieces_of(text, stream))
            if message is None:
                return None
            return ChainState(extend_digest(self.digest, message), self.client_session)
        except Exception as error:  # a failing reply reader must not lose the reply
            log.error("a reply cannot be matched to later requests: %s", type(error).__name__)
            return None


def pieces_of(text: str, stream: Mapping[str, Any]) -> list[Piece]:
    """Split a stored reply into its parts; see `stream_of` in live_turn.py."""
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
    cache_salt: str = "",
) -> list[bytes]:
    """Return the digests of all prefixes of a history, from the empty prefix to the whole history.

    Requests with different values of `cache_salt` never find each other's conversations.
    """
    salt = [cache_salt.encode()] if cache_salt else []
    found = [
        _digest(b"", _with_lengths(_canonical_json([list(tools), dict(template_options)]), *salt))
    ]
    calls: dict[str, int] = {}  # positions by id, in the latest message with calls
    for message in messages:
        found.append(extend_digest(found[-1], message, calls))
        if message.tool_calls:
            calls = {call.id: place for place, call in enumerate(message.tool_calls) if call.id}
    return found


def extend_digest(digest: bytes, message: Message, calls: Mapping[str, int] | None = None) -> bytes:
    """Extend a digest by a message.

    `calls`: the tool calls that the message may answer, as positions by id.
    """
    return _digest(digest, _with_lengths(*_canonical(message, calls or {})))


def session_digest(session_key: str) -> bytes:
    """Digest the client's own name for a conversation, which is private and may be long."""
    return _digest(b"session", session_key.encode(errors="surrogatepass")) if session_key else b""


def prefix_id(system_prompt: str, tools: Sequence[Mapping[str, Any]]) -> str:
    """Make a prefix_id for conversations with this system prompt and these tools.

    Return "" if both are empty. White space in the text also counts, because its tokens are shared.
    """
    if not (system_prompt or tools):
        return ""
    text = system_prompt.encode(errors="surrogatepass")
    return f"chat-{_digest(b'prefix', _with_lengths(text, _canonical_json(list(tools)))).hex()}"


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
    """Write equal values equally: keys sorted, whole numbers as integers."""
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


def _with_lengths(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(LENGTH_BYTES) + part for part in parts)


def _digest(before: bytes, added: bytes) -> bytes:
    return hashlib.blake2b(
        before + added, digest_size=DIGEST_BYTES, person=b"pensieve-chain"
    ).digest()
