"""The description of the served model: for clients (also while the model loads), and in the log."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from pathlib import Path

import grpc
import pytest

from pensieve import __version__
from pensieve.builtin import MODEL_PATH
from pensieve.client import AsyncClient, Client, ServerInfo
from pensieve.guard import callers
from pensieve.guard.exposure import Listening
from pensieve.launch.model_folder import load_texts, model_name
from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.rig_daemon import DaemonRig, wait_for

GATED = """
while [ ! -e "$0" ]; do sleep 0.02; done
exec {python} -m pensieve.launch.echo_engine "$@"
"""


def gated(gate: Path) -> tuple[str, ...]:
    """Return the command of an engine that waits until this file exists."""
    return ("bash", "-c", GATED.format(python=sys.executable), str(gate))


def test_server_info_while_the_engine_loads_serves_and_restarts(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    rig = DaemonRig(tmp_path / "data", program=gated(gate))
    entering = threading.Thread(target=rig.__enter__)
    entering.start()
    wait_for(lambda: getattr(rig, "server", None) and rig.server.address)
    with Client(rig.server.address, timeout=60) as client:
        loading = client.server_info()
        assert (loading.state, loading.context_max_tokens) == ("loading", 0)
        assert loading.fingerprint == load_texts(MODEL_PATH, lambda line: None).fingerprint
        gate.touch()
        entering.join()
        try:
            serving = client.server_info()
            assert (serving.state, serving.context_max_tokens) == ("serving", 100_000)
            assert serving.uptime_seconds >= loading.uptime_seconds > 0
            assert serving.version == __version__
            assert serving.torch_version
            assert serving.sampling_from_model  # the model's files say that it samples greedily
            shown = serving.sampling or {}
            assert (shown["temperature"], shown["top_p"], shown["max_tokens"]) == (0, 1, 1024)
            assert serving.transformers_version.split(".")[0].isdigit()
            gate.unlink()
            os.kill(rig.daemon.engine.pid or 0, signal.SIGKILL)
            wait_for(lambda: client.server_info().state == "restarting")
            assert not any("ready again" in line for line in rig.lines)
            gate.touch()
            wait_for(lambda: client.server_info().state == "serving")
            (line,) = (line for line in rig.lines if "ready again" in line)
            assert line.startswith("the engine is ready again (it was gone for ")
        finally:
            gate.touch()
            rig.__exit__(None, None, None)


def test_both_clients_return_the_same_server_info(tmp_path: Path) -> None:
    async def ask(address: str) -> ServerInfo:
        async with AsyncClient(address) as client:
            return await client.server_info(timeout=60)

    with DaemonRig(tmp_path / "data") as rig, Client(rig.server.address) as client:
        ours, theirs = client.server_info(), asyncio.run(ask(rig.server.address))
        assert ours.model == theirs.model
        assert ours.fingerprint == theirs.fingerprint


def test_server_info_requires_a_token(tmp_path: Path) -> None:
    token, entry = callers.new_token("acme", admin=False)
    file = tmp_path / "tokens.toml"
    file.write_text(entry)
    file.chmod(0o600)
    listening = Listening(
        "127.0.0.1:0", tmp_path / "data" / "admin.sock", tokens=callers.read_tokens(file)
    )
    with DaemonRig(tmp_path / "data", listening=listening) as rig:
        with Client(rig.server.address, token=token) as client:
            assert client.server_info().state == "serving"
        with pytest.raises(grpc.RpcError) as error:
            rig.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_model_name_omits_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "private" / "my-model"
    folder.mkdir(parents=True)
    assert model_name(str(folder)) == model_name(f"{folder}/") == "my-model"
    monkeypatch.chdir(folder)
    assert model_name(".") == "my-model"
    assert model_name("") == "built-in"
    assert model_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
