"""`pensieve cluster up --local`: how long the start takes, and how it fails."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pensieve.cli.main import main
from pensieve.client import Client
from pensieve.errors import Unavailable
from tests.newcomer import free_port

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.xdist_group("ray"),
    pytest.mark.timeout(240),
]
FAILED = 1  # an exit code


def cluster(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pensieve", "cluster", *words, "--data", str(folder)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "PENSIEVE_ENGINE": "echo:0.01"},
    )


def test_two_replicas_of_a_local_cluster_answer(tmp_path: Path) -> None:
    """A second cluster on a used port is refused with one line, and leaves nothing behind."""
    grpc_port, http_port = free_port(), free_port()
    ports = ("--grpc", str(grpc_port), "--http", str(http_port))
    try:
        up = cluster(tmp_path / "one", "up", "--local", "2", *ports)
        assert up.returncode == 0, up.stderr
        assert re.search(r"ready grpc://.* \(\d+ s\)\n$", up.stdout), up.stdout
        with Client(f"127.0.0.1:{grpc_port}") as client:
            assert client.conversation("first").ask("Hello.", max_tokens=20).text

        grpc_twice = ("--grpc", str(grpc_port), "--http", str(free_port()))
        http_twice = ("--grpc", str(free_port()), "--http", str(http_port))
        for taken, where in (
            (grpc_twice, f"0.0.0.0:{grpc_port}"),
            (http_twice, f"127.0.0.1:{http_port}"),
        ):
            other = cluster(tmp_path / "two", "up", "--local", "2", *taken)
            assert other.returncode == FAILED
            line = f"pensieve: cannot listen on {where}: Address already in use\n"
            assert (other.stdout, other.stderr) == ("", line)
            assert not (tmp_path / "two").exists()
    finally:
        down = cluster(tmp_path / "one", "down")
    assert down.returncode == 0, down.stderr
    assert (
        cluster(tmp_path / "one", "status").stdout
        == "no cluster runs here; `pensieve cluster up` starts one\n"
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by the import of Ray Serve
def test_up_stops_the_ray_that_it_started_if_the_cluster_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pensieve.cluster import deploying
    from pensieve.cluster.local_ray import LocalRay

    done = []

    def start(ray: LocalRay, _nodes: int, _cpus: int) -> str:
        done.append("start")
        return "127.0.0.1:1"

    def connected(_: str) -> None:
        raise Unavailable("cannot reach Ray")

    monkeypatch.setattr(LocalRay, "start", start)
    monkeypatch.setattr(LocalRay, "stop", lambda _: done.append("stop"))
    monkeypatch.setattr(deploying, "connected", connected)
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_USAGE_STATS_ENABLED"):
        monkeypatch.setenv(name, "")
    ports = ("--grpc", str(free_port()), "--http", str(free_port()))
    code = main(["cluster", "up", "--local", "1", *ports, "--data", str(tmp_path)])
    assert code == FAILED
    assert done == ["start", "stop"]
    assert "cannot reach Ray" in capsys.readouterr().err


def test_the_error_names_a_port_that_another_program_uses() -> None:
    from pensieve.cluster.local_ray import check_free

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=f"cannot listen on 127.0.0.1:{port}: Address"):
            check_free("127.0.0.1", port)
    check_free("127.0.0.1", port)
