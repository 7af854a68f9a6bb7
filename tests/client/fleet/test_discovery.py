"""An operator names one daemon and sees all daemons that share its history."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pensieve.cli.main import main
from pensieve.client.fleet import SharedReplicas
from pensieve.errors import Unauthenticated, Unavailable
from pensieve.guard.callers import Token
from pensieve.v1 import conversation_pb2 as pb
from tests.cluster.sharing import needs_sqlite, sharing
from tests.conversations.rig_daemon import DaemonRig
from tests.newcomer import free_port

OPERATOR = "operators-token"
SHORT = pb.Sampling(max_tokens=5, ignore_eos=True)
Cluster = dict[str, DaemonRig]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    token = Token(hashlib.sha256(OPERATOR.encode()).digest(), admin=True)
    with sharing(folder, "ab", {"tokens": (token,)}) as rigs:
        found = dict(zip("ab", rigs, strict=True))
        request = pb.SendMessageRequest(
            conversation_id="tea",
            messages=[pb.NewMessage(content="hello")],
            create_if_missing=True,
            sampling=SHORT,
        )
        stub = found["b"].stub
        list(stub.SendMessage(request, metadata=(("authorization", f"Bearer {OPERATOR}"),)))
        yield found


def admin(cluster: Cluster, *words: str) -> int:
    address = cluster["a"].server.address
    return main(["admin", *words, "--replicas", "all", "--address", address, "--token", OPERATOR])


@needs_sqlite
def test_list_replicas_returns_all_daemons_that_have_the_history_open(cluster: Cluster) -> None:
    for rig in cluster.values():
        found = asyncio.run(SharedReplicas(rig.server.address, token=OPERATOR).list_replicas())
        assert [(each.name, each.address, each.state) for each in found] == [
            (name, rig.server.address, "alive") for name, rig in cluster.items()
        ]


@needs_sqlite
def test_stats_include_all_replicas(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert admin(cluster, "stats", "--json") == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [(each["name"], each["answered"]) for each in shown["replicas"]] == [
        ("a", True),
        ("b", True),
    ]
    assert shown["total"]["output_tokens"] == 5


@needs_sqlite
def test_explain_takes_the_owner_from_the_history(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the owner has KV of the conversation. Both daemons know the owner."""
    assert admin(cluster, "explain", "tea", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["owner"] == {"name": "b", "known_by": "history"}
    assert [each["holds_kv"] for each in shown["replicas"]] == [False, True]


@needs_sqlite
def test_replica_selects_a_daemon_by_its_name_in_the_history(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert admin(cluster, "evict", "tea") == 2
    assert "is missing: evict works on one of a, b" in capsys.readouterr().err
    assert admin(cluster, "evict", "tea", "--replica", "c") == 1
    assert "there is no replica 'c'; there are a, b" in capsys.readouterr().err
    assert admin(cluster, "evict", "tea", "--replica", "b") == 0
    assert capsys.readouterr().out == "1 chunks dropped\n"


def test_a_single_daemon_is_listed_as_the_only_replica(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with DaemonRig(tmp_path / "data") as rig:
        address = f"unix:{tmp_path / 'data' / 'admin.sock'}"
        (found,) = asyncio.run(SharedReplicas(address).list_replicas())
        assert (found.name, found.address, found.state) == (address, address, "alive")
        rig.ask("tea", "hello", sampling=SHORT)
        assert main(["admin", "stats", "--json", "--replicas", "all", "--address", address]) == 0
        assert json.loads(capsys.readouterr().out)["total"]["output_tokens"] == 5


def test_a_daemon_that_does_not_answer_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(Unavailable, match="nothing listens"):
        asyncio.run(SharedReplicas(address).list_replicas())
    assert main(["admin", "stats", "--replicas", "all", "--address", address]) == 1
    assert "nothing listens" in capsys.readouterr().err
    assert main(["admin", "stats", "--replicas", "history://10.0.0.9:50060"]) != 0
    assert "--store sqlite:///FOLDER/conversations.db" in capsys.readouterr().err


@needs_sqlite
def test_the_operators_token_is_needed(cluster: Cluster) -> None:
    with pytest.raises(Unauthenticated):
        asyncio.run(SharedReplicas(cluster["a"].server.address).list_replicas())
