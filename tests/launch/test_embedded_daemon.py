"""A daemon in a thread: it can be reached only through its socket, and ends with its owner."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from pensieve.client import Client
from pensieve.client.admin import Admin
from pensieve.config import Resolved, resolve
from pensieve.errors import ConfigError, DeviceError, StoreLocked
from pensieve.launch import programs
from pensieve.launch.embedded_daemon import EmbeddedDaemon
from pensieve.store import ConversationStore


def settings_in(data: Path) -> Resolved:
    return resolve({"data": str(data)}, {})


def embedded(
    data: Path, lines: list[str], program: tuple[str, ...] = programs.ECHO_ENGINE
) -> EmbeddedDaemon:
    return EmbeddedDaemon(settings_in(data), "a test", lines.append, program)


def test_an_embedded_daemon_listens_on_a_private_socket_and_no_port(tmp_path: Path) -> None:
    with embedded(tmp_path, []) as daemon:
        assert daemon.address == f"unix:{tmp_path / 'admin.sock'}"
        assert daemon.server is not None
        assert daemon.server.address == ""
        with Client(daemon.address) as client, Admin(daemon.address) as admin:
            assert client.conversation("c").ask("hello", max_tokens=5, ignore_eos=True).text
            assert admin.stats().serving
        with pytest.raises(StoreLocked, match="a test"):
            ConversationStore.open(tmp_path, "another")
    assert daemon.ended
    assert not (tmp_path / "admin.sock").exists()
    with ConversationStore.open(tmp_path, "another") as store:
        assert [each.role for each in store.messages("c")] == ["user", "assistant"]


def test_the_socket_of_a_folder_with_a_long_path_is_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    data = tmp_path / ("x" * 120)
    with embedded(data, []) as daemon, Client(daemon.address) as client:
        path = Path(daemon.address.removeprefix("unix:"))
        assert data not in path.parents
        assert client.healthy()
    assert not path.parent.exists()


@pytest.mark.parametrize("name", ["my data", "50%41", "c#?", "größe", "one,two"])
def test_a_folder_may_have_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """gRPC reads a socket's path as a URI, in which some characters are special."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    data = tmp_path / name
    with embedded(data, []) as daemon, Admin(daemon.address) as admin:
        assert admin.stats().serving
        assert (data / "admin.sock").exists() is ("," not in name)


def test_a_failed_start_raises_in_the_starting_thread(tmp_path: Path) -> None:
    with (
        ConversationStore.open(tmp_path / "held", "the first"),
        pytest.raises(StoreLocked, match="the first"),
        embedded(tmp_path / "held", []),
    ):
        raise AssertionError("it has started")
    read = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).recv(1 << 20)"
    dying = (sys.executable, "-c", read)
    with (
        pytest.raises(DeviceError, match="ended with exit code 0 while it was starting"),
        embedded(tmp_path, [], dying),
    ):
        raise AssertionError("it has started")
    assert not [each for each in threading.enumerate() if each.name == "daemon"]
    ConversationStore.open(tmp_path, "the next").close()


def test_an_embedded_daemon_ends_at_once_while_its_engine_loads(tmp_path: Path) -> None:
    """On Ctrl-C while the model loads, the engine process is killed and the data folder is released."""
    loading = (sys.executable, "-c", "import time; time.sleep(600)")
    daemon = embedded(tmp_path, [], loading)
    pids: list[int] = []

    def interrupt() -> None:
        while daemon.server is None or daemon.server.daemon.engine.pid is None:
            pass
        pids.append(daemon.server.daemon.engine.pid)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt), daemon:
        raise AssertionError("it has started")
    assert daemon.ended
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
    ConversationStore.open(tmp_path, "the next").close()


def test_after_an_unclean_stop_the_history_is_checked_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ConversationStore.open(tmp_path, "before"):
        pass
    (tmp_path / "lock").write_text("1 somebody\n")
    lines: list[str] = []
    with embedded(tmp_path, lines):
        assert lines[0] == "checking the history after an unclean stop"
    (tmp_path / "lock").write_text("1 somebody\n")
    monkeypatch.setattr(ConversationStore, "integrity_check", lambda self: ["a page is torn"])
    with pytest.raises(ConfigError, match="is damaged: a page is torn"), embedded(tmp_path, []):
        raise AssertionError("it has started")


def test_an_interrupted_start_ends_the_daemon(tmp_path: Path) -> None:
    lines: list[str] = []
    stuck = (sys.executable, "-c", "import time; time.sleep(600)")
    daemon = EmbeddedDaemon(
        settings_in(tmp_path), "a test", lines.append, stuck, given_up=lambda: True
    )
    with pytest.raises(KeyboardInterrupt), daemon:
        raise AssertionError("it has started")
    assert daemon.ended
    assert lines[-1] == "stopping"
    ConversationStore.open(tmp_path, "another").close()
