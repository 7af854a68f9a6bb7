"""A reply that only repeats itself is stopped. Each API reports this in its own terms."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from pensieve.client import Client
from pensieve.jobs.worker import JobsConfig
from pensieve.sampling import STOP_REPETITION
from tests.api.http.rig_http import HttpRig, http_rig
from tests.conversations.rig import write_model
from tests.conversations.rig_daemon import wait_for
from tests.conversations.scripted_engine import write_script
from tests.text.families import QWEN_3

LOOP = "I like green tea. " * 400
Say = Callable[[str], None]  # sets the next reply of the model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("repetition")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[HttpRig]:
    model = write_model(folder / "model", QWEN_3)
    program = (sys.executable, "-m", "tests.conversations.scripted_engine", str(folder / "script"))
    with http_rig(
        folder / "data", program=program, model_folder=model, batch_jobs=JobsConfig()
    ) as found:
        yield found


@pytest.fixture
def client(server: HttpRig, folder: Path) -> Iterator[Client]:
    with Client(server.rig.server.address) as found:
        yield found


@pytest.fixture(autouse=True)
def loops(folder: Path) -> None:
    write_script(folder / "script", [LOOP])


def test_the_sdk_reports_repetition_and_the_reply_is_stored(client: Client) -> None:
    conversation = client.conversation()
    reply = conversation.ask("What do you like?")
    assert reply.finish_reason == "repetition"
    assert LOOP.startswith(reply.text)
    assert STOP_REPETITION <= reply.usage.output_tokens < STOP_REPETITION + 40
    *_, last = conversation.messages()
    assert last.finish_reason == "repetition"
    assert conversation.ask("And now?").finish_reason == "stop"


@pytest.mark.parametrize(
    "off", [{"stop_repetition": 0}, {"ignore_eos": True}, {"min_tokens": 500}], ids=str
)
def test_clients_can_turn_repetition_detection_off(client: Client, off: dict[str, Any]) -> None:
    reply = client.conversation().ask("What do you like?", max_tokens=500, **off)
    assert (reply.finish_reason, reply.usage.output_tokens) == ("length", 500)


def test_clients_can_choose_the_repetition_length(client: Client) -> None:
    reply = client.conversation().ask("What do you like?", stop_repetition=64)
    assert reply.finish_reason == "repetition"
    assert 64 <= reply.usage.output_tokens < 104


def test_openai_chat_reports_length_and_the_stop_reason(server: HttpRig, folder: Path) -> None:
    whole = server.chat("What do you like?", model="model", max_tokens=900).value["choices"][0]
    assert (whole["finish_reason"], whole["stop_reason"]) == ("length", "repetition")
    write_script(folder / "script", [LOOP])
    body: dict[str, Any] = {"model": "model", "max_tokens": 900, "stream": True}
    last = server.chat("What do you like?", **body).events[-2]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("length", "repetition")
    write_script(folder / "script", ["Tea."])
    assert "stop_reason" not in server.chat("And you?", model="model").value["choices"][0]


def test_openais_client_reads_a_reply_stopped_for_repetition(server: HttpRig, folder: Path) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as typed:
        text = typed.completions.create(model="model", prompt="I like", max_tokens=900)
        assert text.choices[0].finish_reason == "length"
        write_script(folder / "script", [LOOP])
        response = typed.responses.create(model="model", input="What do you like?")
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"


def test_anthropics_client_reads_a_reply_stopped_for_repetition(server: HttpRig) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as typed:
        message = typed.messages.create(
            model="model",
            max_tokens=900,
            messages=[{"role": "user", "content": "What do you like?"}],
        )
    assert message.stop_reason == "max_tokens"


def test_a_batch_reports_repetition_like_chat(server: HttpRig) -> None:
    messages = [{"role": "user", "content": "What do you like?"}]
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "model", "messages": messages},
    }
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as typed:
        file = typed.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
        batch = typed.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        wait_for(lambda: typed.batches.retrieve(batch.id).status == "completed")
        output = typed.batches.retrieve(batch.id).output_file_id
        assert output is not None
        answer = json.loads(typed.files.content(output).text)
    choice = answer["response"]["body"]["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "repetition")


def test_the_gateway_reports_repetition(server: HttpRig) -> None:
    body = {
        "conversation_id": "page",
        "messages": [{"content": "What do you like?"}],
        "create_if_missing": True,
    }
    answer = server.ask("POST", "/pensieve.v1.ConversationService/SendMessage", body)
    events = [
        json.loads(line[6:])
        for line in answer.body.decode().splitlines()
        if line.startswith("data: ")
    ]
    assert events[-1]["completed"]["finish_reason"] == "FINISH_REASON_REPETITION"
