"""smollm2 calls tools through OpenAI's API, with random weights and, if fetched, with its own weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from pensieve.launch.model_folder import resolve_model
from pensieve.launch.smollm2 import is_cached
from tests.api.http.rig_http import MODEL_ENGINE, MODEL_SETTINGS, http_rig
from tests.api.http.test_held_calls import SCHEMAS, check, tools, write_random_model
from tests.text.families import SMOLLM2

QUESTION = {"role": "user", "content": "How is the weather in Oslo for the next 3 days?"}
ASK: dict[str, Any] = {"max_tokens": 400, "seed": 5, "tools": tools()}


@pytest.fixture(scope="module", params=["random weights", "itself"])
def client(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    folder = Path(tmp_path_factory.mktemp("tools"))
    if request.param == "random weights":
        model = write_random_model(folder / "model", SMOLLM2)
    elif is_cached():
        model = resolve_model("smollm2")
    else:
        pytest.skip("smollm2 was not fetched yet: `pensieve chat smollm2` fetches it")
    with (
        http_rig(
            folder / "data", program=MODEL_ENGINE, written=MODEL_SETTINGS, model_folder=model
        ) as found,
        openai.OpenAI(base_url=f"{found.url}/v1", api_key="none", max_retries=0) as typed,
    ):
        yield typed


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


@pytest.mark.parametrize(
    "choice",
    ["required", *({"type": "function", "function": {"name": each}} for each in SCHEMAS)],
    ids=["required", *SCHEMAS],
)
def test_a_required_or_named_call_is_made_and_its_result_answered(
    client: openai.OpenAI, model: str, choice: Any
) -> None:
    messages: list[Any] = [QUESTION]
    asked = client.chat.completions.create(
        model=model, messages=messages, tool_choice=choice, parallel_tool_calls=False, **ASK
    ).choices[0]
    assert asked.finish_reason == "tool_calls"
    (name,) = check(asked.message.tool_calls, 1)
    if choice != "required":
        assert name == choice["function"]["name"]
    assert asked.message.tool_calls
    call_id = asked.message.tool_calls[0].id
    result = {"role": "tool", "tool_call_id": call_id, "content": json.dumps({"rain": False})}
    messages += [asked.message.to_dict(), result]
    answered = client.chat.completions.create(
        model=model, messages=messages, tool_choice="none", **{**ASK, "max_tokens": 20}
    ).choices[0]
    assert answered.message.content
    assert not answered.message.tool_calls


def test_auto_tool_choice_gives_text_or_valid_calls(client: openai.OpenAI, model: str) -> None:
    messages: list[Any] = [QUESTION]
    found = client.chat.completions.create(
        model=model, messages=messages, tool_choice="auto", **{**ASK, "max_tokens": 120}
    ).choices[0]
    if found.finish_reason == "tool_calls":
        check(found.message.tool_calls)
    else:
        assert found.message.content
