"""A simulated disk that injects faults, and keeps the files when the simulated process dies.

SQLite and its files are real; the files are in memory. Every statement passes through `Disk.call`, so a
fault can be injected before or after any statement. When the process dies, the files stay as they are at
that moment. They contain the committed transactions and no others.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pensieve.store.connection import preferred_driver
from pensieve.store.conversation_store import ConversationStore
from pensieve.store.folder import DATABASE_NAME

MEMORY = Path("/dev/shm")
BUSY, IO_ERROR, FULL = 5, 10, 13
FILES = (DATABASE_NAME, f"{DATABASE_NAME}-wal")


class ProcessDied(BaseException):
    """Simulates kill -9. The interrupted code must not handle this exception."""


class Fault(NamedTuple):
    """The effect of a fault on a statement."""

    kind: str
    code: int | None  # SQLite's error code; None: the process dies
    after: bool = False  # the statement takes effect first
    lasting: int = 1  # number of statements that fail


STORE_FAULTS = (
    Fault("the disk is full", FULL, lasting=12),
    Fault("a statement fails", IO_ERROR),
    Fault("a statement fails after it took effect", IO_ERROR, after=True),
    Fault("the database is busy", BUSY),
    Fault("the service dies before a statement", None),
    Fault("the service dies after a statement", None, after=True),
)


class Disk:
    """A replacement for the SQLite driver (`connect`, `Error`, versions). Owns the database folder."""

    def __init__(self, shelf: Path, between: Callable[[], None] = lambda: None) -> None:
        self.Error = preferred_driver.Error
        self.sqlite_version = preferred_driver.sqlite_version
        self.sqlite_version_info = preferred_driver.sqlite_version_info
        self.connect = self._connect
        self.num_calls = 0
        self.fired: Fault | None = None  # the latest fault that happened
        self.on_fault: Callable[[Fault], None] = lambda fault: None
        self.on_savepoint: Callable[[], None] = lambda: None
        self.commit_fault: Fault | None = None  # happens at the next COMMIT
        self._between = between  # runs other threads while the store's thread waits for the disk
        self._shelf = shelf
        self._num_folders = 0
        self._fault: Fault | None = None
        self._countdown = 0
        self.folder = self._next_folder()

    # -- called by the world --

    def arm(self, fault: Fault, countdown: int) -> None:
        """Let this fault happen at the `countdown`-th statement from now."""
        self._fault, self._countdown = fault, countdown

    def heal(self) -> None:
        self._fault = self.commit_fault = None

    def die(self) -> None:
        """Kill the process: continue with a copy of the files; old connections no longer work."""
        old, self.folder = self.folder, self._next_folder()
        for name in FILES:
            if (old / name).exists():
                shutil.copyfile(old / name, self.folder / name)
        self.heal()

    # -- statements --

    def call(self, carry_out: Callable[[], Any]) -> Any:
        self.num_calls += 1
        self._countdown -= 1
        fault = self._fault
        if fault is None or not -fault.lasting < self._countdown <= 0:
            self._between()
            return carry_out()
        if fault.after:
            carry_out()
        if self._countdown == 0:
            self.fired = fault
            self.on_fault(fault)
        if fault.code is None:
            self.die()
            raise ProcessDied
        error = preferred_driver.OperationalError("planted")
        error.sqlite_errorcode = fault.code
        raise error

    def _connect(self, *arguments: Any, **options: Any) -> Any:
        disk = self

        class Connection(preferred_driver.Connection):  # type: ignore[misc]
            def execute(self, *arguments: Any) -> Any:
                if arguments[0].startswith("SAVEPOINT"):
                    disk.on_savepoint()
                elif arguments[0] == "COMMIT" and disk.commit_fault is not None:
                    disk.arm(disk.commit_fault, 1)
                    disk.commit_fault = None
                return disk.call(lambda: super(Connection, self).execute(*arguments))

        return preferred_driver.connect(*arguments, factory=Connection, **options)

    def _next_folder(self) -> Path:
        self._num_folders += 1
        folder = self._shelf / str(self._num_folders)
        folder.mkdir()
        return folder


@contextmanager
def shelf() -> Iterator[Path]:
    """Yield a folder for the disks of many worlds, with an empty history to copy."""
    place = MEMORY if os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="pensieve-faults-", dir=place) as path:
        empty = Path(path) / "empty"
        ConversationStore.open(empty, "nobody").close()
        yield Path(path)


def copy_empty_history(folder: Path, shelf: Path) -> None:
    """Copy an empty history into `folder`. This is faster than creating one."""
    shutil.copyfile(shelf / "empty" / DATABASE_NAME, folder / DATABASE_NAME)
