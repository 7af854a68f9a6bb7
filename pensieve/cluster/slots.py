"""The data folders of a node's replicas: a replica that follows another one goes on with what that had.

    REPLICAS/0/        a daemon's data folder: its batch jobs, and no conversation
    REPLICAS/0.lock    locked by who has it
    REPLICAS/1/ …

A replica takes the first folder that nobody has.  The lock is on an open file, which the replica hands on to
its daemon: it ends with the last of the two, however they end, so a folder is never given to a second daemon,
and two replicas that start at once get two folders.  A folder that a daemon of somebody else's holds is
passed over.
"""

from __future__ import annotations

import fcntl
import itertools
import os
from pathlib import Path
from typing import NamedTuple

from pensieve.errors import Unavailable

LOCK_NAME = "lock"  # in a daemon's data folder (store/folder.py)


class Slot(NamedTuple):
    number: int
    folder: Path
    lock: int  # an open file, to be kept open


def take_slot(replicas: Path) -> Slot:
    try:
        replicas.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in itertools.count():
            lock = _locked(replicas / f"{number}.lock")
            if lock is not None:
                if not _is_held(replicas / str(number)):
                    return Slot(number, replicas / str(number), lock)
                os.close(lock)
    except OSError as error:
        raise Unavailable(
            f"the folder {replicas} of this node cannot be used: {error.strerror}"
        ) from error
    raise AssertionError("numbers do not end")


def _locked(path: Path) -> int | None:
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _is_held(folder: Path) -> bool:
    """By a daemon that is no child of a replica."""
    if not (folder / LOCK_NAME).exists():
        return False
    lock = _locked(folder / LOCK_NAME)
    if lock is not None:
        os.close(lock)
    return lock is None
