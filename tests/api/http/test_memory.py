"""A client that resends its whole history does not pay twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from pensieve.conversations import turn_ends
from tests.api.http.rig_http import MODEL, HttpRig, http_rig
from tests.conversations.rig_daemon import wait_for


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpRig]:
    with http_rig(Path(tmp_path_factory.mktemp("http")) / "data", model=True) as found:
        yield found


@pytest.fixture
def client(rig: HttpRig) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def test_twenty_turns_compute_only_their_new_tokens(client: openai.OpenAI, rig: HttpRig) -> None:
    messages: list[Any] = [{"role": "system", "content": "You are brief."}]
    named, recomputed = set(), 0
    for turn in range(20):
        messages.append({"role": "user", "content": f"This is message {turn}."})
        raw = client.chat.completions.with_raw_response.create(
            model=MODEL, messages=messages, max_tokens=10
        )
        reply = raw.parse()
        messages.append(reply.choices[0].message)
        named.add(raw.headers["x-pensieve-conversation-id"])
        recomputed += int(raw.headers["x-pensieve-recomputed-tokens"])
        usage: Any = reply.usage
        cached = usage.prompt_tokens_details.cached_tokens
        assert cached == usage.prompt_tokens - int(raw.headers["x-pensieve-new-tokens"])
        assert (cached > 0) == (turn > 0)
        assert raw.headers["x-pensieve-bound"] == ("appended" if turn else "new")
    assert len(named) == 1
    assert recomputed == 0
    (name,) = named
    stored = rig.rig.messages(name)
    assert [each.content for each in stored[1::2]] == [
        each["content"] for each in messages if isinstance(each, dict) and each["role"] == "user"
    ]


def test_a_long_reply_is_parsed_outside_the_store_thread(
    rig: HttpRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_ends, "INLINE_PARSE_CHARACTERS_MAX", 0)
    text = rig.chat("A long one.").value["choices"][0]["message"]["content"]
    assert rig.chat("A long one.", text, "And?").headers["x-pensieve-bound"] == "appended"


def test_an_edited_message_forks_and_shares_the_earlier_history(
    client: openai.OpenAI, rig: HttpRig
) -> None:
    messages: list[Any] = []
    for text in ("First.", "Second.", "Third."):
        messages.append({"role": "user", "content": text})
        reply = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=10)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    edited = [*messages[:4], {"role": "user", "content": "Not the third."}]
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=edited, max_tokens=10
    )
    assert raw.headers["x-pensieve-bound"] == "forked"
    assert raw.headers["x-pensieve-known-messages"] == "4"
    assert raw.headers["x-pensieve-recomputed-tokens"] == "0"
    assert int(raw.headers["x-pensieve-device-tokens"]) > 0
    again = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=[*messages, {"role": "user", "content": "Fourth."}], max_tokens=10
    )
    assert again.headers["x-pensieve-bound"] == "appended"


def test_a_history_from_another_session_is_forked(rig: HttpRig) -> None:
    first = rig.chat("Hello there.", headers={"x-session-id": "one"})
    reply = first.value["choices"][0]["message"]["content"]
    names = {first.headers["x-pensieve-conversation-id"]}
    history = ("Hello there.", reply, "Go on.")
    for headers, how in (
        ({"x-session-id": "two"}, "forked"),
        ({"x-openwebui-chat-id": "one"}, "appended"),
        ({}, "forked"),
    ):
        answer = rig.chat(*history, headers=headers)
        assert answer.headers["x-pensieve-bound"] == how, headers
        names.add(answer.headers["x-pensieve-conversation-id"])
    assert len(names) == 3
    keyed = rig.chat(*history, prompt_cache_key="three")
    assert keyed.headers["x-pensieve-bound"] == "forked"


def test_a_repeated_idempotency_key_returns_the_first_reply(rig: HttpRig) -> None:
    headers = {"idempotency-key": "a retry / of mine"}
    first = rig.chat("Once only.", headers=headers, temperature=20.0)
    again = rig.chat("Once only.", headers=headers, temperature=20.0)
    assert again.value["choices"] == first.value["choices"]
    assert again.value["id"] == first.value["id"]
    assert again.headers["x-pensieve-bound"] == "known"
    streamed = rig.chat("Once only.", headers=headers, temperature=20.0, stream=True)
    text = "".join(
        each["choices"][0]["delta"].get("content") or "" for each in streamed.events[:-1]
    )
    assert text == first.value["choices"][0]["message"]["content"]


def test_an_idempotency_key_with_another_body_is_refused(rig: HttpRig) -> None:
    reply = rig.chat("A beginning.").value["choices"][0]["message"]["content"]
    headers = {"idempotency-key": "of a second turn"}
    first = rig.chat("A beginning.", reply, "Go on.", headers=headers)
    assert first.headers["x-pensieve-bound"] == "appended"
    for contents in (("Unrelated.",), ("Another.", "Beginning.", "Go on.")):
        other = rig.chat(*contents, headers=headers)
        assert (other.status, other.error["param"]) == (400, "idempotency-key")
        assert "used before with another request" in other.error["message"]
    again = rig.chat("A beginning.", reply, "Go on.", headers=headers)
    assert again.value["choices"] == first.value["choices"]


def test_each_choice_can_be_continued(rig: HttpRig) -> None:
    answer = rig.chat("Pick one.", n=3, temperature=20.0).value
    texts = [each["message"]["content"] for each in answer["choices"]]
    for text in texts:
        after = rig.chat("Pick one.", text, "Why?")
        assert after.headers["x-pensieve-bound"] == "appended"
        assert after.headers["x-pensieve-known-messages"] == "2"
        assert after.headers["x-pensieve-recomputed-tokens"] == "0"


def test_a_reply_cut_by_a_disconnect_can_be_continued(rig: HttpRig) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Talk."}], "stream": True}
    text = json.dumps({**body, "max_tokens": 3000, "ignore_eos": True})
    connection = rig.connection()
    kind = {"content-type": "application/json"}
    connection.request("POST", "/v1/chat/completions", text, kind)
    answer, said = connection.getresponse(), ""
    while said.count(" ") < 3:
        line = answer.readline()
        if line.startswith(b"data: {"):
            said += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
    name = answer.headers["x-pensieve-conversation-id"]
    answer.close()
    connection.close()
    wait_for(lambda: rig.rig.num_live == 0)
    kept = rig.rig.messages(name)[1].content
    assert kept.startswith(said)
    after = rig.chat("Talk.", kept, "Go on.")
    assert after.headers["x-pensieve-bound"] == "appended"
