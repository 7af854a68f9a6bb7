"""The user's folder of converted models: each is there whole, or not at all.

It is `models` in $XDG_CACHE_HOME/pensieve (~/.cache/pensieve), and has a folder for each model.  Whoever
needs one that is missing

1. waits for its lock, which ends with the process that holds it, and looks again;
2. removes what another left half made, and fills a folder KEY.partial-*;
3. has everything reach the disk, and gives it its name.

So a folder with its name is whole, whenever the process or the machine stopped; whatever else is there is
removed by the next.  Nothing is ever changed in a folder that has its name.  People may remove one when
nothing runs on it; it is made again when it is needed.
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

WAIT_SECONDS = 0.2  # between two tries to get the lock
Report = Callable[[str], None]
Check = Callable[[], None]  # called now and then; it raises where everything is to be given up


def models_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "pensieve" / "models"


def kept(key: str) -> Path | None:
    """The folder of this key, if it was made before."""
    folder = models_folder() / key
    return folder if folder.is_dir() else None


def made_once(key: str, make: Callable[[Path], None], report: Report, check: Check) -> Path:
    """The folder of this key, which `make` fills if it is missing; `check` may raise to end the waiting."""
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
    """Raise ModelError unless the disk of the cache has that much room."""
    folder = models_folder()
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ModelError(
            f"{what} needs {num_bytes / 1e9:.1f} GB in {folder}, and {free / 1e9:.1f} GB are free; "
            "XDG_CACHE_HOME names another place"
        )


@contextlib.contextmanager
def _errors_of(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"a model cannot be kept in {folder}: {error.strerror or error}; XDG_CACHE_HOME names "
            "another place"
        ) from error


@contextlib.contextmanager
def _locked(path: Path, report: Report, check: Check) -> Iterator[None]:
    """The file stays: one that was removed could be locked twice, by name and by those who have it open."""
    is_reported = False
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not is_reported:
                    report("waiting for another process, which prepares the same model")
                is_reported = True
                check()
                time.sleep(WAIT_SECONDS)
        yield


def _reach_the_disk(*paths: Path) -> None:
    # It brings SQLite, which an engine's start does not wait for.
    from pensieve.store.durable import sync

    for path in paths:
        sync(path)
