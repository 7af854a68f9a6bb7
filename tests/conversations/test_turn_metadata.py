"""Metadata that a client sends with a turn: stored with its messages, and not shown to the model."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from pensieve.api.grpc.json_values import one_struct as struct
from pensieve.api.grpc.sizes import METADATA_BYTES_MAX
from pensieve.client import Client
from tests.conversations.rig_daemon import DaemonRig, details


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonRig]:
    with DaemonRig(tmp_path_factory.mktemp("metadata") / "data") as rig:
        yield rig


def test_list_messages_returns_metadata_with_the_messages_of_its_turn(rig: DaemonRig) -> None:
    with Client(rig.server.address) as client:
        talk = client.conversation("noted")
        talk.ask("one", metadata={"ticket": 7, "labels": ["a", "b"]}, max_tokens=3)
        talk.ask("two", max_tokens=3)
        found = [message.metadata for message in talk.messages()]
    assert found == [{"ticket": 7, "labels": ["a", "b"]}, {}, {}, {}]


def test_metadata_does_not_change_the_tokens_of_the_model(rig: DaemonRig) -> None:
    rig.ask("with", "Good morning.", metadata=struct({"ticket": 1}))
    rig.ask("without", "Good morning.")
    ours, plain = rig.messages("with"), rig.messages("without")
    assert [list(each.token_ids) for each in ours] == [list(each.token_ids) for each in plain]


def test_a_fork_has_the_metadata_too(rig: DaemonRig) -> None:
    with Client(rig.server.address) as client:
        talk = client.conversation("forked")
        talk.ask("one", metadata={"ticket": 7}, max_tokens=3)
        assert [message.metadata for message in talk.fork().messages()] == [{"ticket": 7}, {}]


def test_a_request_id_with_other_metadata_is_refused(rig: DaemonRig) -> None:
    rig.ask("again", "one", request_id="r", metadata=struct({"ticket": 1}))
    assert rig.ask("again", "one", request_id="r", metadata=struct({"ticket": 1})).started.replayed
    with pytest.raises(grpc.RpcError) as error:
        rig.ask("again", "one", request_id="r", metadata=struct({"ticket": 2}))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_too_large_metadata_is_refused_with_its_field_name(rig: DaemonRig) -> None:
    rig.ask("large", "one", metadata=struct({"text": "x" * (METADATA_BYTES_MAX - 100)}))
    with pytest.raises(grpc.RpcError) as error:
        rig.ask("large", "two", metadata=struct({"text": "x" * METADATA_BYTES_MAX}))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details(error.value)["BadRequest"].field_violations[0].field == "metadata"
