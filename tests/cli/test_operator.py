"""First tasks of an operator: identify the daemon, find a conversation's tenant, remove an old socket."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from pensieve.cli.admin_stats import stats_table
from pensieve.cli.main import main
from pensieve.client import Client
from pensieve.v1 import admin_pb2 as pb
from tests.conversations.rig_daemon import ServeProcess


def run(*arguments: str) -> int:
    return main(list(arguments))


def tokens_for(file: Path, capsys: pytest.CaptureFixture[str], *tenants: str) -> dict[str, str]:
    """Write the file for --token-file. Return a token for each tenant."""
    found = {}
    for tenant in tenants:
        assert run("token", "--tenant", tenant, "--file", str(file)) == 0
        found[tenant] = capsys.readouterr().out.strip()
    return found


def test_a_tenants_conversation_is_found_by_its_id(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tokens.toml"
    tokens = tokens_for(file, capsys, "acme", "beta")
    process = ServeProcess(tmp_path / "data", "--token-file", str(file))
    address, where = process.start(), ("--data", str(tmp_path / "data"))
    with (
        Client(address, token=tokens["acme"]) as acme,
        Client(address, token=tokens["beta"]) as beta,
    ):
        acme.conversation("trip").ask("hello", max_tokens=5)
        for client in (acme, beta):
            client.conversation("same").ask("hello", max_tokens=5)
    assert run("admin", "explain", "trip", *where) == 0
    told = capsys.readouterr().out
    assert "tenant acme" in told
    assert "device" in told
    assert run("admin", "explain", "trip", *where, "--json") == 0
    assert json.loads(capsys.readouterr().out)["tenant"] == "acme"
    assert run("admin", "explain", "trip", *where, "--tenant", "beta") == 1
    assert "there is no conversation 'trip'" in capsys.readouterr().err
    for command in ("explain", "evict"):
        assert run("admin", command, "same", *where) != 0
        error = capsys.readouterr().err
        assert "acme, beta" in error
        assert "--tenant" in error
        assert run("admin", command, "same", *where, "--tenant", "beta") == 0
        capsys.readouterr()
    assert run("admin", "evict", "trip", *where) == 0
    assert capsys.readouterr().out == "1 chunks dropped\n"
    assert run("admin", "explain", "nobody", *where) == 1
    assert "there is no conversation 'nobody'" in capsys.readouterr().err
    assert process.stop() == 0


def test_the_operator_lists_and_deletes_the_prefixes_of_all_tenants(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tokens.toml"
    tokens = tokens_for(file, capsys, "acme", "beta")
    process = ServeProcess(tmp_path / "data", "--token-file", str(file))
    address, where = process.start(), ("--data", str(tmp_path / "data"))
    with (
        Client(address, token=tokens["acme"]) as acme,
        Client(address, token=tokens["beta"]) as beta,
    ):
        for client in (acme, beta):
            client.prefix("rules").create(system_prompt="Be brief.", keep_warm=client is acme)
        acme.conversation("c").create(prefix_id="rules")
        assert run("admin", "prefixes", *where) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if "acme" in line and "yes" in line]
        assert run("admin", "prefixes", "--delete", "rules", *where) == 1
        assert "there is no prefix 'rules'" in capsys.readouterr().err
        assert run("admin", "prefixes", "--delete", "rules", "--tenant", "acme", *where) == 0
        assert capsys.readouterr().out == "deleted prefix rules\n"
        assert run("admin", "prefixes", "--json", *where) == 0
        (left,) = json.loads(capsys.readouterr().out)["prefixes"]
        assert (left["tenant"], left["prefix"]["prefix_id"]) == ("beta", "rules")
        assert acme.conversation("c").get().num_messages == 1
    assert process.stop() == 0


def test_the_socket_of_a_killed_daemon_gives_one_error_line_and_is_replaced(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    process = ServeProcess(tmp_path / "data")
    process.start()
    process.kill()
    where = ("--data", str(tmp_path / "data"))
    assert (tmp_path / "data" / "admin.sock").is_socket()
    assert run("admin", "stats", *where) == 3
    assert capfd.readouterr().err == (
        f"pensieve: no daemon has the data folder {tmp_path / 'data'} (a killed daemon left the socket "
        f"{tmp_path / 'data' / 'admin.sock'}). `pensieve serve` starts one. To use another "
        "daemon, pass --data or --address\n"
    )
    process.start()
    assert run("admin", "stats", *where) == 0
    assert "serving, up" in capfd.readouterr().out
    assert process.stop() == 0


def test_info_stats_and_log_name_the_served_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = ServeProcess(tmp_path / "data", engine="model")
    address, where = process.start(), ("--data", str(tmp_path / "data"))
    assert run("admin", "info", *where) == 0
    told = capsys.readouterr().out
    for part in ("built-in", "float32", "cpu", "serving", "torch", "transformers", "pensieve"):
        assert part in told, part
    assert run("admin", "info", *where, "--json") == 0
    info = json.loads(capsys.readouterr().out)
    assert info["state"] == "serving"
    assert info["context_max_tokens"] > 0
    assert run("admin", "stats", *where) == 0
    assert "built-in" in capsys.readouterr().out
    assert run("admin", "stats", *where, "--json") == 0
    server = json.loads(capsys.readouterr().out)["server"]
    assert (server["model"], server["fingerprint"]) == ("built-in", info["fingerprint"])
    assert server["state"] == "serving"
    log = process.log.read_text()
    assert f"fingerprint {info['fingerprint']}" in log
    chat = subprocess.run(
        [sys.executable, "-m", "pensieve", "chat", "--address", address, *where],
        input="/bye\n",
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert f"ready: built-in at {address} (" in chat.stderr
    assert process.stop() == 0


def test_stats_show_attained_objectives_and_work_per_tenant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tokens.toml"
    tokens = tokens_for(file, capsys, "acme", "beta")
    objectives = ("--tbt", "100", "--ttft", "200")
    process = ServeProcess(tmp_path / "data", "--token-file", str(file), *objectives)
    address, where = process.start(), ("--data", str(tmp_path / "data"))
    for tenant, length in (("acme", 30), ("beta", 60)):
        with Client(address, token=tokens[tenant]) as client:
            client.conversation("c").ask("hello", max_tokens=length, ignore_eos=True)
    assert run("admin", "stats", *where) == 0
    shown = capsys.readouterr().out
    assert "100.0% of tokens within 100,000.0 ms" in shown
    assert "100.0% of first tokens within 200,000.0 ms" in shown
    assert "of the token budget used" in shown
    assert "iteration times, with an error of" in shown
    assert re.search(r"tenants +beta 6\d%, acme 3\d% of \d+ tokens computed", shown)
    assert run("admin", "stats", *where, "--json") == 0
    more = json.loads(capsys.readouterr().out)["more"]
    assert (more["tbt_attained"], more["ttft_attained"], more["ttft_count"]) == (1.0, 1.0, 2)
    assert more["tenant_tokens.beta"] - more["tenant_tokens.acme"] == 30
    assert process.stop() == 0


def test_the_stats_table_shows_waits_stalls_and_suspensions() -> None:
    stats = pb.Stats()
    more = {
        "stalls": 3,
        "suspensions": 7,
        "preemptions": 2,
        "refused_for_ttft": 5,
        "suspended_p50_seconds": 0.25,
        "suspended_p99_seconds": 1.5,
        "queue_wait_seconds": 2.0,
        **{f"tenant_tokens.t{number}": 100.0 - number for number in range(10)},
    }
    stats.more.update(more)
    out = io.StringIO()
    Console(file=out, width=200).print(stats_table(stats))
    shown = out.getvalue()
    assert "a new turn would wait 2,000.0 ms; 5 turns were refused because of the wait" in shown
    assert "3 long gaps between tokens" in shown
    assert "7 times, 2 for turns with priority; p50 250.0 ms, p99 1,500.0 ms" in shown
    assert "t0 10%, t1 10%" in shown
    assert "t7 10% and 2 more of 955 tokens computed" in shown
    assert "objective" not in shown
