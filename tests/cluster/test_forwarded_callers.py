"""The caller of a forwarded call. A daemon is trusted; a client that sends the same headers is not."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from pensieve.api.grpc import http_forwarding
from pensieve.api.grpc.interceptor import CALLER_KEY, FORWARDED
from pensieve.guard import callers
from pensieve.guard.callers import Caller, encode_caller
from pensieve.launch.sharing import Sharing
from pensieve.v1 import conversation_pb2 as pb
from pensieve.v1 import replica_pb2, replica_pb2_grpc
from tests.api.http.rig_http import MODEL, Answer, HttpRig
from tests.cluster.sharing import needs_sqlite, sharing
from tests.conversations.rig_daemon import DaemonRig, wait_for

pytestmark = needs_sqlite
ONE, TWO = 0, 1
PEER = "peer"
SECRET = "a secret that all daemons of a cluster have"


class Guarded:
    """Two daemons that trust each other, and clients of two tenants."""

    def __init__(self, folder: Path, rigs: list[DaemonRig], tokens: dict[str, str]) -> None:
        self.folder, self.rigs, self._tokens = folder, rigs, tokens
        self.http = [HttpRig(rig) for rig in rigs]

    def bearer(self, name: str) -> str:
        return f"Bearer {self._tokens[name]}"

    def send(self, at: int, name: str, conversation: str, **metadata: str) -> list[Any]:
        request = pb.SendMessageRequest(
            conversation_id=conversation, messages=[pb.NewMessage(content="hello")]
        )
        if conversation == "new":
            request.conversation_id, request.create_if_missing = "c", True
        headers = {"authorization": self.bearer(name), **metadata}
        return list(
            self.rigs[at].stub.SendMessage(
                request,
                metadata=tuple((k.replace("_", "-"), v) for k, v in headers.items()),
                timeout=60,
            )
        )

    def ask(
        self, at: int, name: str, method: str, path: str, body: Any = None, **headers: str
    ) -> Answer:
        more = {key.replace("_", "-"): value for key, value in headers.items()}
        return self.http[at].ask(method, path, body, {"authorization": self.bearer(name), **more})

    def allowance(self, at: int, tenant: str) -> Any:
        async def look() -> Any:
            return self.rigs[at].server.guard.allowance(tenant)

        return self.rigs[at].call(look())

    def deletion_lines(self, at: int) -> list[dict[str, Any]]:
        """Return the deletions in a daemon's audit log."""
        lines = (self.folder / f"audit-{at}").read_text().splitlines()
        return [each for each in map(json.loads, lines) if each["event"] == "delete"]

    def deletions(self, at: int, tenant: str) -> list[str]:
        """Return the conversations that the tenant has deleted, according to a daemon's audit log."""
        lines = (self.folder / f"audit-{at}").read_text().splitlines()
        events = [each for each in map(json.loads, lines) if each["event"] == "delete"]
        return [each["conversation_id"] for each in events if each.get("tenant") == tenant]


@contextmanager
def guarding(folder: Path, secret: str) -> Iterator[Guarded]:
    made = {
        "ann": callers.new_token("ann", False, "of-ann"),
        "bob": callers.new_token("bob", False, "of-bob"),
        "admin": callers.new_token("", True, "of-admin"),
    }
    file = folder / "tokens.toml"
    file.write_text("\n".join(entry for _, entry in made.values()))
    listening = {
        "http": "127.0.0.1:0",
        "tokens": callers.read_tokens(file),
        "peer_tokens": Sharing(secret=secret).tokens(),
        "peer_secret": secret,
    }
    logs = [{"audit_log": folder / f"audit-{at}"} for at in (ONE, TWO)]
    with sharing(folder, ("one", "two"), listening, each_listening=logs) as rigs:
        named = {name: token for name, (token, _) in made.items()}
        yield Guarded(folder, rigs, {**named, PEER: secret})


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarding(tmp_path_factory.mktemp("guarded"), SECRET) as daemons:
        yield daemons


FORGED = {
    "pensieve_caller": encode_caller(Caller("ann", admin=True)),
    "pensieve_forwarded": "one",
}


def code(failed: pytest.ExceptionInfo[grpc.RpcError]) -> str:
    return str(failed.value.code().name)


def test_the_owner_checks_the_original_caller_over_grpc_and_http(guarded: Guarded) -> None:
    check_callers(guarded)


def test_without_a_secret_the_clients_token_is_forwarded(tmp_path: Path) -> None:
    with guarding(tmp_path, "") as daemons:
        check_callers(daemons)
        for name, status in (("ann", 200), ("bob", 404), ("admin", 404)):
            assert forwarded_status(daemons, ONE, name) == status
        assert forwarded_status(daemons, ONE, "ann", "DELETE") == 200
        wait_for(lambda: daemons.deletions(ONE, "ann") == ["c"])  # the tenant, not the forwarder


def test_without_a_secret_the_owners_log_names_the_sender_of_a_deletion(tmp_path: Path) -> None:
    with guarding(tmp_path, "") as daemons:
        daemons.send(ONE, "ann", "new")
        assert daemons.ask(TWO, "ann", "DELETE", "/v1/conversations/c").status == 200
        daemons.send(ONE, "ann", "new")
        request = pb.DeleteConversationRequest(conversation_id="c")
        token = (("authorization", daemons.bearer("ann")),)
        daemons.rigs[TWO].stub.DeleteConversation(request, metadata=token, timeout=60)
        daemons.send(ONE, "ann", "new")
        assert forwarded_status(daemons, ONE, "ann", "DELETE", client_host="192.0.2.1") == 200
        wait_for(
            lambda: len(daemons.deletion_lines(ONE)) == 3 and len(daemons.deletion_lines(TWO)) == 2
        )
        for line in daemons.deletion_lines(ONE):
            assert (line["tenant"], line["token"], line["outcome"]) == ("ann", "of-ann", "OK")
            assert line["forwarded"] == "not verified"
            assert line["peer"].startswith("ipv4:127.0.0.1:")
        assert not any("forwarded" in line for line in daemons.deletion_lines(TWO))


def check_callers(guarded: Guarded) -> None:
    guarded.send(ONE, "ann", "new")
    assert guarded.send(TWO, "ann", "c")[-1].completed.finish_reason
    body = {"model": MODEL, "input": "Hello.", "conversation": "c"}
    assert guarded.ask(TWO, "ann", "POST", "/v1/responses", body).status == 200
    key = {"x-api-key": guarded.bearer("ann").removeprefix("Bearer ")}
    assert guarded.http[TWO].ask("POST", "/v1/responses", body, key).status == 200
    forwarder = guarded.rigs[TWO].server.forwarder
    assert forwarder is not None
    assert (forwarder.num_forwarded, forwarder.num_taken) == (3, 0)
    with pytest.raises(grpc.RpcError) as failed:
        guarded.send(TWO, "bob", "c")
    assert code(failed) == "NOT_FOUND"
    assert guarded.ask(TWO, "bob", "POST", "/v1/responses", body).status == 404


def test_identity_headers_of_a_client_are_ignored(guarded: Guarded) -> None:
    for at in (ONE, TWO):
        for name in ("bob", "admin"):
            with pytest.raises(grpc.RpcError) as failed:
                guarded.send(at, name, "c", **FORGED)
            assert code(failed) == "NOT_FOUND"
            path = "/v1/conversations/c"
            assert guarded.ask(at, name, "GET", path, **FORGED).status == 404
            assert guarded.ask(at, name, "DELETE", path, **FORGED).status == 404
    for name in ("ann", "bob", "admin"):
        with pytest.raises(grpc.RpcError) as failed:
            forwarded_status(guarded, ONE, name)
        assert code(failed) == "PERMISSION_DENIED"
    assert forwarded_status(guarded, ONE, PEER) == 200
    assert CALLER_KEY in {key.replace("_", "-") for key in FORGED}
    assert FORWARDED in {key.replace("_", "-") for key in FORGED}


def forwarded_status(
    guarded: Guarded, at: int, name: str, method: str = "GET", **fields: Any
) -> int:
    """Let a client call the method that daemons use to forward calls. Return the status."""
    head = replica_pb2.HttpRequest(method=method, path="/v1/conversations/c", **fields)
    with grpc.insecure_channel(guarded.rigs[at].server.address) as channel:
        stub = replica_pb2_grpc.ReplicaServiceStub(channel)
        answers = stub.ForwardHttp(
            iter([replica_pb2.ForwardHttpRequest(head=head)]),
            metadata=(
                ("authorization", guarded.bearer(name)),
                *((key.replace("_", "-"), value) for key, value in FORGED.items()),
            ),
            timeout=60,
        )
        return int(next(answers).head.status)


def test_forward_calls_without_a_valid_token_are_refused(guarded: Guarded) -> None:
    head = replica_pb2.HttpRequest(method="GET", path="/health")
    with grpc.insecure_channel(guarded.rigs[ONE].server.address) as channel:
        stub = replica_pb2_grpc.ReplicaServiceStub(channel)
        wrong = ("authorization", f"Bearer {SECRET}!")
        for metadata in ((), (wrong,), ((CALLER_KEY, "{}"),)):
            with pytest.raises(grpc.RpcError) as failed:
                next(
                    stub.ForwardHttp(
                        iter([replica_pb2.ForwardHttpRequest(head=head)]), metadata=metadata
                    )
                )
            assert code(failed) == "UNAUTHENTICATED"


@pytest.mark.parametrize(
    "head",
    [
        {"method": "GET /", "path": "/"},
        {"method": "GET", "path": "health"},
        {"method": "GET", "path": "/", "headers": [replica_pb2.HttpHeader()] * 300},
        None,
    ],
)
def test_an_invalid_head_of_a_forwarded_request_is_refused(guarded: Guarded, head: Any) -> None:
    first = replica_pb2.ForwardHttpRequest(body=b"x")
    if head is not None:
        first = replica_pb2.ForwardHttpRequest(head=replica_pb2.HttpRequest(**head))
    with grpc.insecure_channel(guarded.rigs[ONE].server.address) as channel:
        stub = replica_pb2_grpc.ReplicaServiceStub(channel)
        with pytest.raises(grpc.RpcError) as failed:
            next(
                stub.ForwardHttp(iter([first]), metadata=(("authorization", guarded.bearer(PEER)),))
            )
        assert code(failed) == "INVALID_ARGUMENT"


def test_a_forwarded_call_is_counted_and_audited_at_the_daemon_that_received_it(
    guarded: Guarded,
) -> None:
    guarded.send(ONE, "ann", "c")
    counted: list[tuple[int, str]] = []
    for at in (ONE, TWO):
        allowance = guarded.allowance(at, "ann")
        request = allowance.count_request

        def note(now: float, at: int = at, request: Any = request) -> Any:
            counted.append((at, "ann"))
            return request(now)

        allowance.count_request = note
    assert guarded.send(TWO, "ann", "c")[-1].completed.finish_reason
    body = {"model": MODEL, "input": "Hello.", "conversation": "c"}
    assert guarded.ask(TWO, "ann", "POST", "/v1/responses", body).status == 200
    assert counted == [(TWO, "ann")] * 2
    assert guarded.ask(TWO, "ann", "DELETE", "/v1/conversations/c").status == 200
    wait_for(lambda: guarded.deletions(TWO, "ann") == ["c"])
    assert guarded.deletions(ONE, "ann") == []
    for at in (ONE, TWO):
        del guarded.allowance(at, "ann").count_request
        assert guarded.allowance(at, "ann").num_calls == 0


def test_a_forward_call_without_a_head_times_out(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_forwarding, "BODY_SECONDS", 0.1)
    over = threading.Event()

    def nothing() -> Iterator[replica_pb2.ForwardHttpRequest]:
        over.wait()
        yield from ()

    with grpc.insecure_channel(guarded.rigs[ONE].server.address) as channel:
        stub = replica_pb2_grpc.ReplicaServiceStub(channel)
        metadata = (("authorization", guarded.bearer(PEER)),)
        try:
            with pytest.raises(grpc.RpcError) as failed:
                next(stub.ForwardHttp(nothing(), metadata=metadata, timeout=60))
        finally:
            over.set()
        assert code(failed) == "DEADLINE_EXCEEDED"
        assert "did not arrive within" in str(failed.value.details())
