"""The newcomer walk: its quick part finds no problem, and the walk would find planted problems."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import newcomer
from tests.newcomer import ROOT, STEPS, Step, Walk


def test_each_step_is_a_line_of_the_docs() -> None:
    docs = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    lines = [line.strip() for path in docs for line in path.read_text("utf-8").splitlines()]
    missing = [
        step.line
        for step in STEPS
        if not any(line == step.line or line.startswith(step.line + " ") for line in lines)
    ]
    assert not missing


@pytest.mark.timeout(600)
def test_the_quick_walk_finds_no_problem(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "tests/newcomer.py", str(tmp_path / "walk"), "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.count("\nok ") > 30
    assert process.stdout.endswith("nothing to stop at\n")


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (Step("python -c 'print(1)'", (r"^2$",)), "nothing like '^2$'"),
        (Step("python -c 'raise SystemExit(3)'"), "exit code 3 instead of 0"),
        (Step("python -c 'import sys; sys.stderr.write(\"odd\")'"), "an unexpected line: 'odd'"),
        (Step("python -c 'print(\"a Traceback\")'"), "an unexpected line: 'a Traceback'"),
        (Step("python -c 'print(1)'", serves="ready"), "'ready' did not come"),
        (Step("python -c 'input()'", types=("x\n",)), "'> ' did not come"),
    ],
)
def test_unexpected_behaviour_of_a_step_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: Step, problem: str
) -> None:
    monkeypatch.setattr(newcomer, "PATIENCE", 5.0)
    walk = Walk(tmp_path, ROOT, quick=True)
    walk.take(step)
    assert [each for each in walk.problems if problem in each], walk.problems
