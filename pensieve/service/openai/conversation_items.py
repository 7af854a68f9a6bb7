"""The messages of a conversation as items, and its replies as the messages that a client would send back.

a client's message    one item: a message, or the output of a function
a reply               what it thought, its text and its calls, as the response had them (output_items)
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pensieve.service.openai.item_ids import Place
from pensieve.service.openai.output_items import OutputItems
from pensieve.store.bodies import canonical_json
from pensieve.store.records import Message as StoredMessage
from pensieve.text.message import Message, ToolCall
from pensieve.text.parts import Part
from pensieve.text.reply_pieces import Piece, ReplyPieces, Text, Thinking


def reply_items(stored: StoredMessage, place: Place, cutter: ReplyPieces) -> list[dict[str, Any]]:
    """Of a reply."""
    items = OutputItems(place)
    items.push(_cut(stored, cutter))
    items.end(is_whole=stored.finish_reason == "stop")
    return items.items


def items_of(stored: StoredMessage, place: Place, cutter: ReplyPieces) -> list[dict[str, Any]]:
    """Of any message; none where it has nothing to say."""
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
        return []  # stands for the tools of a declared prefix
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
    """Of a message that a client has put into the assistant's mouth."""
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
    """A reply, as a client sends it that keeps the history itself."""
    thinking, texts = list[str](), list[str]()
    calls: list[ToolCall] = []
    for item in reply_items(stored, place, cutter):
        if item["type"] == "function_call":
            arguments: Mapping[str, Any] = {}
            with contextlib.suppress(ValueError):  # it broke off
                arguments = json.loads(item["arguments"])
            calls.append(ToolCall(item["name"], arguments, item["call_id"]))
        else:
            text = "".join(part["text"] for part in item["content"])
            (thinking if item["type"] == "reasoning" else texts).append(text)
    return Message(
        "assistant", "\n\n".join(filter(None, texts)), "\n\n".join(thinking) or None, tuple(calls)
    )


def in_parts(stored: StoredMessage, cutter: ReplyPieces) -> StoredMessage:
    """A reply with what it thought and whom it called beside its text, as if a client had given it.

    One with a call that broke off stays as it is: no client could give it otherwise.
    """
    if stored.finish_reason is None:
        return stored
    pieces = _cut(stored, cutter)
    if cutter.num_calls != len(cutter.calls):
        return stored
    extra = {name: each for name, each in stored.extra.items() if name != "parts"}
    if thinking := "".join(each.text for each in pieces if isinstance(each, Thinking)):
        extra["thinking"] = thinking
    if cutter.calls:
        extra["tool_calls"] = [
            {"id": None, "name": each.name, "arguments": _as_stored(each.arguments)}
            for each in cutter.calls
        ]
    text = "".join(each.text for each in pieces if isinstance(each, Text))
    return replace(stored, content=text, extra=extra)


def calls_of(items: Sequence[Mapping[str, Any]]) -> set[str]:
    """The ids of the calls among them."""
    return {item["call_id"] for item in items if item["type"] == "function_call"}


def _as_stored(arguments: Mapping[str, Any]) -> Any:
    """As the store has those that a client gave: their members in its order."""
    return json.loads(canonical_json(dict(arguments)))


def _cut(stored: StoredMessage, cutter: ReplyPieces) -> list[Piece]:
    text = stored.content
    runs = stored.extra.get("parts") or [[Part.TEXT.value, 0, len(text)]]
    pieces: list[Piece] = []
    start = 0
    for number, (part, _, num_characters) in enumerate(runs, 1):
        stop = start + num_characters if number < len(runs) else len(text)
        pieces += cutter.push(text[start:stop], Part(part))
        start = stop
    return [*pieces, *cutter.end()]
