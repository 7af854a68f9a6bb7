"""The data folder: a single holder, a marker of a clean close, and errors that tell what to do."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pensieve.errors import StoreError, StoreLocked, StoreUnavailable
from pensieve.store import ConversationStore, DataFolder
from pensieve.store.connection import preferred_driver
from pensieve.store.shared_file import SHARED_SQLITE_MIN
from tests.store.talk import create

pytestmark = pytest.mark.sqlite  # the folder with SQLite's files is the subject

CHILD = """
import sys, time
from pathlib import Path
from pensieve.store import ConversationStore

store = ConversationStore.open(Path(sys.argv[1]), "pensieve serve\\nx")
print("open", flush=True)
sys.stdin.read()
"""


def test_the_error_names_the_process_that_uses_the_folder(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child:
        assert child.stdout.readline() == b"open\n"
        with pytest.raises(StoreLocked) as locked:
            ConversationStore.open(tmp_path, "pensieve chat")
        assert str(locked.value) == (
            f"the data folder {tmp_path} is in use by pensieve serve?x, pid {child.pid}"
        )
        child.send_signal(signal.SIGKILL)
        child.wait()
    with ConversationStore.open(tmp_path, "pensieve chat") as store:
        assert store.integrity_check_due


def test_a_process_cannot_open_a_folder_twice(tmp_path: Path) -> None:
    with (
        ConversationStore.open(tmp_path, "pensieve chat"),
        pytest.raises(StoreLocked, match=f"pensieve chat, pid {os.getpid()}"),
    ):
        ConversationStore.open(tmp_path, "pensieve serve")
    ConversationStore.open(tmp_path, "pensieve serve").close()


@pytest.mark.parametrize("name", ["history.db", "conversations.db"])
def test_a_linked_database_is_locked_at_its_real_path(tmp_path: Path, name: str) -> None:
    """The database is opened through another folder's link, through its own folder, or by `--store`."""
    file = tmp_path / "real" / name
    for folder in ("real", "one", "two"):
        (tmp_path / folder).mkdir()
    for folder in ("one", "two"):
        (tmp_path / folder / "conversations.db").symlink_to(file)
    url, others = f"sqlite://{file}", list[dict[str, Any]]([{"path": tmp_path / "two"}])
    if preferred_driver.sqlite_version_info >= SHARED_SQLITE_MIN:
        others.append({"path": tmp_path / "own", "url": url})
    if name == "conversations.db":
        others.append({"path": tmp_path / "real"})
    with ConversationStore.open(tmp_path / "one", "pensieve chat") as store:
        create(store, "tea")
        store.delete_conversation("tea")
        assert not (tmp_path / "one" / "conversations.db-wal").exists()
        for other in others:
            with pytest.raises(StoreLocked, match=f"in use by pensieve chat, pid {os.getpid()}"):
                ConversationStore.open(holder="pensieve serve", **other)
        create(store, "cup")
    for other in others:
        with ConversationStore.open(holder="pensieve serve", **other) as store:
            assert not store.integrity_check_due
            assert store.num_conversations() == 1
            with pytest.raises(StoreLocked, match="in use by "):
                ConversationStore.open(tmp_path / "one", "pensieve chat")


def test_a_linked_database_is_due_for_a_check_after_its_holder_was_killed(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "conversations.db").symlink_to(tmp_path / "history.db")
    command = [sys.executable, "-c", CHILD, str(tmp_path / "one")]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child:
        assert child.stdout.readline() == b"open\n"
        child.kill()
        child.wait()
    with ConversationStore.open(tmp_path / "two", "pensieve chat") as store:
        assert store.integrity_check_due
        assert store.integrity_check() == []
    with ConversationStore.open(tmp_path / "two", "pensieve chat") as store:
        assert not store.integrity_check_due


def test_a_lock_without_a_readable_name_is_reported_as_another_process(tmp_path: Path) -> None:
    folder = DataFolder.open(tmp_path, "pensieve chat")
    (tmp_path / "lock").write_bytes(b"\xff\xfe?")
    with pytest.raises(StoreLocked, match="in use by another process"):
        DataFolder.open(tmp_path, "pensieve serve")
    folder.close(clean=True)
    folder.close(clean=True)


def test_clean_and_unclean_stops_are_recorded(
    open_store: Callable[..., ConversationStore],
) -> None:
    store = open_store()
    assert not store.integrity_check_due
    store.close()
    store.close()
    store = open_store()
    assert not store.integrity_check_due
    store.folder.close(clean=False)  # like a killed process
    store = open_store()
    assert store.integrity_check_due
    store.close()


@pytest.mark.parametrize("is_unclean", [False, True])
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_daemon_with_its_history_elsewhere_does_not_change_the_folders_marks(
    tmp_path: Path, is_unclean: bool, is_killed: bool
) -> None:
    folder = DataFolder.open(tmp_path, "pensieve serve")
    folder.mark_damaged(True)
    folder.close(clean=not is_unclean)
    for _ in range(2):
        daemon_folder = DataFolder.open(tmp_path, "pensieve serve", has_database=False)
        with pytest.raises(StoreLocked, match=f"in use by pensieve serve, pid {os.getpid()}$"):
            DataFolder.open(tmp_path, "pensieve chat")
        if is_killed:
            os.close(daemon_folder._lock or 0)  # like a killed process
        else:
            daemon_folder.close(clean=True)
    folder = DataFolder.open(tmp_path, "pensieve serve")
    assert (folder.stopped_unclean, folder.is_damaged) == (is_unclean, True)
    folder.close(clean=True)


def test_an_integrity_check_stays_due_until_it_has_passed(
    open_store: Callable[..., ConversationStore],
) -> None:
    open_store().folder.close(clean=False)
    open_store().close()
    store = open_store()
    assert store.integrity_check_due
    assert store.integrity_check() == []
    assert not store.integrity_check_due
    store.close()
    assert not open_store().integrity_check_due


def test_files_of_the_data_folder_are_private_to_their_owner(store: ConversationStore) -> None:
    create(store, "tea")
    folder = store.folder.path
    assert folder.stat().st_mode & 0o777 == 0o700
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    database = ("conversations.db", "conversations.db-wal", "conversations.db-shm")
    assert modes == dict.fromkeys(("lock", "reserve", *database), 0o600)


@pytest.mark.parametrize("has_history", [False, True])
def test_the_daemon_removes_other_users_access_to_its_folder(
    tmp_path: Path, has_history: bool
) -> None:
    """systemd and `docker volume` create the folder with mode 0755."""
    folder = tmp_path / "data"
    folder.mkdir()
    if has_history:
        ConversationStore.open(folder, "pensieve serve").close()
        (folder / "chat_history").touch()
    folder.chmod(0o755)
    with ConversationStore.open(folder, "pensieve serve") as store:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert not store.folder.is_open_to_others


def test_a_folder_with_files_of_other_programs_is_not_changed_and_gets_a_warning(
    tmp_path: Path,
) -> None:
    """root with --data /tmp must not make /tmp private."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "notes.txt").touch()
    folder.chmod(0o755)
    with ConversationStore.open(folder, "pensieve serve") as store:
        assert folder.stat().st_mode & 0o777 == 0o755
        assert store.folder.is_open_to_others


def test_the_error_names_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"file/data cannot be used: Not a directory"):
        ConversationStore.open(tmp_path / "file" / "data", "pensieve chat")


READ_ONLY_CHILD = """
import os, sys
from pathlib import Path
from pensieve.errors import PensieveError
from pensieve.store import ConversationStore
path = Path(sys.argv[1])
ConversationStore.open(path, "warm").close()  # import late modules before the process loses its rights
path.chmod(0o555)
for file in path.iterdir():
    file.chmod(0o444)
os.chdir("/")
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
try:
    ConversationStore.open(path, "pensieve chat")
except PensieveError as error:
    print(type(error).__name__, error)
"""


def test_the_error_names_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    path = tmp_path / "data"
    done = subprocess.run(
        [sys.executable, "-c", READ_ONLY_CHILD, str(path)], capture_output=True, text=True
    )
    assert done.stderr == ""
    assert done.stdout == (f"StoreError the data folder {path} cannot be used: Permission denied\n")


def test_a_full_disk_leaves_the_old_clean_close_marker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty marker means a clean close, so a failed write must not leave the marker empty."""
    DataFolder.open(tmp_path / "data", "first").close(clean=False)

    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(StoreUnavailable):
            DataFolder.open(tmp_path / "data", "second")
    folder = DataFolder.open(tmp_path / "data", "third")
    assert folder.stopped_unclean
    folder.close(clean=True)
