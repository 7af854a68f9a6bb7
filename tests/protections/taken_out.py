"""A copy of the tree in which protections are taken out one after the other, and what their tests say.

A test counts as failing only if it ran and something that it asserts, or waits for, was not so.  Code that
cannot be imported, or that names what is not there, would fail any test; that is a mistake in the change,
and is reported as one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from tests.protections import ROOT, Protection

LIMIT_SECONDS = 1800  # of a run
TEST_SECONDS = 90  # of a test; some have more by a mark of their own
EXIT_SECONDS = 10  # of a process whose tests have ended
PATIENCE_SECONDS = 30  # with which a test waits for what may never happen
MISTAKES = ("SyntaxError", "IndentationError", "ImportError", "ModuleNotFoundError", "NameError")


# Python reads it when it starts.  An editable installation has a finder that comes before every path.
HERE_FIRST = """
import sys

sys.meta_path[:] = [each for each in sys.meta_path if "_editable_" not in type(each).__module__]
"""


class Verdict(Enum):
    NOTICED = "noticed"  # every test of it failed
    MISSED = "MISSED"  # a test stayed green
    BROKEN = "BROKEN"  # the change is not code, or its text is not there


class Result(NamedTuple):
    verdict: Verdict
    why: str  # in one line


class TestRun(NamedTuple):
    """How each test of a run went: None for one that passed, else the first line of why not."""

    failures: dict[str, str | None]
    mistake: str | None  # why there is nothing to count
    in_time: bool = True  # False: it was ended before the last test

    @property
    def failed(self) -> list[str]:
        return [test for test, why in self.failures.items() if why is not None]


class Copy:
    """Another copy of this tree, whose code its tests import."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def run(
        self, tests: Sequence[str], *options: str, limit_seconds: float = LIMIT_SECONDS
    ) -> TestRun:
        report = self.root / "report.xml"
        report.unlink(missing_ok=True)
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"),
            *(f"--timeout={TEST_SECONDS}", f"--junitxml={report}", *options),
            *(f"tests/{each}" for each in tests),
        ]
        output, in_time = _ran(command, self.root, self._environment(), report, limit_seconds)
        if report.exists():
            return _read(report, tests)
        lines = output.strip().splitlines() or ["nothing was written"]
        if any("Timeout" in line for line in lines[-40:]):  # pytest-timeout ends the process
            return TestRun(dict.fromkeys(tests, "did not end in time"), None)
        return TestRun({}, f"pytest has no results: {lines[-1]}", in_time)

    def imports_from(self) -> Path:
        """Where a process here has its code from."""
        program = "import pensieve; print(pensieve.__path__[0])"
        printed = subprocess.run(
            [sys.executable, "-c", program],
            cwd="/",
            env=self._environment(),
            capture_output=True,
            text=True,
            check=True,
        )
        return Path(printed.stdout.strip()).resolve().parent

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": str(self.root),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PENSIEVE_TEST_PATIENCE": str(PATIENCE_SECONDS),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }

    def take_out(self, protection: Protection) -> Result:
        """Take one out, run its tests, and put it back."""
        before = {each.file: (self.root / each.file).read_bytes() for each in protection.changes}
        try:
            try:
                for change in protection.changes:
                    change.apply(self.root)
                    if change.file.endswith(".py"):
                        compile((self.root / change.file).read_text(), change.file, "exec")
            except (SyntaxError, ValueError) as error:
                return Result(Verdict.BROKEN, " ".join(str(error).split()))
            run = self.run(protection.tests)
        finally:
            for file, content in before.items():
                (self.root / file).write_bytes(content)
        if run.mistake is not None:
            return Result(Verdict.BROKEN, run.mistake)
        green = [test for test in protection.tests if test not in run.failed]
        if green:
            return Result(Verdict.MISSED, f"{green[0]} stays green")
        return Result(Verdict.NOTICED, str(run.failures[protection.tests[0]]))


@contextmanager
def copy_of_the_tree(tree: Path = ROOT) -> Iterator[Copy]:
    """Every file of the working tree that git does not ignore, elsewhere; the tree itself is not touched."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=tree,
        capture_output=True,
        text=True,
        check=True,
    )
    with tempfile.TemporaryDirectory(prefix="pensieve-protections-") as name:
        root = Path(name)
        for file in filter(None, listed.stdout.split("\0")):
            if (tree / file).is_file():
                (root / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(tree / file, root / file)
        (root / "sitecustomize.py").write_text(HERE_FIRST)
        copy = Copy(root)
        found = copy.imports_from()
        assert found == root.resolve(), f"the copy would import pensieve from {found}"
        yield copy


def _ran(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    report: Path,
    limit_seconds: float,
) -> tuple[str, bool]:
    """What it wrote, and whether it ended in time.

    What it started ends with it.  Once there is a report, it need not end by itself.
    """
    written = folder / "output"
    with written.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            end = time.monotonic() + limit_seconds
            while process.poll() is None and time.monotonic() < end:
                time.sleep(0.05)
                if report.exists():
                    end = min(end, time.monotonic() + EXIT_SECONDS)
            in_time = process.poll() is not None or report.exists()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return written.read_text(errors="replace"), in_time


def _read(report: Path, tests: Sequence[str]) -> TestRun:
    """A test with parameters fails where one of its cases does."""
    failures: dict[str, str | None] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        test = _named(case.get("classname", ""), case.get("name", ""), tests)
        found = case.find("failure")
        if found is None:
            found = case.find("error")
        why = None if found is None else _line_of(found)
        if why is not None and any(f"{each}:" in why for each in MISTAKES):
            return TestRun({test: why}, why)
        failures[test] = failures.get(test) or why
    return TestRun(failures, None if failures else "no test ran")


def _named(module: str, name: str, tests: Sequence[str]) -> str:
    """`tests.service.test_a` and `test_one[case]` as `service/test_a.py::test_one`."""
    file = module.removeprefix("tests.").replace(".", "/") + ".py"
    whole = f"{file}::{name}"
    return whole if whole in tests else f"{file}::{name.partition('[')[0]}"


def _line_of(found: ElementTree.Element) -> str:
    lines = (found.get("message") or found.text or "it failed").strip().splitlines()
    return lines[0][:160] if lines else "it failed"
