"""Prefill: the last message is the assistant's, and the model continues it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from pensieve.builtin import MODEL_PATH
from pensieve.launch.model_folder import load_texts
from pensieve.text import ChatTemplate, Message, TemplateSetting
from tests.api.http.rig_http import MODEL, HttpRig, http_rig
from tests.api.http.test_agents import scripted
from tests.conversations.rig_daemon import wait_for
from tests.text.families import DEEPSEEK_R1
from tests.text.world import flat

USER: Any = {"role": "user", "content": "Tell me a story."}
BEGUN: Any = {"role": "assistant", "content": "Once upon"}
CONTINUED: Any = {"continue_final_message": True, "add_generation_prompt": False}


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return load_texts(MODEL_PATH, lambda line: None).template


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpRig]:
    with http_rig(Path(tmp_path_factory.mktemp("http")) / "data", model=True) as found:
        yield found


def ask(server: HttpRig, *messages: Any, headers: Any = None, **fields: Any) -> Any:
    body = {"model": MODEL, "messages": list(messages), "max_tokens": 8, "seed": 3, **fields}
    answer = server.ask("POST", "/v1/chat/completions", body, headers)
    assert answer.status == 200, answer.body
    return answer


def text_of(answer: Any) -> str:
    found: str = answer.value["choices"][0]["message"]["content"]
    return found


def test_the_stored_reply_includes_the_prefill(server: HttpRig, template: ChatTemplate) -> None:
    answer = ask(server, USER, BEGUN, **CONTINUED)
    text = text_of(answer)
    asked, reply = server.rig.messages(answer.headers["x-pensieve-conversation-id"])
    assert (asked.content, reply.content) == (USER["content"], "Once upon" + text)
    setting = TemplateSetting(now=datetime.now(UTC), reply_begins="Once upon")
    wanted = flat(template.opening([Message("user", USER["content"])], setting))
    assert list(asked.token_ids) == wanted
    assert template.tokenizer.decode(wanted).endswith("Once upon")
    assert answer.value["usage"]["prompt_tokens"] == len(wanted)
    assert len(reply.token_ids) == answer.value["usage"]["completion_tokens"]


def test_a_turn_after_a_prefilled_reply_recomputes_nothing(server: HttpRig) -> None:
    session = {"x-session-id": "next"}
    first = ask(server, USER, BEGUN, **CONTINUED, headers=session, ignore_eos=True)
    whole = {"role": "assistant", "content": "Once upon" + text_of(first)}
    second = ask(server, USER, whole, {"role": "user", "content": "Go on."}, headers=session)
    assert second.headers["x-pensieve-bound"] == "appended"
    assert second.headers["x-pensieve-known-messages"] == "2"
    assert second.headers["x-pensieve-recomputed-tokens"] == "0"
    begun = {"role": "assistant", "content": "And then"}
    third = ask(
        *(server, USER, whole, {"role": "user", "content": "Go on."}, begun),
        **CONTINUED,
        headers=session,
    )
    assert third.headers["x-pensieve-bound"] == "forked"
    assert third.headers["x-pensieve-known-messages"] == "2"
    assert third.headers["x-pensieve-recomputed-tokens"] == "0"
    stored = server.rig.messages(third.headers["x-pensieve-conversation-id"])
    assert stored[-1].content == "And then" + text_of(third)


def test_streamed_and_unstored_replies_continue_the_prefill_identically(server: HttpRig) -> None:
    text = text_of(ask(server, USER, BEGUN, **CONTINUED))
    assert text_of(ask(server, USER, BEGUN, **CONTINUED, store=False)) == text
    events = ask(server, USER, {**BEGUN, "prefix": True}, stream=True).events[:-1]
    deltas = [each["choices"][0]["delta"].get("content") or "" for each in events]
    assert "".join(deltas) == text


def test_a_retry_returns_only_the_continuation(server: HttpRig) -> None:
    key = {"idempotency-key": "k1"}
    first = ask(server, USER, BEGUN, **CONTINUED, headers=key)
    again = ask(server, USER, BEGUN, **CONTINUED, headers=key)
    assert again.headers["x-pensieve-bound"] == "known"
    assert text_of(again) == text_of(first)
    other = {"role": "assistant", "content": "Long ago"}
    body = {"model": MODEL, "messages": [USER, other], "max_tokens": 8, "seed": 3, **CONTINUED}
    assert server.ask("POST", "/v1/chat/completions", body, key).status == 400


def test_openais_and_anthropics_clients_continue_the_same_way(server: HttpRig) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        begun = client.chat.completions.create(
            model=MODEL,
            messages=[USER, BEGUN],
            max_tokens=8,
            temperature=0,
            extra_body=CONTINUED,
        )
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as other:
        message = other.messages.create(
            model=MODEL, max_tokens=8, messages=[USER, BEGUN], extra_body={"temperature": 0}
        )
        counted = other.messages.count_tokens(model=MODEL, messages=[USER, BEGUN])
    block: Any = message.content[0]
    assert block.text == begun.choices[0].message.content
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_without_vllms_fields_the_reply_is_a_new_message(server: HttpRig) -> None:
    """This is OpenAI's own behaviour."""
    answer = ask(server, USER, BEGUN)
    contents = [
        each.content for each in server.rig.messages(answer.headers["x-pensieve-conversation-id"])
    ]
    assert contents == [USER["content"], "Once upon", text_of(answer)]


def test_prefill_is_refused_if_the_template_opens_thinking(tmp_path: Path) -> None:
    with scripted(tmp_path, DEEPSEEK_R1, ["Yes."]) as server:
        body = {"model": "model", "messages": [USER, BEGUN], **CONTINUED}
        refused = server.ask("POST", "/v1/chat/completions", body)
        assert (refused.status, refused.error["param"]) == (400, "messages")
        assert "thinking" in refused.error["message"]


def test_a_disconnect_keeps_the_prefill_and_the_sent_text(server: HttpRig) -> None:
    body = {"model": MODEL, "messages": [USER, BEGUN], "max_tokens": 4000, "ignore_eos": True}
    connection = server.connection()
    raw = json.dumps({**body, **CONTINUED, "stream": True})
    connection.request("POST", "/v1/chat/completions", raw, {"content-type": "application/json"})
    answer = connection.getresponse()
    named = answer.headers["x-pensieve-conversation-id"]
    text = ""
    while len(text) < 20:
        line = answer.readline().decode()
        if line.startswith("data: "):
            text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
    answer.close()
    connection.close()
    wait_for(lambda: len(server.rig.messages(named)) == 2)
    reply = server.rig.messages(named)[1]
    assert reply.content.startswith("Once upon" + text)
    assert len(reply.token_ids) < 4000
