"""Readers that answer pings but read nothing: HTTP/2 windows stay closed, and keepalive does not notice."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import grpc
import pytest

from pensieve.api.grpc import admin
from pensieve.conversations.daemon_config import DaemonConfig
from pensieve.v1 import admin_pb2 as apb
from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.raw_http2 import RawPeer
from tests.conversations.rig_daemon import ECHO, DaemonRig, wait_for

SLOW = (*ECHO, "--seconds=0.01")
IMPATIENT = DaemonConfig(grace_seconds=0.1, stall_seconds=0.5)
WINDOW = 300  # bytes
WATCH = "/pensieve.v1.AdminService/WatchStats"


def test_a_stalled_reader_is_cancelled_although_it_answers_pings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        DaemonRig(tmp_path / "data", program=SLOW, config=IMPATIENT) as rig,
        caplog.at_level(logging.WARNING, "pensieve"),
        RawPeer(rig.server.address, window=WINDOW) as peer,
    ):
        stream = peer.call("/pensieve.v1.ConversationService/SendMessage")
        request = pb.SendMessageRequest(
            conversation_id="stalled",
            messages=[pb.NewMessage(content="hello")],
            create_if_missing=True,
            sampling=pb.Sampling(max_tokens=1_000_000, ignore_eos=True),
        )
        peer.message(stream, request.SerializeToString())
        wait_for(lambda: rig.num_live == 1)
        wait_for(lambda: rig.num_live == 0)
        assert "took nothing for" in caplog.text
        assert rig.messages("stalled") == [], "the turn was given up and did not complete"
        assert not peer.is_closed
        small = pb.Sampling(max_tokens=4, ignore_eos=True)
        assert rig.ask("stalled", "hello", sampling=small).completed.revision == 1


def test_a_stalled_watcher_is_dropped(tmp_path: Path) -> None:
    socket = tmp_path / "data" / "admin.sock"
    with (
        DaemonRig(tmp_path / "data", config=IMPATIENT) as rig,
        RawPeer(f"unix:{socket}", window=WINDOW) as peer,
    ):
        stream = peer.call(WATCH)
        peer.message(stream, apb.WatchStatsRequest(interval_seconds=0.1).SerializeToString())
        wait_for(lambda: rig.server.admin.num_watchers == 1)
        wait_for(lambda: rig.server.admin.num_watchers == 0)
        assert not peer.is_closed


def test_a_slow_watcher_is_kept_and_no_stats_are_collected_until_it_reads(tmp_path: Path) -> None:
    socket = tmp_path / "data" / "admin.sock"
    patient = DaemonConfig(stall_seconds=20.0)
    with (
        DaemonRig(tmp_path / "data", config=patient) as rig,
        RawPeer(f"unix:{socket}", window=0) as peer,
    ):
        asked: list[None] = []
        stats = rig.server.admin._stats

        async def note() -> apb.Stats:
            asked.append(None)
            return await stats()

        rig.server.admin._stats = note  # type: ignore[method-assign]
        stream = peer.call(WATCH)
        peer.message(stream, apb.WatchStatsRequest(interval_seconds=0.1).SerializeToString())
        for number in range(1, 4):
            peer.take_more(stream, 4_000)  # several messages and a part of one
            wait_for(lambda number=number: peer.num_received[stream] == 4_000 * number)
            before = len(asked)
            time.sleep(0.5)  # five intervals of the stream
            assert len(asked) <= before + 1, "further messages wait until the client reads this one"
        assert len(asked) > 3
        assert rig.server.admin.num_watchers == 1
        assert not peer.is_closed


def test_the_number_of_watchers_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "WATCHERS_MAX", 3)
    with DaemonRig(tmp_path / "data") as rig:
        request = apb.WatchStatsRequest(interval_seconds=0.1)
        watches = [rig.admin.WatchStats(request) for _ in range(3)]
        for watch in watches:
            next(watch)
        with pytest.raises(grpc.RpcError) as error:
            next(rig.admin.WatchStats(request))
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        watches[0].cancel()
        wait_for(lambda: rig.server.admin.num_watchers == 2)
        assert next(rig.admin.WatchStats(request)).stats.serving
        for watch in watches:
            watch.cancel()
