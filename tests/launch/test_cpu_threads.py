"""Threads wait for each other only briefly, unless the operator has set something else."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pensieve.config import machine
from pensieve.launch.cpu_threads import SPIN_COUNT, prepare_threads


def test_by_default_threads_spin_only_briefly() -> None:
    environ: dict[str, str] = {}
    prepare_threads(environ)
    assert environ == {"GOMP_SPINCOUNT": str(SPIN_COUNT)}


@pytest.fixture(autouse=True)
def _no_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpu_quota", lambda: None)


@pytest.mark.parametrize(
    ("quota", "threads"),
    [(0.2, "1"), (1.4, "1"), (1.5, "2"), (3.0, "3"), (3.5, None), (64.0, None)],
)
def test_the_number_of_threads_is_limited_by_the_cpu_quota(
    quota: float, threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cpu_quota", lambda: quota)
    monkeypatch.setattr(machine, "num_cores", lambda: 4)
    environ = {"OMP_WAIT_POLICY": "active"}
    prepare_threads(environ)
    assert environ.get("OMP_NUM_THREADS") == threads
    environ = {"OMP_NUM_THREADS": "7"}
    prepare_threads(environ)
    assert environ["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_variables_set_by_the_operator_are_kept(name: str) -> None:
    environ = {name: "active"}
    prepare_threads(environ)
    assert environ == {name: "active"}


def test_the_command_line_sets_the_spin_count_before_it_loads_torch() -> None:
    code = (
        "import os, sys\n"
        "from pensieve.cli.main import main\n"
        "assert 'torch' not in sys.modules\n"
        "main(['chat', '--print-config'])\n"
        "assert 'torch' not in sys.modules\n"
        "print(os.environ['GOMP_SPINCOUNT'])\n"
    )
    unset = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=unset
    )
    assert told.stdout.endswith(f"{SPIN_COUNT}\n")
