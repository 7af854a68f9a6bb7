"""Text completions and unstored chats leave nothing on the disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.http.rig_http import MODEL, HttpRig, http_rig
from tests.conversations.rig_daemon import wait_for

PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tmp_path_factory.mktemp("http")) / "data"


@pytest.fixture(scope="module")
def rig(data: Path) -> Iterator[HttpRig]:
    with http_rig(data, model=True) as found:
        yield found


@pytest.fixture
def client(rig: HttpRig) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    return client.completions.create(model=MODEL, max_tokens=12, seed=1, **fields)


def test_a_stream_equals_the_whole_answer(client: openai.OpenAI) -> None:
    whole = complete(client, prompt=PROMPT)
    usage = {"include_usage": True}
    chunks = list(complete(client, prompt=PROMPT, stream=True, stream_options=usage))
    *texts, last = chunks
    assert "".join(each.choices[0].text for each in texts) == whole.choices[0].text
    assert texts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.usage == whole.usage


def test_a_prompt_may_be_token_ids(client: openai.OpenAI, rig: HttpRig) -> None:
    tokenizer = rig.rig.daemon.texts.template.tokenizer
    ids = list(tokenizer.encode_prompt(PROMPT))
    assert (
        complete(client, prompt=ids).choices[0].text
        == complete(client, prompt=PROMPT).choices[0].text
    )


def test_streamed_logprobs_equal_those_of_the_whole_answer(client: openai.OpenAI) -> None:
    whole = complete(client, prompt=PROMPT, logprobs=2).choices[0].logprobs
    chunks = complete(client, prompt=PROMPT, logprobs=2, stream=True)
    parts = [each.choices[0].logprobs for each in chunks]
    parts = [each for each in parts if each is not None]
    assert [token for each in parts for token in each.tokens] == whole.tokens
    assert [offset for each in parts for offset in each.text_offset] == whole.text_offset


def test_each_choice_has_its_own_seed(client: openai.OpenAI) -> None:
    first = complete(client, prompt=PROMPT, n=3, temperature=20.0)
    again = complete(client, prompt=PROMPT, n=3, temperature=20.0)
    texts = [each.text for each in first.choices]
    assert len(set(texts)) == 3
    assert [each.text for each in again.choices] == texts


def test_invalid_prompts_are_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as large:
        complete(client, prompt=[10**6])
    assert large.value.param == "prompt"
    with pytest.raises(openai.BadRequestError) as long:
        complete(client, prompt="a b c " * 100_000)
    assert long.value.code == "context_length_exceeded"


def test_an_unstored_chat_gives_the_same_reply_and_stores_nothing(rig: HttpRig, data: Path) -> None:
    secret = "the password of zanzibar"
    stored = rig.chat("What did I say?", seed=4)
    kept = rig.chat("What did I say?", seed=4, store=False)
    assert kept.value["choices"][0]["message"] == stored.value["choices"][0]["message"]
    answer = rig.chat(secret, store=False, stream=True)
    assert answer.events[-1] == "[DONE]"
    assert "x-pensieve-conversation-id" not in answer.headers
    assert rig.ask("POST", "/v1/completions", {"model": MODEL, "prompt": secret}).status == 200
    wait_for(lambda: rig.rig.num_live == 0)
    for path in data.rglob("*"):
        if path.is_file():
            assert secret.encode() not in path.read_bytes(), path


def test_a_reply_follows_a_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    for store in (True, False):
        reply = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Which colour?"}],
            response_format=form,
            store=store,
        )
        assert json.loads(str(reply.choices[0].message.content))["colour"] in ("red", "green")
        with pytest.raises(openai.BadRequestError) as wrong:
            client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "Which colour?"}],
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"$ref": "#/nowhere"}},
                },
                store=store,
            )
        assert wrong.value.param is not None
        assert "response_format" in wrong.value.param
