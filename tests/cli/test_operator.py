"""What an operator meets first: which daemon it is, whose conversation, a socket without a daemon."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pensieve.cli.main import main
from pensieve.client import Client
from tests.service.rig_daemon import ServeProcess


def run(*arguments: str) -> int:
    return main(list(arguments))


def tokens_for(file: Path, capsys: pytest.CaptureFixture[str], *tenants: str) -> dict[str, str]:
    """A token of each tenant, and the file for --token-file."""
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


def test_a_socket_that_a_killed_daemon_left_is_one_line_and_in_nobodys_way(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    process = ServeProcess(tmp_path / "data")
    process.start()
    process.kill()
    where = ("--data", str(tmp_path / "data"))
    assert (tmp_path / "data" / "admin.sock").is_socket()
    assert run("admin", "stats", *where) == 3
    assert capfd.readouterr().err == (
        f"pensieve: no daemon runs on {tmp_path / 'data'} (nobody listens on "
        f"{tmp_path / 'data' / 'admin.sock'}, which one that was killed has left); `pensieve serve` "
        "starts one, --data and --address name another\n"
    )
    process.start()
    assert run("admin", "stats", *where) == 0
    assert "serving, up" in capfd.readouterr().out
    assert process.stop() == 0


def test_the_operator_is_told_which_model_is_served(
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
