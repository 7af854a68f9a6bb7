"""LangChain's ChatOpenAI: chat completions and responses, tools, structured output, an agent."""

from __future__ import annotations

from typing import Any

import pydantic
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

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


class City(pydantic.BaseModel):
    """A city."""

    name: str
    people: int


@tool
def look(place: str) -> str:
    """Looks."""
    return f"A chair in {place}."


def model(**options: Any) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", max_retries=0, **options)


def talk(chat: ChatOpenAI, *, stream: bool = False) -> None:
    turns, messages = Turns(), [SystemMessage("Be brief."), HumanMessage("Hello")]
    says(*(f"<think>\nHm.\n</think>\n\nAnswer {turn}." for turn in range(5)))
    for turn in range(5):
        if stream:
            chunks = list(chat.stream(messages))
            reply = chunks[0]
            for each in chunks[1:]:
                reply += each
        else:
            reply = chat.invoke(messages)
        assert reply.text == f"Answer {turn}.", reply.text
        cached = reply.usage_metadata["input_token_details"]["cache_read"]
        assert cached > 0 or not turn
        messages += [reply, HumanMessage(f"And {turn}?")]
    turns.one_conversation(5)


def agent(chat: ChatOpenAI, *, stream: bool = False) -> None:
    """Run LangChain's agent loop: append replies unchanged, and the results of tools."""
    turns, bound = Turns(), chat.bind_tools([look])
    messages: list[Any] = [HumanMessage("Look around.")]
    says(*agent_replies())
    for _ in range(TURNS + 1):
        if stream:
            reply: Any = None
            for chunk in bound.stream(messages):
                reply = chunk if reply is None else reply + chunk
        else:
            reply = bound.invoke(messages)
        messages.append(reply)
        if not reply.tool_calls:
            break
        messages += [look.invoke(each) for each in reply.tool_calls]
    assert reply.text == "Done."
    assert isinstance(messages[2], ToolMessage)
    turns.one_conversation(TURNS + 1)


@scene("invoke, five turns")
def _() -> None:
    talk(model())


@scene("stream, five turns")
def _() -> None:
    talk(model(stream_usage=True), stream=True)


@scene("ainvoke and astream")
async def _() -> None:
    says("One.", "Two.")
    assert (await model().ainvoke("Count.")).text == "One."
    assert "".join([each.text async for each in model().astream("Count.")]) == "Two."


@scene("batch")
def _() -> None:
    says("Yes.", "Yes.", "Yes.")
    assert [each.text for each in model().batch(["A?", "B?", "C?"])] == ["Yes."] * 3


@scene("bind_tools")
def _() -> None:
    says("I look." + call("look", place="attic") + "\n" + call("look", place="cellar"))
    reply = model().bind_tools([look]).invoke("Look.")
    assert [each["args"] for each in reply.tool_calls] == [{"place": "attic"}, {"place": "cellar"}]


@scene("with_structured_output, json_schema")
def _() -> None:
    says('{"name": "Oslo", "people": 700000}')
    found = model().with_structured_output(City).invoke("Which city?")
    assert found == City(name="Oslo", people=700000)


@scene("with_structured_output, json_mode")
def _() -> None:
    says('{"name": "Oslo", "people": 700000}')
    found = model().with_structured_output(City, method="json_mode").invoke("Which city?")
    assert found == City(name="Oslo", people=700000)


@scene("with_structured_output, function_calling (a forced call)")
def _() -> None:
    says(call("City", name="Oslo", people=700000))
    found = model().with_structured_output(City, method="function_calling").invoke("Which?")
    assert found == City(name="Oslo", people=700000)


@scene("an agent of 30 tool turns")
def _() -> None:
    agent(model())


@scene("an agent of 30 tool turns, streamed")
def _() -> None:
    agent(model(), stream=True)


@scene("responses, five turns")
def _() -> None:
    talk(model(use_responses_api=True, use_previous_response_id=True))


@scene("responses, five turns, streamed")
def _() -> None:
    talk(model(use_responses_api=True, use_previous_response_id=True), stream=True)


@scene("responses with the history sent back")
def _() -> None:
    talk(model(use_responses_api=True))


@scene("responses with the history sent back, an agent of 30 tool turns")
def _() -> None:
    agent(model(use_responses_api=True))


@scene("responses, with_structured_output")
def _() -> None:
    says('{"name": "Oslo", "people": 700000}')
    found = model(use_responses_api=True).with_structured_output(City).invoke("Which city?")
    assert found == City(name="Oslo", people=700000)


@scene("responses, an agent of 30 tool turns")
def _() -> None:
    agent(model(use_responses_api=True, use_previous_response_id=True))


if __name__ == "__main__":
    run_scenes("langchain-openai")
