"""`pensieve admin` with several daemons: rows, totals, exit codes, JSON."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pensieve.cli import admin_fleet
from pensieve.cli.main import main
from pensieve.client.fleet import Replica, ReplicaAnswer
from pensieve.errors import DeadlineExceeded, Unavailable
from pensieve.v1 import admin_pb2 as pb
from pensieve.v1 import conversation_pb2
from tests.client.fleet.replicas_rig import Replicas, replicas_in
from tests.conversations.rig_daemon import wait_for

WAIT = ("--wait", "1")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    with replicas_in(tmp_path_factory.mktemp("replicas")) as found:
        yield found


def admin(world: Replicas, *arguments: str, whole: bool = False) -> int:
    replicas = world.alive if whole else world.all
    return main(["admin", *arguments, "--replicas", world.written(replicas)])


def shown(what: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=admin_fleet.WIDTH).print(what)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def stats(seconds: float, **fields: Any) -> pb.Stats:
    value = pb.Stats(daemon_seconds=86_400 * 12.3, serving=True, **fields)
    value.server.state = conversation_pb2.SERVER_STATE_SERVING
    for tier in (value.device, value.host):
        tier.pages, tier.pages_used, tier.chunk_tokens = 1000, 640, 32
    for times in (value.first_token, value.token_gap):
        times.count, times.p99_seconds = 10, seconds
        times.buckets.add(seconds=seconds, count=10)
    return value


FOUND: tuple[ReplicaAnswer[Any], ...] = (
    ReplicaAnswer(Replica("a", "h:1"), stats(0.0123, turns_running=3, conversations_cached=17)),
    ReplicaAnswer(
        Replica("10.0.0.17:50051", "10.0.0.17:50051"),
        stats(1.5, turns_running=200, turns_queued=50, conversations_cached=100_000),
    ),
    ReplicaAnswer(Replica("c", "h:3"), error=Unavailable("nothing listens at h:3")),
    ReplicaAnswer(Replica("d", "h:4"), error=DeadlineExceeded("no answer in 5 s")),
)


def test_the_stats_table_has_a_row_per_replica_and_a_total() -> None:
    FOUND[0].value.replica = "z"  # type: ignore[union-attr]
    assert shown(admin_fleet.stats_table(FOUND)) == (
        "replica          state          up  run  wait   cached  device  host   first p99     gap p99\n"
        "a                serving    12.3 d    3     0       17     64%   64%     12.3 ms     12.3 ms\n"
        "10.0.0.17:50051  serving    12.3 d  200    50  100,000     64%   64%  1,500.0 ms  1,500.0 ms\n"
        "c                no answer\n"
        "d                no answer\n"
        "all (2 of 4)     2 serving          203    50  100,017     64%   64%  1,500.0 ms  1,500.0 ms\n"
        "100,017 conversations cached of 0\n"
        "tokens: 0 new, 0 on the device, 0 on the host, 0 recomputed, 0 generated\n"
        "first token of all: p50 12.3 ms, p95 1,500.0 ms, p99 1,500.0 ms in the last 5 minutes\n"
        "token gap of all: p50 12.3 ms, p95 1,500.0 ms, p99 1,500.0 ms in the last 5 minutes\n"
        "a (h:1) calls itself z\n"
        "c does not answer: nothing listens at h:3\n"
        "d does not answer: no answer in 5 s"
    )


def test_a_long_replica_name_wraps_instead_of_widening_the_table() -> None:
    long = ReplicaAnswer(Replica("r" * 128, "h:1"), FOUND[1].value)
    lines = shown(admin_fleet.stats_table([long, FOUND[0]])).splitlines()
    assert max(len(line) for line in lines) <= 100
    assert sum(line.count("r" * 10) for line in lines) >= 2
    assert any("100,000" in line and "1,500.0 ms" in line for line in lines)


def test_markup_in_a_replica_name_is_printed_literally() -> None:
    odd: ReplicaAnswer[Any] = ReplicaAnswer(
        Replica("[red]a[/]", "h:1"), error=Unavailable("[bold]no[/bold]")
    )
    text = shown(admin_fleet.stats_table([odd]))
    assert "[red]a[/] does not answer: [bold]no[/bold]" in text


def test_stats_sums_the_answering_replicas_and_exits_7_if_some_fail(
    world: Replicas, capsys: pytest.CaptureFixture[str]
) -> None:
    assert admin(world, "stats", *WAIT) == 7
    told = capsys.readouterr().out
    assert "all (3 of 5)  3 serving" in told
    assert f"dead does not answer: nothing listens at {world.dead.address}\n" in told
    assert "hanging does not answer: no answer in 1 s\n" in told
    assert max(len(line) for line in told.splitlines()) <= 100
    assert admin(world, "stats", whole=True) == 0
    assert "does not answer" not in capsys.readouterr().out


def test_json_output_always_has_the_same_fields(
    world: Replicas, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"name", "address", "metrics_address", "state", "answered", "error", "reason"}
    for command, more, of_each in (
        (("stats",), {"total"}, {"stats"}),
        (("conversations",), {"conversations"}, set()),
        (("explain", "x"), {"owner"}, {"holds_kv", "conversation"}),
        (("check",), set(), {"problems"}),
        (("tenants",), {"tenants"}, {"tenants"}),
        (("metrics",), {"text"}, set()),
    ):
        assert admin(world, *command, *WAIT, "--json") == 7
        found = json.loads(capsys.readouterr().out)
        assert found.keys() == {"replicas", "partial"} | more, command
        assert found["partial"] is True
        assert [each["name"] for each in found["replicas"]] == ["a", "b", "c", "dead", "hanging"]
        for each in found["replicas"]:
            assert each.keys() == row | of_each, command
        dead, hanging = found["replicas"][3:]
        assert (dead["answered"], dead["error"]) == (False, "UNAVAILABLE")
        assert (hanging["answered"], hanging["error"]) == (False, "DEADLINE_EXCEEDED")
        assert hanging["reason"] == "no answer in 1 s"
        assert all(each["answered"] for each in found["replicas"][:3])
    assert admin(world, "stats", "--json", whole=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["partial"] is False
    assert found["total"].keys() == {
        *("num_serving", "num_draining", "device", "host", "turns_queued", "turns_running"),
        *("turns_suspended", "conversations_cached", "conversations_stored", "new_tokens"),
        *("device_tokens", "host_tokens", "recomputed_tokens", "output_tokens"),
        *("bytes_swapped_out", "bytes_swapped_in", "iterations", "iterations_per_second"),
        *("idle_tokens", "engine_restarts", "tokens_per_iteration", "first_token", "token_gap"),
        *("service", "more"),
    }
    for name in ("new_tokens", "output_tokens", "conversations_cached", "iterations"):
        alone = [each["stats"][name] for each in found["replicas"]]
        assert found["total"][name] == sum(alone), name


def test_explain_names_the_replica_that_serves_a_conversation(
    world: Replicas, capsys: pytest.CaptureFixture[str]
) -> None:
    assert admin(world, "explain", "x", whole=True) == 0
    assert capsys.readouterr().out == (
        "conversation x: b serves it: its latest turn was there\n"
        "a: stale, KV is cached\n"
        "  chunks     0 to     0: device\n"
        "b: KV is cached\n"
        "  chunks     0 to     0: device\n"
        "these replicas do not have this conversation: c\n"
    )
    assert admin(world, "explain", "x", "--json", whole=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["owner"] == {"name": "b", "known_by": "latest"}
    assert [each["holds_kv"] for each in found["replicas"]] == [True, True, False]
    assert admin(world, "explain", "nobody", whole=True) == 1
    assert "there is no conversation 'nobody'" in capsys.readouterr().err
    assert admin(world, "explain", "nobody", *WAIT) == 7  # silent daemons may know it
    assert "these replicas do not have this conversation: a, b, c\n" in capsys.readouterr().out
    assert admin(world, "conversations", whole=True) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(row[0], row[1]) for row in rows if row[-1] in ("a", "b")] == [("x", "a"), ("x", "b")]


def test_check_and_tenants_cover_all_replicas(
    world: Replicas, capsys: pytest.CaptureFixture[str]
) -> None:
    assert admin(world, "check", whole=True) == 0
    assert capsys.readouterr().out == "nothing is wrong on a, b, c\n"
    assert admin(world, "check", *WAIT) == 7
    assert "hanging does not answer: no answer in 1 s" in capsys.readouterr().out
    assert admin(world, "tenants", whole=True) == 0
    assert "(none)" in capsys.readouterr().out


def test_commands_for_one_daemon_require_the_replica_flag(
    world: Replicas, capsys: pytest.CaptureFixture[str]
) -> None:
    assert admin(world, "drain") == 2
    assert "is missing: drain works on one of a, b, c, dead, hanging" in capsys.readouterr().err
    assert admin(world, "drain", "--replica", "z") == 1
    assert "there is no replica 'z'" in capsys.readouterr().err
    assert admin(world, "info", "--replica", "b") == 0
    assert "model" in capsys.readouterr().out
    assert admin(world, "evict", "y", "--replica", "a") == 0
    assert capsys.readouterr().out == "1 chunks dropped\n"
    assert not world.rigs["a"].server.stopping.is_set()
    assert admin(world, "drain", "--replica", "c") == 0
    assert capsys.readouterr().out == "draining; 0 turns are running\n"
    assert world.rigs["c"].server.stopping.is_set()
    assert not world.rigs["b"].server.stopping.is_set()


def test_several_addresses_are_replicas_without_names(
    world: Replicas, capsys: pytest.CaptureFixture[str]
) -> None:
    addresses = ",".join(each.address for each in world.alive)
    assert main(["admin", "stats", "--address", addresses, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in found["replicas"]] == addresses.split(",")
    assert [each["stats"]["replica"] for each in found["replicas"]] == ["a", "b", "c"]
    assert main(["admin", "metrics", "--address", addresses]) == 0
    text = capsys.readouterr().out
    assert 'pensieve_engine_up{replica="a",' in text  # the daemon's own name
    both = ("--address", addresses, "--replicas", "a=h:1")
    assert main(["admin", "stats", *both]) == 2
    assert "cannot be combined with --replicas" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("stats", "--replica", "a"), "--replica: needs several daemons"),
        (("metrics", "--listen", "127.0.0.1:0"), "--listen: needs several daemons"),
        (("stats", "--replicas", "a="), "--replicas: a has no address"),
        (("stats", "--replicas", "a=h:1", "--wait", "0"), "--wait: must be a number"),
        (("stats", "--replicas", "a=h:1", "--wait", "nan"), "--wait: must be a number"),
        (("watch", "--replicas", "a=h:1", "--interval", "0"), "--interval: must lie"),
        (("conversations", "--replicas", "a=h:1", "--limit", "0"), "--limit: must lie"),
        (("metrics", "--replicas", "a=h:1", "--listen", "127.0.0.1:0", "--wait", "9"), "3.5"),
    ],
)
def test_invalid_fleet_flags_are_refused(
    arguments: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["admin", *arguments]) == 2
    assert problem in capsys.readouterr().err


def started(world: Replicas, *arguments: str) -> subprocess.Popen[str]:
    """Start a command that repeats its calls. A busy daemon may be late for one of them."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "pensieve", "admin", *arguments),
            *("--replicas", world.written(world.all), *WAIT),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_watch_prints_a_json_line_each_interval(world: Replicas) -> None:
    process = started(world, "watch", "--interval", "0.2")
    assert process.stdout is not None
    num_complete = 0
    while num_complete < 3:
        found = json.loads(process.stdout.readline())
        answered = [each["answered"] for each in found["replicas"]]
        assert answered[3:] == [False, False]
        num_complete += all(answered[:3])
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors.strip()) == (130, "")


def test_metrics_of_all_replicas_are_served_at_one_address(world: Replicas) -> None:
    process = started(world, "metrics", "--listen", "127.0.0.1:0")
    assert process.stdout is not None
    url = process.stdout.readline().split()[-1]

    def scrape() -> str:
        with urllib.request.urlopen(url, timeout=60) as response:
            return str(response.read().decode())

    wait_for(lambda: 'pensieve_replica_up{replica="a"} 1\n' in scrape())
    assert 'pensieve_replica_up{replica="hanging"} 0\n' in scrape()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors.strip()) == (130, "")
