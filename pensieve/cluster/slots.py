"""The data folders of a node's replicas. A new replica continues with the folder of an earlier one.

    REPLICAS/0/        a daemon's data folder: its batch jobs, but no conversation
    REPLICAS/0.lock    locked by the replica that uses the folder
    REPLICAS/1/ …

A replica takes the first free folder and locks it. The lock belongs to an open file, which the daemon
inherits from the replica. So the lock lasts until both processes have ended, even if they are killed. Two
daemons never use one folder, even if their replicas start at the same time. A folder is skipped if a daemon
that is not part of the cluster uses it.
"""

from __future__ import annotations

import fcntl
import itertools
import os
from pathlib import Path
from typing import NamedTuple

from pensieve.errors import Unavailable

LOCK_NAME = "lock"  # file in a daemon's data folder (store/folder.py)


class Slot(NamedTuple):
    number: int
    folder: Path
    lock: int  # an open file that must stay open


def take_slot(replicas: Path) -> Slot:
    try:
        replicas.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in itertools.count():
            lock = _try_to_lock(replicas / f"{number}.lock")
            if lock is not None:
                if not _is_held(replicas / str(number)):
                    return Slot(number, replicas / str(number), lock)
                os.close(lock)
    except OSError as error:
        raise Unavailable(
            f"cannot use the folder {replicas} of this node: {error.strerror}"
        ) from error
    raise AssertionError("unreachable: numbers are endless")


def _try_to_lock(path: Path) -> int | None:
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _is_held(folder: Path) -> bool:
    """Return whether a daemon that no replica has started uses the folder."""
    if not (folder / LOCK_NAME).exists():
        return False
    lock = _try_to_lock(folder / LOCK_NAME)
    if lock is not None:
        os.close(lock)
    return lock is None
