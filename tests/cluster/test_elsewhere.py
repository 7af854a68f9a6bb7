"""Requests that reach a daemon other than the conversation's owner get correct answers, only slower."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest

from pensieve.api.grpc import forwarding
from pensieve.api.grpc.peers import LOOK_SECONDS
from pensieve.errors import OwnedElsewhere
from pensieve.guard.callers import Caller
from pensieve.v1 import conversation_pb2 as pb
from tests.api.http.rig_http import MODEL, HttpRig
from tests.cluster.sharing import needs_sqlite, sharing
from tests.conversations.rig_daemon import ECHO, DaemonRig, details, wait_for

pytestmark = needs_sqlite
ONE, TWO = 0, 1


class Both:
    """Two echo daemons with one history."""

    def __init__(self, rigs: list[DaemonRig]) -> None:
        self.rigs = rigs
        self.http = [HttpRig(rig) for rig in rigs]

    def conversations(self) -> int:
        daemon = self.rigs[ONE].daemon
        count = daemon.threads.in_read_thread("", daemon.reader.num_conversations)
        return int(self.rigs[ONE].call(count))

    def respond(self, at: int, **fields: Any) -> Any:
        body = {"model": MODEL, "input": "Hello.", **fields}
        return self.http[at].ask("POST", "/v1/responses", body)


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Both]:
    shape: dict[str, Any] = {"program": (*ECHO, "--seconds", "0.02")}
    with sharing(tmp_path, ("one", "two"), {"http": "127.0.0.1:0"}, **shape) as rigs:
        yield Both(rigs)


def test_a_conversation_can_be_deleted_at_any_daemon(both: Both) -> None:
    both.rigs[ONE].ask("c", "hello", request_id="r0")
    assert both.http[TWO].ask("DELETE", "/v1/conversations/c").status == 200
    assert both.http[ONE].ask("GET", "/v1/conversations/c").status == 404
    assert both.conversations() == 0


def test_the_owner_answers_a_slow_deletion(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other daemon waits for the owner's answer, even when the deleted conversation has no owner."""
    conversations = both.rigs[ONE].daemon.conversations
    delete = conversations.delete

    async def slow(*given: Any) -> None:
        await delete(*given)
        await asyncio.sleep(2.5 * LOOK_SECONDS)

    monkeypatch.setattr(conversations, "delete", slow)
    both.rigs[ONE].ask("c", "hello")
    assert both.http[TWO].ask("DELETE", "/v1/conversations/c").status == 200
    both.rigs[ONE].ask("d", "hello")
    request = pb.DeleteConversationRequest(conversation_id="d")
    both.rigs[TWO].stub.DeleteConversation(request, timeout=60)
    forwarder = both.rigs[TWO].server.forwarder
    assert forwarder is not None
    assert (forwarder.num_forwarded, forwarder.num_taken) == (2, 0)


def test_a_response_can_be_deleted_at_any_daemon_and_leaves_no_conversation(both: Both) -> None:
    made = both.respond(ONE)
    assert (made.status, both.conversations()) == (200, 1)
    assert both.http[TWO].ask("DELETE", f"/v1/responses/{made.value['id']}").status == 200
    assert both.conversations() == 0
    assert both.http[ONE].ask("DELETE", f"/v1/responses/{made.value['id']}").status == 404


def test_a_response_running_at_another_daemon_is_not_reported_as_failed(both: Both) -> None:
    """A request at another daemon still ends the turn at the daemon that runs it."""
    more = {"background": True, "max_output_tokens": 3000, "ignore_eos": True}
    began = both.respond(ONE, **more)
    path = f"/v1/responses/{began.value['id']}"
    wait_for(lambda: both.rigs[ONE].num_live == 1)
    assert both.http[TWO].ask("GET", path).value["status"] in ("queued", "in_progress")
    assert both.http[TWO].ask("POST", f"{path}/cancel").value["status"] == "cancelled"
    assert both.http[ONE].ask("GET", path).value["status"] == "cancelled"
    assert both.http[TWO].ask("DELETE", path).status == 200
    again = both.respond(ONE, **more).value["id"]
    wait_for(lambda: both.rigs[ONE].num_live == 1)
    assert both.http[TWO].ask("DELETE", f"/v1/responses/{again}").status == 200
    wait_for(lambda: both.rigs[ONE].num_live == 0)
    assert both.http[ONE].ask("GET", f"/v1/responses/{again}").status == 404


def lose_answers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let owners execute calls but lose their answers. Return the list of these calls."""
    sent, lost = forwarding.Forwarder._send, list[Any]()

    class Deaf:
        def __init__(self, call: Any) -> None:
            self.may_repeat, self.begin, self.answer = call.may_repeat, call.begin, call.answer

        async def pass_on(self, message: Any) -> None:
            """Do not deliver the answer."""

    async def lose(self: Any, owner: OwnedElsewhere, tenant: str, call: Any) -> None:
        lost.append(call)
        await sent(self, owner, tenant, Deaf(call))
        raise forwarding.Unreachable

    monkeypatch.setattr(forwarding.Forwarder, "_send", lose)
    return lost


def test_a_message_without_a_request_id_that_is_forwarded_twice_is_one_turn(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner receives the message, but becomes unreachable before it answers."""
    both.rigs[ONE].ask("c", "hello", request_id="r0")
    lost = lose_answers(monkeypatch)
    said = both.rigs[TWO].ask("c", "again")
    assert len(lost) == 1
    assert said.completed.finish_reason
    assert len(both.rigs[TWO].messages("c")) == 4


def test_an_http_request_without_a_key_that_is_forwarded_twice_is_one_turn(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    both.rigs[ONE].ask("c", "hello", request_id="r0")
    lost = lose_answers(monkeypatch)
    for number, body in enumerate(({}, {"stream": True}), 1):
        both.rigs[ONE].ask(f"d{number}", "hello")
        found = both.respond(TWO, conversation=f"d{number}", **body)
        assert found.status == 200
        assert len(lost) == number
        assert len(both.rigs[TWO].messages(f"d{number}")) == 4
    message = {"conversation_id": "c", "messages": [{"content": "again"}]}
    both.http[TWO].ask("POST", f"/{forwarding.CONVERSATIONS}/SendMessage", message)
    assert len(lost) == 3
    assert len(both.rigs[TWO].messages("c")) == 4


def test_a_repeated_request_at_another_daemon_returns_the_running_response(both: Both) -> None:
    body = {"model": MODEL, "input": "Hello.", "background": True, "max_output_tokens": 400}
    body["ignore_eos"] = True
    key = {"idempotency-key": "k-1"}
    began = both.http[ONE].ask("POST", "/v1/responses", body, key).value
    wait_for(lambda: both.rigs[ONE].num_live == 1)
    again = both.http[TWO].ask("POST", "/v1/responses", body, key)
    assert (again.value["id"], again.status) == (began["id"], 200)
    assert again.value["status"] in ("queued", "in_progress")
    streamed = both.http[TWO].ask("POST", "/v1/responses", {**body, "stream": True}, key)
    assert streamed.status == 200
    assert streamed.events[-1]["type"] == "response.incomplete"
    assert streamed.events[-1]["response"]["id"] == began["id"]


def first_event(answer: http.client.HTTPResponse) -> bytes:
    line = answer.readline()
    while not line.startswith(b"data: "):
        line = answer.readline()
    return line


def test_a_chat_at_another_daemon_is_continued_by_the_owner_and_streamed(both: Both) -> None:
    began = both.http[ONE].chat("Hello.")
    name = began.headers["x-pensieve-conversation-id"]
    reply = began.value["choices"][0]["message"]["content"]
    messages = [
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": reply},
        {"role": "user", "content": "And?"},
    ]
    body = {"model": MODEL, "messages": messages, "stream": True, "max_tokens": 400}
    connection = both.http[TWO].connection()
    connection.request("POST", "/v1/chat/completions", json.dumps({**body, "ignore_eos": True}))
    answer = connection.getresponse()
    assert (answer.status, answer.getheader("x-pensieve-bound")) == (200, "appended")
    assert answer.getheader("x-pensieve-conversation-id") == name
    first_event(answer)
    assert (both.rigs[ONE].num_live, both.rigs[TWO].num_live) == (1, 0)
    assert answer.read().endswith(b"data: [DONE]\n\n")
    connection.close()
    assert len(both.rigs[ONE].messages(name)) == 4


def test_a_client_that_disconnects_ends_the_turn_at_the_owner(both: Both) -> None:
    both.rigs[ONE].ask("c", "hello")
    body = {"model": MODEL, "input": "Hello.", "conversation": "c", "stream": True}
    for more in ({}, {"stream": False}):
        connection = both.http[TWO].connection()
        raw = json.dumps({**body, "max_output_tokens": 3000, "ignore_eos": True, **more})
        connection.request("POST", "/v1/responses", raw)
        wait_for(lambda: both.rigs[ONE].num_live == 1)
        connection.close()
        wait_for(lambda: both.rigs[ONE].num_live == 0)
    assert both.rigs[TWO].num_live == 0


def test_a_large_body_and_a_refusal_are_forwarded(both: Both) -> None:
    both.rigs[ONE].ask("c", "hello")
    blank = b" " * (5 << 20)
    changed = both.http[TWO].ask("POST", "/v1/conversations/c", b'{"metadata": {"a": "b"}}' + blank)
    assert (changed.status, changed.value["metadata"]) == (200, {"a": "b"})
    item = {"type": "message", "role": "user", "content": "more"}
    path = "/v1/conversations/c/items"
    assert both.http[TWO].ask("POST", path, {"items": [item]}).status == 200
    last = both.http[TWO].ask("GET", f"{path}?limit=1").value["data"][0]["id"]
    assert both.http[TWO].ask("DELETE", f"{path}/{last}").status == 200
    first = both.http[TWO].ask("GET", f"{path}?order=asc&limit=1").value["data"][0]["id"]
    refused = both.http[TWO].ask("DELETE", f"{path}/{first}")
    assert refused.status == 400


def test_daemons_that_name_each_other_as_owner_cause_an_error(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    both.rigs[ONE].ask("c", "hello")
    places = zip(("one", "two"), both.rigs, strict=True)
    owners = [OwnedElsewhere("c", name, rig.server.address) for name, rig in places]
    for rig, other in zip(both.rigs, reversed(owners), strict=True):

        def refused(*_: Any, other: OwnedElsewhere = other, **__: Any) -> None:
            raise OwnedElsewhere(other.conversation_id, other.replica, other.address)

        for name in ("claim", "take", "begin_turn"):
            monkeypatch.setattr(rig.daemon.store, name, refused)
    forwarders = [rig.server.forwarder for rig in both.rigs]
    for forwarder in forwarders:
        assert forwarder is not None
        forwarder.patience_seconds = 0.0
    sent: list[str] = []
    carry = forwarding.Forwarder._send

    async def counted(self: Any, owner: OwnedElsewhere, *given: Any) -> None:
        sent.append(owner.replica)
        await carry(self, owner, *given)

    monkeypatch.setattr(forwarding.Forwarder, "_send", counted)
    with pytest.raises(grpc.RpcError) as failed:
        both.rigs[TWO].ask("c", "again")
    assert details(failed.value)["ErrorInfo"].reason == "OWNED_ELSEWHERE"
    assert sent == ["one"] * 2
    answer = both.respond(TWO, conversation="c")
    assert answer.status == 503
    assert "is served by one" in answer.error["message"]
    assert sent == ["one"] * 4
    assert [each.num_forwarded for each in forwarders if each] == [0, 2]


class SlowRequest:
    """A request whose client reads nothing of the answer until released."""

    def __init__(self) -> None:
        self.scope: Mapping[str, Any] = {"method": "GET", "path": "/", "headers": []}
        self.forwarding_key = ""
        self.received: bytes | None = b""
        self.goes_on = asyncio.Event()
        self.status, self.num_bytes, self.has_ended = 0, 0, False

    def pass_on_head(self, status: int, headers: Any) -> None:
        self.status = status

    async def write(self, piece: bytes) -> None:
        await self.goes_on.wait()
        self.num_bytes += len(piece)

    async def end_bytes(self) -> None:
        self.has_ended = True


def test_a_client_that_reads_nothing_causes_backpressure_at_the_owner(both: Both) -> None:
    piece, num_pieces, num_sent = bytes(256 << 10), 200, 0

    async def flood(scope: Any, receive: Any, send: Any) -> None:
        nonlocal num_sent
        await send({"type": "http.response.start", "status": 201, "headers": []})
        for _ in range(num_pieces):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            num_sent += 1
        await send({"type": "http.response.body", "body": b""})

    both.rigs[ONE].server.http_application = lambda: flood
    owner = OwnedElsewhere("c", "one", both.rigs[ONE].server.address)
    request = SlowRequest()

    async def forward() -> int:
        forward_http = both.rigs[TWO].server.forward_http
        assert forward_http is not None
        answering = asyncio.ensure_future(forward_http(request, Caller(), owner))
        before = -1
        while num_sent != before:
            before = num_sent
            await asyncio.sleep(0.5)
        request.goes_on.set()
        assert await answering
        return before

    assert both.rigs[TWO].call(forward()) < num_pieces / 4
    assert (request.status, request.has_ended) == (201, True)
    assert request.num_bytes == num_pieces * len(piece)
