"""OpenAI's Agents SDK over responses and chat completions: tools, streams, sessions, output types."""

from __future__ import annotations

from typing import Any

import agents
import openai
import pydantic
from agents.models.openai_chatcompletions import OpenAIChatCompletionsModel
from agents.models.openai_responses import OpenAIResponsesModel

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

agents.set_tracing_disabled(True)


class City(pydantic.BaseModel):
    name: str
    people: int


@agents.function_tool(strict_mode=False)
def look(place: str) -> str:
    """Looks."""
    return f"A chair in {place}."


@agents.function_tool
def look_strictly(place: str) -> str:
    """Looks."""
    return f"A chair in {place}."


def client() -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)


def agent(kind: Any, **options: Any) -> agents.Agent[Any]:
    return agents.Agent(
        name="Looker",
        instructions="Be brief.",
        model=kind(model=MODEL, openai_client=client()),
        **options,
    )


async def runs(kind: Any, *, stream: bool = False, **given: Any) -> None:
    turns = Turns()
    says(*agent_replies())
    looker, options = agent(kind, tools=[look]), {"max_turns": TURNS + 2, **given}
    if stream:
        result: Any = agents.Runner.run_streamed(looker, "Look around.", **options)
        async for _ in result.stream_events():
            pass
    else:
        result = await agents.Runner.run(looker, "Look around.", **options)
    assert result.final_output == "Done.", result.final_output
    turns.one_conversation(TURNS + 1)


@scene("chat, an agent of 30 tool turns")
async def _() -> None:
    await runs(OpenAIChatCompletionsModel)


@scene("chat, an agent of 30 tool turns, streamed")
async def _() -> None:
    await runs(OpenAIChatCompletionsModel, stream=True)


@scene("chat, a session of five turns")
async def _() -> None:
    turns, session = Turns(), agents.SQLiteSession("ada")
    looker = agent(OpenAIChatCompletionsModel)
    says(*(f"Answer {turn}." for turn in range(5)))
    for turn in range(5):
        result = await agents.Runner.run(looker, f"Question {turn}?", session=session)
        assert result.final_output == f"Answer {turn}."
    turns.one_conversation(5)


@scene("chat, an output type")
async def _() -> None:
    says('{"name": "Oslo", "people": 700000}')
    result = await agents.Runner.run(
        agent(OpenAIChatCompletionsModel, output_type=City), "Which city?"
    )
    assert result.final_output == City(name="Oslo", people=700000)


@scene("responses, an agent of 30 tool turns")
async def _() -> None:
    await runs(OpenAIResponsesModel)


@scene("responses by previous_response_id, an agent of 30 tool turns")
async def _() -> None:
    await runs(OpenAIResponsesModel, auto_previous_response_id=True)


@scene("responses in a conversation, an agent of 30 tool turns, streamed")
async def _() -> None:
    talk = await client().conversations.create()
    await runs(OpenAIResponsesModel, stream=True, conversation_id=talk.id)


@scene("responses, an output type")
async def _() -> None:
    says('{"name": "Oslo", "people": 700000}')
    result = await agents.Runner.run(agent(OpenAIResponsesModel, output_type=City), "Which city?")
    assert result.final_output == City(name="Oslo", people=700000)


@scene("responses, a session of conversations")
async def _() -> None:
    session = agents.OpenAIConversationsSession(openai_client=client())
    looker, turns = agent(OpenAIResponsesModel), Turns()
    says("Hello Ada.", "It is Ada.")
    await agents.Runner.run(looker, "I am Ada.", session=session)
    result = await agents.Runner.run(looker, "Who am I?", session=session)
    assert result.final_output == "It is Ada."
    turns.all(2)


@scene("responses, strict tools")
async def _() -> None:
    says(call("look_strictly", place="attic"), "Done.")
    looker = agent(OpenAIResponsesModel, tools=[look_strictly])
    result = await agents.Runner.run(looker, "Look.")
    assert result.final_output == "Done."


if __name__ == "__main__":
    run_scenes("openai-agents")
