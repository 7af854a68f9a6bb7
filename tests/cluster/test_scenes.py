"""Two daemons on one database: the faults of the nemesis, one at a time."""

from __future__ import annotations

import http.client
import json
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pensieve.client import Client, Delta, Reply, Retry
from pensieve.errors import OwnedElsewhere
from pensieve.v1 import conversation_pb2 as pb
from tests.cluster.checker import wrong_owners
from tests.cluster.sharing import history, on_both
from tests.cluster.world import Kind, World
from tests.loop_thread import LoopThread

LEASE_SECONDS = 5.0  # longer than a slow machine pauses
ECHO_MODEL = "echo (arithmetic instead of a model)"
LASTING = 5000  # tokens of a turn that lasts until it is cancelled
LONG = 400  # tokens of a turn that lasts some seconds
PATIENT = Retry(retries=1000, first_seconds=0.05, most_seconds=0.5)


class Cluster:
    """A world whose loop runs in a thread."""

    def __init__(self, folder: Path, store: str) -> None:
        self._loop = LoopThread()
        self.run, self.do = self._loop.run, self._loop.do
        self.world = World(folder, Kind(2, LEASE_SECONDS, echo_seconds=0.01, store=store))
        self.run(self.world.__aenter__())
        self.clients = [Client(each, retry=PATIENT) for each in self.world.addresses]

    def close(self) -> None:
        for client in self.clients:
            client.close()
        assert self.run(self.world.stop()) == [0, 0]
        self.run(self.world.__aexit__())
        self._loop.close()

    def events(self, kind: str, **wanted: Any) -> list[dict[str, Any]]:
        return self.world.events(kind, **wanted)

    def texts(self, name: str) -> list[str]:
        return [each.text for each in self.clients[0].conversation(name).messages()]


@pytest.fixture(scope="module", params=on_both)
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with (
        tempfile.TemporaryDirectory(prefix="pensieve-test-") as folder,
        history(request.param) as store,
    ):
        found = Cluster(Path(folder), store)
        yield found
        found.close()
        assert wrong_owners(found.world.events()) == []


class Saying(threading.Thread):
    """A message in progress; `begun` is set with the first piece of the reply."""

    def __init__(self, client: Client, name: str, request_id: str, length: int) -> None:
        super().__init__(daemon=True)
        self._turn = client.conversation(name).send(
            "tell me more", request_id=request_id, max_tokens=length, ignore_eos=True
        )
        self.begun = threading.Event()
        self.reply: Reply | None = None
        self.failure: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            for event in self._turn:
                if isinstance(event, Delta):
                    self.begun.set()
            self.reply = self._turn.reply
        except BaseException as error:
            self.failure = error

    def wait(self) -> Reply:
        self.join(120)
        assert self.failure is None, self.failure
        assert self.reply is not None
        return self.reply


@pytest.mark.timeout(600)
def test_a_paused_daemon_that_resumes_writes_nothing_of_its_old_turn(
    cluster: Cluster,
) -> None:
    """The resumed daemon still believes that it owns the conversation. Its client gets the stored turn."""
    first, second = cluster.clients
    paused = cluster.world.replicas[0]
    away = Saying(first, "still", "r", LONG)
    assert away.begun.wait(120)
    (session,) = {each["session"] for each in cluster.events("begun", conversation_id="still")}
    cluster.do(paused.pause_between_writes, cluster.world.database)
    try:
        there = Saying(second, "still", "r", LONG).wait()
    finally:
        cluster.do(paused.go_on)
    here = away.wait()
    assert (here.text, here.revision) == (there.text, there.revision) == (there.text, 1)
    assert cluster.texts("still") == ["tell me more", there.text]
    begun = cluster.events("begun", conversation_id="still")
    assert [each["session"] == session for each in begun] == [True, False]
    turn_id = begun[0]["turn_id"]
    ends = cluster.events("ended", turn_id=turn_id)
    assert [each["how"] for each in ends] == ["interrupted", "completed"]
    assert ends[1]["session"] == begun[1]["session"]


@pytest.mark.timeout(600)
def test_one_request_sent_to_two_daemons_at_once_is_one_turn(cluster: Cluster) -> None:
    saying = [
        Saying(client, f"both-{number}", "r", 20)
        for number in range(8)
        for client in cluster.clients
    ]
    replies = [each.wait() for each in saying]
    for number in range(8):
        one, two = replies[2 * number : 2 * number + 2]
        assert (one.text, one.turn_id, one.revision) == (two.text, two.turn_id, 1)
        assert cluster.texts(f"both-{number}") == ["tell me more", one.text]
        assert len(cluster.events("begun", conversation_id=f"both-{number}")) == 1


@pytest.mark.timeout(600)
def test_a_turn_can_be_cancelled_at_a_daemon_that_does_not_run_it(cluster: Cluster) -> None:
    saying = Saying(cluster.clients[0], "wrong", "r", LASTING)
    assert saying.begun.wait(120)
    request = pb.CancelTurnRequest(conversation_id="wrong", request_id="r")
    answer = cluster.clients[1].call(lambda at: at.stub.CancelTurn, request, repeat=True)
    reply = saying.wait()
    assert answer.finish_reason == pb.FINISH_REASON_CANCELLED
    assert reply.finish_reason == "cancelled"
    assert cluster.texts("wrong") == ["tell me more", reply.text]


@pytest.mark.timeout(600)
def test_a_draining_daemon_still_forwards_the_owners_reply(cluster: Cluster) -> None:
    """The draining daemon runs no turn itself. A client without retries reads the whole reply through it."""
    cluster.clients[0].conversation("through").ask("hello", max_tokens=4)
    gateway = cluster.world.replicas[1]
    with Client(cluster.world.addresses[1], retry=Retry(retries=0)) as client:
        saying = Saying(client, "through", "r", LONG)
        assert saying.begun.wait(120)
        try:
            assert cluster.run(gateway.terminate()) == 0
            reply = saying.wait()
        finally:
            cluster.run(gateway.start())
    assert cluster.texts("through")[-1] == reply.text
    assert len(cluster.events("begun", conversation_id="through")) == 2


def respond(cluster: Cluster, name: str, *, is_stream: bool) -> None:
    """Send a request over HTTP to the second daemon, from a client that does not retry."""
    address = cluster.world.replicas[1].http_address
    connection = http.client.HTTPConnection(address, timeout=120)
    body = {"model": ECHO_MODEL, "input": "more", "conversation": name, "stream": is_stream}
    connection.request("POST", "/v1/responses", json.dumps(body))
    answer = connection.getresponse()
    raw = answer.read().decode()
    connection.close()
    assert answer.status == 200, raw
    assert "completed" in raw or "incomplete" in raw, raw


@pytest.mark.timeout(600)
def test_an_http_stream_ends_with_an_error_if_its_owner_is_killed_and_a_retry_works(
    cluster: Cluster,
) -> None:
    cluster.clients[0].conversation("broken").ask("hello", max_tokens=8)
    replica, gateway = cluster.world.replicas
    connection = http.client.HTTPConnection(gateway.http_address, timeout=120)
    body = {"model": ECHO_MODEL, "input": "more", "conversation": "broken", "stream": True}
    body |= {"max_output_tokens": LASTING, "ignore_eos": True}
    connection.request("POST", "/v1/responses", json.dumps(body))
    answer = connection.getresponse()
    while b"output_text.delta" not in answer.readline():
        assert answer.status == 200
    cluster.run(replica.kill())
    try:
        rest = answer.read().decode()
        assert "closed the connection" in rest.strip().splitlines()[-1], rest[-1000:]
        connection.close()
        respond(cluster, "broken", is_stream=True)
    finally:
        cluster.run(replica.start())
    assert cluster.texts("broken")[::2] == ["hello", "more"]


@pytest.mark.timeout(600)
def test_conversations_of_a_stopped_daemon_are_served_while_it_is_stopped(
    cluster: Cluster,
) -> None:
    """The stopped daemon still accepts connections. Clients that do not retry get answers (gRPC, HTTP)."""
    first, paused = cluster.clients[0], cluster.world.replicas[0]
    for name in ("idle-grpc", "idle-http", "idle-stream", "idle-cancel"):
        first.conversation(name).ask("hello")
    with Client(cluster.world.addresses[1], retry=Retry(retries=0)) as second:
        second.conversation("idle-grpc").ask("hello")  # forwarded, so the daemons are connected now
        away = Saying(first, "runs", "r", LONG)
        assert away.begun.wait(120)

        def cancel() -> None:
            request = pb.CancelTurnRequest(conversation_id="idle-cancel", request_id="none")
            second.call(lambda at: at.stub.CancelTurn, request, repeat=False)

        def begin() -> None:
            assert Saying(second, "runs", "r", LONG).begun.wait(120)

        calls: list[Callable[[], object]] = [
            lambda: second.conversation("idle-grpc").ask("more", max_tokens=8),
            lambda: respond(cluster, "idle-http", is_stream=False),
            lambda: respond(cluster, "idle-stream", is_stream=True),
            cancel,
            begin,
        ]
        with ThreadPoolExecutor(len(calls)) as threads:
            cluster.do(paused.pause_between_writes, cluster.world.database)
            try:
                for each in [threads.submit(call) for call in calls]:
                    each.result(60)
            finally:
                cluster.do(paused.go_on)
        assert away.wait().revision == 1
    texts = cluster.texts("idle-http")
    assert (len(texts), texts[0], texts[2]) == (4, "hello", "more")


@pytest.mark.timeout(600)
def test_the_error_names_an_owner_that_is_unreachable_but_alive(
    cluster: Cluster,
) -> None:
    """The owner is alive and runs a turn. The SDK would retry until the owner is gone."""
    cluster.do(cluster.world.replicas[0].peer_link.refuse)
    saying = Saying(cluster.clients[0], "apart", "r", LASTING)
    assert saying.begun.wait(120)
    try:
        with Client(cluster.world.addresses[1], retry=Retry(retries=0)) as client:
            with pytest.raises(OwnedElsewhere) as refused:
                client.conversation("apart").ask("tell me more", request_id="r", max_tokens=9)
            assert refused.value.replica == "replica-0"
            assert refused.value.address == cluster.world.replicas[0].peer_link.address
    finally:
        cluster.do(cluster.world.replicas[0].peer_link.heal)
    request = pb.CancelTurnRequest(conversation_id="apart", request_id="r")
    cluster.clients[0].call(lambda at: at.stub.CancelTurn, request, repeat=True)
    assert saying.wait().revision == 1


@pytest.mark.timeout(600)
def test_another_daemon_restarts_a_killed_daemons_turn_when_the_lease_expires(
    cluster: Cluster,
) -> None:
    replica = cluster.world.replicas[0]
    saying = Saying(cluster.clients[0], "killed", "r", LONG)
    assert saying.begun.wait(120)
    (lost,) = {each["session"] for each in cluster.events("begun", conversation_id="killed")}
    cluster.run(replica.kill())
    again = Saying(cluster.clients[1], "killed", "r", LONG)
    assert again.begun.wait(120)
    there = again.wait()
    cluster.run(replica.start())
    here = saying.wait()
    assert (here.text, here.revision) == (there.text, there.revision) == (there.text, 1)
    assert cluster.texts("killed") == ["tell me more", there.text]
    assert len(cluster.events("closed", session=lost)) == 1
