"""A daemon that backs up its history: while it serves, when it stops, and with a broken folder."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pensieve.cli.main import main
from pensieve.client import Client
from pensieve.conversations import backing_up
from pensieve.conversations.daemon_config import BackupConfig, DaemonConfig
from pensieve.errors import PensieveError
from pensieve.store import ConversationStore, backup
from pensieve.store.backup import LOCK_NAME, points, restore
from pensieve.v1 import admin_pb2
from pensieve.v1 import conversation_pb2 as pb
from tests.cluster.sharing import needs_sqlite
from tests.cluster.world import stop_without_locks
from tests.conversations.rig_daemon import DaemonRig, ServeProcess, wait_for

PAGE = Path(__file__).parents[2] / "docs" / "backup.md"
FREQUENT_BACKUPS = "from pensieve.conversations import backing_up; backing_up.SECONDS = 0.1"


@pytest.fixture(autouse=True)
def frequent_backups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backing_up, "SECONDS", 0.02)
    monkeypatch.setattr(backing_up, "PAUSE_SHARE", 0.0)


def rig_with_backup(folder: Path, keep_seconds: float = 0.0) -> DaemonRig:
    config = BackupConfig(folder / "backup", keep_seconds)
    return DaemonRig(folder / "data", config=DaemonConfig(grace_seconds=0.2, backup=config))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DaemonRig]:
    with rig_with_backup(tmp_path) as rig:
        wait_for(lambda: (tmp_path / "backup").exists() and points(tmp_path / "backup"))
        yield rig


def is_failing(rig: DaemonRig) -> bool:
    more = rig.admin.GetStats(admin_pb2.GetStatsRequest()).stats.more
    assert more["backup_age_seconds"] >= 0
    return bool(more["backup_failing"])


def delete(rig: DaemonRig, conversation_id: str) -> None:
    rig.stub.DeleteConversation(pb.DeleteConversationRequest(conversation_id=conversation_id))
    assert not rig.daemon.store.erasure.pending
    for file in rig.daemon.store.folder.path.iterdir():
        assert not file.is_file() or b"a secret" not in file.read_bytes()


def test_a_backup_under_load_restores_all_turns_acknowledged_by_then(
    rig: DaemonRig, tmp_path: Path
) -> None:
    folder, acknowledged_at = tmp_path / "backup", list[float]()
    first = len(points(folder)[0].times)
    while len(points(folder)[0].times) < first + 10:
        rig.ask("tea", f"word {len(acknowledged_at)}")
        acknowledged_at.append(time.time())
    for at in points(folder)[0].times[first::3]:
        assert restore(folder, tmp_path / "restored", at, replace=True).time == at
        with ConversationStore.open(tmp_path / "restored", "test") as store:
            assert store.integrity_check() == store.verify() == []
            said = [each.content for each in store.messages("tea") if each.role == "user"]
            assert said == [f"word {number}" for number in range(len(said))]
            assert sum(when <= at for when in acknowledged_at) <= len(said)


def test_a_clean_stop_backs_up_the_last_turn_and_a_restart_begins_a_new_generation(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "backup"
    process = ServeProcess(tmp_path / "data", "--backup", str(folder))
    process.start()
    wait_for(lambda: folder.exists() and points(folder))
    with Client(process.address) as client:
        client.conversation("tea").ask("hello", max_tokens=5)
    assert process.stop() == 0
    assert restore(folder, tmp_path / "restored").messages == 2
    process.start()
    wait_for(lambda: len(points(folder)) == 2)
    process.stop()
    process = ServeProcess(tmp_path / "restored")
    process.start()
    with Client(process.address) as client:
        conversation = client.conversation("tea")
        conversation.ask("and now", max_tokens=5)
        assert len(list(conversation.messages())) == 4
    process.stop()


def test_a_full_backup_disk_is_reported_and_does_not_stop_turns_or_deletions(
    rig: DaemonRig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(backup, "new_file", full)
        rig.ask("pot", "several pages " * 1000)
        wait_for(lambda: is_failing(rig))
        rig.ask("tea", "a secret")
        rig.ask("cup", "hello")
        delete(rig, "tea")
    wait_for(lambda: not is_failing(rig))
    lines = [
        record.getMessage() for record in caplog.records if "the backup is" in record.getMessage()
    ]
    assert lines == [
        f"the backup is incomplete: the backup {tmp_path / 'backup'}: No space left on device",
        "the backup is complete again",
    ]
    assert restore(tmp_path / "backup", tmp_path / "restored").messages == 4
    assert len(points(tmp_path / "backup")) == 1


def test_an_unresponsive_backup_folder_does_not_block_turns_deletions_or_shutdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, answers = tmp_path / "backup", threading.Event()
    hangs, has_ended = threading.Event(), threading.Event()

    def hang(*arguments: object) -> None:
        hangs.set()
        answers.wait(60)
        has_ended.set()
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(backing_up, "STOP_SECONDS", 0.1)
    monkeypatch.setattr(backing_up, "SLOW_SECONDS", 0.1)
    with rig_with_backup(tmp_path) as rig:
        wait_for(lambda: folder.exists() and points(folder))
        monkeypatch.setattr(backup, "new_file", hang)
        rig.ask("tea", "a secret")
        wait_for(hangs.is_set)
        rig.ask("tea", "more")
        delete(rig, "tea")
        assert not has_ended.is_set()
        wait_for(lambda: is_failing(rig))
    assert not has_ended.is_set()
    answers.set()


def test_new_generations_begin_and_old_generations_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backup, "GENERATION_SECONDS", 0.1)
    folder = tmp_path / "backup"

    def is_in_backup() -> bool:
        files = [file for file in folder.rglob("*") if file.is_file()]
        return any(b"a secret" in file.read_bytes() for file in files)

    with rig_with_backup(tmp_path, keep_seconds=0.3) as rig:
        rig.ask("tea", "a secret")
        delete(rig, "tea")

        def is_dropped() -> bool:
            rig.ask("cup", "hello")
            kept = [each.generation for each in points(folder)] if folder.exists() else []
            return len(kept) > 1 and kept[0] > 3

        wait_for(is_dropped)
    assert not is_in_backup()


def test_the_backup_command_copies_a_history_that_a_daemon_serves(
    rig: DaemonRig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rig.ask("tea", "hello")
    copy, data = str(tmp_path / "copy"), ("--data", str(tmp_path / "data"))
    assert main(["backup", copy, *data]) == 0
    rig.ask("tea", "more")
    assert main(["backup", copy, *data]) == 0
    assert "generation-000002 has the history as of" in capsys.readouterr().out
    assert main(["backup", str(tmp_path / "backup"), *data]) == 3
    assert "another process is writing to the backup" in capsys.readouterr().err
    assert restore(tmp_path / "copy", tmp_path / "restored").messages == 4


def test_the_backup_command_copies_a_history_that_no_daemon_serves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with DaemonRig(tmp_path / "data") as rig:
        rig.ask("tea", "hello")
    copy, data = str(tmp_path / "copy"), ("--data", str(tmp_path / "data"))
    assert main(["backup", copy, *data]) == 0
    assert "generation-000001 has the history as of" in capsys.readouterr().out
    assert main(["restore", copy, *data]) == 3
    assert "--replace" in capsys.readouterr().err
    assert main(["restore", copy, *data, "--at", "1999-01-01"]) != 0
    assert main(["restore", copy, *data, "--at", "yesterday"]) == 2
    assert main(["restore", copy, *data, "--replace"]) == 0
    assert "restored 1 conversations with 2 messages" in capsys.readouterr().out
    assert main(["backup", copy, "--data", str(tmp_path / "nowhere")]) == 3


def num_messages(backup: Path, target: Path) -> int:
    """Restore the backup to `target`. Return its number of messages; 0 if there is no backup yet."""
    with contextlib.suppress(PensieveError):
        return restore(backup, target, replace=True).messages
    return 0


def test_the_drill_in_the_docs_works_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the documented commands line by line, with other folders and the echo engine."""
    text = PAGE.read_text(encoding="utf-8").split("### A drill", 1)[1].split("\n## ", 1)[0]
    lines = re.findall(r"^    (.+)$", text, re.MULTILINE)
    assert len(lines) >= 6
    monkeypatch.setenv("PENSIEVE_ENGINE", "echo")
    (tmp_path / "lib").mkdir()
    daemons: list[Any] = []
    outputs: list[Any] = []
    try:
        for line in lines:
            line = (
                line.split("  #")[0]
                .replace("/var/", f"{tmp_path}/")
                .replace("/srv/", f"{tmp_path}/")
            )
            words = shlex.split(line)
            if words[:2] == ["pensieve", "serve"]:
                ready = tmp_path / f"ready-{len(daemons)}"
                program = f"{FREQUENT_BACKUPS}; from pensieve.cli.main import main; main()"
                words = [sys.executable, "-c", program, *words[1:], "--ready-file", str(ready)]
                daemons.append(subprocess.Popen(words, stderr=subprocess.DEVNULL))
                wait_for(ready.exists)
                continue
            if "restore" in words:
                # The docs wait a minute here.
                wait_for(lambda: num_messages(tmp_path / "backup", tmp_path / "trial") == 2)
            done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
            assert done.returncode == 0, (line, done.stderr)
            outputs.append(done.stdout)
    finally:
        for daemon in daemons:
            daemon.kill()
            daemon.wait()
    assert sum("restored 1 conversations with 2 messages" in each for each in outputs) == 1
    assert any("nothing is wrong" in each for each in outputs)


class SharingDaemon:
    """`pensieve serve` on a history file, with a backup every tenth of a second."""

    def __init__(self, folder: Path, name: str) -> None:
        ready = folder / f"{name}.ready"
        program = f"{FREQUENT_BACKUPS}; from pensieve.cli.main import main; main()"
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-c", program, "serve", "--data", str(folder / name)),
                *("--store", f"sqlite://{folder / 'history.db'}", "--replica", name),
                *("--backup", str(folder / "backup"), "--address", "127.0.0.1:0"),
                *("--ready-file", str(ready)),
            ],
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PENSIEVE_ENGINE": "echo", "PENSIEVE_LEASE": "5"},
        )
        wait_for(ready.exists)
        self.address = ready.read_text().strip()

    def say(self, text: str) -> None:
        with Client(self.address) as client:
            client.conversation("tea").ask(text, max_tokens=2)

    def stop_between_writes(self, folder: Path) -> None:
        """Stop the process (SIGSTOP) while it writes neither a backup nor the history.

        The other daemon would wait for the lock of the backup, or kill the writer of the history.
        """
        stop_without_locks(self.process, folder / LOCK_NAME, folder.parent / "history.db.write")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@needs_sqlite
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_another_daemon_takes_over_the_backup_of_a_shared_file(
    tmp_path: Path, how: signal.Signals
) -> None:
    folder, restored = tmp_path / "backup", tmp_path / "restored"
    with contextlib.ExitStack() as stack:
        one, two = (SharingDaemon(tmp_path, name) for name in ("one", "two"))
        for each in (one, two):
            stack.callback(each.end)
        two.say("hello")
        wait_for(lambda: num_messages(folder, restored) == 2)
        assert len(points(folder)) == 1
        if how == signal.SIGSTOP:
            one.stop_between_writes(folder)
        else:
            one.process.send_signal(how)
            one.process.wait()
        first = points(folder)[0]
        two.say("again")
        wait_for(lambda: num_messages(folder, restored) == 4)
        assert len(points(folder)) == 2
        if how == signal.SIGSTOP:
            assert one.process.poll() is None
            one.process.send_signal(signal.SIGCONT)
            two.say("and again")
            wait_for(lambda: num_messages(folder, restored) == 6)
            time.sleep(0.5)
            assert len(points(folder)) == 2
            assert points(folder)[0] == first, "the daemon that was stopped has written"
    with ConversationStore.open(restored, "test") as store:
        assert store.verify() == []


@needs_sqlite
def test_only_the_daemon_that_writes_the_backup_reports_its_age(tmp_path: Path) -> None:
    url, folder = f"sqlite://{tmp_path / 'history.db'}", tmp_path / "backup"
    config = DaemonConfig(backup=BackupConfig(folder))
    with (
        DaemonRig(tmp_path / "one", store=url, config=config) as one,
        DaemonRig(tmp_path / "two", store=url, config=config) as two,
    ):
        wait_for(lambda: folder.exists() and points(folder))
        figures = [rig.admin.GetStats(admin_pb2.GetStatsRequest()).stats.more for rig in (one, two)]
        assert ["backup_age_seconds" in each for each in figures] == [True, False]


@needs_sqlite
def test_the_backup_command_copies_a_file_that_daemons_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, copy = f"sqlite://{tmp_path / 'history.db'}", str(tmp_path / "copy")
    with DaemonRig(tmp_path / "one", store=url) as rig:
        rig.ask("tea", "hello")
        assert main(["backup", copy, "--store", url]) == 0
    assert restore(tmp_path / "copy", tmp_path / "restored").messages == 2
    assert main(["backup", copy, "--store", "sqlite:///nowhere"]) == 3
    assert "there is no history /nowhere" in capsys.readouterr().err
    assert main(["backup", copy, "--store", "postgresql:///history"]) == 3
