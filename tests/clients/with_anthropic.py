"""Anthropic's own client: messages whole and streamed, tools, counts, its tool runner."""

from __future__ import annotations

import itertools
from typing import Any

import anthropic
import pydantic

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

# Any: the scenes check the values, whichever of the SDK's many types they have.
client: Any = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
GIVEN: Any = {"model": MODEL, "max_tokens": 500}
LOOK: Any = {
    "name": "look",
    "description": "Looks.",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}},
}


class City(pydantic.BaseModel):
    name: str
    people: int


def user(content: Any) -> Any:
    return {"role": "user", "content": content}


@scene("models")
def _() -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL


@scene("messages, ten turns")
def _() -> None:
    turns, messages = Turns(), [user("Hello")]
    says(*(f"<think>\nHm.\n</think>\n\nAnswer {turn}." for turn in range(10)))
    for turn in range(10):
        message = client.messages.create(**GIVEN, system="Be brief.", messages=messages)
        assert [each.type for each in message.content] == ["thinking", "text"]
        assert (message.content[1].text, message.stop_reason) == (f"Answer {turn}.", "end_turn")
        messages += [{"role": "assistant", "content": message.content}, user(f"And {turn}?")]
    turns.one_conversation(10)


@scene("messages.stream")
def _() -> None:
    says("<think>\nHm.\n</think>\n\nOne two three.")
    with client.messages.stream(**GIVEN, messages=[user("Count.")]) as stream:
        text = "".join(stream.text_stream)
    assert text == "One two three."
    message = stream.get_final_message()
    assert message.content[-1].text == text
    assert message.usage.output_tokens > 0


@scene("messages.stream, with a call")
def _() -> None:
    turns, messages = Turns(), [user("Look.")]
    says("I look." + call("look", place="attic") + "\n" + call("look", place="cellar"), "Dust.")
    with client.messages.stream(**GIVEN, messages=messages, tools=[LOOK]) as stream:
        kinds = {event.type for event in stream}
    assert {"input_json", "text", "content_block_stop", "message_stop"} <= kinds
    message = stream.get_final_message()
    assert message.stop_reason == "tool_use"
    calls = [each for each in message.content if each.type == "tool_use"]
    assert [each.input for each in calls] == [{"place": "attic"}, {"place": "cellar"}]
    results = [
        {"type": "tool_result", "tool_use_id": each.id, "content": "Dust."} for each in calls
    ]
    messages += [{"role": "assistant", "content": message.content}, user(results)]
    message = client.messages.create(**GIVEN, messages=messages, tools=[LOOK])
    assert message.content[0].text == "Dust."
    turns.one_conversation(2)


@scene("messages.create, streamed")
def _() -> None:
    says("One two three.")
    events = list(client.messages.create(**GIVEN, messages=[user("Count.")], stream=True))
    assert (events[0].type, events[-1].type) == ("message_start", "message_stop")


@scene("messages of asyncio, streamed")
async def _() -> None:
    says("One two three.")
    async with (
        anthropic.AsyncAnthropic(base_url=URL, api_key="none") as other,
        other.messages.stream(**GIVEN, messages=[user("Count.")]) as stream,
    ):
        text = "".join([each async for each in stream.text_stream])
    assert text == "One two three."


@scene("messages.parse")
def _() -> None:
    says('{"name": "Oslo", "people": 700000}')
    message = client.messages.parse(**GIVEN, messages=[user("Which city?")], output_format=City)
    assert message.parsed_output == City(name="Oslo", people=700000)


@scene("count_tokens")
def _() -> None:
    short = client.messages.count_tokens(model=MODEL, messages=[user("Hello")])
    long = client.messages.count_tokens(
        model=MODEL, messages=[user("Hello")], system="Be brief.", tools=[LOOK]
    )
    assert 0 < short.input_tokens < long.input_tokens


@scene("cache_control, thinking, metadata")
def _() -> None:
    says("Well.")
    mark: Any = {"type": "ephemeral"}
    message = client.messages.create(
        **GIVEN,
        system=[{"type": "text", "text": "Be brief.", "cache_control": mark}],
        messages=[user([{"type": "text", "text": "Well?", "cache_control": mark}])],
        tools=[{**LOOK, "cache_control": mark}],
        tool_choice={"type": "auto"},
        metadata={"user_id": "ada"},
        thinking={"type": "enabled", "budget_tokens": 1024},
        service_tier="auto",
        stop_sequences=["###"],
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 20},
    )
    assert message.content[-1].text == "Well."


@scene("errors are its own")
def _() -> None:
    for arguments, kind in (
        ({"model": "another"}, anthropic.NotFoundError),
        ({"max_tokens": -1}, anthropic.BadRequestError),
        ({"messages": []}, anthropic.BadRequestError),
    ):
        try:
            client.messages.create(**{**GIVEN, "messages": [user("Hello")], **arguments})
        except kind:
            continue
        raise AssertionError(f"{arguments} are not refused")


@scene("beta.messages.tool_runner, 30 tool turns")
def _() -> None:
    @anthropic.beta_tool
    def look(place: str) -> str:
        """Looks.

        Args:
            place: Where.
        """
        return f"A chair in {place}."

    turns = Turns()
    says(*agent_replies())
    messages = list(
        client.beta.messages.tool_runner(**GIVEN, messages=[user("Look around.")], tools=[look])
    )
    assert len(messages) == TURNS + 1
    assert messages[-1].content[-1].text == "Done."
    for before, after in itertools.pairwise(messages):
        assert after.usage.cache_read_input_tokens >= (
            before.usage.cache_read_input_tokens + before.usage.input_tokens
        )
    turns.one_conversation(TURNS + 1)


if __name__ == "__main__":
    run_scenes("anthropic")
