"""The files beside a SQLite database that several daemons of one host share.

    FILE.lock          locked in shared mode by each daemon while the daemon has the database open. If a
                       daemon finds the file unlocked, it locks the file exclusively. It is then *alone* until
                       it calls `share`. The file has a text while the database is open. If a daemon is alone
                       and finds a text, the database was not closed (a power loss, or all daemons were
                       killed).
    FILE.write         the writers' lock, held for one transaction (WriterLock)
    FILE.write-next    locked by the next writer, while it waits for the writers' lock
    FILE.write-done    a pipe; a writer whose slice is over writes a byte to wake the next writer
    FILE.damaged       exists if damage was found
    FILE.reserve       space for deletions on a full disk
    FILE.history       identity of the history for its backup (backup.py)

If FILE is the `conversations.db` of a data folder, the folder's own files (folder.py) are used instead,
except for the three write files. So a daemon that uses the data folder exclusively and daemons that share its
database exclude each other.

**Why a separate lock for writers.** SQLite connections poll the write lock with growing pauses, and the first
to try after a release gets the lock. So a process that writes all the time would starve the others. Here, a
writer first takes the lock of FILE.write-next, and only its holder waits for the writers' lock. After
SLICE_SECONDS, a writer must queue like the others, and wakes the next writer with a byte in the pipe. Within
its slice, a writer may take the writers' lock again before the next writer. That saves time, because SQLite
reads every page again after a transaction of another process.

**Stopped writers.** A process that was stopped (SIGSTOP) within a transaction keeps SQLite's write lock and
the writers' lock. No other daemon could write, or take over the conversations of the stopped process. Only
the end of that process frees SQLite's lock. So a writer that has waited for half a lease checks the process
that has the lock. If that process is stopped, the writer kills it. SQLite then discards the uncommitted
changes. A process that was stopped while it had only the lock of FILE.write-next is not killed. The other
writers then skip that lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from pensieve.errors import StoreError, StoreLocked, StoreUnavailable
from pensieve.store.folder import DAMAGED_NAME, LOCK_NAME, RESERVE_NAME, beside, holder_in

log = logging.getLogger("pensieve")
OPEN_SECONDS_MAX = 10.0  # how long to wait until a daemon that is alone calls `share`
EXCLUSIVE_SECONDS = 1.0  # how long to wait until a new holder has written its text
OPEN_PAUSE_SECONDS = 0.02
STOPPED_SECONDS = 1.0  # a writer must stay stopped this long before it is killed
# (limit, pause) in seconds: a writer that has waited less than `limit` pauses this long between two tries
PAUSES = ((0.05, 0.001), (1.0, 0.005), (float("inf"), 0.02))
SHARED_TEXT = b"shared by daemons with --store sqlite://\n"
SLICE_SECONDS = 0.005
SQLITE_SCHEME = "sqlite://"
SHARED_SQLITE_MIN = (3, 51, 3)  # without the WAL-reset bug
NOT_LOCAL = {  # file systems on which other hosts may have the file open
    *("9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4"),
    *("orangefs", "prl_fs", "pvfs2", "smb3", "smbfs", "vboxsf", "virtiofs"),
}
MOUNTS = Path("/proc/self/mountinfo")
LOCKS = Path("/proc/locks")


def open_shared(url: str, driver: Any, holder: str = "") -> SharedFile:
    """Open the SQLite file of a URL. With a `holder`, open it exclusively for that process."""
    if driver.sqlite_version_info < SHARED_SQLITE_MIN:
        needed = ".".join(map(str, SHARED_SQLITE_MIN))
        raise StoreError(
            f"SQLite {driver.sqlite_version} may damage a history that several daemons share; {needed} is"
            " needed. Install pysqlite3, or use postgresql://"
        )
    return SharedFile.open(path_of(url), holder)


def path_of(url: str) -> Path:
    """Return the file of a URL such as `sqlite:///var/lib/pensieve/history.db`.

    Symbolic links are resolved, because the locks must be beside the file that SQLite opens.
    """
    return Path(unquote(url.removeprefix(SQLITE_SCHEME))).resolve()


class SharedFile:
    """A database that this process shares with others. `open` creates one, `close` releases it."""

    def __init__(self, path: Path, lock: int, *, is_alone: bool, stopped_unclean: bool) -> None:
        self.path = path
        self.is_alone = is_alone  # until `share`
        self.stopped_unclean = stopped_unclean
        self.reserve_path = beside(path, RESERVE_NAME)
        self._damaged_path = beside(path, DAMAGED_NAME)
        self._lock: int | None = lock

    @classmethod
    def open(cls, path: Path, holder: str = "") -> SharedFile:
        """Lock the database at `path`, and create it if it is missing.

        With a `holder`, no other process may open the database until `close`. The errors of other processes
        name the holder.

        Raises:
            StoreLocked: another process has the database open exclusively, or has it open at all if a
                `holder` is given.
            StoreError: the file system may be a network file system.
        """
        refuse_network(path.parent)
        lock_path = beside(path, LOCK_NAME)
        try:
            lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(f"--store: {lock_path} cannot be used: {error.strerror}") from error
        try:
            is_alone = _lock_either(lock, path, is_exclusive=bool(holder))
            before = os.pread(lock, 256, 0) if is_alone else b""
            if is_alone:
                text = f"{os.getpid()} {holder}\n".encode() if holder else SHARED_TEXT
                os.pwrite(lock, text, 0)
                os.ftruncate(lock, len(text))
                os.fsync(lock)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            os.close(lock)
            raise StoreUnavailable(f"{path} cannot be written: {error.strerror}") from error
        except BaseException:
            os.close(lock)
            raise
        return cls(path, lock, is_alone=is_alone, stopped_unclean=bool(before))

    def share(self) -> None:
        """Let other daemons open the database. Called after the startup work that needs exclusive access.

        The operating system may free the lock for a moment when its mode changes. Raises StoreLocked if
        another process takes the lock exclusively in that moment.
        """
        if self.is_alone and self._lock is not None:
            self.is_alone = False
            is_exclusive = True
            while is_exclusive:
                try:
                    fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    is_exclusive = False
                except BlockingIOError:
                    is_exclusive = _lock_either(self._lock, self.path)

    @property
    def is_damaged(self) -> bool:
        return self._damaged_path.exists()

    @property
    def is_check_due(self) -> bool:
        return self.is_damaged or self.stopped_unclean

    def mark_damaged(self, is_damaged: bool) -> None:
        """Remember for the next start whether the history is damaged."""
        with contextlib.suppress(OSError):  # the caller has already logged the damage
            if is_damaged:
                self._damaged_path.touch(mode=0o600)
            else:
                self._damaged_path.unlink(missing_ok=True)

    def close(self, *, clean: bool) -> None:
        """Release the file.

        If `clean` and no other process has the file open, record that the database was closed.
        """
        if self._lock is None:
            return
        lock, self._lock = self._lock, None
        with contextlib.suppress(OSError):
            if clean:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(lock, 0)
                os.fsync(lock)
        os.close(lock)


class WriterLock:
    """The writers' lock, for one connection in one thread at a time."""

    def __init__(self, path: Path, seconds: float, patience: float) -> None:
        self.on_wait: Callable[[float], None] = lambda seconds: None
        self._paths = (
            path.with_name(f"{path.name}.write-next"),
            path.with_name(f"{path.name}.write"),
        )
        self._pipe_path = path.with_name(f"{path.name}.write-done")
        self._pipe: int | None = None
        self._seconds, self._patience = seconds, patience
        self._files: tuple[int, int] | None = None
        self._depth = 0
        self._until = 0.0  # end of the slice in which this writer may overtake the next writer
        self._stopped = (0, 0.0)  # a stopped process that has the lock, and since when
        self._stopped_next = 0  # a stopped process that has the lock of FILE.write-next

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Hold the writers' lock for one transaction. May be nested.

        Raises StoreUnavailable if the lock does not become free in time.
        """
        if not self._depth:
            self._take()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth and self._files is not None:
                fcntl.flock(self._files[1], fcntl.LOCK_UN)
                if self._pipe is not None and time.monotonic() >= self._until:
                    with contextlib.suppress(OSError):  # the pipe may be full of unread bytes
                        os.write(self._pipe, b".")

    def close(self) -> None:
        files, self._files = self._files, None
        for file in files or ():
            os.close(file)
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            os.close(pipe)

    def _take(self) -> None:
        if self._files is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            next_file, file = (os.open(path, flags, 0o600) for path in self._paths)
            self._files = next_file, file
            self._pipe = _open_pipe(self._pipe_path)
        began = time.monotonic()
        next_file, file = self._files
        if began < self._until:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.on_wait(0.0)
                return
        self._stopped = (0, 0.0)
        self._wait_to_be_next(next_file, began)
        try:
            self._wait(file, began, self._pipe)
        finally:
            fcntl.flock(next_file, fcntl.LOCK_UN)
        now = time.monotonic()
        self._until = now + SLICE_SECONDS
        self.on_wait(now - began)

    def _wait_to_be_next(self, next_file: int, began: float) -> None:
        """Wait up to `patience` for FILE.write-next. Continue without that lock if it does not become free.

        A writer without the lock may be overtaken. If a stopped process has the lock, later calls do not
        wait for it.
        """
        is_known = self._stopped_next != 0 and self._stopped_next == stopped_holder(self._paths[0])
        if self._wait(next_file, began, patience=0.0 if is_known else self._patience):
            self._stopped_next = 0
        else:
            self._stopped_next = stopped_holder(self._paths[0])

    def _wait(
        self, file: int, began: float, pipe: int | None = None, patience: float = math.inf
    ) -> bool:
        """Wait for the lock. Return False if `patience` is exceeded."""
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                waited = time.monotonic() - began
            if waited > patience:
                return False
            if waited > self._seconds:
                raise StoreUnavailable(
                    f"the history {self._paths[1].stem} is busy: other daemons have been writing for"
                    f" {waited:.0f} s"
                )
            if waited > self._patience - STOPPED_SECONDS:
                self._kill_if_stopped(self._paths[1])
            pause = next(pause for until, pause in PAUSES if waited < until)
            if pipe is None:
                time.sleep(pause)
            elif select.select([pipe], (), (), pause)[0]:
                with contextlib.suppress(BlockingIOError):
                    os.read(pipe, 1 << 16)

    def _kill_if_stopped(self, path: Path) -> None:
        """Kill the process that has the lock, if it is stopped."""
        pid, now = stopped_holder(path), time.monotonic()
        if pid in (0, os.getpid()):
            self._stopped = (0, 0.0)
            return
        if self._stopped[0] != pid:
            self._stopped = pid, now
        if now - self._stopped[1] < STOPPED_SECONDS:
            return
        log.error(
            "killing process %d: it was stopped in the middle of a write to the history and blocks all other"
            " daemons",
            pid,
        )
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _open_pipe(path: Path) -> int | None:
    """Open the pipe; None if the file system has no pipes."""
    try:
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None


def holder_of_lock(path: Path) -> int | None:
    """Return the process that has locked the file with `flock`; None if there is none, or if unknown."""
    try:
        inode = path.stat().st_ino
        for line in LOCKS.read_text().splitlines():
            _, kind, _, mode, pid, file, *_ = line.split()
            if (kind, mode) == ("FLOCK", "WRITE") and file.rpartition(":")[2] == str(inode):
                names = Path(f"/proc/{pid}/fd").iterdir()
                return int(pid) if any(_is_same(each, path) for each in names) else None
    except (OSError, ValueError):
        pass
    return None


def stopped_holder(path: Path) -> int:
    """Return the process that has locked the file, if it is stopped; otherwise 0."""
    pid = holder_of_lock(path)
    return pid if pid is not None and is_stopped(pid) else 0


def _is_same(descriptor: Path, path: Path) -> bool:
    try:
        return descriptor.samefile(path)
    except OSError:  # the descriptor was closed, or is no file
        return False


def is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped the process."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except OSError:
        return False
    return after_name.split()[0] in ("T", "t")


def refuse_network(folder: Path) -> None:
    """Raise StoreError on a network file system, where SQLite's locks and -shm file do not work."""
    kind = file_system(folder)
    if kind in NOT_LOCAL or kind == "fuse" or kind.startswith("fuse."):
        raise StoreError(
            f"--store: {folder} is on {kind}, but daemons can share a SQLite file only on a local"
            " disk of one host. Use postgresql:// to share a history between hosts"
        )


def file_system(folder: Path) -> str:
    """Return the type of the file system; empty if unknown (not on Linux)."""
    try:
        real = folder.resolve()
        lines = MOUNTS.read_text().splitlines()
    except OSError:
        return ""
    found: tuple[int, str] = (-1, "")
    for line in lines:
        before, _, after = line.partition(" - ")
        mounted = Path(before.split()[4].encode().decode("unicode_escape"))
        if real.is_relative_to(mounted) and len(mounted.parts) >= found[0]:
            found = len(mounted.parts), after.split()[0]
    return found[1]


def _lock_either(lock: int, path: Path, *, is_exclusive: bool = False) -> bool:
    """Lock the file exclusively if it is unlocked, otherwise in shared mode. Return whether it was unlocked.

    With `is_exclusive`, raise StoreLocked if the file does not become unlocked in time.
    """
    end = time.monotonic() + OPEN_SECONDS_MAX
    while True:
        for mode in (fcntl.LOCK_EX,) if is_exclusive else (fcntl.LOCK_EX, fcntl.LOCK_SH):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, mode | fcntl.LOCK_NB)
                return mode == fcntl.LOCK_EX
        # A holder with this text is alone only for its startup. It will call `share` soon.
        will_share = not is_exclusive and os.pread(lock, len(SHARED_TEXT), 0) == SHARED_TEXT
        # A process that has just locked the file may not have written its text yet.
        if time.monotonic() > end - (0 if will_share else OPEN_SECONDS_MAX - EXCLUSIVE_SECONDS):
            raise StoreLocked(f"the history {path} is in use by {holder_in(lock)}")
        time.sleep(OPEN_PAUSE_SECONDS)
