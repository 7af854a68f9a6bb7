"""Lock the data folder for one process, and record whether that process closed it cleanly.

The file `lock` serves both purposes. The process takes an advisory lock on the file. The operating system
frees that lock when the process ends in any way. The text of the file names the process, for example "123
pensieve chat". The text is written when the folder is opened, and removed on a clean close. If a process
takes the lock and finds text, the last holder did not close the history.

A daemon with a shared history also locks its data folder, but does not use the history in the folder. Such
a daemon overwrites the text of `lock`, so it must keep what that text says about the folder's own history
(`Marks` of backend.py). It saves this in a second line, and writes it back on close. If the daemon is killed,
the next holder reads the second line.

If the folder's `conversations.db` is a symbolic link, the lock beside the linked file is taken, too. So only
one process at a time can open the history, under any path.

The folder is private. If other users may read an existing folder (systemd creates such folders), their
permissions are removed. A folder that contains files of other programs is left unchanged.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from pathlib import Path

from pensieve.errors import StoreError, StoreLocked, StoreUnavailable
from pensieve.store.durable import new_file

DATABASE_NAME = "conversations.db"
RESTORING_NAME = "conversations.db.restoring"
LOCK_NAME = "lock"
IDENTITY_NAME = "history"
DAEMON_NAME = "daemon"
DAMAGED_NAME = "damaged"
JOBS_NAME = "jobs"
RESERVE_NAME = "reserve"
HOLDER_BYTES_MAX = 256
LOCK_BYTES_MAX = 512
OWN_HISTORY_TEXTS = {  # the second line of `lock`, if the holder's history is elsewhere
    True: "the history of this folder was not closed\n",
    False: "the history of this folder was closed\n",
}
OUR_NAMES = (
    LOCK_NAME,
    IDENTITY_NAME,
    DAEMON_NAME,
    DAMAGED_NAME,
    JOBS_NAME,
    RESERVE_NAME,
    "admin.sock",
    "chat_history",
    "lost+found",
)


class DataFolder:
    """A data folder that this process has locked. `DataFolder.open` locks it, and `close` unlocks it."""

    def __init__(
        self,
        path: Path,
        lock: int,
        database: int | None,
        before: bytes,
        holder: str,
        lock_beside: int | None = None,
    ) -> None:
        """`before`: the text to restore in `lock` on close, if the history in the folder was not used.

        `lock_beside`: the lock beside the database file, if `conversations.db` is a link to that file.
        """
        self.path = path
        self.holder = holder
        self.stopped_unclean = bool(before)  # the last holder of the history did not close it
        self._before = before
        self.is_open_to_others = _is_open_to_others(path)
        self._lock: int | None = lock
        self._lock_beside = lock_beside
        self._database = database

    @classmethod
    def open(cls, path: Path, holder: str, *, has_database: bool = True) -> DataFolder:
        """Lock the folder, creating it if it is missing. Errors of other processes name the `holder`.

        With `has_database=False`, the history is elsewhere. A history in the folder is then not touched.
        """
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(f"the data folder {path} cannot be used: {error.strerror}") from error
        locks = [lock]
        try:
            _lock_exclusively(lock, f"the data folder {path}")
            before = _text_of_last_holder(lock)
            link = path / DATABASE_NAME
            if has_database and link.is_symlink():
                file = link.resolve()
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                locks.append(os.open(beside(file, LOCK_NAME), flags, 0o600))
                _lock_exclusively(locks[1], f"the history {file}")
                before = before or _text_of_last_holder(locks[1])
            text = f"{os.getpid()} {holder}".replace("\n", "?").encode()[:HOLDER_BYTES_MAX] + b"\n"
            _write(lock, text if has_database else text + OWN_HISTORY_TEXTS[bool(before)].encode())
            for each in locks[1:]:
                _write(each, text)
            database = None
            if has_database:
                with contextlib.suppress(FileNotFoundError):
                    (path / RESTORING_NAME).unlink()  # left by a restore that was killed
                # Other users must not read conversations. SQLite creates its side files with the same mode.
                database = os.open(
                    path / DATABASE_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
                )
        except OSError as error:
            for each in locks:
                os.close(each)
            raise StoreUnavailable(
                f"the data folder {path} cannot be written: {error.strerror}"
            ) from error
        except StoreLocked:
            for each in locks:
                os.close(each)
            raise
        return cls(path, lock, database, before, holder, *locks[1:])

    @property
    def database_path(self) -> Path:
        return self.path / DATABASE_NAME

    @property
    def is_damaged(self) -> bool:
        return (self.path / DAMAGED_NAME).exists()

    @property
    def is_check_due(self) -> bool:
        return self.is_damaged or self.stopped_unclean

    def mark_damaged(self, is_damaged: bool) -> None:
        """Remember for the next start whether the history is damaged."""
        path = self.path / DAMAGED_NAME
        with contextlib.suppress(OSError):  # the caller has already logged the damage
            if is_damaged:
                path.touch(mode=0o600)
            else:
                path.unlink(missing_ok=True)

    @property
    def database_bytes(self) -> int:
        return 0 if self._database is None else os.fstat(self._database).st_size

    def close(self, clean: bool) -> None:
        """Release the folder. Pass `clean` only if the database was closed without an error."""
        if self._lock is None:
            return
        if clean or self._database is None:
            # If this write fails, the next start runs an integrity check.
            with contextlib.suppress(OSError):
                if self._lock_beside is not None:
                    _write(self._lock_beside, b"")
                _write(self._lock, b"" if self._database is not None else self._before)
        os.close(self._lock)
        if self._lock_beside is not None:
            os.close(self._lock_beside)
        if self._database is not None:
            os.close(self._database)
        self._lock = None


def beside(database: Path, name: str) -> Path:
    """Return the path of a side file of a database."""
    return database.with_name(name if database.name == DATABASE_NAME else f"{database.name}.{name}")


def history_identity(database: Path) -> str:
    """Return the identity of the history in this file, creating one if needed."""
    file = beside(database, IDENTITY_NAME)
    try:
        if not file.exists():
            set_history_identity(database, secrets.token_hex(16))
        return file.read_text(encoding="ascii").strip()
    except OSError as error:
        raise StoreUnavailable(f"{file} cannot be used: {error.strerror}") from error


def daemon_identity(path: Path) -> str:
    """Return the identity of the daemon with this data folder, among daemons that share a history."""
    file = path / DAEMON_NAME
    try:
        if not file.exists():
            with new_file(file) as made:
                made.write(f"{secrets.token_hex(16)}\n".encode())
        return file.read_text(encoding="ascii").strip()
    except OSError as error:
        raise StoreUnavailable(f"{file} cannot be used: {error.strerror}") from error


def set_history_identity(database: Path, identity: str) -> None:
    with new_file(beside(database, IDENTITY_NAME)) as file:
        file.write(f"{identity}\n".encode())


def holder_of(path: Path) -> str:
    """Return the holder named in the folder's `lock` file; empty if the file names none.

    The holder may be a process that has died without closing the folder.
    """
    try:
        lock = os.open(path / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return holder_in(lock) if os.fstat(lock).st_size else ""
    finally:
        os.close(lock)


def _is_open_to_others(path: Path) -> bool:
    """Remove the permissions of other users if possible. Return whether they can still read the folder."""
    try:
        if not path.stat().st_mode & 0o077:
            return False
        names = {each.name for each in path.iterdir() if not each.name.startswith(DATABASE_NAME)}
        if not names <= set(OUR_NAMES):
            return True
        path.chmod(0o700)
    except OSError:  # the folder belongs to another user
        return True
    return False


def _lock_exclusively(lock: int, name: str) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StoreLocked(f"{name} is in use by {holder_in(lock)}") from None


def _text_of_last_holder(lock: int) -> bytes:
    """Return the text that the last holder left in `lock`; empty if the holder closed the history."""
    text = os.pread(lock, LOCK_BYTES_MAX, 0)
    return b"" if text.endswith(OWN_HISTORY_TEXTS[False].encode()) else text


def holder_in(lock: int) -> str:
    text = os.pread(lock, HOLDER_BYTES_MAX, 0).decode(errors="replace")
    pid, _, command = text.partition("\n")[0].strip().partition(" ")
    if pid == "shared":
        return "daemons that share it with --store sqlite://"
    if not pid.isdecimal():
        return "another process"
    printable = "".join(letter if letter.isprintable() else "?" for letter in command)
    return f"{printable or 'a process'}, pid {pid}"


def _write(lock: int, text: bytes) -> None:
    # An empty file means a clean close. So write before truncating: on a full disk, the old text stays.
    os.pwrite(lock, text, 0)
    os.ftruncate(lock, len(text))
    os.fsync(lock)
