"""Keep what tests compile: $XDG_CACHE_HOME/pensieve-tests (~/.cache/pensieve-tests), at most 512 MiB.

The key of a file is a hash of the compiler, its arguments, and the contents of the include folders. When the
cache is full, the least recently used files are removed.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

BYTES_MAX = 512 << 20
BASE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()  # before tests change it
FOLDER = BASE / "pensieve-tests"


def compiled(
    command: Sequence[str], text: str, suffix: str = ".cpp", folders: Sequence[Path] = ()
) -> Path:
    """Compile a text and return the output file. `folders` are include folders, in this order."""
    arguments = [*command, *(f"-I{folder}" for folder in folders)]
    digest = hashlib.sha256(repr((_version(command[0]), arguments, text, suffix)).encode())
    for folder in folders:
        digest.update(_content(folder))
    FOLDER.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = FOLDER / digest.hexdigest()[:32]
    with (FOLDER / f"{made.name[:2]}.lock").open("w") as lock:  # other processes wait for this one
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            with tempfile.TemporaryDirectory(dir=FOLDER, prefix="making-") as making:
                source, output = Path(making) / f"source{suffix}", Path(making) / "made"
                source.write_text(text, encoding="utf-8")
                subprocess.run([*arguments, str(source), "-o", str(output)], check=True)
                _make_room(output.stat().st_size)
                output.rename(made)
        os.utime(made)
    return made


def _make_room(num_bytes: int) -> None:
    kept = []
    for path in FOLDER.rglob("*"):
        if path.is_file() and path.suffix != ".lock" and "making-" not in str(path):
            status = path.stat()
            kept.append((status.st_mtime, status.st_size, path))
    too_many = sum(size for _, size, _ in kept) + num_bytes - BYTES_MAX
    for _, size, path in sorted(kept):
        if too_many <= 0:
            return
        path.unlink(missing_ok=True)  # processes that have loaded the file keep it
        too_many -= size


@functools.cache
def _version(compiler: str) -> str:
    return subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=True
    ).stdout


@functools.cache
def _content(folder: Path) -> bytes:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            digest.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
            digest.update(path.read_bytes())
    return digest.digest()
