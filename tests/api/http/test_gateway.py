"""gRPC methods as JSON over HTTP, the web page, and its view of memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from pensieve.api.http import page
from pensieve.guard import callers
from tests.api.http.rig_http import Answer, HttpRig, http_rig
from tests.conversations.rig_daemon import wait_for

SERVICE = "/pensieve.v1.ConversationService/"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[HttpRig]:
    with http_rig(tmp_path / "data") as found:
        yield found


def call(rig: HttpRig, method: str, value: Any, **headers: str) -> Answer:
    return rig.ask("POST", SERVICE + method, value, headers)


def send(rig: HttpRig, conversation_id: str, text: str, **fields: Any) -> list[Any]:
    body = {
        "conversation_id": conversation_id,
        "create_if_missing": True,
        "messages": [{"content": text}],
        "sampling": {"max_tokens": 40, "ignore_eos": True},
        **fields,
    }
    return call(rig, "SendMessage", body).events


def test_send_message_streams_the_events_of_grpc(rig: HttpRig) -> None:
    events = send(rig, "talk", "Hello.", request_id="one")
    assert events[0]["started"]["request_id"] == "one"
    assert [int(each["sequence"]) for each in events] == list(range(1, len(events) + 1))
    text = "".join(each["delta"].get("text", "") for each in events if "delta" in each)
    assert events[-1]["completed"]["usage"]["output_tokens"] == "40"
    stored = rig.rig.messages("talk")
    assert [each.content for each in stored] == ["Hello.", text]
    again = send(rig, "talk", "Hello.", request_id="one")
    assert again[0]["started"]["replayed"]


def test_deletions_are_audited_with_their_ids(tmp_path: Path) -> None:
    audit_log = tmp_path / "audit.log"
    with http_rig(tmp_path / "data", http={"audit_log": audit_log}) as rig:
        send(rig, "talk", "Hello.")
        assert call(rig, "DeleteConversation", {"conversation_id": "talk"}).status == 200
        assert call(rig, "DeletePrefix", {"prefix_id": "none"}).status == 404
    lines = [json.loads(each) for each in audit_log.read_text().splitlines()]
    deleted, missing = [each for each in lines if each["event"] == "delete"]
    assert (deleted["conversation_id"], deleted["outcome"]) == ("talk", "OK")
    assert (missing["prefix_id"], missing["outcome"]) == ("none", "NOT_FOUND")


def test_gateway_methods_answer_like_grpc(rig: HttpRig) -> None:
    send(rig, "talk", "Hello.")
    send(rig, "talk", "Go on.")
    listed = call(rig, "ListMessages", {"conversation_id": "talk"}).value
    assert [each["content"] for each in listed["messages"]][::2] == ["Hello.", "Go on."]
    forked = call(rig, "ForkConversation", {"conversation_id": "talk", "at_revision": "1"}).value
    assert forked["conversation"]["num_messages"] == 2
    rewound = call(rig, "RewindConversation", {"conversation_id": "talk", "to_revision": "1"})
    assert rewound.value["conversation"]["num_messages"] == 2
    assert call(rig, "GetServerInfo", {}).value["server"]["model"] == "builtin"
    assert call(rig, "DeleteConversation", {"conversation_id": "talk"}).value == {}
    missing = call(rig, "GetConversation", {"conversation_id": "talk"})
    assert (missing.status, missing.error["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    "body",
    [
        [],
        {"nothing": 1},
        {"conversation_id": 5},
        {"messages": [{"role": "NOBODY"}]},
        {"at_revision": "x"},
        json.loads("[" * 60 + "]" * 60),
    ],
)
def test_invalid_gateway_bodies_are_refused(rig: HttpRig, body: Any) -> None:
    answer = call(rig, "ForkConversation", body)
    assert (answer.status, answer.error["param"]) == (400, "body")


def test_a_large_field_is_refused_as_it_is_over_grpc(rig: HttpRig) -> None:
    answer = call(rig, "CreateConversation", {"metadata": {"a": "b" * 20_000}})
    assert (answer.status, answer.error["param"]) == (400, "metadata")


def test_the_page_loads_only_its_own_scripts_and_styles(rig: HttpRig) -> None:
    answer = rig.ask("GET", "/")
    assert answer.status == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    page = answer.body.decode()
    assert "http://" not in page
    assert "https://" not in page.replace("https?:", "")
    assert "innerHTML" not in page
    assert page.count("<script>") == page.count("<style>") == 1
    assert " style=" not in page
    assert " onclick=" not in page


def watch(rig: HttpRig, count: int, **headers: str) -> list[Any]:
    """Return `count` pictures of the cache."""
    connection = rig.connection()
    connection.request("GET", "/pensieve/memory", headers=headers)
    answer = connection.getresponse()
    found: list[Any] = []
    while len(found) < count:
        line = answer.readline()
        if line.startswith(b"data: "):
            found.append(json.loads(line[6:]))
    answer.close()
    connection.close()
    return found


def test_the_memory_view_shows_the_tier_of_each_chunk(
    rig: HttpRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "LOOK_SECONDS", 0.01)
    send(rig, "talk", "Hello there.")
    *_, last = watch(rig, 3)
    (shown,) = last["conversations"]
    threads, reader = rig.rig.daemon.threads, rig.rig.daemon.reader
    log = rig.rig.call(threads.in_read_thread("", reader.get_conversation, "talk")).num_tokens
    num_chunks = -(-(log - 1) // 32)  # the last token has no KV yet
    assert (shown["id"], shown["running"], shown["strip"]) == ("talk", 0.0, f"d{num_chunks}")
    assert last["figures"]["device_pages"] > last["figures"]["device_pages_free"] > 0
    explained = rig.ask("GET", "/pensieve/explain/talk").value
    assert explained["runs"] == [{"first": 0, "count": num_chunks, "place": "device", "holders": 1}]


def test_one_tenants_memory_watchers_do_not_lock_out_other_tenants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "WATCHERS_MAX", 2)
    monkeypatch.setattr(page, "WATCHERS_OF_ALL_MAX", 2)
    entries, given = "", []
    for tenant in ("red", "blue"):
        token, entry = callers.new_token(tenant, admin=False)
        given.append({"x-api-key": token})
        entries += entry
    red, blue = given
    tokens = callers.tokens_of(tmp_path / "tokens", entries.encode())
    with http_rig(tmp_path / "data", http={"tokens": tokens}) as rig, ExitStack() as stack:

        def status(headers: dict[str, str]) -> int:
            """Return the status of a watcher that stays connected."""
            connection = stack.enter_context(closing(rig.connection()))
            connection.request("GET", "/pensieve/memory", headers=headers)
            return stack.enter_context(closing(connection.getresponse())).status

        assert [status(red) for _ in range(3)] == [200, 200, 429]
        assert [status(blue) for _ in range(2)] == [200, 429]  # the daemon's limit is reached
        stack.close()
        wait_for(lambda: status(red) == 200)


def test_a_tenant_sees_only_its_own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "LOOK_SECONDS", 0.01)
    given, entries = {}, ""
    for tenant in ("red", "blue"):
        given[tenant], entry = callers.new_token(tenant, admin=False)
        entries += entry
    tokens = callers.tokens_of(tmp_path / "tokens", entries.encode())
    with http_rig(tmp_path / "data", http={"tokens": tokens}) as rig:
        for token in given.values():
            rig.chat("Hello.", headers={"x-api-key": token})
        for token in given.values():
            *_, last = watch(rig, 2, **{"x-api-key": token})
            assert len(last["conversations"]) == 1
            assert "/" not in last["conversations"][0]["id"]
            assert "figures" not in last
        assert rig.ask("GET", "/").status == 200
        assert rig.ask("GET", "/pensieve/memory").status == 401
        named = last["conversations"][0]["id"]
        explained = rig.ask(
            "GET", f"/pensieve/explain/{named}", headers={"x-api-key": given["red"]}
        )
        assert explained.value == {"runs": [], "events": []}
