"""Requests that reach another daemon than the one that has the conversation: right, only slower."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pensieve.api.grpc import forwarding
from tests.api.http.rig_http import MODEL, HttpRig
from tests.conversations.rig_daemon import ECHO, DaemonRig
from tests.history.rig_service import ServiceRig, sharing, wait_for

ONE, TWO = 0, 1


class Both:
    """Two daemons that echo, with one history."""

    def __init__(self, service: ServiceRig, rigs: list[DaemonRig]) -> None:
        self.service, self.rigs = service, rigs
        self.http = [HttpRig(rig) for rig in rigs]

    def conversations(self) -> int:
        store = self.service._store
        return int(self.service.run(self.service.threads.in_store("", store.num_conversations)))

    def respond(self, at: int, **fields: Any) -> Any:
        body = {"model": MODEL, "input": "Hello.", **fields}
        return self.http[at].ask("POST", "/v1/responses", body)


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Both]:
    shape: dict[str, Any] = {"program": (*ECHO, "--seconds", "0.02")}
    with sharing(tmp_path, ("one", "two"), {"http": "127.0.0.1:0"}, **shape) as (service, rigs):
        yield Both(service, rigs)


def test_a_conversation_is_deleted_at_any_daemon(both: Both) -> None:
    both.rigs[ONE].ask("c", "hello", request_id="r0")
    assert both.http[TWO].ask("DELETE", "/v1/conversations/c").status == 200
    assert both.http[ONE].ask("GET", "/v1/conversations/c").status == 404
    assert both.conversations() == 0


def test_a_response_is_deleted_at_any_daemon_and_leaves_no_conversation(both: Both) -> None:
    made = both.respond(ONE)
    assert (made.status, both.conversations()) == (200, 1)
    assert both.http[TWO].ask("DELETE", f"/v1/responses/{made.value['id']}").status == 200
    assert both.conversations() == 0
    assert both.http[ONE].ask("DELETE", f"/v1/responses/{made.value['id']}").status == 404


def test_a_response_that_runs_at_another_daemon_is_not_said_to_have_failed(both: Both) -> None:
    """Who runs its turn ends it; another one says so, and nothing of it is lost."""
    more = {"background": True, "max_output_tokens": 3000, "ignore_eos": True}
    began = both.respond(ONE, **more)
    path = f"/v1/responses/{began.value['id']}"
    wait_for(lambda: both.rigs[ONE].num_live == 1)
    assert both.http[TWO].ask("GET", path).value["status"] in ("queued", "in_progress")
    for method, where in (("POST", f"{path}/cancel"), ("DELETE", path)):
        refused = both.http[TWO].ask(method, where)
        assert refused.status == 503
        assert "is served by" in refused.error["message"]
    assert both.http[ONE].ask("GET", path).value["status"] in ("queued", "in_progress")
    assert both.http[ONE].ask("POST", f"{path}/cancel").value["status"] == "cancelled"
    assert both.http[TWO].ask("GET", path).value["status"] == "cancelled"
    assert both.http[TWO].ask("DELETE", path).status == 200


def test_a_message_without_a_request_id_that_is_sent_twice_is_one_turn(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner has had it, and cannot be reached when it answers."""
    both.rigs[ONE].ask("c", "hello", request_id="r0")
    forwarded = forwarding.Forwarder._forwarded
    seen: list[str] = []

    async def lost(self: Any, address: str, method: str, request: Any, context: Any) -> Any:
        seen.append(request.request_id)
        both.rigs[ONE].ask("c", "again", request_id=request.request_id)
        raise forwarding.Unreachable

    monkeypatch.setattr(forwarding.Forwarder, "_forwarded", lost)
    said = both.rigs[TWO].ask("c", "again")
    monkeypatch.setattr(forwarding.Forwarder, "_forwarded", forwarded)
    assert len(seen[0]) == 32
    assert said.completed.finish_reason
    assert len(both.rigs[TWO].messages("c")) == 4


def test_a_response_that_is_asked_for_again_where_it_does_not_run(both: Both) -> None:
    body = {"model": MODEL, "input": "Hello.", "background": True, "max_output_tokens": 3000}
    body["ignore_eos"] = True
    key = {"idempotency-key": "k-1"}
    began = both.http[ONE].ask("POST", "/v1/responses", body, key).value
    wait_for(lambda: both.rigs[ONE].num_live == 1)
    again = both.http[TWO].ask("POST", "/v1/responses", body, key)
    assert (again.value["id"], again.status) == (began["id"], 200)
    assert again.value["status"] in ("queued", "in_progress")
    streamed = both.http[TWO].ask("POST", "/v1/responses", {**body, "stream": True}, key)
    assert streamed.status == 503
    assert "is served by" in streamed.error["message"]
    both.http[ONE].ask("POST", f"/v1/responses/{began['id']}/cancel")
