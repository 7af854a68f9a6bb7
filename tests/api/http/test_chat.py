"""Chat completions over HTTP, as plain requests and with OpenAI's own client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.http.rig_http import MODEL, HttpRig, http_rig


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpRig]:
    with http_rig(Path(tmp_path_factory.mktemp("http")) / "data", model=True) as found:
        yield found


@pytest.fixture
def client(server: HttpRig) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def test_a_reply_reports_its_usage_and_conversation(server: HttpRig) -> None:
    answer = server.chat("How are you?", ignore_eos=True)
    assert answer.status == 200
    body = answer.value
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    usage = body["usage"]
    assert usage["completion_tokens"] == 8
    assert usage["prompt_tokens"] + 8 == usage["total_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert answer.headers["x-pensieve-new-tokens"] == str(usage["prompt_tokens"])
    stored = server.rig.messages(answer.headers["x-pensieve-conversation-id"])
    assert [each.content for each in stored] == ["How are you?", choice["message"]["content"]]


def test_a_stream_equals_the_whole_answer(server: HttpRig) -> None:
    whole = server.chat("Tell me a story.", seed=3).value
    answer = server.chat(
        "Tell me a story.", seed=3, stream=True, stream_options={"include_usage": True}
    )
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = answer.events
    assert done == "[DONE]"
    assert {each["id"] for each in chunks} == {usage["id"]}
    assert all(each["usage"] is None for each in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    deltas = [each["choices"][0]["delta"] for each in chunks]
    assert deltas[0]["role"] == "assistant"
    text = "".join(each.get("content") or "" for each in deltas)
    assert text == whole["choices"][0]["message"]["content"]
    reasons = [each["choices"][0]["finish_reason"] for each in chunks]
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    assert reasons[-1] == whole["choices"][0]["finish_reason"]


def test_openais_client_lists_models_chats_and_streams(client: openai.OpenAI) -> None:
    assert [each.id for each in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "pensieve"
    messages: Any = [{"role": "user", "content": "One, two, three"}]
    said = client.chat.completions.create(model=MODEL, messages=messages, seed=1)
    text = ""
    with client.chat.completions.stream(model=MODEL, messages=messages, seed=1) as stream:
        for event in stream:
            if event.type == "content.delta":
                text += event.delta
        final = stream.get_final_completion()
    assert text == said.choices[0].message.content == final.choices[0].message.content


def test_streamed_logprobs_equal_those_of_the_whole_answer(server: HttpRig) -> None:
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "seed": 5}
    whole = server.chat("Say something.", **fields).value["choices"][0]["logprobs"]["content"]
    events = server.chat("Say something.", stream=True, **fields).events[:-1]
    chunks = [each["choices"][0]["logprobs"] for each in events]
    rows = [row for each in chunks if each is not None for row in each["content"]]
    assert rows == whole
    assert all(len(row["top_logprobs"]) == 2 for row in rows)


def test_several_choices_are_streamed_together(server: HttpRig) -> None:
    answer = server.chat("Name a colour.", n=3, stream=True, temperature=20.0)
    texts = ["", "", ""]
    ends = []
    for event in answer.events[:-1]:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["delta"].get("content") or ""
        if choice["finish_reason"]:
            ends.append(choice["index"])
    assert sorted(ends) == [0, 1, 2]
    assert len(set(texts)) > 1


def test_errors_have_openais_shape(server: HttpRig, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "?"}])
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "?"}], temperature=-1
        )
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as unknown:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "?"}], extra_body={"best": 1}
        )
    assert (unknown.value.param, unknown.value.code) == ("best", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "a b c " * 20_000}]
        )
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="embeddings"):
        client.embeddings.create(model=MODEL, input="?")
    refused = server.ask("POST", "/v1/chat/completions", b'{"model": NaN}')
    assert (refused.status, refused.error["code"]) == (400, "invalid_json")
    assert server.ask("GET", "/v1/chat/completions").status == 404
    assert server.ask("PUT", "/nowhere", b"").status == 404
