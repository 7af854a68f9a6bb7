"""LiteLLM: OpenAI's chat completions and responses, and Anthropic's messages, through one interface."""

from __future__ import annotations

import json
from typing import Any

import litellm

from tests.clients.play import (
    MODEL,
    TURNS,
    URL,
    Turns,
    agent_replies,
    call,
    run_scenes,
    says,
    scene,
)

litellm.num_retries = 0
OPENAI_ARGUMENTS: Any = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"}
VLLM_ARGUMENTS: Any = {**OPENAI_ARGUMENTS, "model": f"hosted_vllm/{MODEL}"}
ANTHROPIC_ARGUMENTS: Any = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "none"}
LOOK: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def talk(given: Any) -> None:
    turns, messages = Turns(), [user("Hello")]
    says(*(f"<think>\nHm.\n</think>\n\nAnswer {turn}." for turn in range(5)))
    for turn in range(5):
        reply = litellm.completion(**given, messages=messages, max_tokens=200)
        message = reply.choices[0].message
        assert message.content == f"Answer {turn}.", message.content
        assert message.reasoning_content == "Hm."
        messages += [message, user(f"And {turn}?")]
    turns.one_conversation(5)


def streamed(given: Any) -> None:
    says("<think>\nHm.\n</think>\n\nOne two three.")
    chunks = list(
        litellm.completion(
            **given,
            messages=[user("Count.")],
            stream=True,
            stream_options={"include_usage": True},
            max_tokens=200,
        )
    )
    reply = litellm.stream_chunk_builder(chunks, messages=[user("Count.")])
    assert reply.choices[0].message.content == "One two three."
    assert reply.usage.completion_tokens > 0


def agent(given: Any, *, stream: bool) -> None:
    turns, messages = Turns(), [user("Look around.")]
    says(*agent_replies())
    for _ in range(TURNS + 1):
        reply = litellm.completion(
            **given, messages=messages, tools=[LOOK], stream=stream, max_tokens=200
        )
        if stream:
            reply = litellm.stream_chunk_builder(list(reply), messages=messages)
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for each in message.tool_calls:
            place = json.loads(each.function.arguments)["place"]
            messages.append(
                {"role": "tool", "tool_call_id": each.id, "content": f"A chair in {place}."}
            )
    assert message.content == "Done."
    turns.one_conversation(TURNS + 1)


@scene("completion, five turns")
def _() -> None:
    talk(OPENAI_ARGUMENTS)


@scene("completion with the provider hosted_vllm, five turns")
def _() -> None:
    talk(VLLM_ARGUMENTS)


@scene("completion, streamed")
def _() -> None:
    streamed(OPENAI_ARGUMENTS)


@scene("acompletion, streamed")
async def _() -> None:
    says("One two three.")
    stream = await litellm.acompletion(**OPENAI_ARGUMENTS, messages=[user("Count.")], stream=True)
    text = "".join([each.choices[0].delta.content or "" async for each in stream])
    assert text == "One two three."


@scene("completion with a schema")
def _() -> None:
    says('{"name": "Oslo"}')
    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    reply = litellm.completion(**OPENAI_ARGUMENTS, messages=[user("Which?")], response_format=form)
    assert json.loads(reply.choices[0].message.content) == {"name": "Oslo"}


@scene("an agent of 30 tool turns")
def _() -> None:
    agent(OPENAI_ARGUMENTS, stream=False)


@scene("an agent of 30 tool turns, streamed")
def _() -> None:
    agent(OPENAI_ARGUMENTS, stream=True)


@scene("responses, by previous_response_id")
def _() -> None:
    turns, previous = Turns(), None
    says("One.", "Two.")
    for text in ("One.", "Two."):
        response = litellm.responses(
            **OPENAI_ARGUMENTS, input="Count.", previous_response_id=previous
        )
        assert response.output[-1].content[0].text == text
        previous = response.id
    turns.one_conversation(2)


@scene("responses, streamed")
def _() -> None:
    says("I look." + call("look", place="attic"))
    tools: Any = [{"type": "function", **LOOK["function"]}]
    events = list(litellm.responses(**OPENAI_ARGUMENTS, input="Look.", tools=tools, stream=True))
    assert events[-1].type == "response.completed"


@scene("text_completion")
def _() -> None:
    says("and then some")
    given = {**OPENAI_ARGUMENTS, "model": f"text-completion-openai/{MODEL}"}
    reply = litellm.text_completion(**given, prompt="Once", max_tokens=50)
    assert reply.choices[0].text == "and then some"


@scene("Anthropic's messages, five turns")
def _() -> None:
    talk(ANTHROPIC_ARGUMENTS)


@scene("Anthropic's messages, streamed")
def _() -> None:
    streamed(ANTHROPIC_ARGUMENTS)


@scene("Anthropic's messages, an agent of 30 tool turns")
def _() -> None:
    agent(ANTHROPIC_ARGUMENTS, stream=False)


if __name__ == "__main__":
    run_scenes("litellm")
