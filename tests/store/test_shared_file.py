"""Several daemons on one SQLite file: stores in real processes, which are killed and stopped."""

from __future__ import annotations

import fcntl
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pensieve.errors import StoreError, StoreLocked
from pensieve.store import ConversationStore
from pensieve.store import shared_file as module
from pensieve.store.connection import preferred_driver
from pensieve.store.shared_file import (
    SHARED_SQLITE_MIN,
    WriterLock,
    file_system,
    holder_of_lock,
    is_stopped,
    refuse_network,
)
from tests.scale import SCALE
from tests.store.sharing_process import LEASE_SECONDS, Process
from tests.store.talk import create, reply, say, user

pytestmark = pytest.mark.skipif(
    preferred_driver.sqlite_version_info < SHARED_SQLITE_MIN, reason="needs a newer SQLite"
)
NUM_CONVERSATIONS = 12
Start = Callable[..., Process]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shared.db"


@pytest.fixture
def start(path: Path) -> Iterator[Start]:
    """Start processes, and end them after the test."""
    started: list[Process] = []

    def start_one(name: str, **options: Any) -> Process:
        started.append(Process(path, name, **options))
        return started[-1].ready()

    yield start_one
    for each in started:
        each.end()


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.01)


def try_claim(process: Process, *call: Any) -> bool:
    """Make a call that claims a conversation. Return False if another daemon owns the conversation."""
    answer = process(*call)
    if not isinstance(answer, list) or answer[0] != "error":
        return True
    assert answer[1] == "OwnedElsewhere", answer
    return False


def problems_in(path: Path) -> list[str]:
    with ConversationStore.open(path.parent / "last", "test", url=f"sqlite://{path}") as store:
        return [*store.verify(), *store.integrity_check()]


# -- claims --


def test_the_creator_owns_a_conversation_and_other_daemons_learn_its_address(
    start: Start, path: Path
) -> None:
    a, b = start("a"), start("b")
    a("create", "tea")
    assert a("say", "tea", "r1", 2) == 1
    error = b("begin", "tea", "r2", 3)
    assert error == ["error", "OwnedElsewhere", "conversation 'tea' is served by a at a:1"]
    assert b("log", "tea") == [1, 2, 2]  # every daemon may read
    assert b("owner", "tea")[0] == "a"
    assert b("delete", "tea")[1] == "OwnedElsewhere"
    a("close")
    assert b("stale_and_kv_sources") == [[], {}]
    assert b("say", "tea", "r2", 3) == 2
    # There is no origin, because the previous owner has left.
    assert b("stale_and_kv_sources") == [["tea"], {}]
    b("close")
    assert problems_in(path) == []


def test_a_conversation_of_a_killed_daemon_can_be_claimed_after_its_lease(
    start: Start, path: Path
) -> None:
    a, b = start("a", lease_seconds=LEASE_SECONDS), start("b")
    a("create", "tea")
    turn_id, attempt, *_ = a("begin", "tea", "r1", 2)
    a.kill()
    wait_until(lambda: try_claim(b, "begin", "tea", "r1", 2))
    again = b("begin", "tea", "r1", 2)
    assert again == [turn_id, attempt + 1, False, "running"]
    assert b("finish", turn_id, attempt + 1, 7) == 1
    assert b("log", "tea") == [1, 2, 7]
    b("close")
    assert problems_in(path) == []


def test_a_restarted_daemon_interrupts_its_earlier_turns(start: Start) -> None:
    """This happens at once: the lock on its folder shows that the predecessor is dead."""
    a, b = start("a"), start("b")
    a("create", "tea")
    turn_id, *_ = a("begin", "tea", "r1", 2)
    b("create", "cup")
    other, *_ = b("begin", "cup", "r1", 3)
    a.kill()
    again = start("a")
    assert again("running", "tea") is None
    assert again("running", "cup") == other  # a turn of another session continues
    assert b("say", "tea", "r2", 4) == 1
    assert b("finish", other, 1, 5) == 1
    assert again("say", "tea", "r3", 6)[1] == "OwnedElsewhere"
    assert turn_id != other


def test_a_late_turn_end_is_refused_after_another_daemon_took_over(
    start: Start, path: Path
) -> None:
    """The daemon was stopped (SIGSTOP) for longer than its lease."""
    a, b = start("a", lease_seconds=LEASE_SECONDS), start("b")
    a("create", "tea")
    turn_id, attempt, *_ = a("begin", "tea", "r1", 2)
    with a.stopped():
        wait_until(lambda: try_claim(b, "begin", "tea", "r1", 2))
    for late in (attempt, 0, attempt + 1):
        assert a("finish", turn_id, late, 99)[1] == "Unavailable"
    assert b("log", "tea") == [1]
    assert b("finish", turn_id, attempt + 1, 7) == 1
    assert a("finish", turn_id, attempt, 99)[1] == "Unavailable"
    assert a("say", "tea", "r2", 3)[1] == "OwnedElsewhere"  # b owns the conversation now
    assert a("log", "tea") == [1, 2, 7]
    for each in (a, b):
        each("close")
    assert problems_in(path) == []


def test_a_daemon_with_an_expired_lease_keeps_turns_that_no_daemon_claimed(start: Start) -> None:
    a, b = start("a", lease_seconds=LEASE_SECONDS), start("b")
    a("create", "tea")
    turn_id, attempt, *_ = a("begin", "tea", "r1", 2)
    with a.stopped():
        wait_until(lambda: b("running", "tea") is None)  # the next claim would interrupt the turn
    assert a("finish", turn_id, attempt, 7) == 1
    assert a("log", "tea") == [1, 2, 7]


def test_idle_conversations_of_a_draining_daemon_are_claimed_with_the_address_of_their_kv(
    start: Start,
) -> None:
    a, b = start("a"), start("b")
    a("create", "tea")
    a("create", "cup")
    turn_id, attempt, *_ = a("begin", "tea", "r1", 2)
    a("drain")
    assert b("say", "tea", "r2", 3)[1] == "OwnedElsewhere"
    assert b("say", "cup", "r1", 3) == 1
    assert a("finish", turn_id, attempt, 4) == 1
    assert b("say", "tea", "r2", 3) == 2
    assert b("stale_and_kv_sources") == [["cup", "tea"], {"cup": "a:1", "tea": "a:1"}]


def test_a_conversation_recreated_after_another_daemon_deleted_it_is_reported_as_stale(
    start: Start,
) -> None:
    a, b = start("a"), start("b")
    a("create", "tea")
    a("say", "tea", "r1", 2)
    a("drain")
    b("delete", "tea")
    a("stale_and_kv_sources")
    a("create", "tea")
    assert a("stale_and_kv_sources")[0] == ["tea"]
    assert a("say", "tea", "r1", 5) == 1


def test_two_owners_never_share_an_epoch(start: Start, path: Path) -> None:
    """Three daemons claim the same conversations of a dead fourth daemon at once."""
    before = start("before")
    for number in range(20 * SCALE):
        before("create", f"c{number}")
    before("close")
    racers = [start(name) for name in ("a", "b", "c")]
    for seed, each in enumerate(racers):
        each.put("race", "c", 20 * SCALE, seed)
    won = [entry for each in racers for entry in each.answer()]
    assert len(won) == 20 * SCALE  # each conversation was claimed by one daemon
    assert len({epoch for _, epoch, _ in won}) == len(won)
    for each in racers:
        each("close")
    assert problems_in(path) == []


# -- one host --


def test_a_daemon_that_is_stopped_during_a_write_is_killed(start: Start) -> None:
    a, b = (start(name, lease_seconds=LEASE_SECONDS) for name in "ab")
    a("create", "tea")
    b("create", "cup")
    a.put("hold_write_lock")
    wait_until(lambda: is_stopped(a.child.pid))
    assert b("say", "cup", "r1", 2) == 1
    assert b("say", "tea", "r1", 2) == 1
    assert a.child.wait() == -signal.SIGKILL


def test_exclusive_and_shared_use_of_a_history_exclude_each_other(
    tmp_path: Path,
) -> None:
    path = tmp_path / "old" / "conversations.db"
    url = f"sqlite://{path}"
    with ConversationStore.open(path.parent, "pensieve serve") as store:
        create(store, "tea")
        with pytest.raises(StoreLocked, match=r"is in use by pensieve serve, pid \d+"):
            ConversationStore.open(tmp_path / "a", "test", url=url)
    with (
        ConversationStore.open(tmp_path / "a", "test", url=url) as a,
        ConversationStore.open(tmp_path / "b", "test", url=url) as b,
    ):
        assert not a.integrity_check_due
        assert say(b, "tea", "r1", user("hi", 1), reply("hello", 2)) == 1
        with pytest.raises(StoreLocked, match="is in use by daemons that share it"):
            ConversationStore.open(path.parent, "test")
        with pytest.raises(StoreLocked):
            ConversationStore.open(tmp_path / "a", "test", url=url)  # that folder is in use
    with pytest.raises(StoreError, match="give each daemon its own --data folder"):
        ConversationStore.open(path.parent, "test", url=url)
    with ConversationStore.open(path.parent, "test") as store:
        assert list(store.log("tea")) == [1, 2]
        assert not store.integrity_check_due
        assert not store.is_shared


def test_a_shared_file_is_due_for_a_check_after_its_last_daemon_was_killed(
    start: Start, path: Path
) -> None:
    a, b = start("a"), start("b")
    a("create", "tea")
    a.kill()
    with ConversationStore.open(path.parent / "c", "test", url=f"sqlite://{path}") as store:
        assert not store.integrity_check_due  # another daemon has the file open
    b.kill()
    with ConversationStore.open(path.parent / "c", "test", url=f"sqlite://{path}") as store:
        assert store.integrity_check_due
        assert store.integrity_check() == []
    with ConversationStore.open(path.parent / "c", "test", url=f"sqlite://{path}") as store:
        assert not store.integrity_check_due


def test_deleted_text_is_in_no_file_while_other_daemons_have_it_open(
    start: Start, path: Path
) -> None:
    a = start("a")
    a("create", "keep")
    with ConversationStore.open(path.parent / "b", "test", url=f"sqlite://{path}") as store:
        create(store, "gone", user("SECRET", 1))
        a("say", "keep", "r1", 2)
        store.delete_conversation("gone")
        names = [each for each in path.parent.iterdir() if each.is_file()]
        assert [each.name for each in names if b"SECRET" in each.read_bytes()] == []
        assert a("say", "keep", "r2", 3) == 2


def test_the_housekeeper_empties_a_wal_that_may_contain_deleted_text(
    start: Start, path: Path
) -> None:
    with ConversationStore.open(path.parent / "b", "test", url=f"sqlite://{path}") as store:
        assert store.is_housekeeper
        store.erasure.tidy()
        assert store.erasure.due  # the log may contain deleted text
        while store.erasure.step():
            pass
        assert path.with_name("shared.db-wal").stat().st_size == 0


def test_one_daemon_is_the_housekeeper_and_another_daemon_takes_over(start: Start) -> None:
    a, b = (start(name, lease_seconds=LEASE_SECONDS) for name in "ab")
    assert (a("is_housekeeper"), b("is_housekeeper")) == (True, False)
    with a.stopped():
        wait_until(lambda: bool(b("is_housekeeper")))
    assert not a("is_housekeeper")  # at once, before it has renewed its lease
    b("close")
    wait_until(lambda: bool(a("is_housekeeper")))


def test_a_schema_is_not_migrated_while_older_daemons_have_it_open(
    start: Start, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pensieve.store import migrations

    start("a")
    newer = {**migrations.STEPS, "m999_more": ("CREATE TABLE more (number INTEGER)",)}
    monkeypatch.setattr(
        migrations.migrate, "__defaults__", (newer, *(migrations.migrate.__defaults__ or ())[1:])
    )
    with pytest.raises(StoreError, match=r"daemons of an older Pensieve have it open\. Stop all"):
        ConversationStore.open(path.parent / "b", "test", url=f"sqlite://{path}")


def test_an_old_sqlite_is_refused(path: Path) -> None:
    class Old:
        sqlite_version = "3.51.2"
        sqlite_version_info = (3, 51, 2)

    with pytest.raises(StoreError, match=r"SQLite 3.51.2 may damage .* 3.51.3 is needed"):
        ConversationStore.open(path.parent / "a", "test", url=f"sqlite://{path}", driver=Old)
    assert not path.exists()


MOUNTINFO = """\
22 1 0:21 / / rw shared:1 - ext4 /dev/root rw
30 22 0:40 / /mnt rw,relatime shared:2 - {kind} server:/export rw
31 22 0:41 / /mnt2 rw shared:3 - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("kind", "refused"),
    [("nfs4", True), ("cifs", True), ("fuse.sshfs", True), ("xfs", False), ("fuseblk", False)],
)
def test_a_network_file_system_is_refused(
    kind: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTINFO.format(kind=kind))
    monkeypatch.setattr(module, "MOUNTS", mounts)
    assert file_system(Path("/mnt/history")) == kind
    assert file_system(Path("/mnt2")) == "tmpfs"
    assert file_system(Path("/mnt22")) == "ext4"
    if refused:
        with pytest.raises(StoreError, match=f"/mnt/x is on {kind}, .* Use postgresql://"):
            refuse_network(Path("/mnt/x"))
    else:
        refuse_network(Path("/mnt/x"))


def test_a_process_that_has_just_written_does_not_overtake_waiting_writers(tmp_path: Path) -> None:
    import threading

    order: list[int] = []
    path, started = tmp_path / "db", threading.Barrier(3)

    def write(number: int) -> None:
        lock = WriterLock(path, 60.0, 60.0)
        started.wait()
        while len(order) < 600:
            with lock.taken():
                order.append(number)
                time.sleep(0.001)
        lock.close()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    runs = [len(list(group)) for _, group in itertools.groupby(order[10:-10])]
    assert max(runs) <= 20
    assert min(order.count(number) for number in range(3)) > len(order) / 6


def test_holder_of_lock_returns_the_process_that_holds_it(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path / "db", 1.0, 1.0)
    file = tmp_path / "db.write"
    assert holder_of_lock(file) is None
    with lock.taken():
        assert holder_of_lock(file) == os.getpid()
        assert not is_stopped(os.getpid())
    assert holder_of_lock(file) is None
    lock.close()


def test_a_writer_does_not_wait_for_a_stopped_process_ahead_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    following = os.open(tmp_path / "db.write-next", os.O_RDWR | os.O_CREAT)
    fcntl.flock(following, fcntl.LOCK_EX)
    monkeypatch.setattr(module, "is_stopped", lambda pid: True)
    lock = WriterLock(tmp_path / "db", 5.0, 0.5)
    waits: list[float] = []
    lock.on_wait = waits.append
    for _ in range(3):
        with lock.taken():
            time.sleep(module.SLICE_SECONDS * 2)  # so that it cannot overtake in the next round
    assert 0.5 <= waits[0] < 4.0
    assert max(waits[1:]) < 0.4  # later rounds do not wait for the stopped process again
    os.close(following)
    with lock.taken():
        pass
    assert lock._stopped_next == 0
    lock.close()


def test_a_writer_that_was_stopped_for_a_moment_is_not_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[int] = []
    killed: list[int] = []
    monkeypatch.setattr(module, "STOPPED_SECONDS", 0.05)
    monkeypatch.setattr(module, "stopped_holder", lambda path: stopped[-1])
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    lock = WriterLock(tmp_path / "db", 5.0, 5.0)
    for pid in (17, 0, 17, 18):
        stopped.append(pid)
        lock._kill_if_stopped(tmp_path / "db.write")
        time.sleep(0.06)
    assert killed == []
    lock._kill_if_stopped(tmp_path / "db.write")
    assert killed == [18]


def test_a_link_to_the_file_is_the_same_history(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "link.db"
    link.symlink_to(tmp_path / "real" / "shared.db")
    url = f"sqlite://{tmp_path}/real/shared.db"
    with (
        ConversationStore.open(tmp_path / "a", "test", url=url) as a,
        ConversationStore.open(tmp_path / "b", "test", url=f"sqlite://{link}") as b,
    ):
        create(a, "tea")
        assert b.get_conversation("tea").conversation_id == "tea"
    assert not link.with_name("link.db.lock").exists()


def test_a_lock_that_was_lost_while_it_changes_to_shared_is_taken_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system frees the lock to change it. Meanwhile another process takes and releases the lock."""
    file = module.SharedFile.open(path)
    flock, refused = fcntl.flock, [True]

    def lose_once(lock: int, how: int) -> None:
        if how & fcntl.LOCK_SH and refused:
            refused.clear()
            flock(lock, fcntl.LOCK_UN)
            raise BlockingIOError
        flock(lock, how)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", lose_once)
        file.share()
    assert not refused
    other = module.SharedFile.open(path)  # must not raise StoreLocked
    assert not other.is_alone
    for each in (other, file):
        each.close(clean=True)


# -- random actions --


def test_random_faults_neither_lose_nor_duplicate_turns(start: Start, path: Path) -> None:
    """Three daemons run turns in the same conversations, and are killed and stopped.

    Every acknowledged turn is in the log exactly once, in the order of its revision. All turns of an epoch
    come from one daemon.
    """
    said: list[list[Any]] = []
    first = start("first")
    for number in range(NUM_CONVERSATIONS):
        first("create", f"w{number}")
    first("close")
    processes: dict[str, Process] = {}

    def start_daemon(name: str, seed: int) -> None:
        processes[name] = start(name, lease_seconds=LEASE_SECONDS)
        os.set_blocking(processes[name].child.stdout.fileno(), False)  # type: ignore[union-attr]
        processes[name].put("run_random_turns", seed, NUM_CONVERSATIONS)

    def read_output() -> None:
        for name, process in processes.items():
            data = b""
            while True:
                try:
                    piece = os.read(process.child.stdout.fileno(), 1 << 16)  # type: ignore[union-attr]
                except BlockingIOError:
                    piece = b""
                if not piece:
                    break
                data += piece
            unread[name] = unread.get(name, b"") + data
            *lines, unread[name] = unread[name].split(b"\n")
            said.extend(entry for line in lines if (entry := _entry(line))[0] == "said")

    unread: dict[str, bytes] = {}
    seeds = itertools.count(1)
    for name in "abc":
        start_daemon(name, next(seeds))
    for step in range(6 * SCALE):
        time.sleep(0.4)
        read_output()
        victim = "abc"[step % 3]
        if step % 2:
            processes[victim].kill()
            read_output()
            unread[victim] = b""
            start_daemon(victim, next(seeds))
        else:
            processes[victim].stop()
            time.sleep(LEASE_SECONDS + 0.3)
            processes[victim].resume()
    time.sleep(0.4)
    for each in processes.values():
        each.kill()
    read_output()

    assert len(said) > 100
    check_epochs(said)
    with ConversationStore.open(path.parent / "last", "test", url=f"sqlite://{path}") as store:
        for number in range(NUM_CONVERSATIONS):
            name = f"w{number}"
            log, messages = list(store.log(name)), store.messages(name)
            by_revision = {entry[3]: entry[2] for entry in said if entry[1] == name}
            assert len(by_revision) == len([entry for entry in said if entry[1] == name])
            for revision, token in by_revision.items():
                assert log.count(token) == 2  # once in the message, once in its reply
                assert [m.revision for m in messages if list(m.token_ids or ()) == [token]] in (
                    [revision, revision],
                    [],
                )
        assert store.verify() == []
        assert store.integrity_check() == []


def _entry(line: bytes) -> list[Any]:
    import json

    found: list[Any] = json.loads(line)
    return found


def check_epochs(said: list[list[Any]]) -> None:
    """Check that no epoch has two owners."""
    owners: dict[int, tuple[str, int]] = {}
    for _, name, _, _, epoch, seed in said:
        assert owners.setdefault(epoch, (name, seed)) == (name, seed), "two owners in one epoch"
