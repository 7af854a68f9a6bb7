"""Threads wait briefly for each other, unless the operator has said how they shall."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pensieve.launch.cpu_threads import SPIN_COUNT, spin_briefly


def test_a_process_that_nobody_told_anything_spins_briefly():
    environ: dict[str, str] = {}
    spin_briefly(environ)
    assert environ == {"GOMP_SPINCOUNT": str(SPIN_COUNT)}


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_what_the_operator_set_stays(name: str):
    environ = {name: "active"}
    spin_briefly(environ)
    assert environ == {name: "active"}


def test_the_command_line_says_it_before_torch_is_loaded():
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
