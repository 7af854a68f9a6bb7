"""A real daemon's metrics agree with its statistics, turns and log."""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pensieve.api.metrics.families import FAMILIES as OF_DAEMON
from pensieve.conversations.daemon_config import BackupConfig, DaemonConfig
from pensieve.guard.exposure import Listening
from pensieve.guard.limits import Limits
from pensieve.jobs.plugin import FAMILIES as OF_JOBS
from pensieve.jobs.worker import JobsConfig
from pensieve.v1 import admin_pb2, admin_pb2_grpc
from pensieve.v1 import conversation_pb2 as pb
from tests.api.metrics.scraped import Scraped, scrape
from tests.conversations.rig_daemon import DaemonRig, wait_for

FAMILIES = (*OF_DAEMON, *OF_JOBS)
PAGE = Path(__file__).parents[3] / "docs" / "monitoring.md"
SHORT = pb.Sampling(max_tokens=5, ignore_eos=True)
ENDLESS = pb.Sampling(max_tokens=50_000, ignore_eos=True)
SLOW = (sys.executable, "-m", "pensieve.launch.echo_engine", "--seconds=0.01")


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DaemonRig]:
    data = tmp_path / "data"
    listening = Listening("127.0.0.1:0", data / "admin.sock")
    config = DaemonConfig(
        grace_seconds=0.2,
        answer_seconds=3600.0,  # so that only the scrape itself notices a silent engine
        heartbeat_seconds=3600.0,
        limits={"": Limits(turns_max=1)},
        backup=BackupConfig(tmp_path / "backup"),
    )
    with DaemonRig(
        data, config=config, listening=listening, program=SLOW, batch_jobs=JobsConfig()
    ) as rig:
        yield rig


def stats(rig: DaemonRig) -> Any:
    return rig.admin.GetStats(admin_pb2.GetStatsRequest()).stats


def test_counters_agree_with_turns_and_statistics(rig: DaemonRig) -> None:
    at_first = scrape(rig).get("pensieve_store_commit_seconds_count")
    commits = stats(rig).service.commits
    usages = [
        rig.ask(conversation_id, f"word {turn}", sampling=SHORT).completed.usage
        for turn in range(3)
        for conversation_id in ("a", "b")
    ]
    found, shown = scrape(rig), stats(rig)
    assert found.get("pensieve_generation_tokens_total") == 30 == shown.output_tokens
    total = sum(
        each.new_tokens + each.device_tokens + each.host_tokens + each.recomputed_tokens
        for each in usages
    )
    assert found.get("pensieve_prompt_tokens_total") == total
    assert (
        total
        == shown.new_tokens + shown.device_tokens + shown.host_tokens + shown.recomputed_tokens
    )
    device = sum(each.device_tokens for each in usages)
    assert device == shown.device_tokens > 0
    assert (
        found.get("pensieve_prompt_tokens_cached_total") == shown.device_tokens + shown.host_tokens
    )
    sources = found.by("pensieve_prompt_tokens_cached_by_source_total", "source")
    assert sources.keys() == {"device", "host", "shared"}
    assert sum(sources.values()) == shown.device_tokens + shown.host_tokens
    assert sources["shared"] == shown.more["shared_tokens"]
    assert found.by("pensieve_turns_total", "outcome") == {
        "stop": 0,
        "length": 6,
        "repetition": 0,
        "cancelled": 0,
        "failed": 0,
    }
    assert found.get("pensieve_request_prompt_tokens_sum") == total
    assert found.get("pensieve_request_generation_tokens_sum") == 30
    for name in ("e2e_request_latency", "request_queue_time", "request_decode_time"):
        assert found.get(f"pensieve_{name}_seconds_count") == 6
    assert found.get("pensieve_time_to_first_token_seconds_count") == shown.first_token.count == 6
    gaps = found.get("pensieve_inter_token_latency_seconds_count")
    assert gaps == shown.token_gap.count == 24
    iterations = found.get("pensieve_iteration_tokens_total_sum")
    assert iterations == shown.more["tokens_computed"]
    committed = found.get("pensieve_store_commit_seconds_count") - at_first
    assert committed == shown.service.commits - commits >= 12  # one beginning and one end per turn


def test_gauges_agree_with_the_daemons_state(rig: DaemonRig) -> None:
    rig.ask("a", "one", sampling=SHORT)
    stream = rig.send("b", "two", sampling=ENDLESS)
    next(stream)
    wait_for(lambda: stats(rig).turns_running == 1)
    found, shown = scrape(rig), stats(rig)
    assert found.get("pensieve_num_requests_running") == 1
    assert found.get("pensieve_num_requests_waiting") == 0
    assert found.get("pensieve_turns_live") == 1
    assert found.by("pensieve_conversations", "state") == {"stored": 2, "cached": 2, "running": 1}
    device = {
        state: found.get("pensieve_kv_pages", tier="device", state=state)
        for state in ("used", "clean", "free")
    }
    assert sum(device.values()) == shown.device.pages
    assert device["free"] == pytest.approx(shown.device.pages_free, abs=4)  # the reply still grows
    host = [found.get("pensieve_kv_pages", tier="host", state=each) for each in ("used", "free")]
    assert sum(host) == shown.host.pages
    assert found.get("pensieve_kv_cache_usage_perc") == device["used"] / shown.device.pages
    assert found.get("pensieve_engine_up") == found.get("pensieve_serving") == 1
    assert found.get("pensieve_engine_heartbeat_age_seconds") >= 0
    lag = found.by("pensieve_event_loop_lag_seconds", "quantile")
    assert lag["0.5"] <= lag["0.99"] <= lag["1"]
    assert set(found.by("pensieve_jobs", "state")) >= {"running", "waiting", "ended"}
    assert found.get("pensieve_backup_failing") == 0
    stream.cancel()


def test_refused_and_cancelled_turns_are_counted(rig: DaemonRig) -> None:
    stream = rig.send("a", "one", sampling=ENDLESS)
    next(stream)
    with pytest.raises(grpc.RpcError, match="may run 1 turns at once"):
        rig.ask("b", "two")  # exceeds the tenant's turns_max
    with pytest.raises(grpc.RpcError, match="there is no conversation"):
        rig.stub.GetConversation(pb.GetConversationRequest(conversation_id="x"))
    rig.stub.CancelTurn(pb.CancelTurnRequest(conversation_id="a"))
    wait_for(lambda: not rig.num_live)
    found = scrape(rig)
    assert found.by("pensieve_admission_rejections_total", "reason") == {"QUEUE_FULL": 1}
    assert found.by("pensieve_call_errors_total", "reason") == {
        "QUEUE_FULL.turns_max": 1,
        "NOT_FOUND": 1,
    }
    assert found.get("pensieve_turns_total", outcome="cancelled") == 1
    assert found.get("pensieve_request_success_total", finished_reason="abort") == 1


def test_counters_never_decrease_when_the_engine_restarts(rig: DaemonRig) -> None:
    engine_own = {
        "kv_copy",
        "kv_chunks",
        "num_preempt",
        "idle_tokens",
        "tenant_tokens",
        "iteration",
    }
    rig.ask("a", "one", sampling=SHORT)
    before = scrape(rig)
    rig.ask("a", "two", sampling=SHORT)
    between = scrape(rig)
    assert before.counters.keys() == between.counters.keys()
    assert all(between.counters[key] >= value for key, value in before.counters.items())
    pid = rig.daemon.engine.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: rig.daemon.engine.num_restarts == 1 and rig.daemon.serving)
    usage = rig.ask("a", "three", sampling=SHORT).completed.usage
    assert usage.recomputed_tokens > 0
    after = scrape(rig)
    assert after.get("pensieve_engine_restarts_total") == 1
    reasons = after.by("pensieve_kv_recomputed_tokens_total", "reason")
    assert reasons == {
        "engine_restarted": usage.recomputed_tokens,
        "dropped": 0,
        "fingerprint_changed": 0,
        "other": 0,
    }
    for (name, labels), value in between.counters.items():
        if not any(each in name for each in engine_own):  # those restart with the engine process
            assert after.counters[name, labels] >= value, name


def test_if_the_engine_does_not_answer_only_its_metrics_are_missing(
    rig: DaemonRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pensieve.api.metrics.scrape.ENGINE_SECONDS", 0.2)
    rig.ask("a", "one", sampling=SHORT)
    pid = rig.daemon.engine.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        found = scrape(rig)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert found.get("pensieve_generation_tokens_total") == 5
    assert found.families["pensieve_num_requests_running"].samples == []
    assert "cached" not in found.by("pensieve_conversations", "state")


def test_the_documented_metrics_equal_those_of_a_scrape(rig: DaemonRig) -> None:
    rig.ask("a", "one", sampling=SHORT)
    found = scrape(rig)
    text = PAGE.read_text(encoding="utf-8")
    table = text.split("<!-- metrics:")[1].split("<!-- end of the metrics -->")[0]
    rows = re.findall(r"^\| (`[^|]*)\| ([^|]*)\|", table, re.MULTILINE)
    documented = {
        name: set(re.findall(r"`(\w+)`", labels))
        for names, labels in rows
        for name in re.findall(r"`(\w+)`", names)
    }
    assert documented == {family.name: set(family.labels) for family in FAMILIES}
    types = re.findall(r"^# TYPE pensieve_(\w+) ", found.text, re.MULTILINE)
    assert Counter(types) == Counter(documented.keys())


def test_only_the_operator_gets_the_metrics_over_grpc(rig: DaemonRig) -> None:
    rig.ask("a", "one", sampling=SHORT)
    found = Scraped(rig.admin.GetMetrics(admin_pb2.GetMetricsRequest()).text)
    assert found.get("pensieve_generation_tokens_total") == 5
    stub = admin_pb2_grpc.AdminServiceStub(rig.channel)
    with pytest.raises(grpc.RpcError) as refused:
        stub.GetMetrics(admin_pb2.GetMetricsRequest())
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_the_cost_of_a_scrape_does_not_grow_with_conversations(rig: DaemonRig) -> None:
    """Count calls of our own functions in the event loop's thread."""

    async def num_calls() -> int:
        calls = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event == "call" and "/api/metrics/" in frame.f_code.co_filename

        assert threading.current_thread() is rig._thread
        sys.setprofile(count)
        try:
            await rig.server._scrape.text()
        finally:
            sys.setprofile(None)
        return calls

    rig.ask("c0", "one", sampling=SHORT)
    rig.call(num_calls())  # this scrape counts the history, which is not due again
    rig.server._scrape._count_due = math.inf
    before = rig.call(num_calls())
    for number in range(1, 40):
        rig.ask(f"c{number}", "one", sampling=SHORT)
    assert rig.call(num_calls()) == before > 100
