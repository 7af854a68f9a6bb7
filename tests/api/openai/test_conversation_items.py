"""Stored messages as items, and stored replies as clients would send them back."""

from __future__ import annotations

from typing import Any

from pensieve.api.openai.conversation_items import Place, calls_of, items_of, reply_as_sent_back
from pensieve.store.records import StoredMessage
from pensieve.text.message import Message, ToolCall
from pensieve.text.reply_pieces import ReplyPieces
from pensieve.text.tool_calls import STYLES

PLACE = Place("0123456789abcdef", 3)
TOOLS = ({"type": "function", "function": {"name": "add"}},)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'


def stored(role: str, content: str, finish: str | None = None, **more: Any) -> StoredMessage:
    call_id, extra = more.pop("tool_call_id", ""), more
    return StoredMessage(3, role, content, call_id, extra, 2, 10, 5, finish, None)


def cutter() -> ReplyPieces:
    return ReplyPieces(STYLES["hermes"], TOOLS)


def test_a_user_message_becomes_one_item() -> None:
    assert items_of(stored("user", "2 + 2?"), PLACE, cutter()) == [
        {
            "id": "msg_0123456789abcdef-3-0",
            "type": "message",
            "status": "completed",
            "role": "user",
            "content": [{"type": "input_text", "text": "2 + 2?"}],
        }
    ]


def test_a_tool_message_becomes_a_function_call_output() -> None:
    (item,) = items_of(stored("tool", "4", tool_call_id="call_1"), PLACE, cutter())
    assert (item["type"], item["call_id"], item["output"]) == (
        "function_call_output",
        "call_1",
        "4",
    )
    assert item["id"].startswith("fco_")


def test_a_reply_becomes_items_for_thinking_text_and_calls() -> None:
    thought = "<think>\nSums.\n</think>\n\n"
    runs = [["thinking", 4, len(thought)], ["text", 9, len("Let me add.\n" + CALL)]]
    reply = stored("assistant", f"{thought}Let me add.\n{CALL}", "stop", parts=runs)
    items = items_of(reply, PLACE, cutter())
    assert [each["type"] for each in items] == ["reasoning", "message", "function_call"]
    assert items[0]["content"][0]["text"] == "Sums."
    assert items[1]["content"][0]["text"].strip() == "Let me add."
    assert (items[2]["name"], items[2]["arguments"]) == ("add", '{"a": 2}')
    assert calls_of(items) == {PLACE.call_id(0)}
    back = reply_as_sent_back(reply, PLACE, cutter())
    assert (back.thinking, back.content.strip()) == ("Sums.", "Let me add.")
    assert back.tool_calls == (ToolCall("add", {"a": 2}, PLACE.call_id(0)),)


def test_a_reply_cut_at_its_length_limit_is_incomplete() -> None:
    (item,) = items_of(stored("assistant", "It is", "length"), PLACE, cutter())
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "It is")


def test_a_client_written_assistant_message_becomes_the_same_items() -> None:
    calls = [{"name": "add", "arguments": {"a": 2}, "id": "call_9"}]
    said = stored("assistant", "I add.", thinking="Sums.", tool_calls=calls)
    items = items_of(said, PLACE, cutter())
    assert [each["type"] for each in items] == ["reasoning", "message", "function_call"]
    assert items[2]["call_id"] == "call_9"
    assert len({each["id"] for each in items}) == 3
    (alone,) = items_of(stored("assistant", "", tool_calls=calls), PLACE, cutter())
    assert alone["type"] == "function_call"


def test_the_empty_system_message_of_a_prefix_becomes_no_item() -> None:
    assert items_of(stored("system", ""), PLACE, cutter()) == []


def test_a_reply_without_parts_is_text() -> None:
    back = reply_as_sent_back(stored("assistant", "Four.", "stop"), PLACE, cutter())
    assert back == Message("assistant", "Four.")
