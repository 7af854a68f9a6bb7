"""An engine that hangs is noticed, killed and restarted. Its supervisor never stops silently."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from pensieve.client import Client
from pensieve.client.admin import Admin
from pensieve.conversations import engine_client
from pensieve.conversations.daemon_config import DaemonConfig
from pensieve.engine import pipe
from pensieve.v1 import conversation_pb2 as pb
from tests import fork_server
from tests.conversations.rig_daemon import (
    ECHO,
    DaemonRig,
    ServeProcess,
    read_turn,
    send_signal,
    wait_for,
)

FAULTY = (sys.executable, "-m", "tests.conversations.faulty_engine")
SLOW = (*ECHO, "--seconds=0.02")
SHORT = pb.Sampling(max_tokens=8, ignore_eos=True)
LONG = pb.Sampling(max_tokens=300, ignore_eos=True)
ROOT = Path(__file__).parents[2]


# -- an engine that hangs --


def test_a_stopped_engine_is_killed_and_restarted(tmp_path: Path) -> None:
    config = DaemonConfig(grace_seconds=30.0, heartbeat_seconds=5.0)
    with DaemonRig(tmp_path / "data", program=SLOW, config=config) as rig:
        with Client(rig.server.address) as client:
            turn = client.conversation("c").send("hello", max_tokens=60, ignore_eos=True)
            next(iter(turn))
            send_signal(rig.daemon.engine.pid, signal.SIGSTOP)
            for _ in turn:
                pass
            assert len(turn.reply.token_ids) == 60
        assert rig.daemon.engine.num_restarts == 1
        assert len(rig.messages("c")) == 2


def test_an_engine_whose_main_thread_hangs_is_killed_and_restarted(tmp_path: Path) -> None:
    faults = tmp_path / "faults"
    config = DaemonConfig(grace_seconds=30.0, iteration_seconds_max=5.0)
    with DaemonRig(tmp_path / "data", program=(*FAULTY, str(faults)), config=config) as rig:
        rig.ask("c", "one", sampling=SHORT)
        faults.write_text("hang")
        with Client(rig.server.address) as client:
            reply = client.conversation("c").ask("two", max_tokens=8, ignore_eos=True)
        assert len(reply.token_ids) == 8
        assert rig.daemon.engine.num_restarts == 1


def test_an_iteration_longer_than_a_heartbeat_is_not_a_hang(tmp_path: Path) -> None:
    config = DaemonConfig(heartbeat_seconds=5.0)
    with DaemonRig(tmp_path / "data", program=(*ECHO, "--seconds=8"), config=config) as rig:
        one = pb.Sampling(max_tokens=1, ignore_eos=True)
        assert rig.ask("c", "hello", sampling=one).completed.revision == 1
        assert rig.daemon.engine.num_restarts == 0


def test_an_idle_engine_is_not_killed(tmp_path: Path) -> None:
    config = DaemonConfig(heartbeat_seconds=5.0, iteration_seconds_max=5.0)
    with DaemonRig(tmp_path / "data", config=config) as rig:
        time.sleep(8.0)
        assert rig.ask("c", "hello", sampling=SHORT).completed.revision == 1
        assert rig.daemon.engine.num_restarts == 0


def test_a_daemon_that_was_suspended_does_not_kill_its_engine(tmp_path: Path) -> None:
    parameters = {"config": {"heartbeat_seconds": 5.0, "iteration_seconds_max": 5.0}}
    process = ServeProcess(tmp_path / "data", parameters=parameters)
    address = process.start()
    with Client(address) as client, Admin(f"unix:{process.data / 'admin.sock'}") as admin:
        conversation = client.conversation("c")
        conversation.ask("one", max_tokens=4, ignore_eos=True)
        process.process.send_signal(signal.SIGSTOP)
        time.sleep(8.0)
        process.process.send_signal(signal.SIGCONT)
        conversation.ask("two", max_tokens=4, ignore_eos=True)
        time.sleep(1.0)
        assert admin.stats().engine_restarts == 0
    assert process.stop() == 0


def test_an_engine_whose_reader_thread_fails_is_restarted(tmp_path: Path) -> None:
    """Without the restart, the engine's reader thread is dead, and nothing reads the pipe any more."""
    faults = tmp_path / "faults"
    faults.write_text("deaf")
    with DaemonRig(
        tmp_path / "data",
        program=(*FAULTY, str(faults)),
        config=DaemonConfig(grace_seconds=30.0),
    ) as rig:
        with Client(rig.server.address) as client:
            reply = client.conversation("c").ask("one", max_tokens=8, ignore_eos=True)
        assert len(reply.token_ids) == 8
        assert rig.daemon.engine.num_restarts == 1


def test_a_slow_engine_start_is_logged_and_not_aborted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_client, "REPORT_SECONDS", 0.001)
    with (
        caplog.at_level(logging.WARNING, "pensieve"),
        DaemonRig(tmp_path / "data", config=DaemonConfig(heartbeat_seconds=1.0)) as rig,
    ):
        assert "is still starting; no progress for" in caplog.text
        assert rig.ask("c", "hello", sampling=SHORT).completed.revision == 1


def test_a_killed_engine_that_does_not_exit_is_logged_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process may be stuck in a device call. A second engine would compete with it for the device."""
    monkeypatch.setattr(engine_client, "REPORT_SECONDS", 0.001)
    with DaemonRig(tmp_path / "data") as rig, caplog.at_level(logging.ERROR, "pensieve"):
        process = rig.daemon.engine._process
        assert process is not None
        wait = process.wait
        waits: list[Any] = []

        def does_not_end(timeout: float | None = None) -> int:
            if len(waits) < 4:  # the first call asks how the process ended
                waits.append(1)
                raise subprocess.TimeoutExpired("engine", timeout or 0.0)
            return int(wait(timeout))

        monkeypatch.setattr(process, "wait", does_not_end)
        os.kill(process.pid, signal.SIGKILL)
        wait_for(lambda: rig.daemon.engine.num_restarts == 1)
        assert caplog.text.count("was killed but does not end") == 3


def test_a_daemon_stops_even_if_its_engine_does_not_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_client, "STOP_SECONDS", 0.1)

    def does_not_end(timeout: float) -> int:
        raise subprocess.TimeoutExpired("engine", timeout)

    with caplog.at_level(logging.ERROR, "pensieve"), DaemonRig(tmp_path / "data") as rig:
        process = rig.daemon.engine._process
        assert process is not None
        monkeypatch.setattr(process, "wait", does_not_end)
    assert "was killed but does not end" in caplog.text
    monkeypatch.undo()
    process.wait(30)


# -- a supervisor that cannot stop silently --


def raise_unexpected(*arguments: Any) -> None:
    raise ZeroDivisionError("an unexpected error of the test")


@pytest.mark.parametrize("when", ["engine_down", "engine_up", "_reap"])
def test_a_failed_supervisor_ends_the_service(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.ERROR, "pensieve"),
        DaemonRig(tmp_path / "data", program=SLOW) as rig,
    ):
        events = rig.send("c", "hello", sampling=LONG)
        next(events)
        engine, events_of_daemon = rig.daemon.engine, rig.daemon.events
        monkeypatch.setattr(engine if when == "_reap" else events_of_daemon, when, raise_unexpected)
        send_signal(rig.daemon.engine.pid, signal.SIGKILL)
        wait_for(rig.server.stopping.is_set)
        assert "an unexpected error of the test" in str(rig.server.failure)
        monkeypatch.undo()
    assert "the engine's supervisor failed" in caplog.text
    with pytest.raises(grpc.RpcError):
        read_turn(events)


def test_an_engine_start_that_fails_unexpectedly_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with DaemonRig(tmp_path / "data") as rig, caplog.at_level(logging.ERROR, "pensieve"):
        engine, failures = rig.daemon.engine, [2]
        spawn: Callable[[], Any] = engine._spawn

        async def fail_twice() -> Any:
            if failures[0]:
                failures[0] -= 1
                raise_unexpected()
            return await spawn()

        monkeypatch.setattr(engine, "_spawn", fail_twice)
        send_signal(engine.pid, signal.SIGKILL)
        wait_for(lambda: engine.num_restarts == 1)
        assert rig.ask("c", "hello", sampling=SHORT).completed.revision == 1
        assert caplog.text.count("an unexpected error of the test") >= 2


def test_a_service_whose_supervisor_failed_exits_with_a_message(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    program = (
        "import sys; from pensieve.conversations.daemon import Daemon; from pensieve.cli.main import main\n"
        "def raise_unexpected(self, reason): raise ZeroDivisionError('an unexpected error of the test')\n"
        "Daemon._on_down = raise_unexpected; sys.exit(main(sys.argv[1:]))"
    )
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", program, "serve"),
            *("--data", str(tmp_path / "data"), "--address", "127.0.0.1:0"),
            *("--ready-file", str(ready)),
        ],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PENSIEVE_ENGINE": "echo"},
    )
    wait_for(lambda: ready.exists() or process.poll() is not None)
    (engine,) = fork_server.children_of(process.pid)
    os.kill(engine, signal.SIGKILL)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    last = stderr.splitlines()[-1]
    assert last.startswith("pensieve: the daemon failed")
    assert "an unexpected error of the test" in last


@pytest.mark.parametrize("where", ["interrupt", "fail", "finish"])
def test_a_turn_ends_even_if_storing_its_end_fails_unexpectedly(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise readers of this turn would wait for ever."""
    faults = tmp_path / "faults"
    with DaemonRig(tmp_path / "data", program=(*FAULTY, str(faults))) as rig:
        history = rig.daemon.conversations._history
        monkeypatch.setattr(history, where, raise_unexpected)
        if where != "interrupt":
            monkeypatch.setattr(history, "interrupt", raise_unexpected)
        faults.write_text({"interrupt": "memory", "fail": "nan", "finish": ""}[where])
        with pytest.raises(grpc.RpcError) as caught:
            rig.ask("c", "hello", sampling=SHORT, seconds=30)
        assert caught.value.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
        assert rig.num_live == 0


def test_a_turn_whose_log_cannot_be_read_ends_with_an_internal_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DaemonRig(tmp_path / "data") as rig:
        rig.ask("c", "hello", sampling=SHORT)
        send_signal(rig.daemon.engine.pid, signal.SIGKILL)
        wait_for(lambda: rig.daemon.engine.num_restarts == 1)
        monkeypatch.setattr(rig.daemon.conversations._history, "log_for", raise_unexpected)
        with pytest.raises(grpc.RpcError) as caught:
            rig.ask("c", "again", sampling=SHORT, seconds=30)
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert not rig.server.stopping.is_set()


def test_the_last_messages_of_an_engine_with_unread_input_are_received() -> None:
    """Unread data makes the engine's close a reset. The reset must not discard earlier frames."""

    async def main() -> None:
        ours, theirs = socket.socketpair()
        reader, writer = await engine_client._open(ours)
        writer.write(pipe.pack(["never", "read"]))
        await writer.drain()
        theirs.sendall(pipe.pack_alive(7))
        theirs.sendall(pipe.pack(["died", "the reason", 1]))
        theirs.close()
        await asyncio.sleep(0.05)  # until all frames and the reset have arrived
        frame = await engine_client._read(reader)
        assert frame is not None
        assert pipe.rounds_of(frame) == 7
        frame = await engine_client._read(reader)
        assert frame is not None
        assert frame[0] == ["died", "the reason", 1]
        assert await engine_client._read(reader) is None
        writer.close()

    asyncio.run(main())


def test_an_unexpected_error_in_a_background_task_ends_the_service(tmp_path: Path) -> None:
    async def fail() -> None:
        raise_unexpected()

    with DaemonRig(tmp_path / "data") as rig:

        async def spawn() -> None:
            rig.daemon.threads.spawn(fail())

        rig.call(spawn())
        wait_for(rig.server.stopping.is_set)
        assert "an unexpected error of the test" in str(rig.server.failure)
