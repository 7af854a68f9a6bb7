"""Backups of a history while it is written to: whole, of any shipped moment, and safe against damage."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pensieve.errors import (
    BackupDamaged,
    NotFound,
    StoreError,
    StoreLocked,
    StoreTooNew,
    StoreUnavailable,
)
from pensieve.store import ConversationStore
from pensieve.store.backup import capture, files, writing
from pensieve.store.backup.capture import Changes, Feed
from pensieve.store.backup.restoring import check_database, points, restore
from pensieve.store.backup.source import BackupSource
from pensieve.store.backup.writing import BackupFolder, Chain, write_copy
from tests.store.faulty import database_of, history, world, writer_of
from tests.store.talk import begin, create, reply, say, user

pytestmark = pytest.mark.sqlite  # it is about copies of SQLite's file

Open = Callable[..., ConversationStore]


class Busy(BackupSource):
    """A history that changes before each look at its file."""

    def __init__(self, source: BackupSource, between: Callable[[], None]) -> None:
        self.__dict__.update(source.__dict__)
        self._between = between

    def read(self, num_bytes: int, offset: int) -> bytes:
        self._between()
        return super().read(num_bytes, offset)


class Shipping:
    """What the daemon does in two threads, here in one."""

    def __init__(self, store: ConversationStore, path: Path) -> None:
        source = store.backup_source
        assert isinstance(source, BackupSource)
        self.source = source
        self.folder = BackupFolder.open(path, self.source.identity)
        self.feed: Feed | None = None
        self.begin_generation()

    def begin_generation(self, between: Callable[[], None] = lambda: None) -> Chain:
        before, self.feed = self.feed, self.source.begin()
        copy = self.folder.begin(Busy(self.source, between), self.feed)
        copy.run(0)
        between()
        self.source.collect()
        self.chain = copy.finish()
        if before is not None:
            self.source.end(before)
        return self.chain

    def ship(self) -> bool:
        self.source.collect()
        assert self.feed is not None
        before = self.chain.time
        self.chain.ship(self.feed)
        return self.chain.time != before


@contextmanager
def restored(
    folder: Path, driver: Any, at: float | None = None, **options: Any
) -> Iterator[ConversationStore]:
    """The history of a moment, opened as a daemon would."""
    data = folder.with_name("restored")
    shutil.rmtree(data, ignore_errors=True)
    restore(folder, data, at, driver=driver, **options)
    with ConversationStore.open(data, "test", driver=driver) as store:
        assert not store.integrity_check_due
        assert store.integrity_check() == store.verify() == []
        yield store


@pytest.fixture
def backup(tmp_path: Path) -> Path:
    return tmp_path / "backup"


@contextmanager
def reading(store: ConversationStore, driver: Any) -> Iterator[None]:
    """Another program is inside of a transaction."""
    reader = driver.connect(str(store.folder.database_path), isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM turns").fetchall()
    yield
    reader.execute("ROLLBACK")
    reader.close()


def talk(store: ConversationStore, choose: random.Random, number: int) -> None:
    """Any change of the history."""
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


def test_every_shipped_moment_is_restored_as_it_was(
    open_store: Open, driver: Any, backup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever happens between the shipments, and also while a base is copied: deletions, checkpoints, a
    file that is compacted and shortened."""
    monkeypatch.setattr(capture, "CHECKPOINT_FRAMES", 50)
    monkeypatch.setattr(writing, "BLOCK_BYTES", 64 * 2**10)
    store = open_store(compact_bytes_min=2**14)
    choose = random.Random(3)
    world(store)
    shipping = Shipping(store, backup)
    moments = {shipping.chain.time: history(store)}

    def work() -> None:
        for _ in range(choose.choice((1, 5, 20))):
            talk(store, choose, choose.randrange(10**9))
            store.erasure.step()

    for number in range(40):
        work()
        if number % 13 == 12:
            shipping.begin_generation(between=work)
        else:
            assert shipping.ship()
        moments[shipping.chain.time] = history(store)
    assert [len(each.times) for each in points(backup)] == [13, 13, 13, 2]
    assert sorted(moment for each in points(backup) for moment in each.times) == sorted(moments)
    for moment, expected in choose.sample(sorted(moments.items()), 10):
        with restored(backup, driver, moment) as found:
            assert history(found) == expected
    with restored(backup, driver) as found:
        assert history(found) == history(store)


def test_a_moment_between_two_shipments_is_the_one_before_it(
    store: ConversationStore, driver: Any, backup: Path
) -> None:
    create(store, "tea")
    shipping = Shipping(store, backup)
    say(store, "tea", "r1", user("first", 1), reply("a", 2))
    shipping.ship()
    first = shipping.chain.time
    say(store, "tea", "r2", user("second", 3), reply("b", 4))
    shipping.ship()
    with restored(backup, driver, first + 0.5) as found:
        assert list(found.log("tea")) == [1, 2]
    with pytest.raises(NotFound, match="nothing as old as that"):
        restore(backup, backup.with_name("older"), 0.0, driver=driver)
    assert not (backup.with_name("older") / "conversations.db.restoring").exists()


def test_nothing_is_shipped_where_nothing_changed(store: ConversationStore, backup: Path) -> None:
    world(store)
    shipping = Shipping(store, backup)
    assert not shipping.ship()
    store.messages("tea")
    assert not shipping.ship()


def test_a_turn_that_was_running_is_interrupted_in_what_is_restored(
    store: ConversationStore, driver: Any, backup: Path
) -> None:
    create(store, "tea")
    say(store, "tea", "r1", user("hi", 1), reply("hello", 2))
    begin(store, "tea", "r2", "more", 3)
    Shipping(store, backup)
    with restored(backup, driver) as found:
        assert [turn.request_id for turn in found.interrupted_at_open] == ["r2"]
        assert list(found.log("tea")) == [1, 2]
        say(found, "tea", "r2", user("more", 3), reply("yes", 4))
        assert list(found.log("tea")) == [1, 2, 3, 4]


def test_deleted_text_leaves_the_live_files_at_once_and_the_backup_when_its_generation_is_dropped(
    store: ConversationStore, backup: Path
) -> None:
    create(store, "tea")
    say(store, "tea", "r1", user("a secret", 1), reply("hello", 2))
    shipping = Shipping(store, backup)
    store.delete_conversation("tea")
    assert not store.erasure.pending
    files_of_data = [file for file in store.folder.path.iterdir() if file.is_file()]
    assert not [file for file in files_of_data if b"a secret" in file.read_bytes()]
    shipping.ship()
    old = shipping.chain.generation.path
    assert b"a secret" in (old / "base.db").read_bytes()
    shipping.begin_generation()
    new = shipping.chain
    shipping.folder.drop_old(kept_since=new.time - 1)
    assert old.exists()  # it has the moments right before the new one
    shipping.folder.drop_old(kept_since=new.time)
    assert not old.exists()
    assert not [
        file for file in backup.rglob("*") if file.is_file() and b"a secret" in file.read_bytes()
    ]


def test_what_a_folder_does_not_take_holds_up_neither_turns_nor_deletions(
    store: ConversationStore, backup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What gathers meanwhile is bounded; beyond that the chain is broken, and the log is SQLite's again."""
    create(store, "tea")
    create(store, "cup")
    shipping = Shipping(store, backup)
    assert shipping.feed is not None
    shipping.feed._bytes_max = 2**18
    for number in range(200):
        say(store, "tea", f"r{number}", user("text " * 1000, 1), reply("hello", 2))
    assert shipping.feed.failure == "more than 0 MiB of changes could not be written"
    assert shipping.feed.take() is None
    store.delete_conversation("tea")
    assert not store.erasure.pending
    with writer_of(store).reading() as conn:
        assert conn.execute("PRAGMA wal_autocheckpoint").fetchone() == (1000,)


def test_changes_that_could_not_be_written_are_written_later(
    store: ConversationStore, driver: Any, backup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(store, "tea")
    shipping = Shipping(store, backup)
    say(store, "tea", "r1", user("first", 1), reply("a", 2))

    def full(*arguments: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        shipping.source.collect()
        assert shipping.feed is not None
        changes = shipping.feed.take()
        assert changes is not None
        with pytest.raises(StoreUnavailable, match="backup: No space left on device"):
            shipping.chain.append(changes)
        shipping.feed.give_back(changes)
    say(store, "tea", "r2", user("second", 3), reply("b", 4))
    assert shipping.ship()
    assert [len(each.times) for each in points(backup)] == [2]
    with restored(backup, driver) as found:
        assert list(found.log("tea")) == [1, 2, 3, 4]


def test_a_connection_that_is_opened_anew_ends_the_chain(
    store: ConversationStore, backup: Path
) -> None:
    """What was committed may never have been seen here."""
    world(store)
    shipping = Shipping(store, backup)
    assert shipping.feed is not None
    writer_of(store)._discard()
    assert database_of(store) is None
    say(store, "tea", "r9", user("text", 1), reply("hello", 2))
    assert "opened anew" in shipping.feed.failure
    assert not shipping.ship()
    with writer_of(store).reading() as conn:
        assert conn.execute("PRAGMA wal_autocheckpoint").fetchone() == (1000,)


def test_a_log_that_cannot_be_read_ends_the_chain_and_no_turn(
    store: ConversationStore, backup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world(store)
    shipping = Shipping(store, backup)

    def broken(*arguments: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(capture.Capture, "_read", broken)
    say(store, "tea", "r9", user("text", 1), reply("hello", 2))
    store.delete_conversation("cup")
    assert not store.erasure.pending
    assert shipping.feed is not None
    assert "Input/output error" in shipping.feed.failure


def test_a_log_whose_length_cannot_be_read_fails_no_turn(
    store: ConversationStore, driver: Any, backup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turn was stored, and its client was told that it was not."""
    world(store)
    shipping = Shipping(store, backup)

    def broken(*arguments: object) -> bytes:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("os.pread", broken)
        say(store, "tea", "r9", user("text", 1), reply("hello", 2))
    assert shipping.ship()
    with restored(backup, driver) as again:
        assert history(again) == history(store)


def test_a_reader_that_keeps_the_log_long_does_not_hide_anything_from_the_backup(
    store: ConversationStore, driver: Any, backup: Path
) -> None:
    create(store, "tea")
    shipping = Shipping(store, backup)
    with reading(store, driver):
        for number in range(5):
            say(store, "tea", f"r{number}", user("text", number), reply("hello", 2))
            if number == 2:  # the file lacks what the log has
                shipping.begin_generation()
                with restored(backup, driver) as found:
                    assert history(found) == history(store)
            shipping.ship()
    say(store, "tea", "last", user("text", 9), reply("hello", 2))
    shipping.ship()
    with restored(backup, driver) as found:
        assert history(found) == history(store)


def test_a_log_that_is_too_long_to_be_read_at_once_begins_no_feed_and_ends_those_that_are(
    store: ConversationStore, driver: Any, backup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another program has read for hours, or one transaction changes most of the file."""
    create(store, "tea")
    shipping = Shipping(store, backup)
    monkeypatch.setattr(capture, "FRAMES_MAX", 20)
    with reading(store, driver):
        for number in range(5):
            say(store, "tea", f"r{number}", user("text", number), reply("hello", 2))
        with pytest.raises(StoreUnavailable, match="frames are too many at once"):
            shipping.begin_generation()
        assert shipping.feed is not None
        assert "frames are too many at once" in shipping.feed.failure
        with writer_of(store).reading() as conn:
            assert conn.execute("PRAGMA wal_autocheckpoint").fetchone() == (1000,)
    store.delete_conversation("tea")
    assert not store.erasure.pending
    create(store, "cup")
    shipping.begin_generation()
    with restored(backup, driver) as found:
        assert history(found) == history(store)


# -- damage --


@pytest.fixture
def shipped(store: ConversationStore, backup: Path) -> list[float]:
    """Two generations, the second with three segments; a turn for each moment."""
    create(store, "tea")
    shipping = Shipping(store, backup)
    times = [shipping.chain.time]
    for number in range(1, 5):
        say(store, "tea", f"r{number}", user("text", number), reply("hello", number))
        if number == 1:
            shipping.begin_generation()
        else:
            shipping.ship()
        times.append(shipping.chain.time)
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
    [("00000003.segment", 3), ("00000002.segment", 2), ("base.db", 0), ("base.json", 0)],
)
def test_damage_is_named_and_restoring_stops_before_it_only_when_told(
    shipped: list[float], driver: Any, backup: Path, how: str, name: str, turns_before: int
) -> None:
    damage(backup / "generation-000002" / name, how)
    data = backup.with_name("restored")
    with pytest.raises(BackupDamaged, match=rf"generation-000002/{name} .* --last-good"):
        restore(backup, data, driver=driver)
    assert (data / "conversations.db").stat().st_size == 0
    with restored(backup, driver, to_last_good=True) as found:
        assert len(found.messages("tea")) == 2 * turns_before
    if name == "00000002.segment":
        with restored(backup, driver, shipped[1]) as found:
            assert len(found.messages("tea")) == 2


def test_an_older_backup_does_not_know_its_newest_segment_and_restoring_says_so(
    shipped: list[float], driver: Any, backup: Path
) -> None:
    generation, data = backup / "generation-000002", backup.with_name("restored")
    assert restore(backup, data, driver=driver).newest_known
    (generation / files.NEWEST_NAME).unlink()
    (generation / "00000003.segment").unlink()
    found = restore(backup, data, driver=driver, replace=True)
    assert (found.segment, found.time, found.newest_known) == (2, shipped[3], False)


def test_a_segment_whose_number_could_not_be_written_down_is_written_again(
    store: ConversationStore, driver: Any, backup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(store, "tea")
    shipping = Shipping(store, backup)
    create(store, "cup")
    with monkeypatch.context() as full:
        full.setattr(writing, "write_newest", fails_with_no_space)
        with pytest.raises(StoreUnavailable, match="No space"):
            shipping.ship()
    create(store, "pot")
    assert shipping.ship()
    with restored(backup, driver) as found:
        assert history(found) == history(store)


def fails_with_no_space(*arguments: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_segments_of_another_chain_are_refused(
    shipped: list[float], driver: Any, backup: Path
) -> None:
    chain = backup / "generation-000002"
    shutil.copyfile(chain / "00000002.segment", chain / "00000003.segment")
    with pytest.raises(BackupDamaged, match=r"00000003.segment does not follow"):
        restore(backup, backup.with_name("restored"), driver=driver)


def test_what_was_being_written_when_the_process_died_is_not_there(
    store: ConversationStore, driver: Any, backup: Path
) -> None:
    world(store)
    shipping = Shipping(store, backup)
    copy = shipping.folder.begin(shipping.source, shipping.source.begin())
    copy.run(0)
    (shipping.chain.generation.path / "00000001.segment.partial").write_bytes(b"half")
    with restored(backup, driver) as found:
        assert history(found) == history(store)
    shipping.folder.close()
    again = BackupFolder.open(backup, shipping.source.identity)
    assert [path.name for path in sorted(backup.glob("generation-*"))] == ["generation-000001"]
    again.close()


# -- refusals --


def test_a_folder_is_for_one_history_and_one_process(
    store: ConversationStore, backup: Path
) -> None:
    world(store)
    shipping = Shipping(store, backup)
    with pytest.raises(StoreLocked, match="another process writes"):
        write_copy(store.backup_source, backup)
    shipping.folder.close()
    with pytest.raises(StoreError, match="is of another history"):
        BackupFolder.open(backup, "other")
    write_copy(store.backup_source, backup)
    assert [len(each.times) for each in points(backup)] == [1, 1]


def test_only_their_owner_may_read_the_files(shipped: list[float], backup: Path) -> None:
    modes = {path.name: path.stat().st_mode & 0o777 for path in backup.rglob("*")}
    assert {mode for name, mode in modes.items() if name.startswith("generation")} == {0o700}
    assert {mode for name, mode in modes.items() if not name.startswith("generation")} == {0o600}
    assert backup.stat().st_mode & 0o777 == 0o700


def test_a_history_is_replaced_only_when_told(
    store: ConversationStore, driver: Any, backup: Path, tmp_path: Path
) -> None:
    world(store)
    write_copy(store.backup_source, backup)
    data = tmp_path / "other"
    with ConversationStore.open(data, "test", driver=driver) as other:
        create(other, "mine")
    with pytest.raises(StoreError, match="other has a history; --replace"):
        restore(backup, data, driver=driver)
    with ConversationStore.open(data, "test", driver=driver) as other:
        other.get_conversation("mine")
        with pytest.raises(StoreLocked):
            restore(backup, data, driver=driver, replace=True)
    restore(backup, data, driver=driver, replace=True)
    with ConversationStore.open(data, "test", driver=driver) as other:
        assert history(other) == history(store)
        assert other.backup_source.identity == store.backup_source.identity


def test_a_backup_of_a_newer_schema_is_refused_and_the_error_says_who_reads_it(
    store: ConversationStore, driver: Any, backup: Path
) -> None:
    with writer_of(store).writing() as conn:
        conn.execute("PRAGMA user_version = 9")
    write_copy(store.backup_source, backup)
    with pytest.raises(StoreTooNew, match=r"schema version 9 .* the newer Pensieve that wrote it"):
        restore(backup, backup.with_name("restored"), driver=driver)


def test_a_backup_of_an_older_schema_is_restored_and_brought_to_the_present_one(
    store: ConversationStore, driver: Any, backup: Path
) -> None:
    create(store, "tea")
    say(store, "tea", "r1", user("hi", 1), reply("hello", 2))
    wanted = history(store)
    with writer_of(store).writing() as conn:
        for statement in (
            "DROP INDEX turns_logprobs",
            "ALTER TABLE turns DROP COLUMN logprobs",
            "DROP TABLE responses",
            "DROP TABLE chains",
            "DELETE FROM _sqlite_migrations"
            " WHERE name IN ('m004_logprobs', 'm006_chains', 'm007_responses')",
            "PRAGMA user_version = 3",
        ):
            conn.execute(statement)
    write_copy(store.backup_source, backup)
    data = backup.with_name("restored")
    restore(backup, data, driver=driver)
    with ConversationStore.open(data, "test", driver=driver) as again:
        assert again.integrity_check_due
        assert again.integrity_check() == again.verify() == []
        assert history(again) == wanted


def test_a_restore_that_ends_right_before_it_puts_the_new_history_in_place_loses_nothing_of_the_old(
    store: ConversationStore, driver: Any, backup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It removed the write-ahead log first, and with it what was committed last."""
    write_copy(store.backup_source, backup)
    world(store)
    killed = backup.with_name("killed")
    shutil.copytree(store.folder.path, killed)  # as a daemon leaves it that is killed
    (killed / "lock").unlink()
    assert (killed / "conversations.db-wal").stat().st_size

    def end(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", end)
        with pytest.raises(KeyboardInterrupt):
            restore(backup, killed, driver=driver, replace=True)
    with ConversationStore.open(killed, "test", driver=driver) as again:
        assert history(again) == history(store)


def test_a_generation_that_nobody_can_read_is_not_in_the_way_of_earlier_moments(
    store: ConversationStore, driver: Any, backup: Path
) -> None:
    create(store, "tea")
    shipping = Shipping(store, backup)
    say(store, "tea", "r1", user("hi", 1), reply("hello", 2))
    assert shipping.ship()
    wanted, moment = history(store), shipping.chain.time
    say(store, "tea", "r2", user("hi", 1), reply("hello", 2))
    assert shipping.ship()
    (shipping.begin_generation().generation.path / files.DESCRIPTION_NAME).write_text("")
    with restored(backup, driver, moment) as again:
        assert history(again) == wanted
    with pytest.raises(BackupDamaged, match=files.DESCRIPTION_NAME):
        restore(backup, backup.with_name("other"), driver=driver)


def test_a_damaged_history_is_not_restored_as_if_it_were_sound(
    shipped: list[float], store: ConversationStore, driver: Any, backup: Path
) -> None:
    with writer_of(store).writing() as conn:
        conn.execute("UPDATE bodies SET crc = crc + 1 WHERE body = (SELECT max(body) FROM bodies)")
    other = backup.with_name("other")
    write_copy(store.backup_source, other)
    with pytest.raises(BackupDamaged, match="a record fails its checksum"):
        restore(other, backup.with_name("restored"), driver=driver)


def test_a_wrong_number_of_bytes_is_no_reason_to_lose_a_history(
    shipped: list[float], store: ConversationStore, driver: Any, backup: Path
) -> None:
    with writer_of(store).writing() as conn:
        conn.execute("UPDATE tenants SET stored_bytes = stored_bytes + 7")
        conn.execute("INSERT INTO tenants VALUES ('nobody', 5)")
    assert len(store.verify()) == 2
    other, data, said = backup.with_name("other"), backup.with_name("restored"), list[str]()
    write_copy(store.backup_source, other)
    restored = restore(other, data, driver=driver, report=said.append)
    assert restored.messages > 0
    assert "the bytes of 2 tenants were miscounted, and are counted anew" in said
    assert check_database(data / store.folder.database_path.name, driver) == []


def test_a_folder_without_room_for_the_base_is_left_as_it_was(
    store: ConversationStore, backup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world(store)
    usage = shutil.disk_usage(backup.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(StoreUnavailable, match="backup: there is no room for 0 MiB"):
        write_copy(store.backup_source, backup)
    assert [path.name for path in backup.glob("generation*")] == []


def test_two_that_ship_at_once_append_one_after_the_other(
    open_store: Open, backup: Path, driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy on request ships for the chain of the daemon, too; a segment was lost between them."""
    with open_store() as store:
        shipping = Shipping(store, backup)
        append = Chain.append
        inside: list[int] = []
        most: list[int] = []
        entered, go_on = threading.Event(), threading.Event()

        def slow(chain: Chain, changes: Changes) -> None:
            inside.append(1)
            most.append(len(inside))
            entered.set()
            go_on.wait(10)
            append(chain, changes)
            inside.pop()

        monkeypatch.setattr(Chain, "append", slow)
        feed = shipping.feed
        assert feed is not None
        threads = [threading.Thread(target=shipping.chain.ship, args=(feed,)) for _ in range(2)]
        for name, thread in zip("cd", threads, strict=True):
            create(store, name, user("head", 1))
            shipping.source.collect()
            thread.start()
            assert entered.wait(10)
        threads[1].join(0.3)
        assert most == [1]
        go_on.set()
        for thread in threads:
            thread.join()
        assert most == [1, 1]
        shipping.ship()
    with restored(backup, driver) as again:
        assert len(again.list_conversations(100).conversations) == 2
