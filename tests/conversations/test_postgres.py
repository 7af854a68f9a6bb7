"""`pensieve serve --store`: a conversation in PostgreSQL, with daemons that are killed and stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pensieve.cli.main import main
from pensieve.client import Client, Retry
from pensieve.store import ConversationStore
from pensieve.store.folder import DATABASE_NAME
from tests.conversations.rig_daemon import PATIENCE_SECONDS, ServeProcess
from tests.store import postgres_server
from tests.store.postgres_server import USER, PostgresServer

SECRET = "hunter2"
ENOUGH = Retry(retries=60)


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    if problem := postgres_server.missing():
        pytest.skip(problem)
    made = PostgresServer()
    try:
        made.initialise()
        made.start()
        yield made
    finally:
        made.close()


def serve(data: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a daemon that must fail to start."""
    command = (sys.executable, "-m", "pensieve", "serve", "--data", str(data))
    return subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
        env={**os.environ, "PENSIEVE_ENGINE": "echo"},
    )


def test_ctrl_c_ends_a_daemon_that_waits_for_its_database(tmp_path: Path) -> None:
    pytest.importorskip("psycopg")
    command = (sys.executable, "-m", "pensieve", "serve", "--data", str(tmp_path))
    away = "postgresql://nobody@127.0.0.1:1/x"
    with subprocess.Popen(
        [*command, "--store", away, "--address", "127.0.0.1:0"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PENSIEVE_ENGINE": "echo"},
    ) as daemon:
        assert daemon.stderr is not None
        assert any("cannot reach the database" in line for line in daemon.stderr)
        daemon.send_signal(signal.SIGINT)
        assert daemon.wait(PATIENCE_SECONDS) == 130


@pytest.mark.executed  # /proc shows the fork server's environment for forked processes
def test_a_conversation_continues_after_a_kill_of_the_daemon_or_database(
    tmp_path: Path,
    server: PostgresServer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = server.new_database().replace(f"{USER}@", f"{USER}:{SECRET}@")
    for name, secret in (("PENSIEVE_STORE", url), ("PGPASSWORD", SECRET)):
        monkeypatch.setenv(name, secret)
    daemon = ServeProcess(tmp_path / "data", engine="echo:0.002")
    other = ServeProcess(tmp_path / "other", engine="echo:0.002")

    def ask(text: str, at: ServeProcess = daemon) -> str:
        with Client(at.address, retry=ENOUGH) as client:
            return client.conversation("tea").ask(text, max_tokens=6, create_if_missing=True).text

    def texts(at: ServeProcess = daemon) -> list[str]:
        with Client(at.address, retry=ENOUGH) as client:
            return [message.text for message in client.conversation("tea").messages()]

    daemon.start()
    spoken = ["Hello.", ask("Hello.")]
    assert texts() == spoken
    daemon.kill()
    daemon.start()
    assert texts() == spoken
    spoken += ["And now?", ask("And now?")]
    server.kill()
    server.start()
    spoken += ["And then?", ask("And then?")]
    assert texts() == spoken

    engine_pid = daemon.engine_pid()
    for file in ("cmdline", "environ"):
        assert SECRET.encode() not in Path(f"/proc/{engine_pid}/{file}").read_bytes()
    where = ("--data", str(daemon.data))
    assert main(["admin", "check", *where]) == 0
    assert main(["backup", str(tmp_path / "copy"), *where]) != 0
    assert "back PostgreSQL up with its own tools" in capsys.readouterr().err
    copy = ("--data", str(tmp_path / "back"), "--store", url)
    assert main(["copy", "--back", *copy]) == 3
    refused = capsys.readouterr().err
    assert "is in use by pensieve serve, pid " in refused
    assert SECRET not in refused

    other.start()
    assert texts(other) == spoken
    spoken += ["By the first?", ask("By the first?", other)]
    assert texts() == texts(other) == spoken
    assert daemon.stop() == 0
    spoken += ["By the second?", ask("By the second?", other)]
    assert texts(other) == spoken
    assert other.stop() == 0
    for each in (daemon, other):
        assert SECRET not in each.log.read_text()
        assert not (each.data / DATABASE_NAME).exists()
    with ConversationStore.open(tmp_path / "later", "test", url=url) as store:
        assert [message.content for message in store.messages("tea")] == spoken
        assert store.verify() == []


def test_a_daemon_without_its_database_exits_with_an_error(
    tmp_path: Path, server: PostgresServer
) -> None:
    url = server.url("nowhere").replace(f"{USER}@", f"{USER}:{SECRET}@")
    done = serve(tmp_path / "data", "--store", url)
    assert done.returncode == 1
    assert "the history postgresql://" in done.stderr
    assert "does not exist" in done.stderr
    assert "Traceback" not in done.stderr
    assert SECRET not in done.stderr + done.stdout


def test_the_backup_option_is_refused_with_a_postgres_store(tmp_path: Path) -> None:
    backup = ("--backup", str(tmp_path / "copy"))
    done = serve(tmp_path / "data", "--store", "postgresql:///history", *backup)
    assert done.returncode == 2
    assert "Use PostgreSQL's own backups" in done.stderr
