"""Cache converted models in $XDG_CACHE_HOME/pensieve/models (~/.cache/pensieve/models), one folder per model.

If the folder of a model is missing, a process that needs it does this:

1. It takes the lock for the model, and checks again whether the folder is missing. The operating system
   releases the lock if the process dies.
2. It removes partial folders of interrupted processes, and writes to a new folder KEY.partial-*.
3. It syncs all files to disk and renames the folder to KEY.

So a folder named KEY is always complete, even after a crash, and is never changed. A user may delete the
folder while no process uses it. It is then created again when needed.
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


def cached_folder(key: str) -> Path | None:
    """Return the folder of this key, or None if it does not exist."""
    folder = models_folder() / key
    return folder if folder.is_dir() else None


def find_or_make(key: str, make: Callable[[Path], None], report: Report, check: Check) -> Path:
    """Return the folder of this key. If it is missing, `make` fills it. `check` may raise to cancel."""
    if (existing := cached_folder(key)) is not None:
        return existing
    folder = models_folder()
    with _as_model_errors(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(folder / f"{key}.lock", report, check):
            if (existing := cached_folder(key)) is not None:
                return existing
            for leftover in folder.glob(f"{key}.partial-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            partial = Path(tempfile.mkdtemp(prefix=f"{key}.partial-", dir=folder))
            try:
                make(partial)
                _sync_all(*sorted(partial.iterdir()), partial)
                partial.rename(folder / key)
                _sync_all(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return folder / key


def check_room(num_bytes: int, what: str) -> None:
    """Raise ModelError unless the disk of the cache has `num_bytes` of free space."""
    folder = models_folder()
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ModelError(
            f"{what} needs {num_bytes / 1e9:.1f} GB in {folder}, but only {free / 1e9:.1f} GB are free. "
            "To use another disk, set XDG_CACHE_HOME"
        )


@contextlib.contextmanager
def _as_model_errors(folder: Path) -> Iterator[None]:
    """Raise errors of the operating system as ModelErrors that name the cache."""
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"cannot keep a model in {folder}: {error.strerror or error}. To use another folder, set "
            "XDG_CACHE_HOME"
        ) from error


@contextlib.contextmanager
def _locked(path: Path, report: Report, check: Check) -> Iterator[None]:
    """Hold the lock during the block. The lock file is never removed.

    If it were removed, two processes could lock two different files with the same name.
    """
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


def _sync_all(*paths: Path) -> None:
    # Imported here because the module imports SQLite, which an engine does not need.
    from pensieve.store.durable import sync

    for path in paths:
        sync(path)
