"""A daemon that backs its history up, from outside: killed, with a broken folder, and on request."""

from __future__ import annotations

import contextlib
import random
import re
import shlex
import subprocess
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pensieve.builtin import MODEL_PATH
from pensieve.cli.main import main
from pensieve.client import Client, Message, Retry
from pensieve.client.admin import Admin
from pensieve.errors import PensieveError
from pensieve.launch.echo_engine import digest, next_token
from pensieve.service import backing_up
from pensieve.service.daemon_config import BackupConfig, DaemonConfig
from pensieve.store.backup import writing
from pensieve.store.backup.restoring import points, restore
from pensieve.store.conversation_store import ConversationStore
from pensieve.text import Tokenizer
from pensieve.v1 import admin_pb2, admin_pb2_grpc
from pensieve.v1 import conversation_pb2 as pb
from tests.service.rig_daemon import DaemonRig, ServeProcess, wait_for

OPERATING = Path(__file__).parents[2] / "docs" / "operating.md"
TOKENIZER = Tokenizer.load(MODEL_PATH)


class Talker(threading.Thread):
    """Says one thing after another, and keeps when each was acknowledged."""

    def __init__(self, address: str, number: int) -> None:
        super().__init__(daemon=True)
        self.conversation_id = f"talk-{number}"
        self.acknowledged_at: list[float] = []
        self._address = address

    def run(self) -> None:
        try:
            with Client(self._address, retry=Retry(retries=0)) as client:
                conversation = client.conversation(self.conversation_id)
                while True:
                    number = len(self.acknowledged_at)
                    conversation.ask(f"word {number}", max_tokens=20, ignore_eos=True)
                    self.acknowledged_at.append(time.time())
        except PensieveError:
            return  # the daemon was killed


def check_replies(messages: list[Message]) -> None:
    """Sampled tokens are what arithmetic says after the log before them."""
    log = array("I")
    for message in messages:
        assert message.first_token == len(log)
        for token_id in message.token_ids:
            if message.finish_reason:
                assert token_id == next_token(digest(log), TOKENIZER.vocab_size, 2)
            log.append(token_id)


def serving(data: Path, *arguments: str) -> ServeProcess:
    process = ServeProcess(data, *arguments)
    process.start()
    return process


def test_a_backup_under_load_restores_to_exactly_the_acknowledged_turns(tmp_path: Path) -> None:
    """Of the shipped moment, whichever it is, also when the daemon was killed; and what was restored is
    served, and goes on."""
    backup = tmp_path / "backup"
    flags = ("--backup", str(backup), "--backup-seconds", "0.2")
    process = serving(tmp_path / "data", *flags)
    talkers = [Talker(process.address, number) for number in range(6)]
    for talker in talkers:
        talker.start()
    wait_for(lambda: backup.exists() and sum(len(each.times) for each in points(backup)) >= 6)
    process.kill()
    for talker in talkers:
        talker.join(60)
    (found,) = points(backup)
    for name, at in (("first", found.times[len(found.times) // 2]), ("last", found.times[-1])):
        data = tmp_path / name  # its socket's path may be no longer than 107 bytes
        restored = restore(backup, data, at)
        assert restored.time == at
        with ConversationStore.open(data, "test") as store:
            assert store.integrity_check() == store.verify() == []
        process = serving(data)
        with Client(process.address) as client:
            known = {each.conversation_id for each in client.conversations()}
            for talker in talkers:
                num_acknowledged = sum(when <= at for when in talker.acknowledged_at)
                if talker.conversation_id not in known:
                    assert not num_acknowledged
                    continue
                conversation = client.conversation(talker.conversation_id)
                messages = list(conversation.messages(include_token_ids=True))
                said = [message.text for message in messages if message.role == "user"]
                assert said == [f"word {number}" for number in range(len(said))]
                assert len(messages) == 2 * len(said)
                assert num_acknowledged <= len(said) <= len(talker.acknowledged_at) + 1
                check_replies(messages)
                conversation.ask("and now", max_tokens=5, ignore_eos=True)
                messages = list(conversation.messages(include_token_ids=True))
                assert len(messages) == 2 * len(said) + 2
                check_replies(messages)
        process.stop()


def test_daemons_that_are_killed_one_after_the_other_leave_a_backup_that_is_whole(
    tmp_path: Path,
) -> None:
    """At any moment of it: while a base is copied, a segment is written, an old generation is dropped."""
    backup, choose = tmp_path / "backup", random.Random(1)
    flags = ("--backup", str(backup), "--backup-seconds", "0.1", "--backup-keep", "0.00001")
    process = ServeProcess(tmp_path / "data", *flags)
    talkers: list[Talker] = []
    newest = 0.0
    for _ in range(6):
        process.start()
        talkers += [Talker(process.address, len(talkers) + number) for number in range(3)]
        for talker in talkers[-3:]:
            talker.start()
        time.sleep(choose.uniform(0.0, 0.7))
        process.kill()
        for talker in talkers[-3:]:
            talker.join(60)
        if not points(backup):
            continue  # not even the first base was whole
        restored = restore(backup, tmp_path / "restored", replace=True)
        assert restored.time >= newest, "a moment that was shipped is gone"
        newest = restored.time
        with ConversationStore.open(tmp_path / "restored", "test") as store:
            for talker in talkers:
                num_acknowledged = sum(when <= newest for when in talker.acknowledged_at)
                if num_acknowledged:
                    found = store.messages(talker.conversation_id)
                    said = [message.content for message in found if message.role == "user"]
                    assert said == [f"word {number}" for number in range(len(said))]
                    assert len(said) >= num_acknowledged
    assert newest


def test_a_clean_stop_ships_the_last_turn(tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    process = serving(tmp_path / "data", "--backup", str(backup), "--backup-seconds", "3600")
    wait_for(lambda: backup.exists() and points(backup))
    with Client(process.address) as client:
        client.conversation("tea").ask("hello", max_tokens=5)
    assert process.stop() == 0
    assert restore(backup, tmp_path / "restored").messages == 2
    process.start()  # the folder goes on with another generation
    wait_for(lambda: len(points(backup)) == 2)
    process.stop()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DaemonRig]:
    config = BackupConfig(tmp_path / "backup", seconds=0.02, generation_seconds=3600.0)
    with DaemonRig(tmp_path / "data", config=DaemonConfig(grace_seconds=0.2, backup=config)) as rig:
        wait_for(lambda: rig.daemon.backing_up._feed)
        yield rig


def swallow(call: Callable[..., object], *arguments: object) -> None:
    with contextlib.suppress(PensieveError):
        call(*arguments)


def failing(rig: DaemonRig) -> bool:
    more = rig.admin.GetStats(admin_pb2.GetStatsRequest()).stats.more
    return bool(more["backup_failing"])


def delete(rig: DaemonRig, conversation_id: str) -> None:
    rig.stub.DeleteConversation(pb.DeleteConversationRequest(conversation_id=conversation_id))
    assert not rig.daemon.store.erasure.pending
    for file in rig.daemon.store.folder.path.iterdir():
        assert not file.is_file() or b"a secret" not in file.read_bytes()


def test_a_full_disk_of_the_backup_is_said_and_stops_nothing(
    rig: DaemonRig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writing, "write_segment", full)
        rig.ask("pot", "several pages " * 1000)  # which nothing changes later
        wait_for(lambda: failing(rig))
        rig.ask("tea", "a secret")
        rig.ask("cup", "hello")
        delete(rig, "tea")
    wait_for(lambda: not failing(rig))
    lines = [record.getMessage() for record in caplog.records if "whole" in record.getMessage()]
    assert lines == [
        f"the backup is not whole: the backup {tmp_path / 'backup'}: No space left on device",
        "the backup is whole again",
    ]
    assert restore(tmp_path / "backup", tmp_path / "restored").messages == 4
    assert len(points(tmp_path / "backup")) == 1


def test_a_folder_that_does_not_answer_holds_up_neither_turns_nor_deletions_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup, answers = tmp_path / "backup", threading.Event()
    hangs, has_ended = threading.Event(), threading.Event()

    def hang(*arguments: object) -> None:
        hangs.set()
        answers.wait(60)
        has_ended.set()
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(backing_up, "STOP_SECONDS", 0.1)
    monkeypatch.setattr(backing_up, "SLOW_SECONDS", 0.1)
    config = DaemonConfig(grace_seconds=0.2, backup=BackupConfig(backup, seconds=0.02))
    with DaemonRig(tmp_path / "data", config=config) as rig:
        wait_for(lambda: backup.exists() and points(backup))
        monkeypatch.setattr(writing, "write_segment", hang)
        rig.ask("tea", "a secret")
        wait_for(hangs.is_set)
        rig.ask("tea", "more")
        delete(rig, "tea")
        assert not has_ended.is_set()
        wait_for(lambda: failing(rig))
        monkeypatch.setattr(writing, "write_base_description", hang)
        hangs.clear()
        with Admin(f"unix:{tmp_path / 'data' / 'admin.sock'}", retry=Retry(retries=0)) as admin:
            copying = threading.Thread(target=swallow, args=(admin.back_up, str(tmp_path / "copy")))
            copying.start()
            wait_for(hangs.is_set)
    assert not has_ended.is_set()
    copying.join(60)
    assert not copying.is_alive()
    answers.set()


def test_a_folder_that_was_cleared_gets_another_generation(rig: DaemonRig, tmp_path: Path) -> None:
    """It was never used again: each try failed, and a small history never has too much to write."""
    rig.ask("c", "hello")
    wait_for(lambda: points(tmp_path / "backup"))
    (tmp_path / "backup").rename(tmp_path / "cleared")  # at once: it is being written to
    (tmp_path / "backup").mkdir(mode=0o700, exist_ok=True)
    rig.ask("c", "and now?")
    wait_for(lambda: (tmp_path / "backup" / "history").exists() and points(tmp_path / "backup"))
    wait_for(lambda: not failing(rig))


def test_another_generation_begins_when_too_much_could_not_be_written(
    rig: DaemonRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = rig.daemon.backing_up._feed
    assert feed is not None
    feed._bytes_max = 0
    rig.ask("tea", "hello")
    wait_for(lambda: len(points(tmp_path / "backup")) == 2)
    wait_for(lambda: not failing(rig))
    assert restore(tmp_path / "backup", tmp_path / "restored").messages == 2


def test_generations_change_and_old_ones_are_dropped(tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    config = BackupConfig(backup, seconds=0.02, keep_seconds=0.3, generation_seconds=0.1)
    with DaemonRig(tmp_path / "data", config=DaemonConfig(grace_seconds=0.2, backup=config)) as rig:
        rig.ask("tea", "a secret")
        wait_for(lambda: backup.exists() and points(backup))
        delete(rig, "tea")
        last_with_it = points(backup)[-1].generation + 1  # which may be about to be complete

        def is_dropped() -> bool:
            rig.ask("cup", "hello")
            return writing.generations_in(backup)[0][0] > last_with_it

        wait_for(is_dropped)
    generations = writing.generations_in(backup)
    assert len(generations) > 1
    assert not any(b"a secret" in (path / "base.db").read_bytes() for _, path in generations)


def test_a_copy_on_request_is_made_while_turns_go_on(rig: DaemonRig, tmp_path: Path) -> None:
    """Beside the folder that is always written to."""
    rig.ask("tea", "hello")
    with Admin(f"unix:{tmp_path / 'data' / 'admin.sock'}") as admin:
        assert admin.back_up(str(tmp_path / "copy")).generation == 1
        rig.ask("tea", "more")
        assert admin.back_up(str(tmp_path / "copy")).generation == 2
        with pytest.raises(PensieveError, match="another process writes to the backup"):
            admin.back_up(str(tmp_path / "backup"))
        with pytest.raises(PensieveError, match="must be an absolute path"):
            admin.back_up("copy")
    assert restore(tmp_path / "copy", tmp_path / "restored").messages == 4
    wait_for(lambda: points(tmp_path / "backup")[0].times[1:])


def test_only_the_socket_in_the_data_folder_has_the_daemon_write_files(
    rig: DaemonRig, tmp_path: Path
) -> None:
    remote = admin_pb2_grpc.AdminServiceStub(rig.channel)
    with pytest.raises(grpc.RpcError) as refused:
        remote.BackUp(admin_pb2.BackUpRequest(folder=str(tmp_path / "copy")))
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert not (tmp_path / "copy").exists()


def test_the_command_copies_a_history_that_nobody_serves(
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


def test_the_drill_of_the_docs_works_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Line by line, with other folders, and the echo engine."""
    text = OPERATING.read_text(encoding="utf-8").split("### A drill", 1)[1].split("\n## ", 1)[0]
    lines = re.findall(r"^    (.+)$", text, re.MULTILINE)
    assert len(lines) >= 6
    monkeypatch.setenv("PENSIEVE_ENGINE", "echo")
    monkeypatch.setenv("PENSIEVE_BACKUP_SECONDS", "0.1")
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
                words += ["--ready-file", str(ready)]
                daemons.append(subprocess.Popen(words, stderr=subprocess.DEVNULL))
                wait_for(ready.exists)
                continue
            if "restore" in words:
                time.sleep(0.5)  # the minute of the docs
            done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
            assert done.returncode == 0, (line, done.stderr)
            outputs.append(done.stdout)
    finally:
        for daemon in daemons:
            daemon.kill()
            daemon.wait()
    assert sum("restored 1 conversations with 2 messages" in each for each in outputs) == 1
    assert any("nothing is wrong" in each for each in outputs)
