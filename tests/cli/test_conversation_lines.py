"""Replies with thinking and tool calls are written as lines of JSON, and read again."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pensieve.cli.conversation_lines import line_of, parse_line
from pensieve.client import Client, Conversation, ConversationState, Message
from tests.api.http.test_agents import CALL, TOOL, scripted
from tests.text.families import QWEN_3

THOUGHT = "<think>\nHm.\n</think>\n\n"
REPLIES = [
    f"{THOUGHT}I look." + CALL.format(1) + CALL.format(2),
    f"{THOUGHT}Done.",
    '<tool_call>\n{"name": "look", "arguments": {"a": ',
]


def exported(conversation: Conversation) -> dict[str, Any]:
    line = "".join(line_of(conversation.get(), conversation.messages(cut_replies=True)))
    found: dict[str, Any] = json.loads(line)
    return found


def imported(client: Client, line: dict[str, Any], name: str) -> Conversation:
    given = parse_line(json.dumps(line))
    made = client.conversation(name)
    made.create(
        system_prompt=given.system_prompt,
        tools=given.tools,
        template_options=given.template_options,
        metadata=given.metadata,
        messages=given.messages,
    )
    return made


def test_exports_contain_thinking_and_tool_calls(tmp_path: Path) -> None:
    with (
        scripted(tmp_path, QWEN_3, REPLIES) as rig,
        Client(rig.rig.server.address) as client,
    ):
        talk = client.conversation("talk")
        talk.create(tools=[TOOL])
        talk.ask("Look.")
        talk.ask([{"role": "tool", "content": "A door.", "tool_call_id": "call_abc"}])
        talk.ask("And?", max_tokens=20)
        first = exported(talk)
        user, called, answer, done, asked, broken = first["messages"]
        assert (user["content"], asked["content"]) == ("Look.", "And?")
        assert (called["content"], called["reasoning_content"]) == ("I look.", "Hm.")
        assert [each["id"] for each in called["tool_calls"]] == ["call_abc", "call_1_1"]
        assert {each["function"]["name"] for each in called["tool_calls"]} == {"look"}
        assert answer["tool_call_id"] == "call_abc"
        assert (done["content"], done["reasoning_content"]) == ("Done.", "Hm.")
        assert "tool_calls" not in broken
        assert broken["content"].startswith("<tool_call>")  # unfinished: kept as it was sampled
        raw = [each.text for each in talk.messages()]
        assert raw[1].startswith("<think>")  # by default, clients get replies as they were sampled

        again = exported(imported(client, first, "again"))
        assert again == {**first, "id": "again"}
        third = exported(imported(client, again, "third"))
        assert third == {**first, "id": "third"}


def test_a_line_may_have_any_number_of_messages() -> None:
    messages = [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "Yes."}]
    line = {"messages": [{"role": "system", "content": "Be brief."}, *messages * 20_000]}
    given = parse_line(json.dumps(line))
    assert (given.system_prompt, len(given.messages)) == ("Be brief.", 40_000)


def test_unanswered_calls_get_ids_from_their_place() -> None:
    call = {"id": "", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    named, now = {**call, "id": "call_7"}, datetime.now(UTC)
    state = ConversationState("talk", 1, 5, 0, 100, {}, (), {}, "", "", now, now)

    def message(index: int, role: str, text: str, call_id: str = "", *calls: Any) -> Message:
        return Message(index, role, text, call_id, 1, 0, 0, (), "", {}, calls)

    messages = [
        message(0, "user", "Look."),
        message(1, "assistant", "", "", call, named, call),
        message(2, "tool", "A door.", "call_7"),
        message(3, "tool", "A wall.", "call_8"),
        message(4, "assistant", "", "", call),
    ]
    line = json.loads("".join(line_of(state, messages)))
    ids = [[each["id"] for each in made.get("tool_calls", ())] for made in line["messages"]]
    assert ids == [[], ["call_8", "call_7", "call_1_2"], [], [], ["call_4_0"]]
