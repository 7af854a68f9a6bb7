"""Render messages of a conversation as items, and replies as a client would send them back.

message of a client    one item: a message, or the output of a function
reply                  items for thinking, text and calls, as in the response
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pensieve.api.openai.answer import call_id
from pensieve.api.openai.response_stream import OutputItems
from pensieve.conversations.binding.chain import pieces_of
from pensieve.store.records import StoredMessage
from pensieve.text.message import Message, ToolCall
from pensieve.text.reply_pieces import ReplyPieces

PATTERN = re.compile(r"(?:msg|rs|fc|fco)_([0-9a-f]{16})-([0-9]{1,9})-([0-9]{1,6})")


@dataclass(frozen=True, slots=True)
class Place:
    """The number of a message in a conversation, and the ids of its items.

        msg_1f0c53a9d2b7e684-3-1     tag of the conversation, message number, item number (from 0)

    A client's message is one item. A reply may have several items: thinking, text, calls. Number 0 is
    reserved for instructions, because a conversation may get instructions when it already has items.
    """

    tag: str
    number: int

    def item_id(self, prefix: str, part: int = 0) -> str:
        return f"{prefix}_{self.tag}-{self.number}-{part}"

    def call_id(self, number: int) -> str:
        return call_id(f"{self.tag}-{self.number}", 0, number)


def tag_of(tenant: str, conversation_id: str) -> str:
    words = f"{tenant}/{conversation_id}".encode()
    return hashlib.blake2b(words, digest_size=8).hexdigest()


def place_of(item_id: str) -> tuple[Place, int] | None:
    """Return the message of an item, and the item's number within the message. None for a malformed id."""
    found = PATTERN.fullmatch(item_id)
    if found is None:
        return None
    return Place(found[1], int(found[2])), int(found[3])


def reply_items(stored: StoredMessage, place: Place, cutter: ReplyPieces) -> list[dict[str, Any]]:
    items = OutputItems(place)
    items.push(cutter.whole(pieces_of(stored.content, stored.extra)))
    items.end(is_whole=stored.finish_reason == "stop")
    return items.items


def items_of(stored: StoredMessage, place: Place, cutter: ReplyPieces) -> list[dict[str, Any]]:
    """Return the items of a message. An empty message has no items."""
    if stored.finish_reason is not None:
        return reply_items(stored, place, cutter)
    if stored.role == "tool":
        return [
            {
                "id": place.item_id("fco"),
                "type": "function_call_output",
                "call_id": stored.tool_call_id,
                "output": stored.content,
                "status": "completed",
            }
        ]
    if stored.role == "assistant":
        return _assistant_items(stored, place)
    if stored.role == "system" and not stored.content:
        return []  # this message stands for the tools of a declared prefix
    return [
        {
            "id": place.item_id("msg"),
            "type": "message",
            "status": "completed",
            "role": stored.role,
            "content": [{"type": "input_text", "text": stored.content}],
        }
    ]


def _assistant_items(stored: StoredMessage, place: Place) -> list[dict[str, Any]]:
    """Return the items of an assistant message that a client sent."""
    items: list[dict[str, Any]] = []
    if thinking := stored.extra.get("thinking"):
        items.append(
            {
                "id": place.item_id("rs", len(items)),
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": thinking}],
                "encrypted_content": None,
                "status": "completed",
            }
        )
    calls = stored.extra.get("tool_calls", ())
    if stored.content or not (calls or items):
        part = {"type": "output_text", "text": stored.content, "annotations": [], "logprobs": []}
        items.append(
            {
                "id": place.item_id("msg", len(items)),
                "type": "message",
                "status": "completed",
                "role": "assistant",
                "content": [part],
            }
        )
    for call in calls:
        items.append(
            {
                "id": place.item_id("fc", len(items)),
                "type": "function_call",
                "call_id": call["id"],
                "name": call["name"],
                "arguments": json.dumps(call["arguments"]),
                "status": "completed",
            }
        )
    return items


def reply_as_sent_back(stored: StoredMessage, place: Place, cutter: ReplyPieces) -> Message:
    """Return a reply in the form in which a stateless client would send it back."""
    thinking, texts = list[str](), list[str]()
    calls: list[ToolCall] = []
    for item in reply_items(stored, place, cutter):
        if item["type"] == "function_call":
            arguments: Mapping[str, Any] = {}
            with contextlib.suppress(ValueError):  # an incomplete call
                arguments = json.loads(item["arguments"])
            calls.append(ToolCall(item["name"], arguments, item["call_id"]))
        else:
            text = "".join(part["text"] for part in item["content"])
            (thinking if item["type"] == "reasoning" else texts).append(text)
    return Message(
        "assistant", "\n\n".join(filter(None, texts)), "\n\n".join(thinking) or None, tuple(calls)
    )


def calls_of(items: Sequence[Mapping[str, Any]]) -> set[str]:
    return {item["call_id"] for item in items if item["type"] == "function_call"}
