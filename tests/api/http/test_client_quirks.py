"""Surprising requests of real clients.

When each client was first tried (scripts/try_clients), its request was refused, or too much was recomputed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.http.rig_http import HttpRig
from tests.api.http.test_agents import scripted
from tests.conversations.scripted_engine import write_script
from tests.text.families import QWEN_3

REPLY = "<think>\nHm.\n</think>\n\nI look."
LOOK = '<tool_call>\n{"name": "look", "arguments": {"place": "attic"}}\n</tool_call>'
FUNCTION = {"name": "look", "parameters": {"type": "object"}}
HELLO = {"role": "user", "content": "Hello"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clients")


@pytest.fixture(scope="module")
def rig(folder: Path) -> Iterator[HttpRig]:
    with scripted(folder, QWEN_3, []) as found:
        yield found


@pytest.fixture
def says(folder: Path, rig: HttpRig) -> Any:
    return lambda *replies: write_script(folder / "script.json", replies)


def post(rig: HttpRig, path: str, headers: dict[str, str] | None = None, **body: Any) -> Any:
    answer = rig.ask("POST", path, {"model": "model", **body}, headers)
    assert answer.status == 200, answer.body
    return answer


def num_conversations(rig: HttpRig) -> int:
    answer = rig.ask("POST", "/pensieve.v1.ConversationService/ListConversations", {})
    return len(answer.value["conversations"])


def test_a_reply_with_litellms_added_fields_still_matches(rig: HttpRig, says: Any) -> None:
    says(REPLY + LOOK, "Done.")
    tools = [{"type": "function", "function": FUNCTION}]
    path, messages = "/v1/chat/completions", [HELLO]
    first = post(rig, path, messages=messages, tools=tools)
    message = first.value["choices"][0]["message"]
    (call,) = message["tool_calls"]
    call |= {"index": 0, "provider_specific_fields": {}}
    call["function"]["provider_specific_fields"] = None
    added = {"refusal": None, "reasoning_content": "Hm."}
    message |= {"function_call": None, "provider_specific_fields": added}
    answer = {"role": "tool", "tool_call_id": call["id"], "content": "Dust."}
    second = post(rig, path, messages=[*messages, message, answer], tools=tools)
    assert second.headers["x-pensieve-bound"] == "appended"
    assert second.headers["x-pensieve-recomputed-tokens"] == "0"


def test_developer_messages_become_system_messages_without_a_developer_role(
    rig: HttpRig, says: Any
) -> None:
    path, counts = "/v1/chat/completions", []
    for role in ("developer", "system"):
        says("Yes.")
        messages = [{"role": role, "content": "Be brief."}, HELLO]
        counts.append(post(rig, path, messages=messages).value["usage"]["prompt_tokens"])
    assert counts[0] == counts[1]
    says("Yes.")
    items = [{"role": "developer", "content": "Be brief."}, HELLO]
    assert post(rig, "/v1/responses", input=items).value["usage"]["input_tokens"] == counts[0]


def test_thinking_blocks_have_a_signature_and_match_when_sent_back(rig: HttpRig, says: Any) -> None:
    """Without a signature, Pydantic AI sends thinking back as text. That would be another history."""
    given: dict[str, Any] = {"max_tokens": 100}
    messages = [HELLO]
    says(REPLY, REPLY)
    whole = post(rig, "/v1/messages", messages=messages, **given).value["content"]
    assert whole[0]["type"] == "thinking"
    assert whole[0]["signature"]
    events = post(rig, "/v1/messages", messages=messages, stream=True, **given).events
    (block,) = [
        each["content_block"]
        for each in events
        if each["type"] == "content_block_start" and each["content_block"]["type"] == "thinking"
    ]
    signed = [
        each["delta"]["signature"]
        for each in events
        if each["type"] == "content_block_delta" and each["delta"]["type"] == "signature_delta"
    ]
    assert (block["signature"], signed) == ("", [whole[0]["signature"]])
    says("Done.")
    messages = [HELLO, {"role": "assistant", "content": whole}, HELLO]
    again = post(rig, "/v1/messages", messages=messages, **given)
    assert again.headers["x-pensieve-known-messages"] == "2"


def test_unsupported_threads_get_the_error_that_anthropics_tool_runner_expects(
    rig: HttpRig, says: Any
) -> None:
    body: dict[str, Any] = {"model": "model", "max_tokens": 100, "messages": [HELLO]}
    refused = rig.ask("POST", "/v1/messages", {**body, "thread": {"type": "create"}})
    assert refused.status == 400
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert refused.error["details"] == details
    says("Yes.")
    assert post(rig, "/v1/messages", **{**body, "thread": None}).value["stop_reason"] == "end_turn"


def test_open_webui_tasks_are_not_stored(rig: HttpRig, says: Any) -> None:
    """Open WebUI sends the header `X-OpenWebUI-Task: {{TASK}}`, which is empty for chats."""
    path, chat = "/v1/chat/completions", {"x-openwebui-chat-id": "c1"}
    says("Hello you.", '{"title": "Greetings"}')
    talk = {"messages": [HELLO], "stream": True, "stream_options": {"include_usage": True}}
    begun = post(rig, path, chat | {"x-openwebui-task": ""}, **talk)
    assert begun.headers["x-pensieve-bound"] == "new"
    before = num_conversations(rig)
    title = {"messages": [{"role": "user", "content": "### Task: a title"}], "max_tokens": 1000}
    answer = post(rig, path, chat | {"x-openwebui-task": "title_generation"}, **title, stream=False)
    assert json.loads(answer.value["choices"][0]["message"]["content"]) == {"title": "Greetings"}
    assert "x-pensieve-conversation-id" not in answer.headers
    assert num_conversations(rig) == before
    says("Still here.")
    spoken = {"role": "assistant", "content": "Hello you."}
    again = post(rig, path, chat, **{**talk, "messages": [HELLO, spoken, HELLO]})
    assert again.headers["x-pensieve-bound"] == "appended"


def test_a_response_with_the_full_history_continues_its_conversation(
    rig: HttpRig, says: Any
) -> None:
    """OpenAI's Agents SDK does this by default."""
    path, items = "/v1/responses", [HELLO]
    tools = [{"type": "function", **FUNCTION, "strict": False}]
    given: dict[str, Any] = {"tools": tools, "instructions": "Be brief."}
    says(*[REPLY + LOOK] * 4, "Done.", "Another.")
    seen: list[Any] = []
    for _ in range(5):
        seen.append(post(rig, path, input=items, **given))
        output = seen[-1].value["output"]
        items = items + [each for each in output if each["type"] != "reasoning"]
        for each in output:
            if each["type"] == "function_call":
                answer = {"call_id": each["call_id"], "output": "Dust."}
                items.append({"type": "function_call_output", **answer})
    assert [each.headers["x-pensieve-bound"] for each in seen] == ["new"] + ["appended"] * 4
    assert all(each.headers["x-pensieve-recomputed-tokens"] == "0" for each in seen)
    names = {each.headers["x-pensieve-conversation-id"] for each in seen}
    assert len(names) == 1
    usages = [each.value["usage"] for each in seen]
    for before, after in itertools.pairwise(usages):
        cached = after["input_tokens_details"]["cached_tokens"]
        assert cached == before["total_tokens"] - 1  # all tokens but the last, which has no KV yet
    # Sending the same history again makes a fork. Another session never shares a conversation.
    forked = post(rig, path, input=items[:-1], **given)
    assert forked.headers["x-pensieve-bound"] == "forked"
    # When the last of its responses is deleted, the conversation is deleted, too.
    (name,) = names
    for number, each in enumerate(seen):
        assert rig.ask("GET", f"/v1/conversations/{name}").status == 200, number
        assert rig.ask("DELETE", f"/v1/responses/{each.value['id']}").status == 200
    assert rig.ask("GET", f"/v1/conversations/{name}").status == 404


def test_a_response_history_from_another_session_is_forked(rig: HttpRig, says: Any) -> None:
    path = "/v1/responses"
    says("Yes.", "No.", "No.", "No.")
    first = post(rig, path, {"x-session-id": "red"}, input=[HELLO])
    items = [HELLO, *first.value["output"], HELLO]
    for headers, key, how in (
        ({"x-session-id": "blue"}, "", "forked"),
        ({}, "green", "forked"),
        ({"x-session-id": "red"}, "", "appended"),
    ):
        answer = post(rig, path, headers, input=items, prompt_cache_key=key or None)
        assert answer.headers["x-pensieve-bound"] == how


def test_ignored_fields_are_named_in_a_header(rig: HttpRig, says: Any) -> None:
    """Open WebUI sends `keep_alive` of its settings to every server, and LM Studio's clients `ttl`."""
    says("Yes.", "Yes.", "Yes.")
    path = "/v1/chat/completions"
    given: dict[str, Any] = {"messages": [HELLO]}
    sent: dict[str, Any] = {
        "keep_alive": "5m",
        "ttl": 300,
        "stream_options": {"include_usage": True},
    }
    answer = post(rig, path, **given, **sent)
    named = answer.headers["x-pensieve-ignored"].split(", ")
    assert sorted(named) == sorted(sent)
    assert "x-pensieve-ignored" not in post(rig, path, **given).headers
    answer = rig.ask("POST", path, {"model": "model:latest", **given})
    assert (answer.status, answer.value["model"]) == (200, "model")
    assert rig.ask("GET", "/v1/models/model:latest").status == 200
