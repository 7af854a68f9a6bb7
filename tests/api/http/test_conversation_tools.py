"""Replies are split by the conversation's own tools, not by the tools of a request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.api.http.rig_http import Answer
from tests.api.http.test_agents import CALL, TOOL, scripted
from tests.text.families import QWEN_3

LOOK = {"type": "function", **TOOL["function"]}
REPLY = "I look." + CALL.format(1)


def calls(response: Any) -> list[Any]:
    return [each for each in response["output"] if each["type"] == "function_call"]


def test_tool_calls_are_parsed_with_the_tools_of_the_conversation(tmp_path: Path) -> None:
    with scripted(tmp_path, QWEN_3, [REPLY] * 5) as rig:
        made = rig.ask("POST", "/v1/conversations", {}).value["id"]

        def respond(**fields: Any) -> Answer:
            body = {"model": "model", "input": "Look.", "conversation": made, **fields}
            return rig.ask("POST", "/v1/responses", body)

        first = respond(tools=[LOOK]).value
        (call,) = calls(first)
        assert len(calls(respond().value)) == 1
        assert len(calls(respond(store=False).value)) == 1
        unstored = respond(store=False, stream=True).events
        events = respond(stream=True).events
        for each in (unstored, events):
            assert len(calls(each[-1]["response"])) == 1
            kinds = [event["type"] for event in each]
            assert "response.function_call_arguments.done" in kinds
        stored = rig.ask("GET", f"/v1/responses/{events[-1]['response']['id']}").value
        assert calls(stored) == calls(events[-1]["response"])
        assert call["name"] == "look"


def test_a_tool_output_may_be_added_as_a_pending_item(tmp_path: Path) -> None:
    with scripted(tmp_path, QWEN_3, [REPLY, "Done."]) as rig:
        made = rig.ask("POST", "/v1/conversations", {}).value["id"]
        asked = {"model": "model", "input": "Look.", "conversation": made}
        first = rig.ask("POST", "/v1/responses", {**asked, "tools": [LOOK]}).value
        (call,) = calls(first)
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "A server."}
        added = rig.ask("POST", f"/v1/conversations/{made}/items", {"items": [output]})
        assert added.status == 200
        after = rig.ask("POST", "/v1/responses", {**asked, "input": "And?"})
        assert after.status == 200
        stored = [each.content for each in rig.rig.messages(made)]
        assert stored[2:] == ["A server.", "And?", "Done."]
