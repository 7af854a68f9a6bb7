"""Backups of a history during writes: complete, for any moment, and protected against damage."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pensieve.errors import (
    BackupDamaged,
    NotFound,
    StoreError,
    StoreLocked,
    StoreTooNew,
    StoreUnavailable,
)
from pensieve.store import ConversationStore, backup
from pensieve.store.backup import Backup, check_database, points, restore
from pensieve.store.folder import DATABASE_NAME, history_identity
from tests.store.faulty import history, write_history, writer_of
from tests.store.older_schemas import TO_SCHEMA_3
from tests.store.talk import begin, create, reply, say, user

pytestmark = pytest.mark.sqlite  # copies of SQLite's file are the subject

Open = Callable[..., ConversationStore]
Write = Callable[[], float]


class Clock:
    def __init__(self) -> None:
        self.time = 10_000.0

    def __call__(self) -> float:
        return self.time


class Backing(NamedTuple):
    """A history and its backup, as another process could write it."""

    store: ConversationStore
    backup: Backup
    folder: Path
    clock: Clock
    driver: Any

    def write(self, seconds: float = 60.0) -> float:
        """Write the backup. Return the moment that was added, or the previous moment if nothing changed."""
        self.clock.time += seconds
        self.backup.write()
        return points(self.folder)[-1].times[-1]

    @contextmanager
    def restored(self, at: float | None = None, **options: Any) -> Iterator[ConversationStore]:
        """Open the history as it was at a moment, as a daemon would."""
        data = self.folder.with_name("restored")
        shutil.rmtree(data, ignore_errors=True)
        restore(self.folder, data, at, driver=self.driver, **options)
        database = (data / "conversations.db").read_bytes()
        assert len(database) == 4096 * int.from_bytes(database[28:32], "big")  # number of pages
        with ConversationStore.open(data, "test", driver=self.driver) as store:
            assert not store.integrity_check_due
            assert store.integrity_check() == store.verify() == []
            yield store

    def try_restore(self, **options: Any) -> None:
        restore(self.folder, self.folder.with_name("refused"), driver=self.driver, **options)


def backing_of(store: ConversationStore, folder: Path, driver: Any) -> Backing:
    clock = Clock()
    return Backing(
        store, Backup(folder, store.folder.database_path, clock, driver), folder, clock, driver
    )


@pytest.fixture
def backing(store: ConversationStore, driver: Any, tmp_path: Path) -> Iterator[Backing]:
    backing = backing_of(store, tmp_path / "backup", driver)
    with closing(backing.backup):
        yield backing


def talk(store: ConversationStore, choose: random.Random, number: int) -> None:
    """Make a random change to the history."""
    known = [c.conversation_id for c in store.list_conversations(1000).conversations]
    roll = choose.random()
    if roll < 0.15 or not known:
        create(store, f"c{number}", user("head " * choose.randrange(1, 400), 1))
    elif roll < 0.75:
        text = "text " * choose.choice((1, 10, 1000, 5000))
        say(store, choose.choice(known), f"r{number}", user(text, 7), reply(text[::-1], 8, 9))
    elif roll < 0.85:
        store.fork_conversation(name := choose.choice(known), 0, f"f{number}")
        store.rewind_conversation(name, 0)
    else:
        store.delete_conversation(choose.choice(known))


def test_a_restore_to_any_backed_up_moment_gives_the_history_of_that_moment(
    open_store: Open, driver: Any, tmp_path: Path
) -> None:
    """Deletions, checkpoints and a compacted, shortened file come in between."""
    store, choose = open_store(compact_bytes_min=2**14), random.Random(3)
    write_history(store)
    backing, moments = backing_of(store, tmp_path / "backup", driver), {}
    for _ in range(40):
        for _ in range(choose.choice((1, 5, 20))):
            talk(store, choose, choose.randrange(10**9))
            store.erasure.step()
        moments[backing.write(2 * 3600.0)] = history(store)
    assert [len(each.times) for each in points(backing.folder)] == [12, 12, 12, 4]
    assert [moment for each in points(backing.folder) for moment in each.times] == [*moments]
    for moment, expected in choose.sample([*moments.items()], 10):
        with backing.restored(moment + 0.5) as found:
            assert history(found) == expected
    with backing.restored() as found:
        assert history(found) == history(store)
    with pytest.raises(NotFound, match="no moment that old"):
        backing.try_restore(at=0.0)
    backing.backup.close()


def test_a_backup_is_complete_while_a_reader_keeps_the_wal_from_shrinking(
    backing: Backing, driver: Any
) -> None:
    create(backing.store, "tea")
    with closing(
        driver.connect(str(backing.store.folder.database_path), isolation_level=None)
    ) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM turns").fetchall()
        for number in range(5):
            say(backing.store, "tea", f"r{number}", user("text", number), reply("hello", 2))
            backing.write()
    with backing.restored() as found:
        assert history(found) == history(backing.store)


def test_a_backup_includes_the_wal_of_a_killed_daemon(backing: Backing, tmp_path: Path) -> None:
    write_history(backing.store)
    killed = tmp_path / "killed"
    shutil.copytree(backing.store.folder.path, killed)
    (killed / "conversations.db-shm").unlink()
    assert (killed / "conversations.db-wal").stat().st_size
    with closing(Backup(backing.folder, killed / DATABASE_NAME, driver=backing.driver)) as copy:
        copy.write()
    with backing.restored() as found:
        assert history(found) == history(backing.store)


def test_a_backup_of_an_unchanged_history_copies_and_writes_nothing(
    backing: Backing, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_history(backing.store)
    moment = backing.write()
    backing.store.messages("tea")
    monkeypatch.setattr(Backup, "_temporary_copy", None)
    assert backing.write() == moment
    assert backing.write(2 * backup.GENERATION_SECONDS) == moment


def test_a_turn_that_ran_during_the_backup_is_interrupted_after_a_restore(backing: Backing) -> None:
    create(backing.store, "tea")
    say(backing.store, "tea", "r1", user("hi", 1), reply("hello", 2))
    begin(backing.store, "tea", "r2", "more", 3)
    backing.write()
    with backing.restored() as found:
        assert [turn.request_id for turn in found.interrupted_at_open] == ["r2"]
        assert list(found.log("tea")) == [1, 2]
        say(found, "tea", "r2", user("more", 3), reply("yes", 4))
        assert list(found.log("tea")) == [1, 2, 3, 4]


def test_deleted_text_leaves_the_backup_one_day_after_the_keep_period(backing: Backing) -> None:
    """This holds even if nothing else ever changes."""

    def backup_has_the_secret() -> bool:
        files = [file for file in backing.folder.rglob("*") if file.is_file()]
        return any(b"a secret" in file.read_bytes() for file in files)

    create(backing.store, "tea")
    say(backing.store, "tea", "r1", user("a secret", 1), reply("hello", 2))
    moment_with_secret = backing.write()
    backing.store.delete_conversation("tea")
    assert not backing.store.erasure.pending
    assert not [
        file
        for file in backing.store.folder.path.iterdir()
        if file.is_file() and b"a secret" in file.read_bytes()
    ]
    keep = 7 * 86_400.0
    assert backing.write() > moment_with_secret
    for _ in range(8):
        assert backup_has_the_secret()
        with backing.restored(moment_with_secret) as found:
            found.get_conversation("tea")
        backing.clock.time += 86_400.0
        backing.backup.write(keep)
    assert not backup_has_the_secret()
    assert not backing.store.list_conversations(9).conversations
    with backing.restored() as found:
        assert history(found) == history(backing.store)


def raise_disk_full(*arguments: Any, **named: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("broken", ["os.fsync", "pensieve.store.backup._write_newest"])
def test_the_next_backup_includes_the_changes_of_a_failed_backup(
    backing: Backing, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    create(backing.store, "tea")
    moment = backing.write()
    for number in range(2):
        say(backing.store, "tea", f"r{number}", user("text", 1), reply("a", 2))
        with monkeypatch.context() as patch:
            patch.setattr(broken, raise_disk_full)
            with pytest.raises(StoreUnavailable, match="backup: No space left on device"):
                backing.write()
    assert backing.write() > moment
    assert [len(each.times) for each in points(backing.folder)] == [2]
    with backing.restored() as found:
        assert history(found) == history(backing.store)


@pytest.mark.parametrize("place", ["data", "backup"])
def test_a_backup_without_disk_space_for_a_copy_writes_nothing(
    backing: Backing, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    write_history(backing.store)
    usage = shutil.disk_usage(backing.folder.parent)
    full = {backing.folder.with_name(place): usage._replace(free=100)}
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: full.get(path, usage))
        with pytest.raises(StoreUnavailable, match=f"not enough disk space in .*{place}: "):
            backing.write()
    assert [path.name for path in backing.folder.glob("generation*")] == []
    backing.write()


def test_changes_too_large_for_a_segment_begin_a_new_generation(
    backing: Backing, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_history(backing.store)
    backing.write()
    create(backing.store, "another")
    monkeypatch.setattr(backup, "SEGMENT_BYTES_MAX", 4096)
    backing.write()
    assert [len(each.times) for each in points(backing.folder)] == [1, 1]
    with backing.restored() as found:
        assert history(found) == history(backing.store)


def test_a_backup_waits_for_an_earlier_backup_that_is_still_being_written(
    backing: Backing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon writes its last backup while the thread of an earlier backup may still wait for the folder."""
    create(backing.store, "tea")
    backing.write()
    append, running, counts = Backup._append, list[Any](), list[int]()
    entered, go_on = threading.Event(), threading.Event()

    def slow(self: Backup, *arguments: Any) -> bool:
        running.append(arguments)
        counts.append(len(running))
        entered.set()
        assert go_on.wait(60)
        try:
            return append(self, *arguments)
        finally:
            running.pop()

    monkeypatch.setattr(Backup, "_append", slow)
    with ThreadPoolExecutor(2) as pool:
        writes = []
        for number in range(2):
            say(backing.store, "tea", f"r{number}", user("text", number), reply("hello", 2))
            backing.clock.time += 60.0
            writes.append(pool.submit(backing.backup.write))
            assert entered.wait(60)
        wait(writes, timeout=0.3)
        go_on.set()
        for each in writes:
            each.result()
    assert counts == [1, 1]
    assert [len(each.times) for each in points(backing.folder)] == [3]
    with backing.restored() as found:
        assert history(found) == history(backing.store)


def test_a_cleared_backup_folder_gets_a_new_generation(backing: Backing) -> None:
    write_history(backing.store)
    backing.write()
    shutil.rmtree(backing.folder)
    backing.write()
    with backing.restored() as found:
        assert history(found) == history(backing.store)


# -- damage --


@pytest.fixture
def written(backing: Backing) -> list[float]:
    """Write two generations, the second with three segments; a turn before each. Return the moments."""
    create(backing.store, "tea")
    times = [backing.write()]
    for number in range(1, 6):
        say(backing.store, "tea", f"r{number}", user("text", number), reply("hello", number))
        times.append(backing.write(60.0 if number != 2 else 86_400.0))
    assert [len(each.times) for each in points(backing.folder)] == [2, 4]
    return times


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    match how:
        case "a bit":
            data[len(data) // 2] ^= 4
        case "torn":
            del data[len(data) // 2 :]
        case "empty":
            data.clear()
    path.write_bytes(data)
    if how == "missing":
        path.unlink()


@pytest.mark.parametrize("how", ["a bit", "torn", "empty", "missing"])
@pytest.mark.parametrize(
    ("name", "turns_before"),
    [("00000003.segment", 4), ("00000002.segment", 3), ("base.db", 1), ("base.json", 1)],
)
def test_a_restore_names_damage_and_restores_the_moment_before_only_with_last_good(
    written: list[float], backing: Backing, how: str, name: str, turns_before: int
) -> None:
    damage(backing.folder / "generation-000002" / name, how)
    with pytest.raises(BackupDamaged, match=rf"generation-000002/{name} .* --last-good"):
        backing.try_restore()
    assert (backing.folder.with_name("refused") / "conversations.db").stat().st_size == 0
    with backing.restored(to_last_good=True) as found:
        assert len(found.messages("tea")) == 2 * turns_before
    with backing.restored(written[0]) as found:
        assert len(found.messages("tea")) == 0
    if name == "00000002.segment":
        with backing.restored(written[2]) as found:
            assert len(found.messages("tea")) == 4


def test_a_segment_that_does_not_continue_the_chain_is_refused(
    written: list[float], backing: Backing
) -> None:
    chain = backing.folder / "generation-000002"
    shutil.copyfile(chain / "00000002.segment", chain / "00000003.segment")
    with pytest.raises(BackupDamaged, match=r"00000003.segment does not continue"):
        backing.try_restore()


def test_partial_files_of_a_killed_backup_process_are_ignored(
    written: list[float], backing: Backing
) -> None:
    (backing.folder / "generation-000002" / "00000004.segment.partial").write_bytes(b"half")
    base = backing.folder / "generation-000003.partial" / "base.db"
    base.parent.mkdir()
    base.write_bytes(b"half")
    with backing.restored() as found:
        assert history(found) == history(backing.store)
    backing.backup.close()
    with closing(Backup(backing.folder, backing.store.folder.database_path)) as again:
        again.write()
    names = sorted(path.name for path in backing.folder.glob("generation-*"))
    assert names == [f"generation-00000{number}" for number in (1, 2, 3)]


def test_a_damaged_history_is_not_restored(written: list[float], backing: Backing) -> None:
    with writer_of(backing.store).writing() as conn:
        conn.execute("UPDATE bodies SET crc = crc + 1 WHERE body = (SELECT max(body) FROM bodies)")
    backing.write()
    with pytest.raises(BackupDamaged, match="a record fails its checksum"):
        backing.try_restore()


def test_a_restore_corrects_wrong_byte_counters_of_tenants(
    written: list[float], backing: Backing
) -> None:
    with writer_of(backing.store).writing() as conn:
        conn.execute("UPDATE tenants SET stored_bytes = stored_bytes + 7")
        conn.execute("INSERT INTO tenants VALUES ('nobody', 5)")
    assert len(backing.store.verify()) == 2
    backing.write()
    said: list[str] = []
    with backing.restored(report=said.append) as found:
        assert found.messages("tea")
    assert "the byte counters of 2 tenants were wrong and have been corrected" in said


# -- refusals --


def test_a_backup_folder_accepts_one_history_and_one_process_at_a_time(
    backing: Backing, tmp_path: Path
) -> None:
    write_history(backing.store)
    backing.write()
    data = backing.store.folder.path
    with (
        closing(Backup(backing.folder, data / DATABASE_NAME)) as second,
        pytest.raises(StoreLocked, match="another process is writing"),
    ):
        second.write()
    backing.backup.close()
    with ConversationStore.open(tmp_path / "other", "test"):
        other = Backup(backing.folder, tmp_path / "other" / DATABASE_NAME)
        with closing(other), pytest.raises(StoreError, match="belongs to another history"):
            other.write()
    with closing(Backup(backing.folder, data / DATABASE_NAME)) as second:
        second.write()
    assert [len(each.times) for each in points(backing.folder)] == [1, 1]


def test_processes_that_release_the_backup_folder_can_alternate(backing: Backing) -> None:
    write_history(backing.store)
    first = backing.backup
    backing.write()
    first.release()
    database = backing.store.folder.database_path
    with closing(Backup(backing.folder, database, backing.clock)) as second:
        create(backing.store, "cup2")
        second.write()
        with pytest.raises(StoreLocked, match="another process is writing"):
            first.write()
        second.release()
        create(backing.store, "cup3")
        second.write()  # continues its own generation
        second.release()
        create(backing.store, "cup4")
        backing.write()
        assert [len(each.times) for each in points(backing.folder)] == [1, 2, 1]
    with backing.restored() as store:
        assert history(store) == history(backing.store)


def test_backup_and_restored_files_are_private_to_their_owner(
    written: list[float], backing: Backing
) -> None:
    with backing.restored() as found:
        assert found.folder.database_path.stat().st_mode & 0o777 == 0o600
    modes = {path.name: path.stat().st_mode & 0o777 for path in backing.folder.rglob("*")}
    assert {mode for name, mode in modes.items() if name.startswith("generation")} == {0o700}
    assert {mode for name, mode in modes.items() if not name.startswith("generation")} == {0o600}
    assert backing.folder.stat().st_mode & 0o777 == 0o700


def test_a_restore_replaces_an_existing_history_only_with_replace(
    backing: Backing, tmp_path: Path
) -> None:
    write_history(backing.store)
    backing.write()
    data = tmp_path / "other"
    with ConversationStore.open(data, "test", driver=backing.driver) as other:
        create(other, "mine")
    with pytest.raises(StoreError, match="other already has a history; pass --replace"):
        restore(backing.folder, data, driver=backing.driver)
    with ConversationStore.open(data, "test", driver=backing.driver) as other:
        other.get_conversation("mine")
        with pytest.raises(StoreLocked):
            restore(backing.folder, data, driver=backing.driver, replace=True)
    restore(backing.folder, data, driver=backing.driver, replace=True)
    with ConversationStore.open(data, "test", driver=backing.driver) as other:
        assert history(other) == history(backing.store)
    assert history_identity(data / DATABASE_NAME) == (
        history_identity(backing.store.folder.database_path)
    )


def test_the_refusal_of_a_backup_with_a_newer_schema_says_which_pensieve_reads_it(
    backing: Backing,
) -> None:
    with writer_of(backing.store).writing() as conn:
        conn.execute("PRAGMA user_version = 99")
    backing.write()
    with pytest.raises(StoreTooNew, match=r"schema version 99 .* the newer Pensieve that wrote it"):
        backing.try_restore()


def test_a_restored_backup_with_an_older_schema_is_migrated(
    backing: Backing,
) -> None:
    create(backing.store, "tea")
    say(backing.store, "tea", "r1", user("hi", 1), reply("hello", 2))
    wanted = history(backing.store)
    with writer_of(backing.store).writing() as conn:
        for statement in TO_SCHEMA_3:
            conn.execute(statement)
    backing.write()
    data = backing.folder.with_name("restored")
    restore(backing.folder, data, driver=backing.driver)
    with ConversationStore.open(data, "test", driver=backing.driver) as again:
        assert again.integrity_check_due
        assert again.integrity_check() == again.verify() == []
        assert history(again) == wanted


def test_a_restore_that_ends_before_its_final_rename_leaves_the_old_history_complete(
    backing: Backing, monkeypatch: pytest.MonkeyPatch
) -> None:
    backing.write()
    write_history(backing.store)
    killed = backing.folder.with_name("killed")
    shutil.copytree(backing.store.folder.path, killed)  # the files that a killed daemon leaves
    (killed / "lock").unlink()
    assert (killed / "conversations.db-wal").stat().st_size

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            restore(backing.folder, killed, driver=backing.driver, replace=True)
    with ConversationStore.open(killed, "test", driver=backing.driver) as again:
        assert history(again) == history(backing.store)


# -- a process that dies --

TALKER = """
import sys
from pathlib import Path
from pensieve.store import ConversationStore
from tests.store.talk import create, reply, say, user

with ConversationStore.open(Path(sys.argv[1]), "talker") as store:
    name = sys.argv[2]
    create(store, name)
    for number in range(10**6):
        say(store, name, f"{name}-{number}", user(f"word {number}", 1), reply("text " * 99, 2))
        print(number, flush=True)
"""
WRITER = """
import sys, time
from pathlib import Path
from pensieve.store import backup

backup.GENERATION_SECONDS = 0.3
writer = backup.Backup(Path(sys.argv[2]), Path(sys.argv[1]) / "conversations.db")
while True:
    print(writer.write(0.6).time, flush=True)
"""


def test_killed_processes_leave_a_complete_backup(tmp_path: Path) -> None:
    """Everything acknowledged before the moment is in the backup, and no file is half written."""
    data, folder, choose = tmp_path / "data", tmp_path / "backup", random.Random(1)
    ConversationStore.open(data, "test").close()
    root = Path(__file__).parents[2]
    for turn in range(5):
        programs = [(TALKER, str(data), name := f"talk-{turn}"), (WRITER, str(data), str(folder))]
        talker, writer = (
            subprocess.Popen(
                [sys.executable, "-c", *each], cwd=root, stdout=subprocess.PIPE, text=True
            )
            for each in programs
        )
        assert talker.stdout is not None
        assert writer.stdout is not None
        writer.stdout.readline()
        said = [int(talker.stdout.readline()) for _ in range(choose.randrange(1, 200))][-1]
        # A moment is the time before its copy is made. So everything said before the moment is in it.
        said_at = time.time()
        moment = next(at for at in iter(lambda: points(folder)[-1].times[-1], 0.0) if at > said_at)
        for process in (talker, writer):
            process.send_signal(signal.SIGKILL)
            process.communicate()
        restored = restore(folder, tmp_path / "restored", replace=True)
        assert restored.time >= moment
        with ConversationStore.open(tmp_path / "restored", "test") as store:
            assert store.integrity_check() == store.verify() == []
            texts = [each.content for each in store.messages(name) if each.role == "user"]
            assert texts == [f"word {number}" for number in range(len(texts))]
            assert len(texts) > said
        assert check_database(points(folder)[-1].path / "base.db") == []
