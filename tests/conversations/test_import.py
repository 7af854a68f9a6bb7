"""Imports of long histories into each kind of database."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from pensieve.cli.main import main
from pensieve.client import Client
from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.rig_daemon import DaemonRig
from tests.store.conftest import postgres
from tests.store.postgres_server import PostgresServer

__all__ = ["postgres"]  # used as a fixture
NUM_MESSAGES = 600
NUM_IMPORTS = 4


@pytest.fixture(params=["", "postgres"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DaemonRig]:
    server: PostgresServer | None = None
    url = ""
    if request.param:
        server = request.getfixturevalue("postgres")
        url = server.new_database()
    with DaemonRig(tmp_path / "data", store=url) as found:
        yield found
    if server is not None:
        server.drop(url)


def talk(number: int) -> list[dict[str, Any]]:
    """Return alternating messages of user and assistant; some are unusual."""
    odd = {2: "a\0b", 3: "\0", 4: "\ue000\ue001", 5: "é" * 5000}
    return [
        {
            "role": ("user", "assistant")[each % 2],
            "content": odd.get(each, f"{number} {each}"),
        }
        for each in range(NUM_MESSAGES)
    ]


def test_concurrent_imports_of_long_histories_are_exported_unchanged(
    rig: DaemonRig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--address", rig.server.address]
    files = []
    for number in range(NUM_IMPORTS):
        made = {"id": f"c{number}", "messages": talk(number), "metadata": {"for": "ada"}}
        files.append(tmp_path / f"{number}.jsonl")
        files[-1].write_text(json.dumps(made) + "\n")

    def load(file: Path) -> int:
        return main(["conversations", "import", str(file), *place])

    with ThreadPoolExecutor(NUM_IMPORTS) as threads:
        assert list(threads.map(load, files)) == [0] * NUM_IMPORTS
    assert load(files[0]) != 0  # the conversation exists already
    capsys.readouterr()
    for number in range(NUM_IMPORTS):
        assert main(["conversations", "export", f"c{number}", *place]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        exported = json.loads(line)
        assert exported["messages"] == talk(number)
        assert exported["metadata"] == {"for": "ada"}
    with Client(rig.server.address) as client:
        assert client.conversation("c0").ask("and?", max_tokens=2).text
    store = rig.daemon.store
    assert rig.call(rig.daemon.threads.in_store("", store.verify)) == []


def test_an_interrupted_import_leaves_nothing(rig: DaemonRig) -> None:
    def pieces() -> Iterator[pb.ImportConversationRequest]:
        new = pb.CreateConversationRequest(conversation_id="c")
        yield pb.ImportConversationRequest(conversation=new)
        for _ in range(20):
            message = pb.NewMessage(role=pb.ROLE_USER, content="hello")
            yield pb.ImportConversationRequest(messages=[message])

    with pytest.raises(grpc.RpcError) as failed:
        rig.stub.ImportConversation(pieces(), timeout=60)
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with Client(rig.server.address) as client:
        assert list(client.conversations()) == []
        client.conversation("c").create(messages=talk(1)[:2])
