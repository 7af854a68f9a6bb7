"""LlamaIndex's OpenAILike: complete, chat, streams, tools, structured output."""

from __future__ import annotations

from typing import Any

import pydantic
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

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


def look(place: str) -> str:
    """Looks."""
    return f"A chair in {place}."


LOOK = FunctionTool.from_defaults(look)


def model(**options: Any) -> OpenAILike:
    return OpenAILike(
        model=MODEL,
        api_base=f"{URL}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        max_retries=0,
        context_window=8192,
        **options,
    )


def talk(*, stream: bool) -> None:
    turns, chat = Turns(), model()
    messages = [ChatMessage(role="system", content="Be brief."), ChatMessage(content="Hello")]
    says(*(f"<think>\nHm.\n</think>\n\nAnswer {turn}." for turn in range(5)))
    for turn in range(5):
        if stream:
            *_, reply = chat.stream_chat(messages)
        else:
            reply = chat.chat(messages)
        assert reply.message.content == f"Answer {turn}.", reply.message.content
        messages += [reply.message, ChatMessage(content=f"And {turn}?")]
    turns.one_conversation(5)


def agent(*, stream: bool) -> None:
    turns, chat = Turns(), model()
    messages = [ChatMessage(content="Look around.")]
    says(*agent_replies())
    for _ in range(TURNS + 1):
        if stream:
            *_, reply = chat.stream_chat_with_tools([LOOK], chat_history=messages)
        else:
            reply = chat.chat_with_tools([LOOK], chat_history=messages)
        messages.append(reply.message)
        calls = chat.get_tool_calls_from_response(reply, error_on_no_tool_call=False)
        for each in calls:
            output = LOOK(**each.tool_kwargs)
            messages.append(
                ChatMessage(
                    role="tool",
                    content=str(output),
                    additional_kwargs={"tool_call_id": each.tool_id},
                )
            )
        if not calls:
            break
    assert reply.message.content == "Done.", reply.message.content
    turns.one_conversation(TURNS + 1)


@scene("chat, five turns")
def _() -> None:
    talk(stream=False)


@scene("stream_chat, five turns")
def _() -> None:
    talk(stream=True)


@scene("achat")
async def _() -> None:
    says("Hello you.")
    reply = await model().achat([ChatMessage(content="Hello")])
    assert reply.message.content == "Hello you."


@scene("complete and stream_complete")
def _() -> None:
    says("One.", "Two.")
    assert model().complete("Count.").text == "One."
    *_, last = model().stream_complete("Count.")
    assert last.text == "Two."


@scene("chat_with_tools, two calls at once")
def _() -> None:
    chat = model()
    says(call("look", place="attic") + "\n" + call("look", place="cellar"))
    reply = chat.chat_with_tools([LOOK], user_msg="Look.", allow_parallel_tool_calls=True)
    calls = chat.get_tool_calls_from_response(reply)
    assert [each.tool_kwargs for each in calls] == [{"place": "attic"}, {"place": "cellar"}]


@scene("as_structured_llm (a schema)")
def _() -> None:
    says('{"name": "Oslo", "people": 700000}')
    chat = model(should_use_structured_outputs=True)
    found = chat.as_structured_llm(City).complete("Which city?")
    assert found.raw == City(name="Oslo", people=700000)


@scene("as_structured_llm (a forced call)")
def _() -> None:
    says(call("City", name="Oslo", people=700000))
    found = model().as_structured_llm(City).complete("Which city?")
    assert found.raw == City(name="Oslo", people=700000)


@scene("an agent of 30 tool turns")
def _() -> None:
    agent(stream=False)


@scene("an agent of 30 tool turns, streamed")
def _() -> None:
    agent(stream=True)


if __name__ == "__main__":
    run_scenes("llama-index-llms-openai-like")
