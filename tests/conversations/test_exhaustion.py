"""Limits other than memory and disk: file descriptors, the pipe to the engine, and the engine's mailbox."""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import threading
from pathlib import Path

import grpc
import pytest

from pensieve.client import Client
from pensieve.client.admin import Admin
from pensieve.conversations.daemon_config import DaemonConfig
from pensieve.conversations.engine_client import UNSENT_BYTES_MAX, SpareDescriptors
from pensieve.engine.mailbox import Mailbox
from pensieve.engine.messages import CancelTurn, EvictConversation, GetStats, SubmitTurn
from pensieve.errors import Unavailable
from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.rig_daemon import DaemonRig, ServeProcess, send_signal, wait_for

SHORT = pb.Sampling(max_tokens=8, ignore_eos=True)
NEVER_HUNG = DaemonConfig(grace_seconds=30.0, heartbeat_seconds=1e9)


# -- file descriptors --


def num_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.executed  # inspecting a process of the fork server would need a descriptor
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs resource.prlimit")
def test_the_engine_restarts_although_connections_use_all_descriptors(tmp_path: Path) -> None:
    process = ServeProcess(tmp_path / "data")
    address = process.start()
    pid = process.process.pid
    host, port = address.rsplit(":", 1)
    with Client(address) as client, Admin(f"unix:{process.data / 'admin.sock'}") as admin:
        client.conversation("c").ask("hello", max_tokens=4, ignore_eos=True)
        assert admin.stats().engine_restarts == 0  # daemon and engine have their connections
        most = num_descriptors(pid) + 20
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, most))
        flood = [socket.create_connection((host, int(port))) for _ in range(most)]
        wait_for(lambda: num_descriptors(pid) >= most)
        send_signal(process.engine_pid(), signal.SIGKILL)
        reply = client.conversation("c").ask("again", max_tokens=4, ignore_eos=True)
        assert len(reply.token_ids) == 4
        assert admin.stats().engine_restarts == 1
        assert num_descriptors(pid) >= most - 2, "the flood is still there"
        for sock in flood:
            sock.close()
    assert process.stop() == 0


def test_the_engine_restarts_once_descriptors_are_available_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DaemonRig(tmp_path / "data") as rig:
        pair, tries = socket.socketpair, []

        def refuse() -> tuple[socket.socket, socket.socket]:
            tries.append(1)
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(socket, "socketpair", refuse)
        send_signal(rig.daemon.engine.pid, signal.SIGKILL)
        wait_for(lambda: len(tries) >= 3)
        monkeypatch.setattr(socket, "socketpair", pair)
        wait_for(lambda: rig.daemon.engine.num_restarts == 1)
        assert rig.ask("c", "hello", sampling=SHORT).completed.revision == 1


def test_descriptors_are_reserved_and_released() -> None:
    before = set(os.listdir("/proc/self/fd"))
    spare = SpareDescriptors(4)
    spare.take()
    spare.take()
    assert len(set(os.listdir("/proc/self/fd")) - before) == 4
    spare.release()
    assert not set(os.listdir("/proc/self/fd")) - before


# -- an engine that reads nothing --


def test_messages_that_wait_for_a_stopped_engine_are_limited(tmp_path: Path) -> None:
    with DaemonRig(tmp_path / "data", config=NEVER_HUNG) as rig:
        rig.ask("c", "hello", sampling=SHORT)
        engine = rig.daemon.engine
        send_signal(engine.pid, signal.SIGSTOP)
        submit = SubmitTurn(10**9, "big", bytes(1 << 20), 0)

        async def fill() -> int:
            for _ in range(100):  # messages of one MiB
                try:
                    engine.put(submit)
                except Unavailable:
                    engine.put(CancelTurn(1, 0))  # messages that only free resources are accepted
                    return int(vars(engine)["_writer"].transport.get_write_buffer_size())
            raise AssertionError("the number of messages is not limited")

        num_unsent_bytes = rig.call(fill())
        assert 0 < num_unsent_bytes <= UNSENT_BYTES_MAX + (2 << 20)
        with pytest.raises(grpc.RpcError) as caught:
            rig.ask("c", "again", sampling=SHORT, seconds=30)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert rig.num_live == 0
        send_signal(engine.pid, signal.SIGCONT)
        with Client(rig.server.address) as client:
            assert client.conversation("c").ask("again", max_tokens=4).revision == 2
        assert engine.num_restarts == 0


# -- an engine that gets more messages than its mailbox can hold --


def test_the_engine_survives_more_messages_than_its_mailbox_holds(tmp_path: Path) -> None:
    program = (sys.executable, "-m", "tests.conversations.faulty_engine", "nowhere", "50")
    with DaemonRig(tmp_path / "data", program=program, config=NEVER_HUNG) as rig:
        rig.ask("c", "hello", sampling=SHORT)
        engine = rig.daemon.engine
        send_signal(engine.pid, signal.SIGSTOP)

        async def fill() -> None:
            for _ in range(5_000):
                engine.put(EvictConversation("nobody"))

        rig.call(fill())
        send_signal(engine.pid, signal.SIGCONT)
        assert rig.ask("c", "again", sampling=SHORT).completed.revision == 2
        assert engine.num_restarts == 0


def test_put_when_there_is_room_blocks_while_the_mailbox_is_full() -> None:
    box = Mailbox(messages_max=2)
    for number in (1, 2):
        box.put_when_there_is_room(GetStats(number))
    putting = threading.Thread(target=box.put_when_there_is_room, args=(GetStats(3),))
    putting.start()
    putting.join(0.05)
    assert putting.is_alive()
    assert box.drain() == [GetStats(1), GetStats(2)]
    putting.join(10)
    assert box.drain() == [GetStats(3)]
    box.close("bye")
    with pytest.raises(Unavailable, match="bye"):
        box.put_when_there_is_room(GetStats(4))
