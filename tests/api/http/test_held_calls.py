"""Tool calls match their schemas, even from a model with random weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from pensieve.jobs.worker import JobsConfig
from pensieve.text import style_named
from tests.api.http.rig_http import MODEL_ENGINE, MODEL_SETTINGS, HttpRig, http_rig
from tests.conversations.rig import write_model
from tests.conversations.rig_daemon import wait_for
from tests.conversations.schemas import is_valid
from tests.text.families import QWEN_3, Family, template_of, tokenizer_of

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 40},
        "notes": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TIME = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
SCHEMAS = {"get_weather": SCHEMA, "get_time": TIME}
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Where shall we go?"}],
    "max_tokens": 300,
    "temperature": 1.0,
}
MARK = tokenizer_of(QWEN_3).token_id("<tool_call>")
THINK = tokenizer_of(QWEN_3).token_id("<think>")


def tools(strict: bool = False) -> list[Any]:
    return [
        {"type": "function", "function": {"name": each, "parameters": schema, "strict": strict}}
        for each, schema in SCHEMAS.items()
    ]


def write_random_model(folder: Path, family: Family = QWEN_3) -> Path:
    """Write a model with random weights, whose context has room for its long replies."""
    path = write_model(folder, family) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 1024}))
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpRig]:
    folder = Path(tmp_path_factory.mktemp("held"))
    with http_rig(
        folder / "data",
        program=MODEL_ENGINE,
        written=MODEL_SETTINGS,
        model_folder=write_random_model(folder / "model"),
        batch_jobs=JobsConfig(call_style=style_named("auto", template_of(QWEN_3))),
    ) as found:
        yield found


@pytest.fixture
def client(served: HttpRig) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def check(calls: Any, num: int | None = None) -> list[str]:
    """Check each call against its schema, and return the names of the calls."""
    assert calls
    assert num is None or len(calls) == num
    for each in calls:
        assert is_valid(json.loads(each.function.arguments), SCHEMAS[each.function.name])
    return [each.function.name for each in calls]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_required_tool_choice_makes_the_reply_a_call(
    client: openai.OpenAI, model: str, seed: int
) -> None:
    found = client.chat.completions.create(
        model=model,
        tools=tools(),
        tool_choice="required",
        parallel_tool_calls=False,
        n=2,
        seed=seed,
        logit_bias={str(THINK): -100},
        **ASK,
    )
    for choice in found.choices:
        assert choice.finish_reason == "tool_calls"
        assert not choice.message.content
        check(choice.message.tool_calls, 1)


def test_a_named_tool_is_called_in_streams_and_whole_answers(
    client: openai.OpenAI, model: str
) -> None:
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    given: Any = {"tools": tools(), "tool_choice": choice, "parallel_tool_calls": False, "seed": 7}
    whole = client.chat.completions.create(model=model, **ASK, **given).choices[0].message
    assert check(whole.tool_calls, 1) == ["get_weather"]
    with client.chat.completions.stream(model=model, **ASK, **given) as events:
        for _ in events:
            pass
        streamed = events.get_final_completion().choices[0].message
    assert check(streamed.tool_calls, 1) == ["get_weather"]


def test_a_strict_tool_constrains_calls_but_not_text(client: openai.OpenAI, model: str) -> None:
    """A logit bias makes the model begin a call. Only the constraint makes the call valid JSON."""
    given: Any = {**ASK, "model": model, "tools": tools(strict=True)}
    silent = {str(MARK): -100, str(THINK): -100}
    said = client.chat.completions.create(seed=3, logit_bias=silent, **given).choices[0].message
    assert said.content
    assert not said.tool_calls
    eager = {str(MARK): 100, str(THINK): -100}
    called = client.chat.completions.create(
        seed=3, logit_bias=eager, parallel_tool_calls=False, **given
    )
    check(called.choices[0].message.tool_calls, 1)
    assert called.choices[0].finish_reason == "tool_calls"


def test_a_required_call_may_follow_thinking(served: HttpRig, model: str) -> None:
    """The first token opens the thinking. The constraint applies after the thinking."""
    body = {"model": model, "tools": tools(), "tool_choice": "required", **ASK, "max_tokens": 40}
    answer = served.ask("POST", "/v1/chat/completions", {**body, "logit_bias": {str(THINK): 100}})
    message = answer.value["choices"][0]["message"]
    assert answer.value["choices"][0]["finish_reason"] == "length"
    assert message.get("tool_calls") is None
    assert not message["content"]


def test_responses_and_messages_constrain_tool_calls(
    served: HttpRig, client: openai.OpenAI, model: str
) -> None:
    flat: Any = [{"type": "function", **each["function"]} for each in tools(strict=True)]
    response = client.responses.create(
        model=model,
        input="Where?",
        tools=flat,
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=300,
        extra_body={"seed": 5, "logit_bias": {str(THINK): -100}},
    )
    (call,) = [each for each in response.output if each.type == "function_call"]
    assert is_valid(json.loads(call.arguments), SCHEMAS[call.name])
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as other:
        message = other.messages.create(
            model=model,
            max_tokens=300,
            messages=[{"role": "user", "content": "Where?"}],
            tools=[{"name": "get_weather", "input_schema": SCHEMA, "strict": True}],
            tool_choice={"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True},
            thinking={"type": "disabled"},
        )
    assert message.stop_reason == "tool_use"
    (use,) = [each for each in message.content if each.type == "tool_use"]
    assert is_valid(use.input, SCHEMA)


def test_batch_lines_constrain_tool_calls(client: openai.OpenAI, model: str) -> None:
    body = {
        **ASK,
        "model": model,
        "tools": tools(),
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "logit_bias": {str(THINK): -100},
    }
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    file = client.files.create(file=("a.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    wait_for(lambda: client.batches.retrieve(batch.id).status == "completed")
    done = client.batches.retrieve(batch.id)
    assert done.output_file_id is not None
    answer = json.loads(client.files.content(done.output_file_id).text)
    (choice,) = answer["response"]["body"]["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert is_valid(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])


def test_unsupported_tool_schemas_are_refused_by_name(client: openai.OpenAI, model: str) -> None:
    wrong: Any = {"name": "f", "strict": True, "parameters": {"type": "object", "not": {}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=model, tools=[{"type": "function", "function": wrong}], **ASK
        )
    assert caught.value.param == "tools"
    assert "not" in caught.value.message
