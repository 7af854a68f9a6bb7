"""OpenAI's own client, versions 2 and 3: every resource that is served."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic

from tests.clients.play import MODEL, URL, Turns, agent_replies, call, run_scenes, says, scene

# Any: the scenes check the values, whichever of the SDK's many types they have.
client: Any = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
THOUGHT = "<think>\nHm.\n</think>\n\n"
LOOK: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
LOOK_ITEM: Any = {"type": "function", "strict": False, **LOOK["function"]}


class City(pydantic.BaseModel):
    name: str
    people: int


def user(text: str) -> Any:
    return {"role": "user", "content": text}


@scene("models")
def _() -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).owned_by == "pensieve"


@scene("chat, ten turns")
def _() -> None:
    turns, messages = Turns(), [user("Hello")]
    says(*(f"{THOUGHT}Answer {turn}." for turn in range(10)))
    for turn in range(10):
        reply = client.chat.completions.create(model=MODEL, messages=messages)
        message = reply.choices[0].message
        assert (message.content, reply.choices[0].finish_reason) == (f"Answer {turn}.", "stop")
        assert (message.model_extra or {})["reasoning_content"] == "Hm."
        assert reply.usage.prompt_tokens_details.cached_tokens > 0 or not turn
        messages += [message, user(f"And {turn}?")]
    turns.one_conversation(10)


@scene("chat, streamed")
def _() -> None:
    says("One two three.")
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=[user("Count.")],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    deltas = [each.choices[0].delta.content or "" for each in chunks if each.choices]
    assert "".join(deltas) == "One two three."
    assert chunks[-1].usage.completion_tokens > 0


@scene("chat.completions.stream, with a call")
def _() -> None:
    says("I look." + call("look", place="attic"))
    with client.chat.completions.stream(
        model=MODEL, messages=[user("Look.")], tools=[LOOK]
    ) as stream:
        kinds = {event.type for event in stream}
    assert {"chunk", "content.delta", "content.done"} <= kinds
    (found,) = stream.get_final_completion().choices[0].message.tool_calls
    assert json.loads(found.function.arguments) == {"place": "attic"}


@scene("chat with tools, two calls at once")
def _() -> None:
    turns, messages = Turns(), [user("Look.")]
    says(call("look", place="attic") + "\n" + call("look", place="cellar"), "Nothing there.")
    reply = client.chat.completions.create(model=MODEL, messages=messages, tools=[LOOK])
    message = reply.choices[0].message
    assert reply.choices[0].finish_reason == "tool_calls"
    assert len(message.tool_calls) == 2
    messages.append(message)
    for each in message.tool_calls:
        messages.append({"role": "tool", "tool_call_id": each.id, "content": "Dust."})
    reply = client.chat.completions.create(model=MODEL, messages=messages, tools=[LOOK])
    assert reply.choices[0].message.content == "Nothing there."
    turns.one_conversation(2)


@scene("chat.completions.parse")
def _() -> None:
    says('{"name": "Oslo", "people": 700000}')
    reply = client.chat.completions.parse(
        model=MODEL, messages=[user("Which city?")], response_format=City
    )
    assert reply.choices[0].message.parsed == City(name="Oslo", people=700000)


@scene("chat.completions.parse, tools of pydantic (strict)")
def _() -> None:
    says(call("City", name="Oslo", people=7))
    reply = client.chat.completions.parse(
        model=MODEL, messages=[user("Which city?")], tools=[openai.pydantic_function_tool(City)]
    )
    (found,) = reply.choices[0].message.tool_calls
    assert found.function.parsed_arguments == City(name="Oslo", people=7)


@scene("choices, logprobs and what changes nothing")
def _() -> None:
    says("Yes.", "No.")
    reply = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Well?"}]},
        ],
        n=2,
        temperature=0.5,
        top_p=0.9,
        seed=7,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        max_completion_tokens=50,
        stop=["###"],
        metadata={"for": "a test"},
        user="ada",
        service_tier="auto",
        modalities=["text"],
        extra_body={"top_k": 20},
    )
    assert [each.message.content for each in reply.choices] == ["Yes.", "No."]


@scene("errors are its own")
def _() -> None:
    for arguments, kind, param in (
        ({"model": "another"}, openai.NotFoundError, "model"),
        ({"temperature": -1.0}, openai.BadRequestError, "temperature"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"audio": {"voice": "alloy", "format": "wav"}}, openai.BadRequestError, "audio"),
    ):
        given = {"model": MODEL, "messages": [user("Hello")], **arguments}
        found: Any = None
        try:
            client.chat.completions.create(**given)
        except kind as error:
            found = error
        assert found is not None, f"{param} is not refused"
        assert found.param == param, found.param


@scene("chat of asyncio, streamed")
async def _() -> None:
    says("One two three.")
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none") as other:
        stream = await other.chat.completions.create(
            model=MODEL, messages=[user("Count.")], stream=True
        )
        text = "".join([each.choices[0].delta.content or "" async for each in stream])
    assert text == "One two three."


@scene("a client that leaves a stream")
def _() -> None:
    says("word " * 200, "Still here.")
    with client.chat.completions.create(
        model=MODEL, messages=[user("Talk.")], stream=True
    ) as stream:
        next(iter(stream))
    says("Still here.")
    reply = client.chat.completions.create(model=MODEL, messages=[user("Hello?")])
    assert reply.choices[0].message.content == "Still here."


@scene("completions")
def _() -> None:
    says("and then some")
    reply = client.completions.create(model=MODEL, prompt="Once", max_tokens=50)
    assert reply.choices[0].text == "and then some"


@scene("responses, by previous_response_id")
def _() -> None:
    turns, previous = Turns(), None
    says(*(f"{THOUGHT}Answer {turn}." for turn in range(5)))
    for turn in range(5):
        response = client.responses.create(
            model=MODEL,
            input=f"Question {turn}?",
            instructions="Be brief.",
            previous_response_id=previous,
        )
        assert (response.status, response.output_text) == ("completed", f"Answer {turn}.")
        previous = response.id
    turns.one_conversation(5)
    assert client.responses.retrieve(previous).output_text == "Answer 4."
    client.responses.delete(previous)


@scene("responses.stream, with a call")
def _() -> None:
    turns = Turns()
    says(THOUGHT + "I look." + call("look", place="attic"), "Dust.")
    with client.responses.stream(model=MODEL, input="Look.", tools=[LOOK_ITEM]) as stream:
        kinds = [event.type for event in stream]
        response = stream.get_final_response()
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert "response.function_call_arguments.delta" in kinds
    (found,) = [each for each in response.output if each.type == "function_call"]
    output: Any = {"type": "function_call_output", "call_id": found.call_id, "output": "Dust."}
    with client.responses.stream(
        model=MODEL, input=[output], tools=[LOOK_ITEM], previous_response_id=response.id
    ) as stream:
        text = "".join(each.delta for each in stream if each.type == "response.output_text.delta")
    assert text == "Dust."
    turns.one_conversation(2)


@scene("responses with the output sent back")
def _() -> None:
    turns = Turns()
    says(THOUGHT + "I look." + call("look", place="attic"), "Dust.")
    items: list[Any] = [{"role": "user", "content": "Look."}]
    first = client.responses.create(model=MODEL, input=items, tools=[LOOK_ITEM])
    items += first.output
    (found,) = [each for each in first.output if each.type == "function_call"]
    items.append({"type": "function_call_output", "call_id": found.call_id, "output": "Dust."})
    second = client.responses.create(
        model=MODEL,
        input=items,
        tools=[LOOK_ITEM],
        include=["reasoning.encrypted_content"],
    )
    assert second.output_text == "Dust."
    turns.one_conversation(2)


@scene("responses.parse")
def _() -> None:
    says('{"name": "Oslo", "people": 700000}')
    response = client.responses.parse(model=MODEL, input="Which city?", text_format=City)
    assert response.output_parsed == City(name="Oslo", people=700000)


@scene("responses in the background")
def _() -> None:
    says("Done at last.")
    response = client.responses.create(model=MODEL, input="Take your time.", background=True)
    while response.status in ("queued", "in_progress"):
        response = client.responses.retrieve(response.id)
    assert response.output_text == "Done at last."


@scene("conversations and their items")
def _() -> None:
    turns = Turns()
    item: Any = {"type": "message", "role": "user", "content": "My name is Ada."}
    talk = client.conversations.create(metadata={"topic": "names"}, items=[item])
    says("Hello Ada.", "It is Ada.")
    client.responses.create(model=MODEL, input="Hello.", conversation=talk.id)
    response = client.responses.create(model=MODEL, input="My name?", conversation=talk.id)
    assert response.output_text == "It is Ada."
    items = client.conversations.items.list(talk.id, order="asc").data
    assert [each.role for each in items] == ["user", "user", "assistant", "user", "assistant"]
    turns.one_conversation(2)
    client.conversations.update(talk.id, metadata={"topic": "Ada"})
    assert client.conversations.retrieve(talk.id).metadata == {"topic": "Ada"}
    assert client.conversations.delete(talk.id).deleted


@scene("files and batches")
def _() -> None:
    body = {"model": MODEL, "messages": [user("Hello")]}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    says("Hello you.")
    file = client.files.create(file=("requests.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    while (batch := client.batches.retrieve(batch.id)).status in (
        "validating",
        "in_progress",
        "finalizing",
    ):
        pass
    assert batch.status == "completed", batch
    answer = json.loads(client.files.content(batch.output_file_id).text)
    assert answer["response"]["body"]["choices"][0]["message"]["content"] == "Hello you."


@scene("an agent of 30 tool turns, streamed")
def _() -> None:
    turns, messages = Turns(), [user("Look around.")]
    says(*agent_replies())
    cached = prompt = 0
    while True:
        with client.chat.completions.stream(
            model=MODEL,
            messages=messages,
            tools=[LOOK],
            stream_options={"include_usage": True},
        ) as stream:
            completion = stream.get_final_completion()
        message = completion.choices[0].message
        if prompt:  # earlier items must still exist
            assert completion.usage.prompt_tokens_details.cached_tokens >= prompt - 1
        prompt = completion.usage.prompt_tokens
        cached += completion.usage.prompt_tokens_details.cached_tokens
        if not message.tool_calls:
            break
        messages.append(message)
        for each in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": each.id, "content": "A chair."})
    assert message.content == "Done."
    turns.one_conversation(31)


if __name__ == "__main__":
    run_scenes("openai")
