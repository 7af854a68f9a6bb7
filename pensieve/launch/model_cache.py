"""Keep converted models in $XDG_CACHE_HOME/pensieve/models (~/.cache/pensieve/models), one folder per model.

A process that needs a missing folder

1. waits for the folder's lock, which the operating system releases when its holder ends, and looks again;
2. removes partial folders that an interrupted process has left, and fills a folder KEY.partial-*;
3. syncs all files to disk and renames the folder to KEY.

So a folder named KEY is always complete, even after a crash, and is never changed. A user may delete it while
nothing uses it. It is then created again when needed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pensieve.errors import ModelError

WAIT_SECONDS = 0.2  # between two attempts to get the lock
Report = Callable[[str], None]
Check = Callable[[], None]  # called a few times a second; raises to cancel the work


def models_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "pensieve" / "models"


def kept(key: str) -> Path | None:
    """Return the folder of this key; None if it does not exist."""
    folder = models_folder() / key
    return folder if folder.is_dir() else None


def made_once(key: str, make: Callable[[Path], None], report: Report, check: Check) -> Path:
    """Return the folder of this key; if it is missing, `make` fills it. `check` may raise to cancel."""
    if (there := kept(key)) is not None:
        return there
    folder = models_folder()
    with _errors_of(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(folder / f"{key}.lock", report, check):
            if (there := kept(key)) is not None:
                return there
            for left in folder.glob(f"{key}.partial-*"):
                shutil.rmtree(left, ignore_errors=True)
            partial = Path(tempfile.mkdtemp(prefix=f"{key}.partial-", dir=folder))
            try:
                make(partial)
                _reach_the_disk(*sorted(partial.iterdir()), partial)
                partial.rename(folder / key)
                _reach_the_disk(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return folder / key


def check_room(num_bytes: int, what: str) -> None:
    """Raise ModelError unless the disk of the cache has that much free space."""
    folder = models_folder()
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ModelError(
            f"{what} needs {num_bytes / 1e9:.1f} GB in {folder}, but only {free / 1e9:.1f} GB are free. "
            "To use another disk, set XDG_CACHE_HOME"
        )


@contextlib.contextmanager
def _errors_of(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"cannot keep a model in {folder}: {error.strerror or error}. To use another folder, set "
            "XDG_CACHE_HOME"
        ) from error


@contextlib.contextmanager
def _locked(path: Path, report: Report, check: Check) -> Iterator[None]:
    """Hold the lock. The file stays: if it were removed, two processes could lock two files of one name."""
    is_reported = False
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not is_reported:
                    report("waiting for another process that prepares the same model")
                is_reported = True
                check()
                time.sleep(WAIT_SECONDS)
        yield


def _reach_the_disk(*paths: Path) -> None:
    # Imported here because it imports SQLite, which an engine does not need.
    from pensieve.store.durable import sync

    for path in paths:
        sync(path)
