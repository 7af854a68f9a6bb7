"""Conversations that have been idle for a long time are erased."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from pensieve.conversations.daemon_config import DaemonConfig
from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.rig_daemon import ECHO, DaemonRig, wait_for


def ids(rig: DaemonRig) -> set[str]:
    found = rig.stub.ListConversations(pb.ListConversationsRequest(page_size=100))
    return {each.conversation_id for each in found.conversations}


def test_idle_conversations_are_erased_and_running_ones_are_not(tmp_path: Path) -> None:
    secret = b"a secret of long ago"
    config = DaemonConfig(grace_seconds=0.2, conversation_keep_seconds=0.5)
    slow = (*ECHO, "--seconds=0.05")
    with DaemonRig(tmp_path / "data", config=config, program=slow) as rig:
        sampling = pb.Sampling(max_tokens=10_000, ignore_eos=True)
        busy = rig.send("busy", "Count.", sampling=sampling)
        next(iter(busy))
        rig.ask("old", secret.decode(), sampling=pb.Sampling(max_tokens=1))
        wait_for(lambda: "old" not in ids(rig))
        assert "busy" in ids(rig)
        with pytest.raises(grpc.RpcError) as gone:
            rig.stub.GetConversation(pb.GetConversationRequest(conversation_id="old"))
        assert gone.value.code() is grpc.StatusCode.NOT_FOUND
        busy.cancel()
        wait_for(lambda: not ids(rig))
    kept = [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
    assert not any(secret in path.read_bytes() for path in kept)


def test_idle_conversations_stay_without_the_setting(tmp_path: Path) -> None:
    with DaemonRig(tmp_path / "data", config=DaemonConfig(grace_seconds=0.2)) as rig:
        rig.ask("old", "Hello", sampling=pb.Sampling(max_tokens=1))
        assert rig.daemon.config.conversation_keep_seconds == 0
        assert ids(rig) == {"old"}
