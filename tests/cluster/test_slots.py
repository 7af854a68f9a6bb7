"""How a replica chooses its data folder."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from pensieve.cluster.child_process import ChildProcess
from pensieve.cluster.slots import LOCK_NAME, take_slot
from pensieve.errors import Unavailable
from pensieve.store import folder
from pensieve.store.folder import DataFolder

READY = (
    "import sys, time; print('ready grpc://127.0.0.1:7', file=sys.stderr, flush=True); time.sleep"
)


def test_replicas_that_start_at_once_get_separate_folders(tmp_path: Path) -> None:
    slots = [take_slot(tmp_path / "replicas") for _ in range(3)]
    assert [each.folder for each in slots] == [tmp_path / "replicas" / name for name in "012"]


def test_the_successor_of_a_replica_reuses_its_folder(tmp_path: Path) -> None:
    slots = [take_slot(tmp_path) for _ in range(3)]
    (slots[1].folder / "jobs").mkdir(parents=True)
    os.close(slots[1].lock)
    again = take_slot(tmp_path)
    assert again.folder == tmp_path / "1"
    assert (again.folder / "jobs").is_dir()


def test_a_folder_stays_locked_until_its_daemon_has_ended(tmp_path: Path) -> None:
    async def scenario() -> None:
        slot = take_slot(tmp_path)
        child = ChildProcess([sys.executable, "-c", READY + "(600)"], pass_fds=(slot.lock,))
        await child.start(60.0)
        os.close(slot.lock)  # the kernel does this when the replica is killed
        other = take_slot(tmp_path)
        assert other.folder == tmp_path / "1"
        os.kill(child.pid, signal.SIGKILL)
        await child.ended_unexpectedly()
        assert take_slot(tmp_path).folder == tmp_path / "0"

    asyncio.run(scenario())


def test_a_folder_held_by_another_daemon_is_skipped(tmp_path: Path) -> None:
    held = DataFolder.open(tmp_path / "0", "pensieve serve", has_database=False)
    assert take_slot(tmp_path).folder == tmp_path / "1"
    held.close(clean=True)
    assert take_slot(tmp_path).folder == tmp_path / "0"


def test_the_error_says_that_the_node_has_no_free_folder(tmp_path: Path) -> None:
    (tmp_path / "replicas").write_text("a file")
    with pytest.raises(
        Unavailable, match=r"cannot use the folder .*replicas of this node: File exists"
    ):
        take_slot(tmp_path / "replicas")


def test_the_slot_checks_the_daemons_lock_file() -> None:
    assert LOCK_NAME == folder.LOCK_NAME
