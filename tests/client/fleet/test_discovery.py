"""An operator names the history, and looks at the daemons that share it."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from pensieve.cli.main import main
from pensieve.client.fleet import HistoryReplicas
from pensieve.errors import InvalidArgument, Unauthenticated, Unavailable
from pensieve.guard.callers import Token
from pensieve.history.guard import Guard
from pensieve.v1 import conversation_pb2 as pb
from pensieve.v1 import history_pb2_grpc
from tests.conversations.rig_daemon import DaemonRig
from tests.history.rig_service import ServiceRig, sharing
from tests.newcomer import free_port

OPERATOR = "operators-token"
SHORT = pb.Sampling(max_tokens=5, ignore_eos=True)


@dataclass
class Cluster:
    history: ServiceRig
    rigs: dict[str, DaemonRig]

    @property
    def address(self) -> str:
        return f"history://{self.history.link.address}"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    token = Token(hashlib.sha256(OPERATOR.encode()).digest(), admin=True)
    with sharing(folder, "ab", {"tokens": (token,)}) as (history, rigs):
        found = Cluster(history, dict(zip("ab", rigs, strict=True)))
        request = pb.SendMessageRequest(
            conversation_id="tea",
            messages=[pb.NewMessage(content="hello")],
            create_if_missing=True,
            sampling=SHORT,
        )
        stub = found.rigs["b"].stub
        list(stub.SendMessage(request, metadata=(("authorization", f"Bearer {OPERATOR}"),)))
        yield found


def admin(cluster: Cluster, *words: str) -> int:
    return main(["admin", *words, "--replicas", cluster.address, "--token", OPERATOR])


def test_the_replicas_are_those_that_the_history_knows(cluster: Cluster) -> None:
    found = asyncio.run(HistoryReplicas(cluster.address).list_replicas())
    assert [(each.name, each.address, each.state) for each in found] == [
        (name, rig.server.address, "alive") for name, rig in cluster.rigs.items()
    ]


def test_figures_are_of_all_of_them(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert admin(cluster, "stats", "--json") == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [(each["name"], each["answered"]) for each in shown["replicas"]] == [
        ("a", True),
        ("b", True),
    ]
    assert shown["total"]["output_tokens"] == 5


def test_whose_a_conversation_is_says_the_table_of_owners(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its owner alone has KV of it, and both know it."""
    assert admin(cluster, "explain", "tea", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["owner"] == {"name": "b", "known_by": "history"}
    assert [each["holds_kv"] for each in shown["replicas"]] == [False, True]
    assert asyncio.run(HistoryReplicas(cluster.address).locate("nothing")) == ""


def test_one_of_them_is_named_as_the_history_names_it(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert admin(cluster, "evict", "tea") == 2
    assert "must say which, for evict is of one: a, b" in capsys.readouterr().err
    assert admin(cluster, "evict", "tea", "--replica", "c") == 1
    assert "there is no replica 'c': a, b" in capsys.readouterr().err
    assert admin(cluster, "evict", "tea", "--replica", "b") == 0
    assert capsys.readouterr().out == "1 chunks dropped\n"


def test_a_history_that_does_not_answer_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    address = f"history://127.0.0.1:{free_port()}"
    with pytest.raises(Unavailable, match="nothing listens"):
        asyncio.run(HistoryReplicas(address).list_replicas())
    assert main(["admin", "stats", "--replicas", address]) == 1
    assert "nothing listens" in capsys.readouterr().err
    with pytest.raises(InvalidArgument, match="is no history://HOST:PORT"):
        HistoryReplicas("history://")


def test_the_secret_of_the_daemons_is_needed_where_there_is_one(cluster: Cluster) -> None:
    secret = "a-secret-of-several-words"

    async def go() -> list[str]:
        server = grpc.aio.server(interceptors=[Guard(secret)])
        service = cluster.history.service
        history_pb2_grpc.add_HistoryServiceServicer_to_server(service, server)
        address = f"history://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            with pytest.raises(Unauthenticated, match="needs the secret"):
                await HistoryReplicas(address).list_replicas()
            found = await HistoryReplicas(address, secret=secret).list_replicas()
            return [each.name for each in found]
        finally:
            await server.stop(None)

    assert asyncio.run(go()) == ["a", "b"]
