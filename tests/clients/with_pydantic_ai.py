"""Pydantic AI: agents over OpenAI's chat completions and responses, and Anthropic's messages."""

from __future__ import annotations

from typing import Any

import pydantic
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

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

LIMITS = UsageLimits(request_limit=TURNS + 2)


class City(pydantic.BaseModel):
    name: str
    people: int


OSLO = City(name="Oslo", people=700000)


def chat() -> Any:
    return OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))


def responses() -> Any:
    provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
    return OpenAIResponsesModel(MODEL, provider=provider)


def messages() -> Any:
    return AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key="none"))


def talk(model: Any, settings: Any = None) -> None:
    turns, history = Turns(), None
    agent = Agent(model, instructions="Be brief.", model_settings=settings)
    says(*(f"<think>\nHm.\n</think>\n\nAnswer {turn}." for turn in range(5)))
    for turn in range(5):
        result = agent.run_sync(f"Question {turn}?", message_history=history)
        assert result.output == f"Answer {turn}.", result.output
        history = result.all_messages()
    turns.one_conversation(5)


async def streamed(model: Any) -> None:
    says("<think>\nHm.\n</think>\n\nOne two three.")
    async with Agent(model).run_stream("Count.") as result:
        pieces = [each async for each in result.stream_text(delta=True, debounce_by=None)]
    assert "".join(pieces) == "One two three.", pieces


def agent_with_look_tool(model: Any, settings: Any = None) -> Agent:
    agent = Agent(model, model_settings=settings)

    @agent.tool_plain
    def look(place: str) -> str:
        """Looks."""
        return f"A chair in {place}."

    return agent


def agent_runs(model: Any, settings: Any = None) -> None:
    turns = Turns()
    says(*agent_replies())
    result = agent_with_look_tool(model, settings).run_sync("Look around.", usage_limits=LIMITS)
    assert result.output == "Done."
    turns.one_conversation(TURNS + 1)


async def agent_streams(model: Any) -> None:
    turns = Turns()
    says(*agent_replies())
    kinds = set()

    async def read(_: Any, events: Any) -> None:
        kinds.update([type(each).__name__ async for each in events])

    result = await agent_with_look_tool(model).run(
        "Look around.", usage_limits=LIMITS, event_stream_handler=read
    )
    assert result.output == "Done.", result.output
    assert {"PartStartEvent", "PartDeltaEvent"} <= kinds, kinds
    turns.one_conversation(TURNS + 1)


def check_schema_output(model: Any, output: Any) -> None:
    says('{"name": "Oslo", "people": 700000}')
    assert Agent(model, output_type=output).run_sync("Which city?").output == OSLO


def check_tool_output(model: Any) -> None:
    says(call("final_result", name="Oslo", people=700000))
    agent = Agent(model, output_type=ToolOutput(City, name="final_result"))
    assert agent.run_sync("Which city?").output == OSLO


@scene("chat, five turns")
def _() -> None:
    talk(chat())


@scene("chat, streamed")
async def _() -> None:
    await streamed(chat())


@scene("chat, an agent of 30 tool turns")
def _() -> None:
    agent_runs(chat())


@scene("chat, an agent of 30 tool turns, streamed")
async def _() -> None:
    await agent_streams(chat())


@scene("chat, NativeOutput (a schema)")
def _() -> None:
    check_schema_output(chat(), NativeOutput(City))


@scene("chat, PromptedOutput (json_object)")
def _() -> None:
    check_schema_output(chat(), PromptedOutput(City))


@scene("chat, ToolOutput (a forced call)")
def _() -> None:
    check_tool_output(chat())


@scene("responses, five turns")
def _() -> None:
    talk(responses())


@scene("responses by previous_response_id, five turns")
def _() -> None:
    talk(responses(), {"openai_previous_response_id": "auto"})


@scene("responses, streamed")
async def _() -> None:
    await streamed(responses())


@scene("responses, an agent of 30 tool turns")
def _() -> None:
    agent_runs(responses())


@scene("responses by previous_response_id, an agent of 30 tool turns")
def _() -> None:
    agent_runs(responses(), {"openai_previous_response_id": "auto"})


@scene("responses, NativeOutput (a schema)")
def _() -> None:
    check_schema_output(responses(), NativeOutput(City))


@scene("responses, ToolOutput (a forced call)")
def _() -> None:
    check_tool_output(responses())


@scene("Anthropic's messages, five turns")
def _() -> None:
    talk(messages())


@scene("Anthropic's messages, streamed")
async def _() -> None:
    await streamed(messages())


@scene("Anthropic's messages, an agent of 30 tool turns")
def _() -> None:
    agent_runs(messages())


@scene("Anthropic's messages, an agent of 30 tool turns, streamed")
async def _() -> None:
    await agent_streams(messages())


@scene("Anthropic's messages, ToolOutput (a forced call)")
def _() -> None:
    check_tool_output(messages())


if __name__ == "__main__":
    run_scenes("pydantic-ai-slim")
