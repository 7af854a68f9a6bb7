"""A cluster on a real Ray with two nodes, as clients see it: two replicas behind one address.

All tests of this file share one cluster. It is started and stopped with the user's commands.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from pensieve.client import Client
from pensieve.errors import InvalidArgument, NotFound
from pensieve.store import ConversationStore
from pensieve.store.records import StoredTurnState
from pensieve.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    conversation_pb2_grpc,
    jobs_pb2,
    jobs_pb2_grpc,
)
from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.rig_daemon import details, wait_for
from tests.newcomer import free_port

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.xdist_group("ray"),
    pytest.mark.timeout(240),
]
MODEL = "echo (arithmetic instead of a model)"


@dataclass
class RayCluster:
    folder: Path
    address: str
    http: str

    def command(self, *words: str, codes: tuple[int, ...] = (0,)) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "pensieve", "cluster", *words, "--data", str(self.folder)],
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
            env={**os.environ, "PENSIEVE_ENGINE": "echo:0.01"},
        )
        assert done.returncode in codes, done.stdout + done.stderr
        return done.stdout

    def replicas(self) -> dict[str, int]:
        """Return the running replicas and their process ids."""
        found = re.findall(
            r"Replica +(\w+) +running +\S+ pid (\d+)", self.command("status", codes=(0, 1))
        )
        return {name: int(pid) for name, pid in found}

    def wait_until_replaced(self, killed: str) -> None:
        """Wait until both replicas run and `killed` is gone. Ray lists a killed replica for a while."""

        def is_whole() -> bool:
            names = self.replicas().keys()
            return len(names) == 2 and killed not in names

        wait_for(is_whole)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    ports = free_port(), free_port()
    config = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": ports[1]},
        "grpc_options": {
            "port": ports[0],
            "grpc_servicer_functions": ["pensieve.cluster.grpc_edge:add_services"],
        },
        "applications": [
            {
                "name": "pensieve",
                "route_prefix": "/",
                "import_path": "pensieve.cluster.deployments:build",
                "args": {
                    "replicas": 2,
                    "local": True,
                    "data": str(folder / "history"),
                    "serve": {"drain_timeout": 10},
                },
            }
        ],
    }
    (folder / "serve.yaml").write_text(yaml.safe_dump(config))
    found = RayCluster(folder, f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}")
    try:
        out = found.command("up", str(folder / "serve.yaml"), "--nodes", "2", "--cpus", "1")
        assert f"ready grpc://{found.address}, http://{found.http}" in out
        yield found
    finally:
        found.command("down")


def replica_of(call: Any) -> str:
    """Return the replica that answered, from the trailing metadata."""
    return str(dict(call.trailing_metadata())["pensieve-replica"])


def send(stub: Any, conversation_id: str, text: str, **metadata: str) -> str:
    """Run a turn and return the replica that ran it. The SDK also sends the id as the session."""
    metadata = {"session_id": conversation_id, **metadata}
    new = pb.CreateConversationRequest(conversation_id=conversation_id)
    with contextlib.suppress(grpc.RpcError):  # the conversation may exist
        stub.CreateConversation(new, metadata=tuple(metadata.items()), timeout=60)
    request = pb.SendMessageRequest(
        conversation_id=conversation_id,
        request_id=f"{conversation_id}-{text}",
        messages=[pb.NewMessage(content=text)],
    )
    call = stub.SendMessage(request, metadata=tuple(metadata.items()), timeout=60)
    assert list(call)[-1].WhichOneof("event") == "completed"
    return replica_of(call)


@pytest.fixture
def stub(cluster: RayCluster) -> Iterator[Any]:
    with grpc.insecure_channel(cluster.address) as channel:
        yield conversation_pb2_grpc.ConversationServiceStub(channel)


def test_a_conversation_is_never_split(cluster: RayCluster, stub: Any) -> None:
    at = {
        f"c-{index}": [send(stub, f"c-{index}", str(turn)) for turn in range(3)]
        for index in range(12)
    }
    assert all(len(set(names)) == 1 for names in at.values())
    assert {names[0] for names in at.values()} == set(cluster.replicas())


def test_the_session_id_in_the_metadata_selects_the_replica(stub: Any) -> None:
    names = {send(stub, f"k-{index}", "x", session_id="one key") for index in range(6)}
    assert len(names) == 1


def test_any_replica_serves_any_conversation(cluster: RayCluster, stub: Any) -> None:
    """The daemon of that replica forwards the turn to the conversation's owner."""
    replicas, names, num_turns = set(cluster.replicas()), set[str](), 0
    while names != replicas and num_turns < 64:  # a key may belong to either replica
        names.add(send(stub, "anywhere", str(num_turns), session_id=f"key {num_turns}"))
        num_turns += 1
    assert names == replicas
    with Client(cluster.address) as client:
        texts = [each.text for each in client.conversation("anywhere").messages()]
    assert texts[::2] == [str(turn) for turn in range(num_turns)]
    assert all(texts)


def test_the_sdk_works_with_the_cluster_as_with_a_daemon(cluster: RayCluster) -> None:
    with Client(cluster.address) as client:
        trip = client.conversation("trip")
        deltas = list(trip.send("Hello.", max_tokens=20))
        assert deltas
        assert [each.role for each in trip.messages()] == ["user", "assistant"]
        assert client.server_info().model == MODEL


def test_errors_keep_their_status_and_their_details(cluster: RayCluster, stub: Any) -> None:
    with Client(cluster.address) as client:
        with pytest.raises(NotFound, match="there is no conversation 'nowhere'"):
            list(client.conversation("nowhere").messages())
        with pytest.raises(InvalidArgument, match="max_tokens"):
            client.conversation("trip").ask("x", max_tokens=-1)
    request = pb.SendMessageRequest(
        conversation_id="trip",
        messages=[pb.NewMessage(content="x")],
        sampling=pb.Sampling(max_tokens=-1),
    )
    call = stub.SendMessage(request, timeout=60)
    with pytest.raises(grpc.RpcError) as caught:
        list(call)  # the stream ends with this error, without a message before
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    violations = details(caught.value)["BadRequest"].field_violations
    assert [each.field for each in violations] == ["sampling.max_tokens"]


def test_an_http_client_that_disconnects_ends_its_turn(cluster: RayCluster) -> None:
    host, _, port = cluster.http.partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Go on."}], "stream": True}
    connection.request(
        "POST",
        "/v1/chat/completions",
        json.dumps({**body, "max_tokens": 50_000, "ignore_eos": True}),
        {"content-type": "application/json", "x-session-id": "leaves"},
    )
    response = connection.getresponse()
    assert response.read1(10)
    sockets = sorted(cluster.folder.glob("history/replicas/*/admin.sock"))

    def num_running() -> int:
        found = 0
        for each in sockets:
            with grpc.insecure_channel(f"unix:{each}") as channel:
                stub: Any = admin_pb2_grpc.AdminServiceStub(channel)
                stats = stub.GetStats(admin_pb2.GetStatsRequest(), timeout=60).stats
                found += stats.turns_running
        return found

    assert len(sockets) == 2
    assert num_running() == 1
    response.close()
    connection.close()
    wait_for(lambda: num_running() == 0)


def test_a_deadline_ends_the_turn(stub: Any) -> None:
    request = pb.SendMessageRequest(
        conversation_id="slow",
        request_id="slow-1",
        messages=[pb.NewMessage(content="x")],
        sampling=pb.Sampling(max_tokens=50_000, ignore_eos=True),
    )
    send(stub, "slow", "0")
    call = stub.SendMessage(request, timeout=1.0)
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


def test_the_next_message_is_accepted_after_a_cancelled_turn(stub: Any) -> None:
    request = pb.SendMessageRequest(
        conversation_id="left",
        request_id="left-1",
        messages=[pb.NewMessage(content="x")],
        sampling=pb.Sampling(max_tokens=50_000, ignore_eos=True),
    )
    send(stub, "left", "0")
    call = stub.SendMessage(request, timeout=60)
    assert next(iter(call)).WhichOneof("event") == "started"
    stub.CancelTurn(pb.CancelTurnRequest(conversation_id="left"), timeout=60)
    events = [each.WhichOneof("event") for each in call]
    assert events[-1] == "completed"
    assert send(stub, "left", "next")


def test_a_batch_file_is_uploaded_as_a_stream(cluster: RayCluster) -> None:
    lines = [
        json.dumps(
            {
                "custom_id": f"line-{index}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {"model": MODEL, "messages": [{"role": "user", "content": "Hello."}]},
            }
        )
        for index in range(3)
    ]
    with grpc.insecure_channel(cluster.address) as channel:
        stub = jobs_pb2_grpc.JobServiceStub(channel)

        def parts() -> Iterator[jobs_pb2.CreateJobRequest]:
            yield jobs_pb2.CreateJobRequest(header=jobs_pb2.JobHeader(job_id="job-1"))
            for line in lines:
                yield jobs_pb2.CreateJobRequest(chunk=(line + "\n").encode())
            yield jobs_pb2.CreateJobRequest(complete=True)

        created, call = stub.CreateJob.with_call(
            parts(), timeout=60, metadata=(("session_id", "j"),)
        )
        assert created.job.num_lines == 3
        assert replica_of(call) in cluster.replicas()


def test_http_answers_are_streamed_chunk_by_chunk(cluster: RayCluster) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello."}], "stream": True}
    host, _, port = cluster.http.partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    names = set()
    for _ in range(3):
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps({**body, "max_tokens": 30}),
            {"content-type": "application/json", "x-session-id": "chunks"},
        )
        response = connection.getresponse()
        assert response.status == 200
        assert response.getheader("content-type", "").startswith("text/event-stream")
        names.add(response.getheader("pensieve-replica"))
        chunks = []
        while chunk := response.read1(65536):
            chunks.append(chunk)
        assert len(chunks) > 1
        assert b"".join(chunks).endswith(b"data: [DONE]\n\n")
    assert len(names) == 1
    connection.close()


def test_an_http_error_is_forwarded_unchanged(cluster: RayCluster) -> None:
    host, _, port = cluster.http.partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    connection.request("POST", "/v1/chat/completions", "{", {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.status == 400
    assert json.loads(response.read())["error"]["type"] == "invalid_request_error"
    connection.close()


def test_y_a_turn_whose_replica_is_killed_ends_as_unavailable(
    cluster: RayCluster, stub: Any
) -> None:
    """This also holds in the middle of a stream, after messages that named the replica."""
    processes = cluster.replicas()
    killed = send(stub, "cut", "0")
    request = pb.SendMessageRequest(
        conversation_id="cut",
        request_id="cut-1",
        messages=[pb.NewMessage(content="x")],
        sampling=pb.Sampling(max_tokens=50_000, ignore_eos=True),
    )
    call = stub.SendMessage(request, timeout=60)
    events = (each.WhichOneof("event") for each in call)
    assert [next(events), next(events)] == ["started", "delta"]
    os.kill(processes[killed], 9)
    with pytest.raises(grpc.RpcError) as caught:
        list(events)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    cluster.wait_until_replaced(killed)


class Talking(threading.Thread):
    """A user who sends messages with the SDK all the time."""

    def __init__(self, address: str, name: str, enough: threading.Event) -> None:
        super().__init__(daemon=True)
        self.spoken: list[str] = []  # all messages and replies, in order
        self.failure: BaseException | None = None
        self._address, self._name, self._enough = address, name, enough

    def run(self) -> None:
        try:
            with Client(self._address) as client:
                talk = client.conversation(self._name)
                while not self._enough.is_set():
                    text = f"word {len(self.spoken)}"
                    self.spoken += [text, talk.ask(text, max_tokens=20).text]
        except BaseException as error:
            self.failure = error


def test_y_a_roll_replaces_all_replicas_and_loses_no_turn(cluster: RayCluster) -> None:
    before = cluster.replicas()
    enough = threading.Event()
    talking = [Talking(cluster.address, f"roll-{number}", enough) for number in range(6)]
    for each in talking:
        each.start()
    wait_for(lambda: all(each.spoken for each in talking))
    assert "all replicas were restarted" in cluster.command("roll")
    num_before = [len(each.spoken) for each in talking]
    wait_for(
        lambda: all(
            each.failure or len(each.spoken) > number
            for each, number in zip(talking, num_before, strict=True)
        )
    )
    enough.set()
    for each in talking:
        each.join(120)
        assert each.failure is None, each.failure
    assert len(cluster.replicas()) == len(before) == 2
    assert not before.keys() & cluster.replicas().keys()
    with Client(cluster.address) as client:
        for number, each in enumerate(talking):
            stored = client.conversation(f"roll-{number}").messages()
            assert [message.text for message in stored] == each.spoken


def test_y_up_with_the_unchanged_file_replaces_no_replica(cluster: RayCluster) -> None:
    """Options that Ray would silently ignore are errors."""
    before = cluster.replicas()
    cluster.command("up", str(cluster.folder / "serve.yaml"))
    assert cluster.replicas() == before
    config = yaml.safe_load((cluster.folder / "serve.yaml").read_text())
    config["grpc_options"]["port"] = free_port()
    (cluster.folder / "other.yaml").write_text(yaml.safe_dump(config))
    cluster.command("up", str(cluster.folder / "other.yaml"), codes=(3,))
    assert cluster.replicas() == before


def test_y_endless_calls_do_not_block_the_draining_of_a_replica(
    cluster: RayCluster, stub: Any
) -> None:
    """Watch streams end at once. The daemon ends the turn when the drain timeout is over."""
    at = send(stub, "endless", "0")
    request = pb.SendMessageRequest(
        conversation_id="endless",
        request_id="endless-1",
        messages=[pb.NewMessage(content="x")],
        sampling=pb.Sampling(max_tokens=50_000, ignore_eos=True),
    )
    turn = stub.SendMessage(request, timeout=200)
    assert next(turn).WhichOneof("event") == "started"
    with grpc.insecure_channel(cluster.address) as channel:
        watch: Any = channel.unary_stream("/grpc.health.v1.Health/Watch")
        watches = [watch(b"", timeout=200) for _ in range(6)]
        for each in watches:
            next(each)
        began = time.monotonic()
        rolling = threading.Thread(target=cluster.command, args=("roll",), daemon=True)
        rolling.start()
        for each in (turn, *watches):
            with pytest.raises(grpc.RpcError) as caught:
                list(each)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE, caught.value
            assert replica_of(caught.value)
        rolling.join(180)
    assert at not in cluster.replicas()
    # If the replicas did not drain by themselves, Ray would kill each of the two after 52 s.
    assert time.monotonic() - began < 90


def test_z_when_a_replica_is_killed_only_its_conversations_move(
    cluster: RayCluster, stub: Any
) -> None:
    before = {f"m-{index}": send(stub, f"m-{index}", "0") for index in range(12)}
    processes = cluster.replicas()
    killed = before["m-0"]
    os.kill(processes[killed], 9)
    after = {}
    for conversation in before:
        wait_for(
            lambda each=conversation: after.update({each: try_turn(stub, each)}) or after[each]
        )
    moved = {each for each in before if before[each] != after[each]}
    assert moved == {each for each in before if before[each] == killed}
    cluster.wait_until_replaced(killed)


def test_zz_down_waits_for_running_turns(cluster: RayCluster, stub: Any) -> None:
    """Replies of running turns are stored."""
    send(stub, "last", "0")
    request = pb.SendMessageRequest(
        conversation_id="last",
        request_id="last-1",
        messages=[pb.NewMessage(content="x")],
        sampling=pb.Sampling(max_tokens=900, ignore_eos=True),
    )
    turn = stub.SendMessage(request, timeout=200)
    assert next(turn).WhichOneof("event") == "started"
    command = [sys.executable, "-m", "pensieve", "cluster", "down", "--data", str(cluster.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as down:
        assert down.stdout is not None
        assert down.stdout.readline() == "draining and stopping the replicas\n"
        began = time.monotonic()
        events, refused = [], None
        for each in turn:
            events.append((each.WhichOneof("event"), time.monotonic() - began))
            if refused is None and events[-1][1] > 2.5:
                with pytest.raises(grpc.RpcError) as caught:
                    stub.GetConversation(pb.GetConversationRequest(conversation_id="last"))
                refused = caught.value.code()
        assert down.stdout.read() == "stopped\n"
    assert down.returncode == 0
    assert refused in (None, grpc.StatusCode.UNAVAILABLE)  # clients retry after UNAVAILABLE
    assert events[-1][0] == "completed"
    assert events[-1][1] > 0.5, "the turn had already ended"
    with ConversationStore.open(cluster.folder / "history" / "history", "a test") as store:
        stored = store.find_turn("last", "last-1")
        assert stored is not None
        assert stored.state is StoredTurnState.COMPLETED


def try_turn(stub: Any, conversation_id: str) -> str:
    """Return the replica that ran a turn; "" if the request must be sent again."""
    try:
        return send(stub, conversation_id, "1")
    except grpc.RpcError as error:
        if error.code() != grpc.StatusCode.UNAVAILABLE:
            raise
        return ""
