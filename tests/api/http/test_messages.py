"""Anthropic's API over HTTP, with its own client and as plain requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from pensieve.api.anthropic.render import SIGNATURE
from pensieve.v1 import conversation_pb2 as pb
from tests.api.http.rig_http import MODEL, Answer, HttpRig, http_rig

USER: Any = {"role": "user", "content": "How are you?"}
TOOL: Any = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpRig]:
    with http_rig(Path(tmp_path_factory.mktemp("http")) / "data", model=True) as found:
        yield found


@pytest.fixture
def client(server: HttpRig) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as found:
        yield found


def ask(server: HttpRig, path: str = "/v1/messages", **members: Any) -> Answer:
    body = {"model": MODEL, "max_tokens": 8, "messages": [USER], **members}
    return server.ask("POST", path, body, {"anthropic-version": "2023-06-01"})


def conversations(server: HttpRig) -> set[str]:
    found = server.rig.stub.ListConversations(pb.ListConversationsRequest(page_size=1000))
    return {each.conversation_id for each in found.conversations}


def test_a_message_reports_its_usage_and_is_stored(server: HttpRig) -> None:
    answer = ask(server, max_tokens=3)
    assert answer.status == 200
    assert answer.headers["request-id"].startswith("req_")
    found = answer.value
    assert (found["type"], found["role"], found["model"]) == ("message", "assistant", MODEL)
    assert (found["stop_reason"], found["stop_sequence"]) == ("max_tokens", None)
    assert found["usage"] == {
        "input_tokens": int(answer.headers["x-pensieve-new-tokens"]),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 3,
    }
    (block,) = found["content"]
    stored = server.rig.messages(answer.headers["x-pensieve-conversation-id"])
    assert [each.content for each in stored] == ["How are you?", block["text"]]


def test_anthropics_client_asks_and_streams(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 40, "messages": [USER]}
    whole = client.messages.create(**asked)
    assert whole.stop_reason == "end_turn"
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text
    assert [each.to_dict() for each in final.content] == [each.to_dict() for each in whole.content]
    assert final.usage == whole.usage
    assert final.stop_reason == whole.stop_reason
    raw = client.messages.create(**asked, stream=True)
    kinds = [each.type for each in raw]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])


def test_each_stream_event_is_named_by_its_type(server: HttpRig) -> None:
    answer = ask(server, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    parts = [each for each in answer.body.decode().split("\n\n") if each and each[0] != ":"]
    lines = [each.split("\n") for each in parts]
    assert [name for name, _ in lines][:3] == [
        *("event: message_start", "event: ping", "event: content_block_start")
    ]
    for name, data in lines:
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


def test_thinking_and_a_system_prompt_reach_the_model(client: anthropic.Anthropic) -> None:
    thinking: Any = {"type": "thinking", "thinking": "where?", "signature": SIGNATURE}
    found = client.messages.create(
        model=MODEL,
        max_tokens=8,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        thinking={"type": "enabled", "budget_tokens": 1024},
        messages=[
            USER,
            {"role": "assistant", "content": [thinking, {"type": "text", "text": "Oh."}]},
            {"role": "user", "content": [{"type": "text", "text": "And?"}]},
        ],
        metadata={"user_id": "u"},
    )
    assert found.usage.input_tokens > 20


def test_tools_are_refused_if_the_template_does_not_write_tools(
    client: anthropic.Anthropic,
) -> None:
    with pytest.raises(anthropic.BadRequestError, match="does not write tools"):
        client.messages.create(model=MODEL, max_tokens=8, tools=[TOOL], messages=[USER])


def test_the_answer_names_the_stop_sequence(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 40, "messages": [USER]}
    text = client.messages.create(**asked).content[0].text
    stop = text[4:6]
    found = client.messages.create(**asked, stop_sequences=["\0", stop])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
    assert found.content[0].text == text[: text.index(stop)]
    with client.messages.stream(**asked, stop_sequences=[stop]) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", stop)


def test_count_tokens_equals_the_prompt_length_and_stores_nothing(
    server: HttpRig, client: anthropic.Anthropic
) -> None:
    asked: dict[str, Any] = {"model": MODEL, "system": "Be brief.", "messages": [USER]}
    whole = client.messages.create(**asked, max_tokens=1)
    before = conversations(server)
    usage = whole.usage  # an earlier conversation has the same system prompt
    num_tokens = usage.input_tokens + usage.cache_read_input_tokens
    assert client.messages.count_tokens(**asked).input_tokens == num_tokens
    assert conversations(server) == before
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.count_tokens(
            model=MODEL, messages=[{"role": "user", "content": "a b c " * 20_000}]
        )


def test_errors_have_anthropics_shape(server: HttpRig, client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "messages": [USER]}
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**asked | {"model": "claude"})
    body: Any = missing.value.body
    assert body["error"]["type"] == "not_found_error"
    assert missing.value.request_id is not None
    with pytest.raises(anthropic.BadRequestError, match="best: is not supported"):
        client.messages.create(**asked, extra_body={"best": 1})
    long = {"role": "user", "content": "word " * 8_000}
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**asked | {"messages": [long]})
    refused = server.ask("POST", "/v1/messages", b"{")
    assert refused.status == 400
    assert refused.value["type"] == "error"
    assert refused.error["type"] == "invalid_request_error"
    elsewhere = server.ask("POST", "/v1/messages", b"{}", {"origin": "http://elsewhere.example"})
    assert (elsewhere.status, elsewhere.error["type"]) == (403, "permission_error")


def test_a_reply_follows_the_output_schema(server: HttpRig) -> None:
    form = {"type": "json_schema", "schema": {"enum": ["yes", "no"]}}
    answer = ask(server, max_tokens=40, output_config={"format": form})
    assert answer.status == 200
    assert json.loads(answer.value["content"][-1]["text"]) in ("yes", "no")
    wrong = {"type": "json_schema", "schema": {"$ref": "#/nowhere"}}
    refused = ask(server, output_config={"format": wrong})
    assert refused.status == 400
    assert "output_config.format.schema" in refused.error["message"]
