"""A daemon finds damage in a conversation that nothing has read for a long time. It then refuses changes."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from pensieve.conversations.daemon_config import DaemonConfig
from pensieve.v1 import admin_pb2
from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.rig_daemon import DaemonRig, details, wait_for

SHORT = pb.Sampling(max_tokens=4, ignore_eos=True)
SCRUBS = DaemonConfig(grace_seconds=0.2, scrub_seconds=0.001)
COLD = "words of an old conversation, " * 20


def more(rig: DaemonRig) -> dict[str, float]:
    return dict(rig.admin.GetStats(admin_pb2.GetStatsRequest()).stats.more)


def damage_a_cold_page(data: Path) -> None:
    database = data / "conversations.db"
    content = bytearray(database.read_bytes())
    at = content.index(COLD[100:200].encode())
    content[at] ^= 1
    database.write_bytes(content)


def test_damage_in_an_idle_conversation_is_found_and_changes_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with DaemonRig(tmp_path / "data") as rig:
        rig.ask("cold", COLD, sampling=SHORT)
        rig.ask("warm", "hello", sampling=SHORT)
    damage_a_cold_page(tmp_path / "data")
    with DaemonRig(tmp_path / "data", config=SCRUBS) as rig:
        wait_for(lambda: more(rig)["history_problems"])
        with pytest.raises(grpc.RpcError) as refused:
            rig.ask("warm", "more", sampling=SHORT)
        assert details(refused.value)["ErrorInfo"].reason == "STORE_CORRUPT"
        assert len(rig.messages("warm")) == 2
        assert not rig.admin.GetStats(admin_pb2.GetStatsRequest()).stats.serving
    assert "the history is damaged: conversation 'cold', message 0" in caplog.text
    with DaemonRig(
        tmp_path / "data"
    ) as rig:  # the finding is kept, though SQLite's own check finds nothing
        assert not rig.daemon.serving

        async def check() -> None:
            rig.daemon.damage.check(rig.lines.append)

        rig.call(check())
        wait_for(lambda: "cold" in rig.daemon.damage.problems[0])
        assert not rig.daemon.serving


def test_an_undamaged_history_is_scrubbed_repeatedly_while_it_serves(tmp_path: Path) -> None:
    with DaemonRig(tmp_path / "data", config=SCRUBS) as rig:
        rig.ask("tea", "hello", sampling=SHORT)
        wait_for(lambda: more(rig)["scrub_passes"] >= 2)
        rig.stub.DeleteConversation(pb.DeleteConversationRequest(conversation_id="tea"))
        assert not rig.daemon.store.erasure.pending
        assert rig.ask("cup", "hello", sampling=SHORT).completed.revision == 1
        assert more(rig)["history_problems"] == 0
