"""Requests of Open WebUI 0.12, written by hand. It depends on torch, so it is not installed.

Chats are streamed. The history is sent back without thinking, and with tool calls assembled from deltas.
Titles, tags and follow-up questions are separate requests of the same chat.
"""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from tests.clients.play import MODEL, TURNS, URL, Turns, agent_replies, run_scenes, says, scene

CHAT = {"X-OpenWebUI-User-Id": "u1", "X-OpenWebUI-User-Name": "Ada%20L", "X-OpenWebUI-Chat-Id": "c"}
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}


def request(path: str, body: Any = None, **headers: str) -> bytes:
    given = {"Content-Type": "application/json", "Authorization": "Bearer none", **headers}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{URL}/v1{path}", data, given)) as answer:
        found: bytes = answer.read()
    return found


def streamed(messages: list[Any], **more: Any) -> dict[str, Any]:
    """Return the reply, assembled from its deltas."""
    body = {
        "stream": True,
        "model": MODEL,
        "messages": messages,
        "stream_options": {"include_usage": True},
        **more,
    }
    raw = request("/chat/completions", body, **CHAT, **{"X-OpenWebUI-Task": ""}).decode()
    events = [line.removeprefix("data: ") for line in raw.splitlines() if line[:6] == "data: "]
    assert events[-1] == "[DONE]"
    reply: dict[str, Any] = {"role": "assistant", "content": ""}
    for chunk in map(json.loads, events[:-1]):
        for choice in chunk["choices"]:
            delta = choice["delta"]
            reply["content"] += delta.get("content") or ""
            for each in delta.get("tool_calls", ()):
                calls = reply.setdefault("tool_calls", [])
                if each["index"] == len(calls):
                    calls.append(each)
                else:
                    function = calls[each["index"]]["function"]
                    function["arguments"] += each["function"]["arguments"]
    return reply


def task(name: str, text: str) -> str:
    """Send a task request, with the header `X-OpenWebUI-Task: {{TASK}}`."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "stream": False,
        "max_tokens": 1000,
    }
    answer = json.loads(request("/chat/completions", body, **CHAT, **{"X-OpenWebUI-Task": name}))
    found: str = answer["choices"][0]["message"]["content"]
    return found


def conversations() -> list[Any]:
    data, kind = b"{}", {"Content-Type": "application/json"}
    path = f"{URL}/pensieve.v1.ConversationService/ListConversations"
    with urllib.request.urlopen(urllib.request.Request(path, data, kind)) as answer:
        found: list[Any] = json.load(answer)["conversations"]
    return found


@scene("the list of models")
def _() -> None:
    found = json.loads(request("/models"))
    assert (found["object"], found["data"][0]["id"]) == ("list", MODEL)


@scene("a chat of five turns with title, tags and follow-ups")
def _() -> None:
    turns = Turns()
    messages: list[Any] = [{"role": "system", "content": "Be brief."}]
    answers = [f"<think>\nHm.\n</think>\n\nAnswer {turn}." for turn in range(5)]
    says(answers[0], '{"title": "Hello"}', '{"tags": ["a"]}', '{"follow_ups": []}', *answers[1:])
    for turn in range(5):
        messages.append({"role": "user", "content": f"Question {turn}?"})
        messages.append(streamed(messages, temperature=0.7))
        assert messages[-1]["content"] == f"Answer {turn}."
        if not turn:
            assert json.loads(task("title_generation", "### Task: title")) == {"title": "Hello"}
            assert json.loads(task("tags_generation", "### Task: tags")) == {"tags": ["a"]}
            assert json.loads(task("follow_up_generation", "### Task")) == {"follow_ups": []}
    listed = conversations()
    assert len(listed) == 1
    of_chat = [each for each in turns.all(8) if each["conversation_id"].startswith("chat-")]
    assert len({each["conversation_id"] for each in of_chat}) == 1
    assert len(of_chat) == 5
    assert not any(each["recomputed_tokens"] for each in of_chat)


@scene("native calls of tools, 30 turns")
def _() -> None:
    turns = Turns()
    messages: list[Any] = [{"role": "user", "content": "Look around."}]
    says(*agent_replies())
    while True:
        reply = streamed(messages, tools=[LOOK])
        messages.append(reply)
        if "tool_calls" not in reply:
            break
        for each in reply["tool_calls"]:
            messages.append({"role": "tool", "tool_call_id": each["id"], "content": "A chair."})
    assert reply["content"] == "Done."
    turns.one_conversation(TURNS + 1)


if __name__ == "__main__":
    run_scenes()
