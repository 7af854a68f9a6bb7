"""Metrics of the service process: each changes when the thing that it measures changes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc

from pensieve.api.grpc.interceptor import CountedContext
from pensieve.cli.main import main
from pensieve.conversations.daemon_config import DaemonConfig
from pensieve.conversations.live_turn import usage_figures
from pensieve.conversations.threads import LoopLag, Quantiles
from pensieve.core.turn import Usage
from pensieve.guard.exposure import Listening
from pensieve.guard.limits import Limits
from pensieve.store import connection
from pensieve.store.connection import WriterConnection
from pensieve.v1 import admin_pb2
from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.rig_daemon import ECHO, DaemonRig, wait_for

SHORT = pb.Sampling(max_tokens=3, ignore_eos=True)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DaemonRig]:
    data = tmp_path / "data"
    listening = Listening("127.0.0.1:0", data / "admin.sock", audit_log=tmp_path / "audit.jsonl")
    config = DaemonConfig(grace_seconds=0.3, limits={"": Limits(turns_max=1)})
    program = (*ECHO, "--seconds=0.01")
    with DaemonRig(data, config=config, listening=listening, program=program) as rig:
        yield rig


def test_the_usage_message_has_a_field_for_every_usage_figure() -> None:
    """`completed` drops figures that have no field in the proto."""
    fields = {field.name for field in pb.Usage.DESCRIPTOR.fields}
    assert usage_figures(Usage()).keys() <= fields


def service_stats(rig: DaemonRig) -> Any:
    return rig.admin.GetStats(admin_pb2.GetStatsRequest(), timeout=60).stats.service


def test_a_blocked_event_loop_is_reported_for_a_minute(rig: DaemonRig) -> None:
    before = rig.server._loop_lag.quantiles().most  # a busy machine delays the loop, too
    rig._loop.call_soon_threadsafe(time.sleep, before + 0.6)
    wait_for(lambda: service_stats(rig).loop_lag_max_seconds >= before + 0.4)
    lag = LoopLag()
    for tenth in range(1200):
        lag.add(tenth / 10, 5.0 if tenth == 100 else tenth % 100 / 1000)
        if tenth == 600:
            assert (lag.quantiles().most, lag.quantiles().p99) == (5.0, 0.099)
    assert lag.quantiles().most == 0.099


def test_quantiles_are_measured_values() -> None:
    assert Quantiles.of([]) == Quantiles(0.0, 0.0, 0.0)
    assert Quantiles.of([3.0]) == Quantiles(3.0, 3.0, 3.0)
    assert Quantiles.of(range(200, 0, -1)) == Quantiles(100, 198, 200)


def test_jobs_waiting_for_the_store_are_counted_with_the_oldest_age(rig: DaemonRig) -> None:
    wait_for(lambda: service_stats(rig).store_jobs == 0)
    assert service_stats(rig).store_oldest_seconds == 0.0
    gate = threading.Event()
    jobs: list[Any] = [rig.daemon.threads.in_store(tenant, gate.wait) for tenant in ("", "", "a")]
    for job in jobs:
        rig._loop.call_soon_threadsafe(rig.daemon.threads.spawn, job)
    wait_for(lambda: service_stats(rig).store_jobs == 3)
    before = service_stats(rig).store_oldest_seconds
    wait_for(lambda: service_stats(rig).store_oldest_seconds > before)
    gate.set()
    wait_for(lambda: service_stats(rig).store_jobs == 0)


def test_commits_and_the_size_of_the_write_ahead_log_are_measured(
    rig: DaemonRig,
) -> None:
    before = service_stats(rig)
    rig.ask("c", "hello", sampling=SHORT)
    after = service_stats(rig)
    assert after.commits >= before.commits + 2
    assert 0 < after.commit_p50_seconds <= after.commit_p99_seconds <= after.commit_max_seconds
    assert after.journal_bytes > before.journal_bytes
    rig.stub.DeleteConversation(pb.DeleteConversationRequest(conversation_id="c"))
    assert service_stats(rig).journal_bytes == 0, "a deletion empties the write-ahead log"


def test_the_commit_time_excludes_earlier_statements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(connection, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    writer = WriterConnection(tmp_path / "x.db", lambda db: None)

    def on_commit(statement: str) -> None:
        clock.now += 3.0 if statement == "COMMIT" else 0.0

    with writer.writing() as conn:
        conn.set_trace_callback(on_commit)
        conn.execute("CREATE TABLE t (x)")
        clock.now += 100.0
    with pytest.raises(ZeroDivisionError), writer.writing():
        raise ZeroDivisionError
    assert writer.figures.commit_seconds == (3.0,)
    assert writer.figures.num_commits == 1
    writer.close()


def test_failed_calls_are_counted_by_reason(rig: DaemonRig) -> None:
    assert not service_stats(rig).refusals
    with pytest.raises(grpc.RpcError):
        rig.stub.GetConversation(pb.GetConversationRequest(conversation_id="no"))
    running = rig.send("c", "hello", sampling=pb.Sampling(max_tokens=500, ignore_eos=True))
    next(iter(running))
    for _ in range(2):
        with pytest.raises(grpc.RpcError):
            rig.ask("d", "hello")
    running.cancel()
    assert dict(service_stats(rig).refusals) == {"NOT_FOUND": 1, "QUEUE_FULL.turns_max": 2}


def test_connections_and_calls_are_counted(rig: DaemonRig) -> None:
    first = service_stats(rig)
    channels = [
        grpc.insecure_channel(rig.server.address, [("grpc.use_local_subchannel_pool", 1)])
        for _ in range(5)
    ]
    for channel in channels:
        grpc.channel_ready_future(channel).result(60)
    running = rig.send("c", "hello", sampling=pb.Sampling(max_tokens=500, ignore_eos=True))
    next(iter(running))
    found = service_stats(rig)
    assert found.calls == first.calls + 1
    assert found.connections_max == 512
    assert found.connections >= first.connections + 5, (
        "five channels, and the connection of the call"
    )
    running.cancel()
    for channel in channels:
        channel.close()
    wait_for(lambda: service_stats(rig).connections <= first.connections + 1)
    wait_for(lambda: service_stats(rig).calls == first.calls)


def test_stats_show_pending_erasure_lost_audit_lines_and_the_heartbeat(
    rig: DaemonRig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text that is not erased yet, an audit log that cannot be written, and the engine's heartbeat."""
    rig.ask("c", "hello", sampling=SHORT)
    assert service_stats(rig).HasField("heartbeat_age_seconds")
    assert not service_stats(rig).erasure_pending
    reader = connection.open_read_only(tmp_path / "data" / "conversations.db")
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM conversations").fetchall()
    deleting = rig.stub.DeleteConversation.future(pb.DeleteConversationRequest(conversation_id="c"))
    wait_for(lambda: service_stats(rig).erasure_pending)
    reader.execute("ROLLBACK")
    reader.close()
    deleting.result(60)
    wait_for(lambda: not service_stats(rig).erasure_pending)
    (tmp_path / "audit.jsonl").unlink()
    (tmp_path / "audit.jsonl").mkdir()
    wait_for(lambda: service_stats(rig).audit_lines_lost >= 2)
    with pytest.raises(grpc.RpcError):
        rig.stub.GetConversation(pb.GetConversationRequest(conversation_id="no"))
    assert main(["admin", "stats", "--data", str(tmp_path / "data")]) == 0
    shown = capsys.readouterr().out
    for words in (
        "late by at most",
        "commits p50",
        "of 512 connections",
        "1 NOT_FOUND",
        "lines could",
    ):
        assert words in shown, shown


def test_a_client_that_disconnects_during_a_write_is_not_counted_as_an_error(
    rig: DaemonRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = CountedContext.write

    async def fails(call: CountedContext, message: object) -> None:
        """Fail like gRPC, where this happens about once in a thousand writes."""
        await write(call, message)
        raise cygrpc.ExecuteBatchError("Failed 'send_message'")

    monkeypatch.setattr(CountedContext, "write", fails)
    before = dict(service_stats(rig).refusals)
    with pytest.raises(grpc.RpcError) as caught:
        list(rig.send("left", "hello"))
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert dict(service_stats(rig).refusals) == before
