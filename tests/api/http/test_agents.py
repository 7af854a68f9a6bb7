"""Agents: models that think and call tools, and clients that send their whole history back.

Clients drop the thinking of replies, and format tool calls in another way. A template would therefore not
reproduce the sampled tokens. The stored conversation has these tokens, so nothing is recomputed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from tests.api.http.rig_http import HttpRig, http_rig
from tests.conversations.rig import write_model
from tests.text.families import DEEPSEEK_R1, QWEN_3, Family

TURNS = 30
CALL = '<tool_call>\n{{"name": "look", "arguments": {{"place": "room {0}", "deep": {0}.0}}}}\n</tool_call>'
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}


@contextmanager
def scripted(folder: Path, family: Family, replies: list[str]) -> Iterator[HttpRig]:
    model = write_model(folder / "model", family)
    script = folder / "script.json"
    script.write_text(json.dumps(replies))
    program = (sys.executable, "-m", "tests.conversations.scripted_engine", str(script))
    with http_rig(folder / "data", program=program, model_folder=model) as found:
        yield found


def thinking_and_calls() -> list[str]:
    calls = [
        f"<think>\nRoom {turn} is next.\n</think>\n\nI look." + CALL.format(turn)
        for turn in range(TURNS)
    ]
    return [*calls, "<think>\nAll seen.\n</think>\n\nDone."]


def agent_loop(client: openai.OpenAI, *, stream: bool) -> list[Any]:
    """Run the agent and return the headers of all answers. The agent sends back the SDK's own messages."""
    messages: list[Any] = [{"role": "user", "content": "Look around."}]
    seen = []
    for _ in range(TURNS + 1):
        if stream:
            message, headers = streamed(client, messages)
        else:
            raw = client.chat.completions.with_raw_response.create(
                model="model", messages=messages, tools=[TOOL]
            )
            message, headers = raw.parse().choices[0].message, raw.headers
            usage: Any = raw.parse().usage
            cached = usage.prompt_tokens_details.cached_tokens
            assert cached + int(headers["x-pensieve-new-tokens"]) == usage.prompt_tokens
            assert headers["x-pensieve-recomputed-tokens"] == "0"
        seen.append(headers)
        if not message.tool_calls:
            assert message.content == "Done."
            return seen
        (call,) = message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert (call.function.name, set(arguments)) == ("look", {"place", "deep"})
        again = {"deep": int(arguments["deep"]), "place": arguments["place"]}
        function = {"name": "look", "arguments": json.dumps(again, indent=1)}
        sent = {"id": "re-made", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [sent]})
        messages.append({"role": "tool", "tool_call_id": "re-made", "content": "A server."})
    raise AssertionError("the agent did not come to an end")


def streamed(client: openai.OpenAI, messages: list[Any]) -> Any:
    raw = client.chat.completions.with_raw_response.create(
        model="model", messages=messages, tools=[TOOL], stream=True
    )
    state = ChatCompletionStreamState(input_tools=[TOOL])
    chunk: Any
    for chunk in raw.parse():
        state.handle_chunk(chunk)
    return state.get_final_completion().choices[0].message, raw.headers


@pytest.mark.parametrize("stream", [False, True])
def test_thirty_agent_turns_stay_in_one_conversation(tmp_path: Path, stream: bool) -> None:
    with scripted(tmp_path, QWEN_3, thinking_and_calls()) as rig:
        with openai.OpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0) as client:
            seen = agent_loop(client, stream=stream)
        names = {headers["x-pensieve-conversation-id"] for headers in seen}
        assert len(names) == 1
        how = [headers["x-pensieve-bound"] for headers in seen]
        assert how == ["new"] + ["appended"] * TURNS
        stored = rig.rig.messages(names.pop())
        replies = [each.content for each in stored if each.finish_reason]
        assert len(replies) == TURNS + 1
        assert all("is next" in each for each in replies[:-1])


@pytest.mark.parametrize("family", [QWEN_3, DEEPSEEK_R1], ids=["qwen3", "r1"])
def test_twenty_turns_of_a_thinking_model_stay_in_one_conversation(
    tmp_path: Path, family: Family
) -> None:
    opening = "" if family is DEEPSEEK_R1 else "<think>"  # DeepSeek's template writes it itself
    replies = [f"{opening}\nThought {n}.\n</think>\n\nAnswer {n}." for n in range(20)]
    with scripted(tmp_path, family, replies) as rig:
        history: list[str] = []
        for turn in range(20):
            answer = rig.chat(*history, f"Question {turn}?", model="model", max_tokens=200)
            message = answer.value["choices"][0]["message"]
            assert message["content"] == f"Answer {turn}."
            assert message["reasoning_content"] == f"Thought {turn}."
            assert answer.headers["x-pensieve-bound"] == ("appended" if turn else "new")
            assert answer.headers["x-pensieve-recomputed-tokens"] == "0"
            usage = answer.value["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert cached + int(answer.headers["x-pensieve-new-tokens"]) == usage["prompt_tokens"]
            history += [f"Question {turn}?", message["content"]]


def test_agent_turns_over_anthropics_api_stay_in_one_conversation(tmp_path: Path) -> None:
    tool: Any = {"name": "look", "input_schema": TOOL["function"]["parameters"]}
    with scripted(tmp_path, QWEN_3, thinking_and_calls()) as rig:
        messages: list[Any] = [{"role": "user", "content": "Look around."}]
        names, computed = set(), 0
        with anthropic.Anthropic(base_url=rig.url, api_key="none", max_retries=0) as client:
            for turn in range(TURNS + 1):
                raw = client.messages.with_raw_response.create(
                    model="model", max_tokens=200, messages=messages, tools=[tool]
                )
                names.add(raw.headers["x-pensieve-conversation-id"])
                assert raw.headers["x-pensieve-recomputed-tokens"] == "0"
                message = raw.parse()
                computed += message.usage.input_tokens
                if message.stop_reason == "end_turn":
                    break
                assert message.stop_reason == "tool_use", turn
                kept = [each for each in message.content if each.type != "thinking"]
                results = [
                    {"type": "tool_result", "tool_use_id": each.id, "content": "A server."}
                    for each in kept
                    if each.type == "tool_use"
                ]
                messages.append({"role": "assistant", "content": [each.to_dict() for each in kept]})
                messages.append({"role": "user", "content": results})
        assert message.stop_reason == "end_turn"
        assert len(names) == 1
        stored = rig.rig.messages(names.pop())
        brought = sum(each.num_tokens for each in stored if not each.finish_reason)
        assert computed == brought + TURNS  # TURNS: the last token of each reply had no KV yet
